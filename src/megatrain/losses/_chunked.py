"""A loss over chunks of tokens, with each chunk's gradient taken inside the chunk.

Logits never exist for more than one chunk: at a vocabulary of 150,000 they would otherwise be the largest tensor of the
step. Tokens without a target are dropped before the matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatrain.layout import even_ranges
from megatrain.losses import TokenLoss

Head = Callable[[torch.Tensor], torch.Tensor]
"""``hidden [n, width] -> logits [n, vocab]``."""


def chunked_loss(
    head: Head,
    token_loss: TokenLoss,
    hidden: torch.Tensor,
    index: torch.Tensor,
    targets: torch.Tensor,
    *,
    scale: float,
    chunk_tokens: int,
    parameters: Sequence[torch.Tensor],
    add_gradients: Callable[[Sequence[torch.Tensor | None]], None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of token losses and its scaled gradient.

    ``hidden [rows, width]``; ``index [n]`` says which rows have the ``targets [n]``. ``add_gradients`` is called once a
    chunk with the gradients of ``parameters`` (``None`` where the head has already added its own). Returns the FP64
    sum of losses, unscaled, and the gradient ``scale * d(sum)/d(hidden)`` with the shape of ``hidden``.
    """
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    gradient = torch.zeros_like(hidden)
    for start, end in even_ranges(index.numel(), chunk_tokens):
        rows = index[start:end]
        with torch.enable_grad():
            chunk = hidden[rows].requires_grad_()
            loss = token_loss(head(chunk), targets[start:end]).sum()
            grads = torch.autograd.grad(loss * scale, [chunk, *parameters], allow_unused=True)
        gradient[rows] = grads[0]
        add_gradients(grads[1:])
        total += loss.detach()
    return total, gradient


def chunked_log_probs(
    head: Head,
    token_loss: TokenLoss,
    hidden: torch.Tensor,
    index: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk_tokens: int,
) -> torch.Tensor:
    """FP32 log-probabilities ``[n]`` of the targets; arguments as in `chunked_loss`."""
    pieces = [
        -token_loss(head(hidden[index[start:end]]), targets[start:end])
        for start, end in even_ranges(index.numel(), chunk_tokens)
    ]
    return torch.cat(pieces) if pieces else torch.zeros(0, device=hidden.device)
