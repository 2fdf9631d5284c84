"""When each operation of a program would start and end, were each to take a given time. No torch.

A lane runs its operations in order; each starts when its lane is free and the operations that it waits for have ended.
The waits are those of `schedule`, so what is simulated is what the executor runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

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
    """One operation and its seconds since the step began."""

    op: Op
    start: float
    end: float


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


def simulate(program: Sequence[Waiting], seconds: Callable[[Op], float]) -> Timeline:
    """The last step of ``program``, which must hold at least two, with the updates that earlier ones left to it.

    ``seconds(op)`` is how long an operation takes. The host submits a step once the one before is published.
    """
    ends: dict[Ticket, float] = {}
    free: dict[str, float] = {}
    submitted = {0: 0.0}
    timed: list[Timed] = []
    published: list[float] = []
    for waiting in program:
        lane = waiting.op.lane
        ready = max((ends[ticket] for ticket in waiting.waits), default=0.0)
        start = max(ready, free.get(lane, 0.0), submitted[waiting.step])
        end = start + seconds(waiting.op)
        ends[waiting.ticket] = free[lane] = end
        timed.append(Timed(waiting.op, start, end))
        if waiting.op.kind == "PUBLISH":
            published.append(end)
            submitted[waiting.step + 1] = end
    begin, finish = published[-2:]
    inside = [
        Timed(t.op, max(t.start, begin) - begin, min(t.end, finish) - begin)
        for t in timed
        if t.end > begin and t.start < finish
    ]
    return Timeline(finish - begin, tuple(inside))
