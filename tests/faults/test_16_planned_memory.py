"""Fault 16: planned bytes are those that training takes, by label, and real models are planned from their config."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from _fixtures import tiny_config

from megatrain import Model
from megatrain.choices import Choice, Request
from megatrain.devices._host import TOTAL_MEMORY
from megatrain.machine import probe
from megatrain.machines import load_machine, this_machine
from megatrain.model_spec import load_model_spec
from megatrain.planner import plan
from megatrain.search import Search

GIB = 1 << 30


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


CHOICES = {
    "one slot": Choice(1, 0, 0, 2, False),
    "two slots": Choice(2, 0, 0, 1, False),
    "some states": Choice(3, 3, 0, 2, False),
    "all states": Choice(2, 6, 0, 2, False),
    "some weights": Choice(2, 1, 0, 2, False, weights=4),
    "kept": Choice(2, 0, 2, 2, False),
    "blocks": Choice(2, 0, 0, 2, False, every=2),
    "boundaries on the host": Choice(2, 0, 1, 4, False, host=True),
    "passing gradients": Choice(2, 1, 0, 2, False),
    "micro-batch-major": Choice(1, 2, 4, 4, False, weights=6, major=True),
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(("dtype", "tied"), [("float32", False), ("bfloat16", True)])
def test_planned_bytes_are_allocated_bytes(tmp_path: Path, dtype: str, tied: bool, name: str) -> None:
    """By label where they stay; the device's peak is never below what is measured, and close."""
    config = tiny_config(tie_word_embeddings=tied, vocab_size=2048, hidden_size=128, intermediate_size=512)
    config.save_pretrained(tmp_path)
    spec, choice, rows, tokens = load_model_spec(str(tmp_path)), CHOICES[name], 4, 32
    passing = name == "passing gradients"
    request = Request(
        rows=rows,
        seq_len=tokens,
        compute_dtype=dtype,
        compiled=False,
        loss_memory=TOTAL_MEMORY,
        passing_gradients=passing,
    )
    search = Search(spec, this_machine(probe(), "cpu"), request)
    names = [unit.name for unit in spec.units]
    options = {
        "slots": choice.slots,
        "states_on_device": names[: choice.states],
        "weights_on_device": names[: choice.weights],
        "activations": names[1:-1][len(names) - 2 - choice.kept :],
        "boundaries": "host" if choice.host else "device",
        "boundary_every": choice.every,
        "order": "micro_batch" if choice.major else "layer",
    }
    if passing:
        options |= {"host_gradients": "passing", "max_grad_norm": None}
    with Model.from_config(config, device="cpu", compute_dtype=dtype, **options) as model:
        model.reserve(rows // choice.micro_batches, tokens, choice.micro_batches)
        measured = model.memory.device_peak
        ids = torch.randint(3, 300, (rows, tokens))
        model.step([{"input_ids": part, "labels": part} for part in ids.chunk(choice.micro_batches)])
        assert dict(search.device_labels(choice)) == {label: n for label, n in model.memory.by_label.items() if n}
        host = sum(search.host_bytes(choice).values())
        assert model.memory.host_bytes <= host <= 1.1 * model.memory.host_bytes
        assert measured <= search.peak(choice)[0] <= 1.5 * measured


@pytest.mark.parametrize(
    ("name", "host_gib"),
    [
        ("qwen2.5-7b", 99.3),
        ("llama-3.1-8b", 104.7),
        ("qwen2.5-14b", 192.6),
        ("qwen3-32b", 427.2),
        ("qwen2.5-72b", 948.0),
    ],
)
def test_real_models_are_planned_from_their_config(name: str, host_gib: float) -> None:
    request = Request(rows=64, seq_len=1024, clipping="deferred")
    found = plan(load_model_spec(name), load_machine("h200-1.5tb"), request)
    state = found.host_total + found.device_bytes.get("resident state", 0)
    assert (state - found.host_bytes.get("boundary activations", 0)) / GIB == pytest.approx(host_gib, rel=0.005)
    assert all(
        nbytes > 0 for part in (found.device_bytes, found.host_bytes, found.disk_bytes) for nbytes in part.values()
    )
