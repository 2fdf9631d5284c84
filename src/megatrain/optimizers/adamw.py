"""AdamW with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101), in FP32 on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatrain.checks import number
from megatrain.errors import UserError
from megatrain.kernels import blocks_of, can_take_back
from megatrain.layout import Layout, Parameter
from megatrain.optimizers import SpeculativeOptimizer

if TYPE_CHECKING:
    import torch

    from megatrain.kernels import AdamWSettings, DeviceKernel, Kernel
    from megatrain.optimizers import State


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(SpeculativeOptimizer):
    """Hyperparameters as in `torch.optim.AdamW`; the update equals its fused one.

    Decay leaves out names ending in ``bias``, norm weights, and parameters with fewer than two dimensions.
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        number("optim.lr", self.lr, ">= 0", least=0)
        number("optim.eps", self.eps, "> 0", above=0)
        number("optim.weight_decay", self.weight_decay, ">= 0", least=0)
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise UserError(f"optim.betas: {self.betas!r} is not two numbers; they must be in [0, 1)")
        for beta in self.betas:
            if number("optim.betas", beta, "two numbers in [0, 1)", least=0) >= 1:
                raise UserError(f"optim.betas: {self.betas} is out of range; it must be two numbers in [0, 1)")

    @property
    def base_lr(self) -> float:
        return self.lr

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
        for piece in self._pieces(state, gradient, lr, step):
            kernel.adamw(
                *piece.buffers,
                grad_scale=scale,  # type: ignore[arg-type]  # a tensor goes with a device kernel only
                **piece.settings,
            )

    def can_take_back(self, lr: float) -> bool:
        return can_take_back(lr=lr, beta1=self.betas[0], beta2=self.betas[1], weight_decay=self.weight_decay)

    def blocks(self, layout: Layout) -> int:
        return sum(blocks_of(end - start) for start, end, _ in decay_runs(layout))

    def speculate(
        self, kernel: Kernel, state: State, gradient: torch.Tensor, waiting: torch.Tensor, *, lr: float, step: int
    ) -> None:
        for piece in self._pieces(state, gradient, lr, step):
            kernel.adamw_speculate(*piece.buffers, waiting[piece.blocks], **piece.settings)

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
        for piece in self._pieces(state, gradient, lr, step):
            kernel.adamw_resolve(*piece.buffers, waiting[piece.blocks], factor=factor, **piece.settings)

    def _pieces(self, state: State, gradient: torch.Tensor, lr: float, step: int) -> Iterator[_Piece]:
        """What the kernel is called with: one piece for each run of parameters with the same decay."""
        block = 0
        for start, end, decayed in decay_runs(state.layout):
            part = slice(start, end)
            first, block = block, block + blocks_of(end - start)
            yield _Piece(
                (
                    state.head[part],
                    None if state.tail is None else state.tail[part],
                    state.exp_avg[part],
                    state.exp_avg_sq[part],
                    gradient[part],
                ),
                slice(first, block),
                {
                    "lr": lr,
                    "beta1": self.betas[0],
                    "beta2": self.betas[1],
                    "eps": self.eps,
                    "weight_decay": self.weight_decay if decayed else 0.0,
                    "step": step,
                },
            )


class _Piece(NamedTuple):
    """The arguments of one kernel call."""

    buffers: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]
    """Head, tail, both moments, gradient."""
    blocks: slice
    """Its flags among the unit's: blocks count from the start of each piece."""
    settings: AdamWSettings


def decays(parameter: Parameter) -> bool:
    """Whether weight decay applies to a parameter, by its name and shape."""
    *owners, kind = parameter.name.split(".")
    is_norm = bool(owners) and "norm" in owners[-1].lower()
    return len(parameter.shape) >= 2 and not kind.endswith("bias") and not is_norm


def decay_runs(layout: Layout) -> Iterator[tuple[int, int, bool]]:
    """``(start, end, decayed)`` ranges of elements: neighbours with the same rule are updated in one pass.

    A run spans the padding between its parameters, where gradient and state are zero and stay so.
    """
    run: tuple[int, int, bool] | None = None
    for parameter in layout.parameters:
        rule = decays(parameter)
        if run is not None and run[2] == rule:
            run = (run[0], parameter.end, rule)
        else:
            if run is not None:
                yield run
            run = (parameter.offset, parameter.end, rule)
    if run is not None:
        yield run
