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


class SpeculativeOptimizer(Optimizer):
    """One whose update can be made before the clip factor is known, and corrected."""

    @abstractmethod
    def can_take_back(self, lr: float) -> bool:
        """Whether an update at this learning rate loses nothing that taking it back needs."""

    @abstractmethod
    def blocks(self, layout: Layout) -> int:
        """How many flags `speculate` sets for a unit."""

    @abstractmethod
    def speculate(
        self, kernel: Kernel, state: State, gradient: torch.Tensor, waiting: torch.Tensor, *, lr: float, step: int
    ) -> None:
        """Update those blocks of ``state`` whose update can be corrected, with the gradient as it is.

        ``waiting`` [blocks] uint8 is set to 1 for the others, which are left as they are.
        """

    @abstractmethod
    def resolve(
        self,
        kernel: Kernel,
        state: State,
        gradient: torch.Tensor,
        waiting: torch.Tensor,
        *,
        lr: float,
        step: int,
        factor: float,
    ) -> None:
        """Make of what `speculate` did the update with the gradient times ``factor``; 0 takes it back.

        With factor 1 the result is bitwise that of `update`.
        """
