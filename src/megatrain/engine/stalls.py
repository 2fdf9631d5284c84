"""Why a lane stands still: what its next operation waited for, followed back to what was running then. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatrain.devices import LANES
from megatrain.engine.schedule import Ticket
from megatrain.engine.simulate import Timed, Timeline

HOST = "host"
"""Nothing that an operation waits for is running: what is left is submitting, starting and noticing."""

DONE = "end of step"
"""A lane starts nothing more before the step ends."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A time in which a lane does not work, and why."""

    start: float
    end: float
    why: str
    """Lane and kind of the operation that runs meanwhile, `HOST` or `DONE`."""
    cause: Timed | None = None
    """That operation."""


@dataclass(frozen=True, slots=True)
class LaneShare:
    """A lane's part of a step, in seconds."""

    busy: float
    waiting: dict[str, float]
    """By `Stall.why`, the longest first. With ``busy`` it adds up to the step."""


def breakdown(timeline: Timeline) -> dict[str, LaneShare]:
    """How long each lane of a step works, and what it waits for in the rest."""
    shares: dict[str, LaneShare] = {}
    for lane in LANES:
        waiting: dict[str, float] = {}
        for stall in stalls(timeline, lane):
            waiting[stall.why] = waiting.get(stall.why, 0.0) + stall.end - stall.start
        longest_first = sorted(waiting.items(), key=lambda item: -item[1])
        shares[lane] = LaneShare(timeline.busy(lane), dict(longest_first))
    return shares


def stalls(timeline: Timeline, lane: str) -> list[Stall]:
    """The times in which a lane does not work, in order.

    A lane that waits for an operation that waits itself waits for what that one waits for: each stall names what was
    running.
    """
    by_ticket = {timed.waiting.ticket: timed for timed in timeline.ops}
    found: list[Stall] = []
    free = 0.0
    for timed in timeline.ops:
        if timed.op.lane != lane:
            continue
        found += reversed(list(_causes(by_ticket, timed, free, timed.start)))
        free = max(free, timed.end)
    if free < timeline.seconds:
        found.append(Stall(free, timeline.seconds, DONE))
    return found


def _causes(by_ticket: dict[Ticket, Timed], timed: Timed, since: float, until: float) -> Iterator[Stall]:
    """What an operation waited for between two times, from the later to the earlier."""
    while until > since:
        lane, index = timed.waiting.ticket
        before = (by_ticket.get(ticket) for ticket in (*timed.waiting.waits, (lane, index - 1)))
        last = max((other for other in before if other is not None), key=lambda other: other.end, default=None)
        if last is None or last.end <= since:
            yield Stall(since, until, HOST)
            return
        if last.end < until:
            yield Stall(last.end, until, HOST)
        start = max(since, min(last.start, until))
        end = min(last.end, until)
        if start < end:
            yield Stall(start, end, f"{last.op.lane} {last.op.kind}", last)
        timed, until = last, start
