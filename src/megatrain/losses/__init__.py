"""Losses: one file each. A loss maps logits and targets to one value a token; chunking is done around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TokenLoss = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""``(logits [n, vocab], targets [n]) -> FP32 losses [n]``; differentiable in the logits."""
