"""The host kernel for devices whose memory is the host's: their resident state is updated as any other."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Unpack

from megatrain.kernels import AdamWSettings, Kernel

if TYPE_CHECKING:
    import torch


class HostResidentKernel:
    """A `DeviceKernel` for `cpu` and `sim`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

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
        norm, factor = grad_scale.tolist()
        if isfinite(norm):
            self._kernel.adamw(head, tail, exp_avg, exp_avg_sq, grad, grad_scale=factor, **settings)
