"""What both kernels share: the scalars of a step and of its correction, and the check of the buffers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypedDict

SPECULATION_BLOCK = 4096
"""Elements that are speculated on together; ``native/block.h`` has the same number."""


class AdamWSettings(TypedDict):
    """One step of AdamW. ``step`` counts from 1 and belongs to the caller: every unit gets the same bias correction."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


class AdamWScalars(NamedTuple):
    """The scalars of one AdamW step, in double; a kernel rounds each to float32 once, as torch does."""

    decay: float
    lerp_weight: float
    beta2: float
    square_weight: float
    root_correction: float
    eps: float
    step_size: float
    grad_scale: float


def adamw_scalars(grad_scale: float, settings: AdamWSettings) -> AdamWScalars:
    """Fold rate, decay and bias correction of a step into the multipliers of the kernel."""
    beta1, beta2, step = settings["beta1"], settings["beta2"], settings["step"]
    if step < 1:
        raise ValueError(f"step must count from 1, got {step}")
    return AdamWScalars(
        decay=1 - settings["lr"] * settings["weight_decay"],
        lerp_weight=1 - beta1,
        beta2=beta2,
        square_weight=1 - beta2,
        root_correction=math.sqrt(1 - beta2**step),
        eps=settings["eps"],
        step_size=-settings["lr"] / (1 - beta1**step),
        grad_scale=grad_scale,
    )


class AdamWCorrection(NamedTuple):
    """What turns a step with clip factor 1 into the one with a smaller factor, or into none: multipliers, in double.

    Both moments are linear, one in the factor and one in its square.
    """

    first_weight: float
    second_weight: float
    first_rescale: float
    second_rescale: float
    change_weight: float
    master_rescale: float


def adamw_correction(factor: float, settings: AdamWSettings) -> AdamWCorrection:
    """The correction to ``factor`` < 1; 0 takes the step back."""
    first, second = -(1 - settings["beta1"]), -(1 - settings["beta2"])
    if factor > 0:
        return AdamWCorrection(first * (1 - factor), second * (1 - factor) * (1 + factor), 1, 1, 1, 1)
    decay = 1 - settings["lr"] * settings["weight_decay"]
    return AdamWCorrection(first, second, 1 / settings["beta1"], 1 / settings["beta2"], 0, 1 / decay)


def speculation_reach(settings: AdamWSettings) -> float:
    """The r for which ``r |g| <= sqrt(v)`` says both (1 - beta1) |g| <= 8 sqrt(v) and (1 - beta2) g^2 <= 8 v."""
    return max((1 - settings["beta1"]) / 8, math.sqrt((1 - settings["beta2"]) / 8))


def can_take_back(*, lr: float, beta1: float, beta2: float, weight_decay: float) -> bool:
    """Whether dividing by both betas and by the decay keeps enough digits: none may be below a half."""
    return min(beta1, beta2, 1 - lr * weight_decay) >= 0.5


def check_speculation(settings: AdamWSettings) -> None:
    """ValueError where a step could not be taken back."""
    names = ("lr", "beta1", "beta2", "weight_decay")
    if not can_take_back(**{name: settings[name] for name in names}):  # type: ignore[literal-required]
        raise ValueError(f"speculation needs beta1, beta2 and 1 - lr * weight_decay of at least 0.5, got {settings}")


def check_factor(factor: float) -> None:
    """ValueError unless ``factor`` is a clip factor."""
    if not 0 <= factor <= 1:
        raise ValueError(f"factor must be in [0, 1], got {factor}")


def blocks_of(length: int) -> int:
    """Speculation blocks that ``length`` elements begin."""
    return -(-length // SPECULATION_BLOCK)


def check_waiting(waiting: Any, length: int) -> None:
    """TypeError or ValueError unless ``waiting`` has one byte a block."""
    dtype_name("waiting", waiting, "uint8")
    blocks = blocks_of(length)
    if tuple(waiting.shape) != (blocks,):
        raise ValueError(f"waiting must have {blocks} flags for {length} elements, got {tuple(waiting.shape)}")


# bfloat16 has no NumPy type; there its bits are held as uint16.
_ALLOWED = {
    "bfloat16": ("torch.bfloat16", "uint16"),
    "int16": ("torch.int16", "int16"),
    "float32": ("torch.float32", "float32"),
    "uint8": ("torch.uint8", "uint8"),
}


def dtype_name(name: str, buffer: Any, *allowed: str) -> str:
    """Which of the ``allowed`` types ("bfloat16", "int16", "float32", "uint8") the buffer has; else TypeError."""
    dtype = str(buffer.dtype)
    for candidate in allowed:
        if dtype in _ALLOWED[candidate]:
            return candidate
    raise TypeError(f"{name} must be {' or '.join(allowed)}, got {dtype}")


def common_length(**buffers: Any) -> int:
    """The length that all buffers share; ValueError unless each is one-dimensional and of that length."""
    shapes = {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    first = next(iter(shapes.values()))
    if len(first) != 1 or any(shape != first for shape in shapes.values()):
        raise ValueError(f"buffers must be one-dimensional and of one length, got {shapes}")
    return int(first[0])
