"""AdamW on the split master for state that lives on an NVIDIA GPU: one pass, the arithmetic of `reference`."""

from __future__ import annotations

from typing import Unpack

import torch
import triton
import triton.language as tl

from megatrain.kernels._adamw import AdamWSettings, adamw_scalars

_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]  # annotations of a kernel must be Triton's own
    head,
    tail,
    exp_avg,
    exp_avg_sq,
    grad,
    clip,
    n,
    decay,
    lerp_weight,
    beta2,
    square_weight,
    root_correction,
    eps,
    step_size,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    norm = tl.load(clip)
    if norm - norm == 0:  # finite
        factor = tl.load(clip + 1).to(tl.float32)
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        if SPLIT:
            bits = (tl.load(head + at, inside, 0).to(tl.int32) << 16) + tl.load(tail + at, inside, 0).to(tl.int32)
            master = bits.to(tl.float32, bitcast=True)
        else:
            master = tl.load(head + at, inside, 0)
        m = tl.load(exp_avg + at, inside, 0)
        v = tl.load(exp_avg_sq + at, inside, 0)
        g = tl.load(grad + at, inside, 0).to(tl.float32) * factor
        master = master * decay
        m = tl.fma(g - m, tl.full((BLOCK,), 1.0, tl.float32) * lerp_weight, m)
        v = tl.fma(g * square_weight, g, v * beta2)
        denominator = tl.div_rn(tl.sqrt_rn(v), tl.full((BLOCK,), 1.0, tl.float32) * root_correction) + eps
        master = master + tl.div_rn(m * step_size, denominator)
        tl.store(exp_avg + at, m, inside)
        tl.store(exp_avg_sq + at, v, inside)
        if SPLIT:
            bits = master.to(tl.int32, bitcast=True)
            top = (bits + 0x8000) >> 16
            tl.store(head + at, top.to(tl.int16), inside)
            tl.store(tail + at, (bits - (top << 16)).to(tl.int16), inside)
        else:
            tl.store(head + at, master, inside)


class TritonKernel:
    """A `DeviceKernel`."""

    def adamw(
        self,
        head: torch.Tensor,
        tail: torch.Tensor | None,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        *,
        grad_scale: torch.Tensor,
        **settings: Unpack[AdamWSettings],
    ) -> None:
        """See `megatrain.kernels.DeviceKernel`."""
        scalars = adamw_scalars(1.0, settings)
        n = head.numel()
        _adamw[(triton.cdiv(n, _BLOCK),)](
            head if tail is None else head.view(torch.int16),
            head if tail is None else tail,
            exp_avg,
            exp_avg_sq,
            grad,
            grad_scale,
            n,
            *scalars[:-1],
            SPLIT=tail is not None,
            BLOCK=_BLOCK,
        )
