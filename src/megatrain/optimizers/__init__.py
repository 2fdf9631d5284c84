"""Optimizers: one file each. The contract is what the engine calls for one unit at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from megatrain.kernels import DeviceKernel, Kernel
    from megatrain.layout import Layout


class State(Protocol):
    """One unit's training state as flat sections, on the host or on the device."""

    layout: Layout
    head: torch.Tensor
    tail: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class Optimizer(ABC):
    """A frozen set of hyperparameters and the update that they mean."""

    @abstractmethod
    def update(
        self,
        kernel: Kernel | DeviceKernel,
        state: State,
        gradient: torch.Tensor,
        *,
        lr: float,
        step: int,
        scale: float | torch.Tensor,
    ) -> None:
        """Update ``state`` in place with the unit's flat ``gradient`` times ``scale``.

        ``step`` counts the unit's updates from 1. ``scale`` is a number, or for state on the device the FP64 tensor
        ``[norm, factor]``: nothing is updated when the norm is not finite.
        """

    @property
    @abstractmethod
    def base_lr(self) -> float:
        """The learning rate used when a step names none."""
