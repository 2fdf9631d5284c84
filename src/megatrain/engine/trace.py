"""What the lanes did and when: a mark before and after each operation, read when the steps are over."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatrain.devices import Device, Mark
from megatrain.engine.batches import HostBatch
from megatrain.engine.program import Op
from megatrain.engine.simulate import Timed, Timeline, Waiting, steady_steps
from megatrain.engine.workspace import Shape


@dataclass(slots=True)
class _Marked:
    waiting: Waiting
    start: Mark | None = None
    end: Mark | None = None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What the time of a micro-batch depends on; ``targets``: the share of its tokens that the loss is taken on."""

    shape: Shape
    targets: float

    @staticmethod
    def of(batch: HostBatch) -> MicroBatch:
        """Of a micro-batch."""
        return MicroBatch(Shape.of(batch), batch.targets.numel() / batch.input_ids.numel())


class Trace:
    """Steps of a model as its lanes ran them; complete when `Model.trace` has ended."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._marked: list[_Marked] = []
        self.micro_batches: dict[int, list[MicroBatch]] = {}
        """Of each step, by its number."""
        self.ops: tuple[Timed, ...] = ()
        """Every operation of every step, in order of submission, in seconds since the first one began."""

    @property
    def steps(self) -> list[Timeline]:
        """The steady steps: all but the first, each from the PUBLISH of the one before to its own."""
        return steady_steps(self.ops)

    def timing(self, waiting: Waiting, run: Callable[[], None]) -> Callable[[], None]:
        """``run``, for its lane to call, with a mark before and after it."""
        marked = _Marked(waiting)
        self._marked.append(marked)
        lane = waiting.op.lane

        def timed() -> None:
            marked.start = self._device.mark(lane)
            run()
            marked.end = self._device.mark(lane)

        return timed

    def read(self) -> None:
        """Turn marks into times. The lanes must be drained."""
        marks = [mark for m in self._marked for mark in (m.start, m.end) if mark is not None]
        instants = self._device.instants(marks)
        begin = min(instants, default=0.0)
        pairs = zip(self._marked, instants[::2], instants[1::2], strict=True)
        self.ops = tuple(Timed(m.waiting, start - begin, end - begin) for m, start, end in pairs)
        self._marked.clear()

    def typical_seconds(self, structure: Mapping[str, int]) -> Callable[[Op], float]:
        """The median time of the recorded operations that are like a given one: its kind, its lane, a unit of the same
        ``structure`` (of each unit)."""
        seconds: dict[tuple[str, str, int | None], list[float]] = {}
        for timed in self.ops:
            seconds.setdefault(_likeness(timed.op, structure), []).append(timed.end - timed.start)
        medians = {likeness: statistics.median(values) for likeness, values in seconds.items()}
        return lambda op: medians[_likeness(op, structure)]


def _likeness(op: Op, structure: Mapping[str, int]) -> tuple[str, str, int | None]:
    return op.kind, op.lane, structure.get(op.unit)
