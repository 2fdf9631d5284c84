"""What a compiled layer keeps for its backward, against the planner's formula."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from megatrain import AdamW, Model
from megatrain.costs import Costs, Workload
from megatrain.engine.workspace import Shape
from megatrain.machines import load_machine
from megatrain.model_spec import spec_data, spec_from_data

SIZES: dict[str, Any] = {
    "hidden_size": 448,
    "intermediate_size": 1216,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 512,
    "num_hidden_layers": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_what_a_compiled_layer_keeps(config: type[PreTrainedConfig]) -> None:
    """To the byte but for two FP32 values a head and token, which Qwen3's norms of queries and keys keep."""
    rows, tokens = 2, 128
    options: dict[str, Any] = {"compile": True, "compute_dtype": "bfloat16", "activations": "keep"}
    with closing(Model(config(**SIZES), device="cpu", optimizer=AdamW(lr=1e-3), **options)) as model:
        ids = torch.randint(0, 512, (rows, tokens))
        model.step([{"input_ids": ids, "labels": ids.clone()}])
        need = model._engine._workspaces.need(Shape(rows, tokens, packed=False), "keep")
        measured = need.held["graph", 0]
    spec = spec_from_data("small", spec_data(config(**SIZES).to_dict()))
    work = Workload(rows=rows, seq_len=tokens, micro_rows=rows)
    predicted = Costs(spec, load_machine("h200-128gb"), work, 1 << 30).buffer_bytes(("graph", "layers.0", 0), "keep")
    assert 0 <= measured - predicted <= 8 * SIZES["num_attention_heads"] * rows * tokens * spec.has_query_norm
