"""Lanes without threads: a seeded generator picks which runnable lane advances.

Every seed is one legal interleaving and runs the real arithmetic, so an order that the declared waits allow but that
gives another result is found, and found again by its seed. A deadlock is reported by the names of what is stuck.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from megatrain.devices import LANES, Device, Ticket
from megatrain.devices._host import HostMemoryDevice
from megatrain.devices._threads import Job, lane_error
from megatrain.errors import LaneError


class SimDevice(HostMemoryDevice):
    """Deterministic for a seed. ``starve`` names an operation that runs only when nothing else can."""

    name = "sim"

    def __init__(self, seed: int = 0, starve: Ticket | None = None) -> None:
        self._random = random.Random(seed)
        self._starve = starve
        self._queues: dict[str, deque[Job]] = {lane: deque() for lane in LANES}
        self._done: dict[str, int] = dict.fromkeys(LANES, 0)
        self._failure: LaneError | None = None

    def submit(self, ticket: Ticket, label: str, unit: str, run: Callable[[], None], waits: Sequence[Ticket]) -> None:
        self._queues[ticket[0]].append(Job(ticket, label, unit, run, waits))

    def wait(self, ticket: Ticket) -> None:
        lane, index = ticket
        while self._done[lane] <= index:
            self._advance()

    def drain(self) -> None:
        while any(self._queues.values()):
            self._advance()

    def abort(self) -> None:
        self._failure = LaneError("the step was interrupted; its remaining operations were dropped")

    def _advance(self) -> None:
        if self._failure is not None:
            raise self._failure
        heads = [queue[0] for queue in self._queues.values() if queue]
        ready = [job for job in heads if all(self._done[lane] > index for lane, index in job.waits)]
        if not ready:
            stuck = "; ".join(f"{job.label} waits for {list(job.waits)}" for job in heads)
            self._failure = LaneError(f"deadlock: no lane can advance: {stuck or 'nothing is queued'}")
            raise self._failure
        fair = [job for job in ready if job.ticket != self._starve]
        job = self._random.choice(fair or ready)
        try:
            job.run()
            self._queues[job.ticket[0]].popleft()
            self._done[job.ticket[0]] += 1
        except BaseException as cause:  # Ctrl-C too: an operation that ran in part must not run again
            self._failure = lane_error(job.ticket[0], job.label, job.unit, cause)
            raise self._failure from cause

    def close(self) -> None:
        """Nothing to end."""


def open() -> Device:
    """A simulator with seed 0."""
    return SimDevice()
