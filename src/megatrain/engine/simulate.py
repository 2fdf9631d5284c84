"""When each operation of a program would start and end, were each to take a given time. No torch.

A lane runs its operations in order; each starts when its lane is free and the operations that it waits for have ended.
The waits are those of `schedule`, so what is simulated is what the executor runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatrain.engine.program import Op
from megatrain.engine.schedule import Ticket, WaitTracker


@dataclass(frozen=True, slots=True)
class Waiting:
    """An operation of a sequence of steps and what it waits for."""

    op: Op
    step: int
    ticket: Ticket
    waits: tuple[Ticket, ...]


@dataclass(frozen=True, slots=True)
class Timed:
    """One operation, simulated or measured, and its seconds on the time axis of what it is part of."""

    waiting: Waiting
    start: float
    end: float

    @property
    def op(self) -> Op:
        """The operation itself."""
        return self.waiting.op


@dataclass(frozen=True, slots=True)
class Timeline:
    """A steady step: from one PUBLISH to the next, ``seconds`` long."""

    seconds: float
    ops: tuple[Timed, ...]
    """Every operation that runs within it, cut at its edges."""

    def busy(self, lane: str) -> float:
        """Seconds in which a lane runs something."""
        return sum(timed.end - timed.start for timed in self.ops if timed.op.lane == lane)

    def hidden(self, lane: str) -> float:
        """Seconds in which a lane and the compute lane both run something."""
        compute = [(t.start, t.end) for t in self.ops if t.op.lane == "compute"]
        return sum(
            max(0.0, min(end, timed.end) - max(start, timed.start))
            for timed in self.ops
            if timed.op.lane == lane
            for start, end in compute
        )


def derive(steps: Iterable[Sequence[Op]]) -> list[Waiting]:
    """The operations of consecutive steps with the waits that the executor would derive."""
    tracker = WaitTracker()
    derived: list[Waiting] = []
    for number, ops in enumerate(steps):
        published: Ticket | None = None
        for op in ops:
            ticket, waits = tracker.add(op)
            derived.append(Waiting(op, number, ticket, tuple(waits)))
            if op.kind == "PUBLISH":
                published = ticket
        if published is not None:
            tracker.observe(published)
    return derived


def simulate(program: Sequence[Waiting], seconds: Callable[[Op], float], *, one_processor: bool = False) -> Timeline:
    """The last step of ``program``, which must hold at least two, with the updates that earlier ones left to it.

    ``seconds(op)`` is how long an operation takes. The host submits a step once the one before is published; what ran
    before the program is over. ``one_processor``: every operation takes all cores of the same one, so that lanes take
    turns and nothing is hidden.
    """
    ends: dict[Ticket, float] = {}
    free: dict[str, float] = {}
    submitted: dict[int, float] = {}
    timed: list[Timed] = []
    for waiting in program:
        lane = "" if one_processor else waiting.op.lane
        ready = max((ends.get(ticket, 0.0) for ticket in waiting.waits), default=0.0)
        start = max(ready, free.get(lane, 0.0), submitted.get(waiting.step, 0.0))
        end = start + seconds(waiting.op)
        ends[waiting.ticket] = free[lane] = end
        timed.append(Timed(waiting, start, end))
        if waiting.op.kind == "PUBLISH":
            submitted[waiting.step + 1] = end
    return steady_steps(timed)[-1]


def steady_steps(timed: Sequence[Timed]) -> list[Timeline]:
    """Each step of a sequence but the first: from the PUBLISH of the one before to its own."""
    published = [t.end for t in timed if t.op.kind == "PUBLISH"]
    return [_between(timed, begin, finish) for begin, finish in pairwise(published)]


def _between(timed: Sequence[Timed], begin: float, finish: float) -> Timeline:
    inside = [
        Timed(t.waiting, max(t.start, begin) - begin, min(t.end, finish) - begin)
        for t in timed
        if t.end > begin and t.start < finish
    ]
    return Timeline(finish - begin, tuple(inside))
