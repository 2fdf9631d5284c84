"""The output matrix, whose gradient is summed in place.

Left to autograd, every chunk of the loss would first write a gradient of the size of the vocabulary matrix and then add
it: the largest temporary of the step, and one more pass over memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatrain.layout import ranges

_ROWS = 16384
"""Vocabulary rows whose gradient exists in the compute dtype before it is added to an FP32 sum."""


class StreamedLinear(nn.Linear):
    """``input [n, width] @ weight.T``; the weight's gradient goes to ``gradient`` when that is set.

    Still an ``nn.Linear``: by that a model's initialisation knows what to draw.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        nn.Module.__init__(self)  # that of nn.Linear would make and fill another weight
        self.out_features, self.in_features = weight.shape[0], weight.shape[-1]
        self.weight = weight  # [vocab, width]
        self.register_parameter("bias", None)
        self.gradient: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.gradient is None:
            return nn.functional.linear(hidden, self.weight)
        summed: Any = _SummedLinear  # untyped up to torch 2.13
        result: torch.Tensor = summed.apply(hidden, self.weight, self.gradient)
        return result


class _SummedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        # Saved on the context, not by save_for_backward: forward and backward run in one operation on one slot.
        ctx.hidden, ctx.weight, ctx.gradient = hidden, weight, gradient
        return nn.functional.linear(hidden, weight)

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (output,) = outputs
        rows = output.reshape(-1, output.shape[-1])
        hidden = ctx.hidden.reshape(-1, ctx.hidden.shape[-1])
        add_outer(ctx.gradient, rows, hidden)
        return output @ ctx.weight, None, None


def add_outer(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total [a, b] += left [n, a].T @ right [n, b]``, without a temporary of the size of ``total``."""
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
        return
    if total.is_cuda:  # one product that adds in FP32: no temporary, and a fifth faster than the pieces
        torch.addmm(total, left.T, right, out_dtype=torch.float32, out=total)
        return
    for start, end in ranges(total.shape[0], _ROWS):
        total[start:end] += left[:, start:end].T @ right
