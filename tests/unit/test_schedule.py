"""Derived waits order every conflict, none is implied by others, and what is remembered does not grow."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.devices import LANES
from megatrain.engine.program import Builder, Op, Policy, UnitSpec
from megatrain.engine.schedule import Ticket, WaitTracker

BUFFERS = st.lists(st.integers(0, 5).map(lambda i: ("buffer", i)), max_size=3).map(lambda found: tuple(set(found)))
OPS = st.builds(
    lambda lane, reads, writes: Op(kind="X", lane=lane, reads=reads, writes=writes),
    st.sampled_from(LANES),
    BUFFERS,
    BUFFERS,
)
PROGRAMS = st.lists(st.tuples(OPS, st.booleans()), min_size=1, max_size=30)


def conflict(one: Op, other: Op) -> bool:
    return bool({*one.writes} & {*other.reads, *other.writes} or {*one.reads} & {*other.writes})


def reachable(edges: dict[Ticket, set[Ticket]], start: Ticket) -> set[Ticket]:
    """Everything that is complete when ``start`` may run."""
    seen: set[Ticket] = set()
    stack = list(edges[start])
    while stack:
        ticket = stack.pop()
        if ticket not in seen:
            seen.add(ticket)
            stack += edges[ticket]
    return seen


@settings(max_examples=300, deadline=None)
@given(PROGRAMS)
def test_waits_order_all_conflicts_and_none_is_superfluous(program: list[tuple[Op, bool]]) -> None:
    """After some operations the host waits, which orders everything that is added later."""
    tracker = WaitTracker()
    ops: list[tuple[Ticket, Op]] = []
    edges: dict[Ticket, set[Ticket]] = {}
    waits_of: dict[Ticket, list[Ticket]] = {}
    observed: set[Ticket] = set()
    for op, observe in program:
        ticket, waits = tracker.add(op)
        assert ticket == (op.lane, sum(1 for _, other in ops if other.lane == op.lane))
        previous = {(op.lane, ticket[1] - 1)} if ticket[1] else set()
        edges[ticket], waits_of[ticket] = previous | set(waits) | observed, waits
        complete = reachable(edges, ticket)
        for other_ticket, other in ops:
            if conflict(op, other):
                assert other_ticket in complete, "two operations that conflict may run in either order"
        assert all(wait[0] != op.lane for wait in waits)
        for wait in waits:
            edges[ticket].remove(wait)
            assert wait not in reachable(edges, ticket), "a wait that the others imply"
            edges[ticket].add(wait)
        ops.append((ticket, op))
        if observe:
            tracker.observe(ticket)
            observed.add(ticket)


def test_any_order_that_respects_waits_respects_conflicts_in_real_programs() -> None:
    layers = [UnitSpec(f"layers.{i}", 200, keeps=i > 2, weights_resident=i == 1) for i in range(4)]
    units = [UnitSpec("embedding", 100), *layers, UnitSpec("head", 90)]
    tied = [UnitSpec("embedding", 100, lookup=True, keeps=True, state_resident=True), *layers]
    tied += [UnitSpec("head", 10, uses=("embedding",))]
    for specs in (units, tied):
        for slots in (1, 2, 6):
            for policy in (Policy(), Policy(sum_dtype_differs=True)):
                builder, tracker = Builder(specs, slots, policy), WaitTracker()
                ops: list[tuple[Ticket, Op]] = []
                edges: dict[Ticket, set[Ticket]] = {}
                for program in (builder.training_step(2), builder.scoring(1), builder.training_step(1)):
                    for op in program:
                        ticket, waits = tracker.add(op)
                        edges[ticket] = set(waits) | ({(op.lane, ticket[1] - 1)} if ticket[1] else set())
                        complete = reachable(edges, ticket)
                        assert all(other in complete for other, earlier in ops if conflict(op, earlier))
                        ops.append((ticket, op))


def test_memory_does_not_grow_with_what_has_run() -> None:
    """Weights that are only read, as in an evaluation, are no exception."""
    units = [UnitSpec("embedding", 100), *[UnitSpec(f"layers.{i}", 200) for i in range(4)], UnitSpec("head", 90)]
    builder, tracker = Builder(units, 1, Policy()), WaitTracker()
    sizes = []
    for _ in range(3):
        for _ in range(2500):
            for op in builder.scoring(1):
                tracker.add(op)
        sizes.append((len(tracker._known), sum(len(use.readers) for use in tracker._uses.values())))
    assert max(known for known, _ in sizes) < 60_000
    assert sizes[0][1] == sizes[-1][1] < 200
