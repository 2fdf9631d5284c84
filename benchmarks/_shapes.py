"""Shapes of known models with random weights: what the benchmarks train."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from transformers import Qwen2Config

from megatrain.model import Model

_QWEN25 = {
    "7b": {"hidden": 3584, "mlp": 18944, "layers": 28, "heads": 28, "kv": 4, "vocab": 152064},
    "14b": {"hidden": 5120, "mlp": 13824, "layers": 48, "heads": 40, "kv": 8, "vocab": 152064},
    "32b": {"hidden": 5120, "mlp": 27648, "layers": 64, "heads": 40, "kv": 8, "vocab": 152064},
    "tiny": {"hidden": 256, "mlp": 512, "layers": 4, "heads": 4, "kv": 2, "vocab": 1024},
}
SHAPES = tuple(_QWEN25)
_NOISE = 1 << 24


def shape_config(shape: str, layers: int | None = None) -> Qwen2Config:
    """The Qwen2.5 config of a shape, with fewer layers where given."""
    size = _QWEN25[shape]
    return Qwen2Config(
        hidden_size=size["hidden"],
        intermediate_size=size["mlp"],
        num_hidden_layers=layers or size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"],
        vocab_size=size["vocab"],
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    )


def random_model(config: Qwen2Config, **options: Any) -> Model:
    """A model with the weights of `random_values`."""
    model = Model(config, **options)
    store = model.store
    for name in store.parameter_names:
        for start, values in random_values(name, store.place(name)[1].numel):
            store.load_master(name, start, values)
    return model


def random_values(name: str, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """FP32 values of a parameter in pieces, each with where it starts: 0.02 x normal (one block, tiled), norms 1 and
    biases 0. Never zeros where it matters: on them a GPU computes faster."""
    piece = torch.ones(_NOISE) if "norm" in name else torch.zeros(_NOISE) if name.endswith("bias") else _noise()
    for start in range(0, count, _NOISE):
        yield start, piece[: min(_NOISE, count - start)]


@cache
def _noise() -> torch.Tensor:
    return torch.randn(_NOISE, generator=torch.Generator().manual_seed(0)) * 0.02


def random_batch(vocab: int, rows: int, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """A micro-batch of random tokens, all of them targets but the first of a row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (rows, tokens), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}
