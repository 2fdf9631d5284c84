from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from _fixtures import peak_rss
from _stores import UNITS, PlainStore

from megatrain import UserError
from megatrain.checkpoint import latest_complete, load_state, prune, save_state, step_folder


def flip_byte(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def weights_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_round_trip_is_bitwise_and_brings_meta_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain._safetensors.BLOCK_ELEMENTS", 50)
    store, other = PlainStore(UNITS, 1), PlainStore(UNITS, 2)
    store.masters["model.layers.0.norm.weight"][:3] = torch.tensor([-0.0, 1e-45, 3.4e38])
    rng = torch.get_rng_state()
    meta = {
        "step": 7,
        "rng": {"torch": rng},
        "data": [1, {"epoch": 2, "position": 12345678901}],
        "loss": math.pi,
    }
    save_state(tmp_path / "run" / "step-00000007", store, meta)
    loaded = load_state(tmp_path / "run" / "step-00000007", other)
    assert store.same(other)
    assert other.steps == {"embedding": 1, "layers.0": 1, "layers.1": 1, "head": 2}
    assert torch.equal(loaded["rng"].pop("torch"), rng)
    assert loaded == {**meta, "rng": {}}
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000007"]


def test_a_state_loads_into_another_grouping(tmp_path: Path) -> None:
    store = PlainStore(UNITS, 1)
    save_state(tmp_path / "s", store, {})
    names = {name: shape for unit in UNITS.values() for name, shape in unit.items()}
    other = PlainStore({"all": dict(reversed(names.items()))}, 2)
    load_state(tmp_path / "s", other)
    assert store.same(other)
    assert other.steps == {"all": 1}


def test_groupings_that_mix_step_counts_are_refused(tmp_path: Path) -> None:
    store = PlainStore(UNITS, 1)
    store.steps["layers.1"] = 5
    save_state(tmp_path / "s", store, {})
    other = PlainStore({"all": {name: shape for unit in UNITS.values() for name, shape in unit.items()}}, 2)
    with pytest.raises(UserError, match="1 of several step counts: all"):
        load_state(tmp_path / "s", other)


def test_frozen_parameters_have_no_moments(tmp_path: Path) -> None:
    frozen = ("model.embed_tokens.weight",)
    store, other = PlainStore(UNITS, 1, frozen), PlainStore(UNITS, 2, frozen)
    save_state(tmp_path / "s", store, {})
    load_state(tmp_path / "s", other)
    assert store.same(other)
    with pytest.raises(UserError, match=r"2 missing from it: exp_avg\.model\.embed_tokens\.weight"):
        load_state(tmp_path / "s", PlainStore(UNITS, 2))


def test_a_state_of_another_model_is_refused_untouched(tmp_path: Path) -> None:
    save_state(tmp_path / "s", PlainStore(UNITS, 1), {})
    other = PlainStore({**UNITS, "head": {"lm_head.weight": (40, 8)}, "layers.1": {"model.layers.1.norm.weight": (9,)}})
    with pytest.raises(UserError) as caught:
        load_state(tmp_path / "s", other)
    assert "3 missing from it: master.lm_head.weight" in str(caught.value)
    assert "3 not in the model: master.model.layers.1.mlp.weight" in str(caught.value)
    assert "master.model.layers.1.norm.weight [8] instead of [9]" in str(caught.value)
    assert not other.touched


@pytest.mark.parametrize("damage", ["missing", "truncated", "header"])
def test_incomplete_files_are_named_before_the_store_is_touched(tmp_path: Path, damage: str) -> None:
    save_state(tmp_path / "s", PlainStore(UNITS, 1), {})
    path = weights_of(tmp_path / "s")[1]
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-4])
    else:
        flip_byte(path, 3)
    other = PlainStore(UNITS, 2)
    with pytest.raises(UserError, match=path.name):
        load_state(tmp_path / "s", other)
    assert not other.touched


@pytest.mark.parametrize("at", [-1, -700, 60])
def test_one_changed_bit_is_found(tmp_path: Path, at: int) -> None:
    save_state(tmp_path / "s", PlainStore(UNITS, 1), {})
    path = weights_of(tmp_path / "s")[2]
    before = path.read_bytes()
    at %= len(before)
    if at == 60:  # in a name inside the header: still the state of another model, or a wrong checksum
        path.write_bytes(before.replace(b'"format"', b'"fornat"'))
    else:
        flip_byte(path, at)
    with pytest.raises(UserError, match=rf"{path.name} is damaged.*load the model again"):
        load_state(tmp_path / "s", PlainStore(UNITS, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format": "x", "version": 1, "files": {}}', "format 'x'"),
    ],
)
def test_a_broken_description_is_refused(tmp_path: Path, text: str, message: str) -> None:
    save_state(tmp_path / "s", PlainStore(UNITS, 1), {})
    (tmp_path / "s" / "state.json").write_text(text)
    with pytest.raises(UserError, match=message):
        load_state(tmp_path / "s", PlainStore(UNITS, 2))


def test_a_complete_save_is_never_overwritten_and_a_broken_one_is_set_aside(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    save_state(folder, PlainStore(UNITS, 1), {})
    with pytest.raises(UserError, match="not an empty folder"):
        save_state(folder, PlainStore(UNITS, 2), {})
    load_state(folder, PlainStore(UNITS, 2))
    weights_of(folder)[0].unlink()
    save_state(folder, PlainStore(UNITS, 3), {"step": 3})
    assert load_state(folder, PlainStore(UNITS, 2)) == {"step": 3}
    (aside,) = tmp_path.glob("s.broken-*")
    assert len(weights_of(aside)) == len(weights_of(folder)) - 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(UserError, match="not an empty folder"):
        save_state(tmp_path / "other", PlainStore(UNITS, 2), {})


def test_meta_that_cannot_be_saved_fails_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot hold a set"):
        save_state(tmp_path / "s", PlainStore(UNITS), {"x": {1}})
    assert not list(tmp_path.iterdir())


def test_prune_keeps_the_newest_complete_saves(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save_state(step_folder(tmp_path, step), PlainStore(UNITS, step), {"step": step})
    (tmp_path / "final").mkdir()
    (tmp_path / "step-00000009.tmp-999999999").mkdir()
    weights_of(step_folder(tmp_path, 10))[0].unlink()
    latest, skipped = latest_complete(tmp_path)
    assert latest == step_folder(tmp_path, 3)
    assert [path.name for path, _ in skipped] == ["step-00000010", "step-00000009.tmp-999999999"]
    assert "is missing" in skipped[0][1]
    assert "not finished" in skipped[1][1]
    deleted = prune(tmp_path, keep=2)
    assert [path.name for path in deleted] == ["step-00000001", "step-00000009.tmp-999999999"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "final", "step-00000002", "step-00000003", "step-00000010",
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"checkpoint\.keep is 0"):
        prune(tmp_path, keep=0)


def test_prune_deletes_nothing_while_no_save_is_complete(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000002.tmp-999999999").mkdir()
    assert prune(tmp_path, keep=1) == []
    assert latest_complete(tmp_path)[0] is None
    assert latest_complete(tmp_path / "absent") == (None, [])


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    store = PlainStore(UNITS)
    save_state(tmp_path / "s", store, {}, lambda *call: calls.append(call))
    load_state(tmp_path / "s", store, lambda *call: calls.append(call))
    total = 12 * sum(value.numel() for value in store.masters.values())
    assert [c for c in calls if c[1] == c[2]] == [("save", total, total), ("load", total, total)]


BIG = {f"layers.{i}": {f"layers.{i}.weight": (2500, 1000)} for i in range(4)}


def _steady(folder: Path) -> PlainStore:
    return PlainStore(BIG)


def _save_big(folder: Path) -> PlainStore:
    store = PlainStore(BIG)
    save_state(folder, store, {})
    return store


def _load_big(folder: Path) -> PlainStore:
    store = PlainStore(BIG)
    load_state(folder, store)
    return store


@pytest.mark.slow
def test_saving_and_loading_need_a_few_blocks(tmp_path: Path) -> None:
    steady = peak_rss(_steady, tmp_path / "s").peak
    assert peak_rss(_save_big, tmp_path / "s").peak - steady < 60e6
    assert peak_rss(_load_big, tmp_path / "s").peak - steady < 60e6
    assert sum(path.stat().st_size for path in weights_of(tmp_path / "s")) > 119e6


def test_state_json_names_sizes_and_checksums(tmp_path: Path) -> None:
    save_state(tmp_path / "s", PlainStore(UNITS), {"step": 1})
    state = json.loads((tmp_path / "s" / "state.json").read_text())
    assert {name: facts["size"] for name, facts in state["files"].items()} == {
        path.name: path.stat().st_size for path in weights_of(tmp_path / "s")
    }
    assert state["version"] == 1
