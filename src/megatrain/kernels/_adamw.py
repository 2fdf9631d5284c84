"""What both kernels share: the scalars of a step and the check of the buffers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


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


def adamw_scalars(
    *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, grad_scale: float
) -> AdamWScalars:
    """Fold rate, decay and bias correction of step ``step`` (from 1) into the multipliers of the kernel."""
    if step < 1:
        raise ValueError(f"step must count from 1, got {step}")
    return AdamWScalars(
        decay=1 - lr * weight_decay,
        lerp_weight=1 - beta1,
        beta2=beta2,
        square_weight=1 - beta2,
        root_correction=math.sqrt(1 - beta2**step),
        eps=eps,
        step_size=-lr / (1 - beta1**step),
        grad_scale=grad_scale,
    )


# bfloat16 has no NumPy type; there its bits are held as uint16.
_ALLOWED = {
    "bfloat16": ("torch.bfloat16", "uint16"),
    "int16": ("torch.int16", "int16"),
    "float32": ("torch.float32", "float32"),
}


def dtype_name(name: str, buffer: Any, *allowed: str) -> str:
    """Which of the ``allowed`` types ("bfloat16", "int16", "float32") the buffer has; else TypeError."""
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
