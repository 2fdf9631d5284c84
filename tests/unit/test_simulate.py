"""The simulated time line: lanes in order, waits honoured, a step from publish to publish."""

from __future__ import annotations

import pytest

from megatrain.engine.program import Builder, Op, Policy, UnitSpec
from megatrain.engine.simulate import Timeline, Waiting, derive, simulate

UNITS = [UnitSpec("embedding", 8, lookup=True, keeps=True), *[UnitSpec(f"layers.{i}", 8) for i in range(4)]]
UNITS.append(UnitSpec("head", 8))


def program(units: list[UnitSpec] = UNITS, *, speculative: bool = False) -> list[Waiting]:
    builder = Builder(units, 2, Policy())
    return derive(builder.training_step(1, speculative=speculative) for _ in range(2))


def times(**seconds: float) -> Timeline:
    return simulate(program(), lambda op: seconds.get(op.kind, 0.0))


def test_one_lane_alone_takes_the_sum() -> None:
    assert times(FORWARD=1.0, BACKWARD=2.0, LOSS=3.0).seconds == 5 * 1 + 5 * 2 + 3
    assert times(UPDATE=1.0).seconds == 6


def test_on_one_processor_nothing_is_hidden() -> None:
    each = {"FORWARD": 2.0, "BACKWARD": 4.0, "LOSS": 2.0, "FETCH": 1.0, "DRAIN": 1.0, "UPDATE": 1.0}
    timeline = simulate(program(), lambda op: each.get(op.kind, 0.0), one_processor=True)
    assert timeline.seconds == sum(timed.end - timed.start for timed in timeline.ops)
    assert timeline.hidden("h2d") == timeline.hidden("optimizer") == 0


def test_copies_hide_under_arithmetic() -> None:
    timeline = times(FORWARD=2.0, BACKWARD=4.0, LOSS=2.0, FETCH=1.0, DRAIN=1.0)
    compute = 5 * 2 + 5 * 4 + 2
    assert compute < timeline.seconds <= compute + 2, "the first fetch and the last drain have nothing to hide under"
    assert timeline.busy("compute") == compute
    assert 0.7 * timeline.busy("h2d") <= timeline.hidden("h2d") < timeline.busy("h2d")


def test_updates_run_under_the_next_forward() -> None:
    """Forward of a unit waits for its own update: deferred clipping exposes all but the last units' updates."""
    timeline = times(FORWARD=1.0, BACKWARD=1.0, LOSS=1.0, UPDATE=1.0)
    assert timeline.seconds == 6 + 6, "six updates, the head's last, then loss and five backwards"
    assert timeline.hidden("optimizer") == 5


def test_resident_states_update_on_the_compute_lane() -> None:
    units = [UnitSpec(u.name, 8, state_resident=True, lookup=u.lookup, keeps=u.keeps) for u in UNITS]
    timeline = simulate(program(units), lambda op: 1.0 if op.kind == "UPDATE" else 0.0)
    assert (timeline.seconds, timeline.busy("optimizer")) == (6, 0)


def test_speculation_updates_under_backward() -> None:
    def seconds(op: Op) -> float:
        return {"FORWARD": 0.5, "BACKWARD": 3.0, "LOSS": 1.0, "UPDATE": 1.0, "SPECULATE": 1.0}.get(op.kind, 0.0)

    assert simulate(program(), seconds).seconds == 6 + 1 + 15, "every update is exposed"
    early = simulate(program(speculative=True), seconds).seconds
    assert early == 2.5 + 1 + 15 + 1, "the last unit's update alone is exposed"


@pytest.mark.parametrize("speculative", [False, True])
def test_waits_and_lanes_are_kept(speculative: bool) -> None:
    derived = program(speculative=speculative)
    ends: dict[tuple[str, int], float] = {}
    timeline = simulate(derived, lambda op: 1.0 + len(op.unit) / 10)
    inside = {id(timed.op): timed for timed in timeline.ops}
    last: dict[str, float] = {}
    for waiting in derived:
        timed = inside.get(id(waiting.op))
        if timed is None:
            continue
        assert timed.start >= last.get(waiting.op.lane, 0.0)
        assert all(timed.start >= ends[ticket] for ticket in waiting.waits if ticket in ends)
        ends[waiting.ticket] = last[waiting.op.lane] = timed.end
    assert len(ends) > len(derived) / 3
