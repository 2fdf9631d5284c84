"""Recording steps: every operation once a step, in the order of its lane and after what it waited for."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _engine import engine, joined, rows
from _fixtures import tiny_config

from megatrain import Model, UserError
from megatrain.engine.program import Builder, Op
from megatrain.engine.trace import Trace

POLICIES: list[dict[str, Any]] = [
    {"clipping": "deferred"},
    {"clipping": "speculative", "max_grad_norm": 1.0, "slots": 3},
    {"clipping": "deferred", "states_on_device": ["embedding", "layers.0"], "activations": ["layers.3"]},
    {"clipping": "deferred", "boundaries": "host", "boundary_every": 2, "slots": 1},
]


def told(op: Op) -> tuple[str, str, str, int]:
    return op.lane, op.kind, op.unit, op.micro


def recorded(model: Model, steps: int = 3) -> Trace:
    with model.trace() as trace:
        for step in range(steps):
            model.step(rows(2, seed=step))
    return trace


def by_step(trace: Trace) -> list[list[Op]]:
    numbers = sorted({timed.waiting.step for timed in trace.ops})
    return [[timed.op for timed in trace.ops if timed.waiting.step == number] for number in numbers]


@pytest.fixture
def model(device: str, one_thread: None) -> Iterator[Model]:
    with engine(tiny_config(), device, clipping="deferred") as made:
        yield made


@pytest.mark.parametrize("options", POLICIES)
def test_every_operation_of_the_program_once_a_step(device: str, one_thread: None, options: dict[str, Any]) -> None:
    with engine(tiny_config(), device, **options) as made:
        speculative = options["clipping"] == "speculative"
        own = made._engine._builder
        builder = Builder(own.units, options.get("slots", 2), own.policy)
        expected = [[told(op) for op in builder.training_step(2, speculative=speculative)] for _ in range(3)]
        trace = recorded(made)
    assert [[told(op) for op in ops] for ops in by_step(trace)] == expected
    assert len(trace.steps) == 2


@pytest.mark.parametrize("options", POLICIES)
def test_times_keep_the_order_of_lanes_and_waits(device: str, one_thread: None, options: dict[str, Any]) -> None:
    slack = 1e-3 if device == "cuda" else 0.0  # between the clocks of device and host
    with engine(tiny_config(), device, **options) as made:
        trace = recorded(made)
    ends = {timed.waiting.ticket: timed.end for timed in trace.ops}
    waits = 0
    for timed in trace.ops:
        assert 0 <= timed.start <= timed.end
        assert timed.end > timed.start or timed.op.kind not in ("FORWARD", "LOSS", "BACKWARD", "UPDATE")
        lane, index = timed.waiting.ticket
        assert timed.start >= ends.get((lane, index - 1), 0.0)
        for ticket in timed.waiting.waits:
            assert timed.start >= ends.get(ticket, 0.0) - slack
            waits += ticket in ends
    assert waits > 3 * len(by_step(trace))
    publishes = [timed.end for timed in trace.ops if timed.op.kind == "PUBLISH"]
    assert [timeline.seconds for timeline in trace.steps] == pytest.approx(
        [publishes[1] - publishes[0], publishes[2] - publishes[1]]
    )


@pytest.mark.parametrize("activations", ["50%", "selective"])
def test_recording_and_predicting_change_nothing(device: str, one_thread: None, activations: str) -> None:
    config = tiny_config(num_key_value_heads=4)  # a GPU has no fused attention in FP32 for grouped heads
    results = []
    for records in (False, True):
        with engine(config, device, activations=activations, states_on_device=["embedding"]) as made:
            if records:
                made.predict(recorded(made))
            else:
                for step in range(3):
                    made.step(rows(2, seed=step))
            made.step(rows(2, seed=9))
            results.append(made.state_dict())
    for name, master in results[0].items():
        assert torch.equal(master, results[1][name]), name


def test_only_training_steps_inside_the_block_are_recorded(model: Model) -> None:
    model.step(rows(1))
    with model.trace() as trace:
        model.step(rows(1))
        model.logprobs(joined(rows(1)))
        model.step(rows(1))
    model.step(rows(1))
    assert [timed.op.kind for timed in trace.ops].count("PUBLISH") == 2
    assert "SCORE" not in {timed.op.kind for timed in trace.ops}
    assert sorted(trace.micro_batches) == [1, 2]


def test_a_trace_ends_with_its_block(model: Model) -> None:
    with pytest.raises(ZeroDivisionError), model.trace():
        raise ZeroDivisionError
    with model.trace():
        with pytest.raises(UserError, match=r"trace\(\): .* already"), model.trace():
            pass
        model.step(rows(1))
    with model.trace() as again:
        model.step(rows(1))
    assert len(by_step(again)) == 1
    assert again.steps == []


def test_a_prediction_takes_arithmetic_alone_and_the_rest_from_the_trace(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = recorded(model)
    monkeypatch.setattr(type(model._device), "seconds", lambda self, run, repeats=3: 2.0)
    predicted = model.predict(trace)
    arithmetic = [t for t in predicted.ops if t.op.lane == "compute" and t.op.unit]
    # The embedding's backward is timed together with its forward, which is taken off.
    # 15 of a row's 16 tokens are targets.
    expected = {"FORWARD": 2.0, "LOSS": 2.0 * 15 / 16, "BACKWARD": 2.0}
    assert [t.end - t.start for t in arithmetic] == pytest.approx(
        [0.0 if (t.op.kind, t.op.unit) == ("BACKWARD", "embedding") else expected[t.op.kind] for t in arithmetic]
    )
    last = max(timed.waiting.step for timed in trace.ops)
    assert [told(t.op) for t in arithmetic] == [
        told(t.op) for t in trace.ops if t.waiting.step == last and t.op.lane == "compute" and t.op.unit
    ]
    drains = [t.end - t.start for t in trace.ops if t.op.kind == "DRAIN" and t.op.unit.startswith("layers.")]
    simulated = [t.end - t.start for t in predicted.ops if t.op.kind == "DRAIN" and t.op.unit.startswith("layers.")]
    assert simulated == pytest.approx([statistics.median(drains)] * 4)
    assert predicted.seconds >= 2.0 * 2 * (5 + 15 / 16 + 4)


def test_a_kept_backward_is_timed_with_its_forward_which_is_taken_off_once(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(self: object, run: Any, repeats: int = 3) -> float:
        return 5.0 if getattr(run, "func", run).__name__ == "_both" else 2.0

    with engine(tiny_config(num_key_value_heads=4), device, activations="keep") as made:
        trace = recorded(made)
        monkeypatch.setattr(type(made._device), "seconds", seconds)
        predicted = made.predict(trace)
    backward = [t.end - t.start for t in predicted.ops if t.op.kind == "BACKWARD"]
    assert set(backward) == {3.0}


def test_a_prediction_needs_a_steady_step(model: Model) -> None:
    with pytest.raises(UserError, match="1 step was recorded; a steady one needs at least two"):
        model.predict(recorded(model, steps=1))


def test_gradients_of_before_are_not_given_after_a_prediction(model: Model) -> None:
    trace = recorded(model)
    model.step(rows(1), keep_gradients=True)
    model.predict(trace)
    with pytest.raises(UserError, match="gradients"):
        model.gradients()
