"""Shapes of known models with random weights: what the benchmarks train."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from megatrain.model import Model
from megatrain.model_spec import FOLDER, known_models
from megatrain.models._skeleton import supports_sdpa

SHAPES = {"7b": "qwen2.5-7b", "14b": "qwen2.5-14b", "32b": "qwen2.5-32b", "72b": "qwen2.5-72b"}
"""Short names; every other known model goes by its own."""

_TINY = {
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
}
_NOISE = 1 << 24


def shapes() -> list[str]:
    """Names of all shapes."""
    return ["tiny", *SHAPES, *known_models()]


def shape_data(shape: str, layers: int | None = None) -> dict[str, Any]:
    """The ``config.json`` of a shape, with fewer layers where given."""
    data = _TINY
    if shape != "tiny":
        file = FOLDER / f"{SHAPES.get(shape, shape)}.json"
        data = json.loads(file.read_text(encoding="utf-8"))["config"]
    changed = {"max_position_embeddings": 131072} | ({"num_hidden_layers": layers} if layers else {})
    return data | changed


def shape_config(shape: str, layers: int | None = None) -> PreTrainedConfig:
    """The config of a shape, with fewer layers where given."""
    config: PreTrainedConfig = AutoConfig.for_model(**shape_data(shape, layers))
    return config


def attention_of(config: PreTrainedConfig) -> str:
    """The fastest implementation that computes the model's attention."""
    return "sdpa" if supports_sdpa(config) else "eager"


def random_model(config: PreTrainedConfig, **options: Any) -> Model:
    """A model with the weights of `random_values`."""
    model = Model(config, attn_implementation=attention_of(config), **options)
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
