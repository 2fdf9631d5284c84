"""Fresh weights are drawn as transformers draws them for the family: scale, ones and zeros, tensor by tensor."""

from __future__ import annotations

import pytest
import torch
from _engine import engine
from _fixtures import FAMILIES, tiny_config
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("family", FAMILIES)
def test_as_transformers_draws_them(family: str) -> None:
    config = tiny_config(family)
    pad = config.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    with engine(config, "sim") as model:
        masters = model.state_dict()
    assert masters.keys() == plain.keys()
    for name, expected in plain.items():
        found, expected = masters[name], expected.detach()
        if expected.std() == 0:
            assert torch.equal(found, expected), name
            continue
        assert found.std().item() == pytest.approx(expected.std().item(), rel=0.1), name
        assert abs(found.mean()) < 5 * expected.std() / expected.numel() ** 0.5, name
        if name.endswith("embed_tokens.weight"):
            assert torch.equal(found[pad], expected[pad])


def test_the_seed_decides() -> None:
    states = []
    for seed in (1, 1, 2):
        with engine(tiny_config(), "sim", seed=seed) as model:
            states.append(model.state_dict())
    one, same, other = states
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert all(not torch.equal(one[name], other[name]) for name in one if "norm" not in name)
    layers = [one[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1)]
    assert not torch.equal(*layers)
