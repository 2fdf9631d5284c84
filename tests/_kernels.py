"""The kernels there are, random states of all magnitudes, and bitwise comparison."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain.kernels.native import NativeKernel, NativeUnavailable
from megatrain.kernels.reference import ReferenceKernel

SETTINGS: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
REFERENCE = ReferenceKernel()


def _natives() -> list[NativeKernel]:
    try:
        widest = NativeKernel()
    except NativeUnavailable:
        return []
    return [NativeKernel(isa) for isa in widest.instruction_sets()]


NATIVES = _natives()
each_kernel = pytest.mark.parametrize(
    "kernel", [REFERENCE, *NATIVES], ids=lambda kernel: getattr(kernel, "isa", "reference")
)
each_native = pytest.mark.parametrize("native", NATIVES, ids=lambda kernel: kernel.isa)


def bits_to_floats(bits: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def random_values(generator: np.random.Generator, count: int, kind: str) -> Tensor:
    """Finite FP32 values: about 1, denormal, or over the whole exponent range."""
    if kind == "normal":
        return torch.from_numpy(generator.standard_normal(count).astype(np.float32))
    bits = generator.integers(0, 1 << 32, count, dtype=np.uint32)
    if kind == "denormal":
        bits &= np.uint32(0x807FFFFF)
    if kind == "extreme":  # finite: exponent 255 becomes 254
        top = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
        bits = np.where(top, bits ^ np.uint32(0x00800000), bits)
    return bits_to_floats(bits)


def random_state(seed: int, count: int, kind: str, split: bool, half_gradient: bool) -> list[Tensor | None]:
    """[head, tail, exp_avg, exp_avg_sq, grad]; the second moment is not negative."""
    generator = np.random.default_rng(seed)
    master, exp_avg, exp_avg_sq, grad = (random_values(generator, count, kind) for _ in range(4))
    head: Tensor = master
    tail: Tensor | None = None
    if split:
        head, tail = torch.empty(count, dtype=torch.bfloat16), torch.empty(count, dtype=torch.int16)
        REFERENCE.split(master, head, tail)
    return [head, tail, exp_avg, exp_avg_sq.abs_(), grad.bfloat16() if half_gradient else grad]


def copies(state: list[Tensor | None]) -> list[Tensor | None]:
    return [None if buffer is None else buffer.clone() for buffer in state]


def assert_same_bits(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    """Equal bit patterns; a NaN may have any payload in FP32 buffers that arithmetic wrote."""
    for left, right in zip(found, expected, strict=True):
        if left is None or right is None:
            assert left is right
            continue
        kind = torch.int32 if left.dtype == torch.float32 else torch.int16
        equal = left.view(kind) == right.view(kind)
        if left.dtype == torch.float32:
            equal |= left.isnan() & right.isnan()
        assert bool(equal.all()), (
            f"{int((~equal).sum())} of {equal.numel()} differ, first at {int((~equal).nonzero()[0])}"
        )


def joined(state: list[Tensor | None]) -> Tensor:
    head, tail = state[0], state[1]
    assert head is not None
    assert tail is not None
    master = torch.empty(head.numel())
    REFERENCE.join(head, tail, master)
    return master
