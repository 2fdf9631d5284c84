"""Plain PyTorch, all resident: what every MegaTrain step must reproduce.

The loop is a Hugging Face model, `torch.optim.AdamW` and the loss; nothing here is shared with the engine except, where
a test says so, the chunked loss and the seeds of dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from megatrain.engine.template import unit_seed
from megatrain.layout import Parameter
from megatrain.losses._chunked import chunked_loss
from megatrain.losses.cross_entropy import token_losses
from megatrain.models._linear import StreamedLinear
from megatrain.optimizers.adamw import decays

Batch = dict[str, torch.Tensor]


class _ChunkedLoss(torch.autograd.Function):
    """The engine's loss as one autograd function of the hidden states and the head's weights."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, model: nn.Module, batch: Batch, tokens: int, chunk: int, *weights: Any):
        targets = torch.full_like(batch["labels"], -100)
        targets[:, :-1] = batch["labels"][:, 1:]
        flat = targets.flatten()
        index = (flat != -100).nonzero().flatten()
        names = ["model.norm.weight", "lm_head.weight"]
        parameters = [w.detach().requires_grad_() for w in weights]
        sums = [torch.zeros_like(w, dtype=torch.float32) for w in weights]
        streamed = StreamedLinear(nn.Parameter(torch.empty(0)))
        streamed.gradient = sums[1]

        def head(rows: torch.Tensor) -> torch.Tensor:
            normed = torch.func.functional_call(model.model.final_norm, {"weight": parameters[0]}, (rows[None],))
            logits = torch.func.functional_call(streamed, {"weight": parameters[1]}, (normed,))
            return logits[0]

        def add(grads: Sequence[torch.Tensor | None]) -> None:
            for total, grad in zip(sums, grads, strict=True):
                if grad is not None:
                    total += grad

        total, gradient = chunked_loss(
            head,
            token_losses,
            hidden.detach().reshape(-1, hidden.shape[-1]),
            index,
            flat[index],
            scale=1.0 / tokens,
            chunk_tokens=chunk,
            parameters=parameters,
            add_gradients=add,
        )
        assert len(names) == len(weights)
        ctx.grads = (gradient.view(hidden.shape), [s.to(w.dtype) for s, w in zip(sums, weights, strict=True)])
        return total / tokens

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor):
        hidden, weights = ctx.grads
        return hidden, None, None, None, None, *weights


@dataclass
class Oracle:
    """A resident model and its optimizer."""

    config: PreTrainedConfig
    weights: dict[str, torch.Tensor]
    lr: float = 1e-3
    weight_decay: float = 0.01
    max_grad_norm: float | None = None
    seed: int = 0
    own_loss: bool = False
    chunk: int = 10_000
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = AutoModelForCausalLM.from_config(self.config, attn_implementation="sdpa")
        self.model.load_state_dict(self.weights, strict=False)
        self.model.tie_weights()
        self.model.train()
        self.step_index, self.micro = 0, 0
        base = self.model.model
        base.register_forward_pre_hook(self._seeder(0))
        for index, layer in enumerate(base.layers):
            layer.register_forward_pre_hook(self._seeder(index + 1))
        base.final_norm = base.norm
        if not self.own_loss:
            base.norm = nn.Identity()
        groups = {True: [], False: []}
        for name, p in self.named_parameters():
            rule = decays(Parameter(name=name, local=name, shape=tuple(p.shape), offset=0, numel=p.numel()))
            groups[rule].append(p)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": groups[True], "weight_decay": self.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            lr=self.lr,
            fused=True,  # the variant whose square root is IEEE's; see docs/decisions.md
        )

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [(n.replace("final_norm", "norm"), p) for n, p in self.model.named_parameters()]

    def _seeder(self, unit: int):
        def hook(*_: Any) -> None:
            torch.manual_seed(unit_seed(self.seed, self.step_index, self.micro, unit))

        return hook

    def step(self, micro_batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
        """One optimizer step; returns the gradients before clipping."""
        tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in micro_batches)
        self.optimizer.zero_grad()
        total = 0.0
        for self.micro, batch in enumerate(micro_batches):
            inputs = {k: v for k, v in batch.items() if k != "labels"}
            if self.own_loss:
                loss = self.model(**inputs, labels=batch["labels"], num_items_in_batch=tokens).loss
            else:
                hidden = self.model.model(**inputs, use_cache=False).last_hidden_state
                weights = (self.model.model.final_norm.weight, self.model.lm_head.weight)
                loss = _ChunkedLoss.apply(hidden, self.model, batch, tokens, self.chunk, *weights)
            loss.backward()
            total += loss.item()
        gradients = {name: p.grad.clone() for name, p in self.named_parameters()}
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_([p for _, p in self.named_parameters()], self.max_grad_norm)
        self.optimizer.step()
        self.losses.append(total)
        self.step_index += 1
        return gradients

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.named_parameters()}


def random_batches(
    vocab: int, *, steps: int, rows: int = 4, tokens: int = 24, micros: int = 1, seed: int = 0
) -> list[list[Batch]]:
    """``steps`` lists of ``micros`` micro-batches; rows have very different numbers of targets."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(steps):
        ids = torch.randint(3, vocab, (rows, tokens), generator=generator)
        labels = ids.clone()
        for row in range(rows):
            labels[row, : int(torch.randint(1, tokens - 2, (1,), generator=generator))] = -100
        result.append([{"input_ids": i, "labels": l} for i, l in zip(ids.chunk(micros), labels.chunk(micros))])
    return result


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over norm."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
