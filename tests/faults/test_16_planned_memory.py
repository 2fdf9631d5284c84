"""Fault 16: planned bytes are those that training takes, by label, and real models are planned from their config."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from _fixtures import tiny_config

from megatrain import Model
from megatrain.machines import load_machine
from megatrain.model_spec import load_model_spec
from megatrain.planner import plan
from megatrain.search import Choice, Request, Search

GIB = 1 << 30


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("slots", "states"), [(1, 0), (2, 0), (3, 3), (2, 6)])
def test_planned_bytes_are_allocated_bytes(tmp_path: Path, tied: bool, dtype: str, slots: int, states: int) -> None:
    config = tiny_config(tie_word_embeddings=tied, vocab_size=4096, hidden_size=256, intermediate_size=1024)
    config.save_pretrained(tmp_path)
    spec = load_model_spec(str(tmp_path))
    search = Search(spec, load_machine("h200-128gb"), Request(rows=8, seq_len=64, compute_dtype=dtype))
    choice = Choice(slots, states, 0, 1, False)
    resident = [unit.name for unit in spec.units[:states]]
    with Model.from_config(config, device="cpu", compute_dtype=dtype, slots=slots, states_on_device=resident) as model:
        allocated = {label: n for label, n in model.memory.by_label.items() if label != "libraries" and n}
        host = sum(search.host_bytes(choice).values())
        assert model.memory.host_bytes <= host <= 1.1 * model.memory.host_bytes
    planned = {label: n for label, n in search._fixed_labels(slots, states).items() if label != "libraries"}
    assert planned == {label: n for label, n in allocated.items() if label in planned}
    assert set(planned) >= {"gradients"} if states < 6 else {"resident state"}


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
    begun = time.monotonic()
    request = Request(rows=64, seq_len=1024, clipping="deferred")
    found = plan(load_model_spec(name), load_machine("h200-1.5tb"), request)
    assert time.monotonic() - begun < 15, "a second when nobody else uses this machine"
    on_device = found.device_bytes.get("resident state", 0)
    assert (found.host_total + on_device) / GIB == pytest.approx(host_gib, rel=0.005)
    assert all(
        nbytes > 0 for part in (found.device_bytes, found.host_bytes, found.disk_bytes) for nbytes in part.values()
    )
