"""The few steps of a run that are recorded: when, what was predicted of them, and the pictures of both."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from megatrain.config import TraceConfig
from megatrain.engine.simulate import Timeline
from megatrain.engine.trace import Trace
from megatrain.loggers import Checked
from megatrain.model import Model
from megatrain.timeline_page import page
from megatrain.trace_events import trace_events

_WARM = 2
"""Steps that are passed over where the run is long enough: they measure, compile and fill caches."""


class RecordedSteps:
    """Records some steps out of ``steps``, the numbers of those that this process runs, counted from 0.

    Without a ``trace.path`` they are the two that a prediction needs. Where there are too few, nothing is recorded.
    """

    def __init__(self, config: TraceConfig, steps: range) -> None:
        self._config = config
        recorded = 1 + (config.steps if config.path else 1)  # from the first one only the steady state is taken
        spare = len(steps) - recorded
        self.steps = steps[min(_WARM, spare) :][:recorded] if spare >= 0 else range(0)
        """Numbers of the recorded steps."""
        self._stack = ExitStack()
        self._trace: Trace | None = None
        self.predicted: Timeline | None = None
        """The last recorded step, simulated."""

    def before(self, model: Model, step: int) -> None:
        """Called before each step."""
        if self.steps and step == self.steps[0]:
            self._trace = self._stack.enter_context(model.trace())

    def ends_with(self, step: int) -> bool:
        """Whether this is the last recorded step; then `finish` is due."""
        return bool(self.steps) and step == self.steps[-1]

    def finish(self, model: Model) -> None:
        """End the recording, and simulate the last step of it."""
        self._stack.close()
        assert self._trace is not None
        self.predicted = model.predict(self._trace)

    @property
    def one_step(self) -> Checked | None:
        """Seconds of the last recorded step."""
        if self._trace is None or self.predicted is None:
            return None
        return Checked(self.predicted.seconds, self._trace.steps[-1].seconds)

    def write(self, title: str, lines: list[str]) -> list[Path]:
        """Write the page and the trace events to ``trace.path``, where there is one; returns the files."""
        if self._trace is None or self.predicted is None or self._config.path is None:
            return []
        first, last = self.steps[0] + 1, self.steps[-1] + 1
        measured = self._trace.steps
        pictures = [(f"step {last}, predicted", self.predicted)]
        pictures += [(f"step {first + i}, measured", timeline) for i, timeline in enumerate(measured, 1)]
        begin = [timed.end for timed in self._trace.ops if timed.op.kind == "PUBLISH"][-2]
        simulated = [replace(t, start=t.start + begin, end=t.end + begin) for t in self.predicted.ops]
        processes = [
            (f"step {last}, predicted", simulated),
            (f"steps {first} to {last}, measured", self._trace.ops),
        ]
        file = Path(self._config.path)
        file.write_text(page(title, lines, pictures), encoding="utf-8")
        events = file.with_suffix(".json")
        events.write_text(json.dumps(trace_events(processes)), encoding="utf-8")
        return [file, events]
