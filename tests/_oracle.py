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
    """The engine's loss as one autograd function of the hidden states; the head's FP32 gradients go to ``sums``."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, oracle: Oracle, batch: Batch, tokens: int) -> torch.Tensor:
        targets = torch.full_like(batch["labels"], -100)
        targets[:, :-1] = batch["labels"][:, 1:]
        flat = targets.flatten()
        index = (flat != -100).nonzero().flatten()
        model, ctx.shape = oracle.model, hidden.shape
        norm_weight, matrix = (
            weight.detach().requires_grad_() for weight in (oracle.final_norm.weight, model.lm_head.weight)
        )
        streamed = StreamedLinear(nn.Parameter(torch.empty(0, device=hidden.device)))
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in (norm_weight, matrix)]
        streamed.gradient = sums[1]

        def head(rows: torch.Tensor) -> torch.Tensor:
            normed = torch.func.functional_call(oracle.final_norm, {"weight": norm_weight}, (rows[None],))
            logits: torch.Tensor = torch.func.functional_call(streamed, {"weight": matrix}, (normed,))[0]
            return logits

        def add(grads: Sequence[torch.Tensor | None]) -> None:
            for total, grad in zip(sums, grads, strict=True):
                if grad is not None:
                    total += grad

        total, ctx.gradient = chunked_loss(
            head,
            token_losses,
            hidden.detach().reshape(-1, hidden.shape[-1]),
            index,
            flat[index],
            scale=1.0 / tokens,
            chunk_tokens=oracle.chunk,
            parameters=[norm_weight, matrix],
            add_gradients=add,
        )
        oracle.add_gradients({"model.norm.weight": sums[0], "lm_head.weight": sums[1]})
        return total / tokens

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.gradient.view(ctx.shape), None, None, None


@dataclass
class Oracle:
    """A resident model, FP32 masters and `torch.optim.AdamW`.

    With FP32 the masters are the model's parameters. With BF16 the model's weights are the masters rounded as the
    documentation says: to nearest, ties away from zero; gradients of several uses and micro-batches are summed in
    FP32 and rounded once.
    """

    config: PreTrainedConfig
    weights: dict[str, torch.Tensor]
    lr: float = 1e-3
    weight_decay: float = 0.01
    max_grad_norm: float | None = None
    seed: int = 0
    own_loss: bool = False
    chunk: int = 10_000
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    attn_implementation: str = "sdpa"
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = AutoModelForCausalLM.from_config(
            self.config, attn_implementation=self.attn_implementation, dtype=self.dtype
        ).to(self.device)
        self.model.tie_weights()
        self.model.train()
        self.step_index = self.micro = 0
        base = self.model.model
        base.register_forward_pre_hook(self._seeder(0))
        for index, layer in enumerate(base.layers):
            layer.register_forward_pre_hook(self._seeder(index + 1))
        self.final_norm = base.norm
        self.named = dict(self.model.named_parameters())
        if not self.own_loss:
            base.norm = nn.Identity()
        self.masters = {
            name: nn.Parameter(self.weights[name].to(self.device, torch.float32, copy=True)) for name in self.named
        }
        self._publish()
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, p in self.masters.items():
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

    def _publish(self) -> None:
        with torch.no_grad():
            for name, p in self.named.items():
                p.copy_(round_half_away(self.masters[name]) if self.dtype is torch.bfloat16 else self.masters[name])

    def _seeder(self, unit: int) -> Any:
        def hook(*_: Any) -> None:
            torch.manual_seed(unit_seed(self.seed, self.step_index, self.micro, unit))

        return hook

    def add_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        """Sum gradients in FP32 under the name of the parameter that owns them."""
        for name, gradient in gradients.items():
            owner = name if name in self.named else "model.embed_tokens.weight"
            self.sums[owner] += gradient

    def step(self, micro_batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
        """One optimizer step; returns the gradients before clipping."""
        tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in micro_batches)
        self.sums = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        total = 0.0
        for self.micro, batch in enumerate(micro_batches):
            on_device = {key: value.to(self.device) for key, value in batch.items()}
            inputs = {key: value for key, value in on_device.items() if key != "labels"}
            if self.own_loss:
                loss = self.model(**inputs, labels=on_device["labels"], num_items_in_batch=tokens).loss
            else:
                hidden = self.model.model(**inputs, use_cache=False).last_hidden_state
                loss = _ChunkedLoss.apply(hidden, self, on_device, tokens)
            loss.backward()
            total += loss.item()
            self.add_gradients({name: p.grad for name, p in self.named.items() if p.grad is not None})
            self.model.zero_grad(set_to_none=True)
        for name, master in self.masters.items():
            master.grad = self.sums[name].to(self.dtype).float()
        gradients = {name: master.grad.cpu().clone() for name, master in self.masters.items()}
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(list(self.masters.values()), self.max_grad_norm)
        self.optimizer.step()
        self._publish()
        self.losses.append(total)
        self.step_index += 1
        return gradients

    def state_dict(self) -> dict[str, torch.Tensor]:
        """FP32 masters on the CPU."""
        return {name: master.detach().cpu().clone() for name, master in self.masters.items()}


def round_half_away(master: torch.Tensor) -> torch.Tensor:
    """The nearest bfloat16, ties away from zero, as an FP32 tensor: integer arithmetic on the bit pattern."""
    bits = master.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    head = ((bits + 0x8000) >> 16) << 16
    return torch.where(head >= 2**31, head - 2**32, head).to(torch.int32).view(torch.float32)


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
        result.append(
            [
                {"input_ids": part, "labels": label}
                for part, label in zip(ids.chunk(micros), labels.chunk(micros), strict=True)
            ]
        )
    return result


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over norm."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
