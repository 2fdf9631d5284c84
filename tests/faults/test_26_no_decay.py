"""Weight decay leaves norms, biases and everything with fewer than two dimensions alone, in every family."""

from __future__ import annotations

import pytest
import torch
from _fixtures import tiny_config
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedConfig

from megatrain import AdamW
from megatrain.kernels import load
from megatrain.layout import build_layout
from megatrain.store import Store

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")


def gpt_oss() -> PreTrainedConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16}
    return GptOssConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, num_local_experts=2)


CONFIGS = {name: tiny_config(name) for name in ("tiny", "tiny-tied", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")}


@pytest.mark.parametrize("family", [*CONFIGS, "gpt_oss"])
def test_tensors_that_zero_gradients_move(family: str) -> None:
    config = CONFIGS.get(family) or gpt_oss()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    kernel, layout = load("reference"), build_layout(shapes)
    store = Store({"unit": layout}, torch.float32, kernel, lambda m: None, lambda m: None, gradient_dtype=torch.float32)
    for parameter in layout.parameters:
        store.load_master(parameter.name, 0, torch.ones(parameter.numel))
    gradient = torch.zeros(layout.numel)
    AdamW(weight_decay=0.1).update(kernel, store.slab("unit"), gradient, lr=0.1, step=1, scale=1.0)
    moved = {name for name in shapes if not bool((store.master(name) == 1).all())}
    expected = {name for name in shapes if name.split(".")[-2] in ("embed_tokens", "lm_head", *MATRICES)}
    expected = {name for name in expected if not name.endswith("bias")}
    if family == "gpt_oss":
        expected |= {
            name for name in shapes if name.endswith(("experts.gate_up_proj", "experts.down_proj", "router.weight"))
        }
        assert any(name.endswith("sinks") for name in shapes)
        assert any(name.endswith("gate_up_proj_bias") for name in shapes)
    if family == "qwen2":
        assert any(name.endswith("q_proj.bias") for name in shapes)
    assert moved == expected
    for name in moved:
        assert torch.allclose(store.master(name), torch.tensor(0.99))
