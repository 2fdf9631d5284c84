"""Which operations of other lanes each operation waits for, derived from what it reads and writes.

Read after write, write after read and write after write; operations of one lane keep their order by themselves.
A wait that other waits imply is left out. Nothing else in MegaTrain orders lanes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.engine.program import Buffer, Op

Ticket = tuple[str, int]
"""An operation as (lane, position in that lane since the engine started)."""


@dataclass(slots=True)
class _Use:
    writer: Ticket | None = None
    readers: dict[str, int] = field(default_factory=dict)
    """Latest reader of each lane: it implies the earlier ones."""


class WaitTracker:
    """Derives waits for a growing sequence of operations; its state persists from step to step.

    Buffers outlive a step, so the first FETCH of a unit waits for its last UPDATE and for nothing more.
    """

    def __init__(self) -> None:
        self._uses: dict[Buffer, _Use] = {}
        self._counts: dict[str, int] = {}
        self._known: dict[Ticket, dict[str, int]] = {}
        self._observed: dict[str, int] = {}

    def add(self, op: Op) -> tuple[Ticket, list[Ticket]]:
        """Append ``op``; returns its ticket and the tickets of other lanes that must complete before it runs."""
        position = self._counts.get(op.lane, 0)
        ticket = (op.lane, position)
        self._counts[op.lane] = position + 1
        needed = self._conflicts(op)
        # Latest first: a later operation of a lane implies the earlier ones, and may imply other lanes' too.
        waits: list[Ticket] = []
        known = dict(self._known.get((op.lane, position - 1), {}))
        _merge(known, self._observed)
        for lane, index in self._strongest_first(needed, op.lane):
            if known.get(lane, -1) >= index:
                continue
            waits.append((lane, index))
            _merge(known, self._known[lane, index])
            known[lane] = max(known.get(lane, -1), index)
        known[op.lane] = position
        self._known[ticket] = known
        self._note(op, ticket)
        self._forget_old()
        return ticket, waits

    def observe(self, ticket: Ticket) -> None:
        """The host has waited for an operation: what is added from now on need not."""
        _merge(self._observed, self._known[ticket])

    def _conflicts(self, op: Op) -> set[Ticket]:
        needed: set[Ticket] = set()
        for buffer in op.reads:
            use = self._uses.get(buffer)
            if use and use.writer:
                needed.add(use.writer)
        for buffer in op.writes:
            use = self._uses.get(buffer)
            if use:
                needed.update(use.readers.items())
                if use.writer:
                    needed.add(use.writer)
        return needed

    def _strongest_first(self, needed: set[Ticket], own_lane: str) -> list[Ticket]:
        latest: dict[str, int] = {}
        for lane, index in needed:
            if lane != own_lane:
                latest[lane] = max(latest.get(lane, -1), index)
        candidates = list(latest.items())
        # An operation that knows of another candidate makes waiting for that one superfluous.
        return sorted(
            candidates,
            key=lambda c: -sum(self._known[c].get(lane, -1) >= index for lane, index in candidates),
        )

    def _note(self, op: Op, ticket: Ticket) -> None:
        for buffer in op.reads:
            self._uses.setdefault(buffer, _Use()).readers[op.lane] = ticket[1]
        for buffer in op.writes:
            self._uses[buffer] = _Use(writer=ticket)

    def _forget_old(self) -> None:
        """Drop the clocks that no buffer refers to any more, so that memory does not grow with the steps."""
        if len(self._known) < 50_000:
            return
        live = {use.writer for use in self._uses.values()} | {
            r for use in self._uses.values() for r in use.readers.items()
        }
        live |= {(lane, count - 1) for lane, count in self._counts.items()}
        self._known = {ticket: clock for ticket, clock in self._known.items() if ticket in live}


def _merge(into: dict[str, int], other: dict[str, int]) -> None:
    for lane, index in other.items():
        if index > into.get(lane, -1):
            into[lane] = index
