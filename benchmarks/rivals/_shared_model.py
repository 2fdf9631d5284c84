"""The model that the rivals train: Hugging Face layers under a head whose logits exist for one chunk of tokens only.

The loss is MegaTrain's own, so that the systems differ in what moves the weights and in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from _shapes import random_values
from torch import nn
from transformers import AutoModel, PreTrainedConfig

from megatrain.losses import TokenLoss
from megatrain.losses._chunked import chunked_loss
from megatrain.losses.cross_entropy import token_losses
from megatrain.models._compiled import compiled_token_loss
from megatrain.models._functions import layer_function
from megatrain.models._linear import StreamedLinear
from megatrain.models._skeleton import build_skeleton

_CHUNK = 4096


class CausalModel(nn.Module):
    """``(input_ids [rows, tokens], labels [rows, tokens]) -> mean loss``; parameter names are Hugging Face's."""

    def __init__(self, config: PreTrainedConfig, *, reentrant: bool) -> None:
        super().__init__()
        self.model = AutoModel.from_config(config, attn_implementation="sdpa")
        self.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        self.lm_head = _Head(config.hidden_size, config.vocab_size)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return self.lm_head(hidden[:, :-1].reshape(-1, hidden.shape[-1]), labels[:, 1:].flatten())


class _Head(nn.Module):
    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, width))

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _ChunkedLoss.apply(hidden, self.weight, targets)


@cache
def _token_loss() -> TokenLoss:
    return compiled_token_loss(token_losses) if torch.cuda.is_available() else token_losses


class _ChunkedLoss(torch.autograd.Function):
    """Takes the gradients while the logits are there, as fused linear cross-entropy kernels do."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        head = StreamedLinear(nn.Parameter(weight.detach()))
        head.gradient = torch.zeros_like(weight)
        total, gradient = chunked_loss(
            head,
            _token_loss(),
            hidden.detach(),
            torch.arange(targets.numel(), device=targets.device),
            targets,
            scale=1 / targets.numel(),
            chunk_tokens=_CHUNK,
            parameters=(),
            add_gradients=lambda _: None,
        )
        ctx.gradients = gradient, head.gradient
        return (total / targets.numel()).float()

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.gradients
        del ctx.gradients
        return hidden.mul_(outputs[0]), weight.mul_(outputs[0]), None


@torch.no_grad()
def fill(name: str, parameter: torch.Tensor) -> None:
    """Give a parameter of `CausalModel` the values that MegaTrain's has in the other benchmarks."""
    flat = parameter.view(-1)
    for start, values in random_values(name, flat.numel()):
        flat[start : start + values.numel()].copy_(values)


def renew_frequencies(model: CausalModel, config: PreTrainedConfig, device: torch.device) -> None:
    """Rotary frequencies are buffers that no checkpoint holds: without storage, or in bfloat16, after construction."""
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)


def compile_layers(model: CausalModel, config: PreTrainedConfig) -> None:
    """From here on every layer runs one compiled function of its weights, whatever its hooks do before and after."""
    template = build_skeleton(config, torch.float32, "sdpa", trust_remote_code=False).model.layers[0]
    torch._dynamo.reset()
    run = torch.compile(layer_function(template), dynamic=False)
    for layer in model.model.layers:
        layer.forward = _with_weights(layer, run)


def _with_weights(layer: nn.Module, run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forward(hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
        return run(dict(layer.named_parameters()), hidden, arguments)

    return forward
