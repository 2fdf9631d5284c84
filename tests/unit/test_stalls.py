"""What a lane waits for: followed back to what was running, and adding up to the step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.devices import LANES
from megatrain.engine.program import Builder, Op, Policy, UnitSpec
from megatrain.engine.simulate import Timed, Timeline, Waiting, derive, simulate
from megatrain.engine.stalls import DONE, HOST, breakdown, stalls

UNITS = [UnitSpec("embedding", 8, lookup=True, keeps=True), *[UnitSpec(f"layers.{i}", 8) for i in range(4)]]
UNITS.append(UnitSpec("head", 8))
KINDS = ("INPUT", "FETCH", "FORWARD", "LOSS", "BACKWARD", "DRAIN", "NORM", "PUBLISH", "UPDATE", "SPECULATE", "RESOLVE")


def timeline(seconds: dict[str, float], *, micros: int = 1, speculative: bool = False) -> Timeline:
    builder = Builder(UNITS, 2, Policy())
    program = derive(builder.training_step(micros, speculative=speculative) for _ in range(3))
    return simulate(program, lambda op: seconds.get(op.kind, 0.0))


def waited(seconds: dict[str, float], lane: str = "compute") -> dict[str, float]:
    return breakdown(timeline(seconds))[lane].waiting


def test_a_wait_through_another_operation_is_for_the_one_that_runs() -> None:
    """Forward waits for a FETCH that takes no time itself: it stands behind an UPDATE."""
    assert waited({"FORWARD": 1.0, "BACKWARD": 1.0, "LOSS": 1.0, "UPDATE": 1.0}) == {"optimizer UPDATE": 1.0}


def test_each_part_of_a_wait_has_its_own_cause() -> None:
    found = waited({"FORWARD": 4.0, "BACKWARD": 4.0, "LOSS": 4.0, "UPDATE": 1.0, "FETCH": 0.5, "PUBLISH": 0.25})
    assert found == {"optimizer UPDATE": 1.0, "h2d FETCH": 0.5, DONE: 0.25}


def test_late_fetches_and_drains() -> None:
    late = waited({"FORWARD": 1.0, "BACKWARD": 1.0, "LOSS": 1.0, "FETCH": 3.0})
    assert set(late) == {"h2d FETCH"}
    assert late["h2d FETCH"] == timeline({"FORWARD": 1.0, "BACKWARD": 1.0, "LOSS": 1.0, "FETCH": 3.0}).seconds - 11
    drains = waited({"FORWARD": 1.0, "BACKWARD": 1.0, "LOSS": 1.0, "DRAIN": 5.0})
    assert set(drains) == {"d2h DRAIN", DONE}


def test_the_optimizer_waits_for_backward_when_it_speculates() -> None:
    share = breakdown(timeline({"FORWARD": 1.0, "BACKWARD": 2.0, "LOSS": 1.0, "SPECULATE": 0.5}, speculative=True))
    optimizer = share["optimizer"]
    assert optimizer.busy == 6 * 0.5
    assert optimizer.waiting == {"compute BACKWARD": 4 * 1.5, "compute FORWARD": 5.0, DONE: 1.5, "compute LOSS": 1.0}


def op(kind: str, lane: str, index: int, start: float, end: float, *waits: tuple[str, int]) -> Timed:
    return Timed(Waiting(Op(kind=kind, lane=lane, unit=f"u{index}"), 0, (lane, index), waits), start, end)


def test_time_in_which_nothing_runs_is_the_host_s() -> None:
    measured = Timeline(
        10.0,
        (
            op("FETCH", "h2d", 0, 1.0, 3.0),
            op("FORWARD", "compute", 0, 3.5, 6.0, ("h2d", 0)),
            op("FETCH", "h2d", 1, 3.0, 3.25),
            op("FORWARD", "compute", 1, 7.0, 9.0, ("h2d", 1)),
        ),
    )
    assert [(s.start, s.end, s.why) for s in stalls(measured, "compute")] == [
        (0.0, 1.0, HOST),
        (1.0, 3.0, "h2d FETCH"),
        (3.0, 3.5, HOST),
        (6.0, 7.0, HOST),
        (9.0, 10.0, DONE),
    ]
    causes = [s.cause.op.unit for s in stalls(measured, "compute") if s.cause]
    assert causes == ["u0"]


def test_clocks_that_differ_a_little_do_not_matter() -> None:
    """What was waited for seems to end after what waited has begun."""
    measured = Timeline(5.0, (op("FETCH", "h2d", 0, 1.0, 2.1), op("FORWARD", "compute", 0, 2.0, 5.0, ("h2d", 0))))
    assert [(s.start, s.end, s.why) for s in stalls(measured, "compute")] == [(0.0, 1.0, HOST), (1.0, 2.0, "h2d FETCH")]


@settings(deadline=None, max_examples=60)
@given(
    seconds=st.fixed_dictionaries({kind: st.floats(0.0, 3.0) for kind in KINDS}),
    micros=st.integers(1, 3),
    speculative=st.booleans(),
)
def test_it_adds_up_to_the_step(seconds: dict[str, float], micros: int, speculative: bool) -> None:
    step = timeline(seconds | {"LOSS": seconds["LOSS"] + 0.01}, micros=micros, speculative=speculative)
    shares = breakdown(step)
    assert tuple(shares) == LANES
    for lane, share in shares.items():
        assert share.busy + sum(share.waiting.values()) == pytest.approx(step.seconds)
        assert HOST not in share.waiting or share.waiting[HOST] == pytest.approx(0.0, abs=1e-9)
        assert f"{lane} UPDATE" not in share.waiting
        for before, after in zip(stalls(step, lane), stalls(step, lane)[1:], strict=False):
            assert before.end <= after.start + 1e-12
