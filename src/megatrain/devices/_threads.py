"""Lanes as worker threads: shared by the `cpu` device and by `cuda`, whose lanes each add a stream."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from megatrain import numa
from megatrain.errors import LaneError

Ticket = tuple[str, int]


@dataclass(slots=True)
class Job:
    """A queued operation: ``label`` and ``unit`` name it in errors."""

    ticket: Ticket
    label: str
    unit: str
    run: Callable[[], None]
    waits: Sequence[Ticket]


class ThreadLanes:
    """Ordered queues, one thread each. ``done(lane)`` counts operations whose work on the host is over.

    ``prepare(ticket)`` runs before an operation's waits are counted as met on the lane's own thread, and
    ``perform(lane, run)`` runs the operation; the CUDA device uses them to place events and streams.
    """

    def __init__(
        self,
        lanes: Sequence[str],
        perform: Callable[[Ticket, Callable[[], None]], None],
        await_other: Callable[[str, Ticket], None],
        near: numa.Node | None = None,
    ) -> None:
        """``near``: the node whose cores the threads keep to."""
        self._perform, self._await_other, self._near = perform, await_other, near
        self._condition = threading.Condition()
        self._queues: dict[str, deque[Job]] = {lane: deque() for lane in lanes}
        self._done: dict[str, int] = dict.fromkeys(lanes, 0)
        self._closing = False
        self.failure: LaneError | None = None
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"megatrain-{lane}", daemon=True) for lane in lanes
        ]
        for thread in self._threads:
            thread.start()
        self._process = os.getpid()
        atexit.register(self._end)

    def submit(self, ticket: Ticket, label: str, unit: str, run: Callable[[], None], waits: Sequence[Ticket]) -> None:
        """Queue an operation on its lane."""
        with self._condition:
            self._queues[ticket[0]].append(Job(ticket, label, unit, run, waits))
            self._condition.notify_all()

    def wait(self, ticket: Ticket) -> None:
        """Block until the operation is over or a lane has failed, which is raised."""
        lane, index = ticket
        with self._condition:
            self._condition.wait_for(lambda: self.failure is not None or self._done[lane] > index)
        self.raise_failure()

    def drain(self) -> None:
        """Block until the queues are empty or a lane has failed, which is raised."""
        with self._condition:
            self._condition.wait_for(lambda: self.failure is not None or not any(self._queues.values()))
        self.raise_failure()

    def abort(self) -> None:
        """Drop every operation that has not started."""
        with self._condition:
            if self.failure is None:
                self.failure = LaneError("the step was interrupted; its remaining operations were dropped")
            self._condition.notify_all()

    def raise_failure(self) -> None:
        """Raise what went wrong in a lane, if anything did."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Let the threads finish what runs and end them."""
        atexit.unregister(self._end)
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _end(self) -> None:
        """At the end of a process that has not closed its model: an interpreter that ends under a thread in native code
        ends in an abort. A fork of it has none of the threads, and perhaps a lock that nobody will let go."""
        if os.getpid() != self._process:
            return
        self.abort()
        self.close()

    def _work(self, lane: str) -> None:
        if self._near is not None:
            numa.bind(self._near.cores)
        queue = self._queues[lane]
        while True:
            with self._condition:
                self._condition.wait_for(lambda: bool(queue) or self._closing)
                if self._closing and (not queue or self.failure is not None):
                    return
                job = queue[0]
                self._condition.wait_for(partial(self._may_start, job))
                stopped = self.failure is not None
            error = None if stopped else self._attempt(job)
            with self._condition:
                if error is not None and self.failure is None:
                    self.failure = error
                queue.popleft()
                self._done[lane] += 1
                self._condition.notify_all()

    def _may_start(self, job: Job) -> bool:
        return self.failure is not None or all(self._done[other] > index for other, index in job.waits)

    def _attempt(self, job: Job) -> LaneError | None:
        try:
            for other in job.waits:
                self._await_other(job.ticket[0], other)
            self._perform(job.ticket, job.run)
        except BaseException as cause:  # raised again, named, in the thread that waits
            return lane_error(job.ticket[0], job.label, job.unit, cause)
        return None


def lane_error(lane: str, label: str, unit: str, cause: BaseException) -> LaneError:
    """A `LaneError` that names lane, operation and unit, with ``cause`` as its cause."""
    where = f"lane {lane}, operation {label}" + (f", unit {unit}" if unit and unit not in label else "")
    error = LaneError(f"{where}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
