"""Mixtures of experts: every gradient, and refusals of what is not there yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from _fixtures import tiny_config, tiny_model
from _oracle import Oracle, random_batches, relative

from megatrain import AdamW, Model, UserError

EXPERTS: dict[str, dict[str, Any]] = {"qwen3_moe": {}, "gpt_oss": {"attn_implementation": "eager"}}


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("family", EXPERTS)
def test_gradients_against_its_own_forward(family: str, activations: str, device: str) -> None:
    config = tiny_config(family)
    (step,) = random_batches(config.vocab_size, steps=1, micros=2, tokens=80)
    options = {"compute_dtype": "float32", "max_grad_norm": None, "compile": False} | EXPERTS[family]
    with Model.from_config(
        config, seed=7, device=device, optimizer=AdamW(lr=1e-3), activations=activations, **options
    ) as model:
        oracle = Oracle(config, model.state_dict(), own_loss=True, device=device, **EXPERTS[family])
        result = model.step(step, keep_gradients=True)
        expected = oracle.step(step)
        assert abs(result.loss - oracle.losses[0]) <= 1e-6 * result.loss
        gradients = model.gradients()
        assert any(".experts." in name for name in gradients)
        for name, gradient in gradients.items():
            assert relative(gradient, expected[name]) <= 2e-6, name


def test_files_that_hold_each_expert_apart_are_refused(tmp_path: Path) -> None:
    message = r"model: checkpoints of type 'qwen3_moe' hold each expert apart"
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "source")
    with pytest.raises(UserError, match=message):
        Model.from_pretrained(tmp_path / "source", device="cpu")
    with Model.from_config(tiny_config("qwen3_moe"), device="cpu") as model:
        for save in (model.check_save, model.save_pretrained):
            with pytest.raises(UserError, match=message):
                save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_loss_that_balances_experts_is_refused_not_left_out() -> None:
    with pytest.raises(UserError, match=r"output_router_logits: true .* set it to false"):
        Model.from_config(tiny_config("qwen3_moe", output_router_logits=True), device="cpu")


def test_attention_that_the_default_cannot_compute_names_the_field() -> None:
    with pytest.raises(UserError, match=r"model\.attn_implementation: sdpa: .*'gpt_oss'.* use .*=eager"):
        Model.from_config(tiny_config("gpt_oss"), device="cpu")
