"""What programs of other orders do and leave out, counted in operations."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from _engine import engine, rows
from _fixtures import tiny_config

from megatrain import UserError
from megatrain.engine.program import Builder, Op, Policy, UnitSpec
from megatrain.engine.template import Batch, Templates
from megatrain.engine.workspace import Workspaces


def specs(layers: int, **changes: Any) -> list[UnitSpec]:
    inner = [UnitSpec(f"layers.{i}", 100, **changes) for i in range(layers)]
    edge = {"weights_resident": changes.get("weights_resident", False)}
    return [UnitSpec("embedding", 500, keeps=True, lookup=True, **edge), *inner, UnitSpec("head", 500, **edge)]


def test_half_speculated_the_first_units_are_updated_first() -> None:
    """The next forward needs them first; those that were updated in time have only a look left."""
    units = [replace(unit, speculates=i >= 3) for i, unit in enumerate(specs(4))]
    ops = [op for op in Builder(units, 2, Policy()).training_step(1, speculative=True) if op.lane == "optimizer"]
    names = [unit.name for unit in units]
    expected = [("SPECULATE", name) for name in reversed(names[3:])]
    expected += [("UPDATE", name) for name in names[:3]] + [("RESOLVE", name) for name in names[3:]]
    assert [(op.kind, op.unit) for op in ops] == expected


def second_step(units: list[UnitSpec], micros: int, slots: int = 2, **policy: Any) -> list[Op]:
    builder = Builder(units, slots, Policy(**policy))
    builder.training_step(micros)
    return builder.training_step(micros)


def fetches(ops: list[Op]) -> int:
    return sum(op.kind == "FETCH" and op.unit.startswith("layers.") for op in ops)


@pytest.mark.parametrize("every", [2, 3, 4])
def test_a_block_that_fits_in_the_slots_is_fetched_as_often_as_its_layers_alone(every: int) -> None:
    units = specs(12)
    plain = fetches(second_step(units, 2, slots=every))
    assert fetches(second_step(units, 2, slots=every, boundary_every=every)) == plain == 2 * 12 - every
    assert fetches(second_step(units, 2, slots=1, boundary_every=every)) > plain


@pytest.mark.parametrize(("layers", "every", "blocks"), [(12, 4, 3), (7, 3, 3), (5, 100, 1), (4, 1, 4)])
def test_a_block_computes_all_but_its_last_layer_again(layers: int, every: int, blocks: int) -> None:
    count = Counter(op.kind for op in second_step(specs(layers), 2, boundary_every=every))
    assert count["RECOMPUTE"] == 2 * (layers - blocks)
    assert count["FORWARD"] == count["BACKWARD"] == 2 * (layers + 1)


@pytest.mark.parametrize("micros", [1, 2, 5])
def test_what_goes_to_the_host_comes_back_once(micros: int) -> None:
    ops = second_step(specs(8), micros, boundaries_on_host=True)
    out, back = ([(op.unit, op.micro) for op in ops if op.kind == kind] for kind in ("OFFLOAD", "RELOAD"))
    assert sorted(out) == sorted(back)
    assert len(set(back)) == len(back)
    stages = {buffer for op in ops for buffer in op.writes if buffer[0] == "stage"}
    assert len(stages) == micros + 2
    assert 8 * micros - len(stages) <= len(back) < 8 * micros


def test_a_micro_batch_is_done_before_the_next_starts() -> None:
    ops = second_step(specs(4, weights_resident=True), 3, micro_batch_major=True)
    order = [op.micro for op in ops if op.micro >= 0]
    assert order == sorted(order)
    assert Counter(op.kind for op in ops)["DRAIN"] == 6
    assert fetches(ops) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "micro_batch"}, r"compute\.order: micro_batch needs .* those of embedding stream; set"),
        ({"order": "micro_batch", "weights_on_device": ["embedding"]}, r"compute\.order: .* layers\.0 stream"),
        ({"order": "unit"}, r"compute\.order: 'unit' is"),
        ({"boundaries": "disk"}, r"compute\.boundaries: 'disk' is"),
        ({"boundary_every": 0}, r"compute\.boundary_every: 0 is"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        engine(tiny_config(), "sim", **options)


@pytest.mark.parametrize(("every", "operations"), [(1, 5 + 1 + 5), (4, 5 + 1 + 3 + 5)])
def test_the_bound_of_arithmetic_counts_what_is_computed_again(
    every: int, operations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Workspaces, "seconds_together", lambda *args: float(len(args[-1])))
    with engine(tiny_config(), "cpu", boundary_every=every) as model:
        assert model.compute_bound(1, 16, micro_batches=2) == 2 * operations


def test_time_is_measured_on_tokens_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal rows draw less power of a GPU, which then computes faster than in any step."""
    seen: list[int] = []
    whole = Templates.forward

    def forward(self: Templates, unit: Any, slots: Any, batch: Batch, *rest: Any) -> Any:
        seen.append(batch.input_ids.unique().numel())
        return whole(self, unit, slots, batch, *rest)

    with engine(tiny_config(), "cpu") as model:
        with model.trace() as trace:
            for seed in range(2):
                model.step(rows(2, seed=seed))
        monkeypatch.setattr(Templates, "forward", forward)
        model.compute_bound(1, 16)
        model.predict(trace)
    assert min(seen) > 8


@pytest.mark.parametrize("activations", ["recompute", "50%"])
def test_the_bound_is_measured_and_changes_nothing(device: str, one_thread: None, activations: str) -> None:
    results = []
    for measured in (False, True):
        with engine(tiny_config(), device, activations=activations) as model:
            for seed in range(2):
                model.step(rows(2, seed=seed))
                if measured:
                    assert model.compute_bound(1, 16, micro_batches=2) > 0
            results.append(model.state_dict())
    for name, master in results[0].items():
        assert torch.equal(master, results[1][name]), name
