"""Peak device memory of a program, from the sizes of its buffers and what its operations take while they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatrain.engine.program import Buffer, Op


def planned_peak(
    ops: Sequence[Op], fixed: int, size: Callable[[Buffer], int], workspace: Callable[[Op], int]
) -> tuple[int, str]:
    """Peak device bytes of a program and the operation at which it is reached.

    ``fixed`` bytes are always held; ``size`` gives the bytes of a buffer that comes and goes, ``workspace`` what an
    operation takes while it runs.
    """
    live: dict[Buffer, int] = {}
    peak, where = fixed, "slots and gradient buffers"
    held = 0
    for op in ops:
        if op.lane != "compute":
            continue
        total = fixed + held + workspace(op)
        if total > peak:
            peak, where = total, str(op)
        for buffer in op.writes:
            held += size(buffer) - live.get(buffer, 0)
            live[buffer] = size(buffer)
        for buffer in op.releases:
            held -= live.pop(buffer, 0)
    return peak, where
