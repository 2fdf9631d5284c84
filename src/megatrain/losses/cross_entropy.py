"""Cross-entropy of next-token prediction, in FP32 whatever the logits' dtype."""

from __future__ import annotations

import torch
from torch.nn import functional


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of each target; ``logits [n, vocab]``, ``targets [n]`` -> FP32 ``[n]``."""
    return functional.cross_entropy(logits.float(), targets, reduction="none")
