"""Steps as trace events: what ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatrain.engine.simulate import Timed
from megatrain.timeline_page import KINDS, LANES

_THREAD = {lane: number for number, lane in enumerate(LANES, 1)}


def trace_events(processes: Sequence[tuple[str, Sequence[Timed]]]) -> dict[str, Any]:
    """The trace event format, as JSON data: a process for each name, a thread for each lane, a slice for each
    operation, and an arrow from what an operation waited for to it.

    All processes are on one time axis, that of their operations.
    """
    events: list[dict[str, Any]] = []
    for process, (name, ops) in enumerate(processes, 1):
        events += _names(process, name)
        known = {timed.waiting.ticket: timed for timed in ops}
        for timed in ops:
            where = {"pid": process, "tid": _THREAD[timed.op.lane]}
            waits = [known[ticket] for ticket in timed.waiting.waits if ticket in known]
            events.append({**where, **_slice(timed, waits)})
            for other in waits:
                arrow = {"name": "wait", "cat": "wait", "id": len(events)}
                source = {
                    "pid": process,
                    "tid": _THREAD[other.op.lane],
                    "ts": _micro((other.start + other.end) / 2),
                }
                events.append({**arrow, **source, "ph": "s"})
                events.append({**arrow, **where, "ph": "f", "bp": "e", "ts": _micro(timed.start)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(process: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for lane, thread in _THREAD.items():
        where = {"ph": "M", "pid": process, "tid": thread}
        yield {**where, "name": "thread_name", "args": {"name": LANES[lane]}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _slice(timed: Timed, waits: Sequence[Timed]) -> dict[str, Any]:
    op = timed.op
    args: dict[str, Any] = {"lane": op.lane, "kind": op.kind, "unit": op.unit, "step": timed.waiting.step}
    if op.micro >= 0:
        args["micro_batch"] = op.micro
    return {
        "ph": "X",
        "name": str(op),
        "cat": KINDS[op.kind][1],
        "ts": _micro(timed.start),
        "dur": _micro(timed.end - timed.start),
        "args": {**args, "waits": [str(other.op) for other in waits]},
    }


def _micro(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)
