"""A model so small that hundreds of interleavings run in seconds."""

from __future__ import annotations

from typing import Any

import torch
from _fixtures import tiny_config

from megatrain import AdamW, Model
from megatrain.devices import Device

STEPS = 2


def small_config(**changes: Any) -> Any:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    return tiny_config(**{**sizes, **changes})


def batches(steps: int = STEPS, micros: int = 2) -> list[list[dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    steps_ids = torch.randint(3, 32, (steps, micros, 2, 6), generator=generator)
    return [[{"input_ids": ids, "labels": ids.clone()} for ids in step] for step in steps_ids]


def outcome(
    device: Device | str, *, config: Any = None, steps: int = STEPS, variance: float = 0.0, **options: Any
) -> list[torch.Tensor]:
    """Losses, norms, gradients and masters of a few steps with active clipping, and a score between them.

    ``variance`` is what the second moments start from: where it is 0, speculation waits in the first steps.
    """
    options = {
        "slots": 2,
        "compute_dtype": "float32",
        "kernel": "reference",
        "loss_chunk_tokens": 3,
        "compile": False,
        "max_grad_norm": 0.5,
    } | options
    keeps = options.get("host_gradients") != "passing"
    result = []
    with Model.from_config(
        config or small_config(), seed=1, device=device, optimizer=AdamW(lr=1e-2), **options
    ) as model:
        for name in model.store.parameter_names:
            model.store.moment(name, "exp_avg_sq").fill_(variance)
        for index, step in enumerate(batches(steps)):
            done = model.step(step, keep_gradients=keeps)
            result.append(torch.tensor([done.loss, done.grad_norm], dtype=torch.float64))
            if index == 0:
                result.append(model.logprobs(step[0]))
        result += model.gradients().values() if keeps else []
        result += model.state_dict().values()
    return result


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
