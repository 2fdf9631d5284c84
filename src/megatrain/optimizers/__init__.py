"""Optimizers: one file each. The contract is what the engine calls for one unit at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from megatrain.kernels import Kernel
    from megatrain.store import Slab


class Optimizer(ABC):
    """A frozen set of hyperparameters and the update that they mean."""

    @abstractmethod
    def update(self, kernel: Kernel, slab: Slab, gradient: torch.Tensor, *, lr: float, scale: float) -> None:
        """Update ``slab`` in place and count the step.

        ``gradient`` is the unit's flat gradient on the host, multiplied by ``scale`` on the way in. Blocking; runs
        on the optimizer lane.
        """

    @property
    @abstractmethod
    def base_lr(self) -> float:
        """The learning rate used when a step names none."""
