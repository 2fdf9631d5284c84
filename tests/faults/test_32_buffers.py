"""Buffers that no checkpoint holds are what a normal load computes, never what fresh memory held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from _engine import engine
from _fixtures import FAMILIES, tiny_checkpoint, tiny_config
from torch import nn

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in FAMILIES}
CASES["yarn"] = ("tiny", {"rope_parameters": YARN})


@pytest.fixture
def _poisoned() -> Iterator[None]:
    """Fresh memory is NaN."""
    mode = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(mode)


def buffers(module: nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    return {prefix + name: buffer.cpu() for name, buffer in module.named_buffers()}


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buffers_equal_those_of_a_normal_load(case: str, dtype: str, tmp_path: Path, device: str) -> None:
    family, changes = CASES[case]
    tiny_checkpoint(tmp_path / "model", family, dtype=getattr(torch, dtype), **changes)
    normal = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=getattr(torch, dtype))
    with engine(tmp_path / "model", device, compute_dtype=dtype, kernel="reference") as model:
        decoder = model._decoder
        found = buffers(decoder._base)
        for unit in decoder.units[1:-1]:
            index = unit.name.rpartition(".")[2]
            found |= buffers(decoder._templates[unit.structure], f"layers.{index}.")
        state = model.state_dict()
    expected = buffers(normal.model)
    assert any("inv_freq" in name for name in expected)
    assert found.keys() == expected.keys()
    for name, buffer in expected.items():
        assert buffer.isfinite().all()
        assert found[name].dtype == buffer.dtype, name
        assert torch.equal(found[name], buffer), name
    for name, parameter in normal.named_parameters():
        assert torch.equal(state[name], parameter.float()), name


def test_two_rotary_bases_differ() -> None:
    """Else the test above would not tell them apart."""
    normal = transformers.AutoModelForCausalLM.from_config(tiny_config("gemma3"))
    rotary = {tuple(buffer.tolist()) for name, buffer in normal.named_buffers() if name.endswith("inv_freq")}
    assert len(rotary) == 2
