"""The terminal: a live line where there is one, plain lines elsewhere; never silent for more than ten seconds."""

from __future__ import annotations

import threading
import time

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from megatrain.loggers import Logger, StepRecord, Summary
from megatrain.loggers._screens import duration, step_line, summary_lines

_SILENCE = 5.0  # seconds after which a plain console says what is under way


class ConsoleLogger(Logger):
    """Prints every ``every``-th step to ``console``, and in between what is under way and how far it is."""

    def __init__(self, console: Console, every: int = 1, silence: float = _SILENCE) -> None:
        self._console, self._every, self._silence = console, every, silence
        self._status = _Status()
        self._printed, self._lock, self._closed = time.monotonic(), threading.Lock(), threading.Event()
        self._live = (
            Live(self._status, console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        )
        if self._live:
            self._live.start()
        else:
            self._heartbeat = threading.Thread(target=self._beat, name="megatrain-console", daemon=True)
            self._heartbeat.start()

    def note(self, text: str) -> None:
        self._print(text)

    def step(self, record: StepRecord) -> None:
        if record.step % self._every == 0 or record.step in (1, record.total_steps) or record.skipped:
            self._print(step_line(record))

    def progress(self, phase: str, done: int, total: int) -> None:
        self._status.update(phase, done, total)

    def summary(self, summary: Summary) -> None:
        self._status.clear()
        for line in summary_lines(summary):
            self._print(line)

    def close(self) -> None:
        self._closed.set()
        if self._live:
            self._status.clear()
            self._live.stop()
        else:
            self._heartbeat.join()

    def _print(self, line: str) -> None:
        with self._lock:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            self._printed = time.monotonic()

    def _beat(self) -> None:
        while not self._closed.wait(min(1.0, self._silence / 5)):
            text = self._status.text()
            if text and time.monotonic() - self._printed >= self._silence:
                try:
                    self._print(f"        {text}")
                except BrokenPipeError:  # the training thread finds it at its next line
                    return


class _Status:
    """What is under way, how far, and for how long."""

    def __init__(self) -> None:
        self._phase, self._done, self._total, self._since = "", 0, 0, 0.0

    def update(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            self._since = time.monotonic()
        self._phase, self._done, self._total = phase, done, total

    def clear(self) -> None:
        self._phase = ""

    def text(self) -> str:
        if not self._phase:
            return ""
        percent = f" · {100 * self._done / self._total:.0f} %" if self._total else ""
        return f"{self._phase}{percent} · {duration(time.monotonic() - self._since)}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.text(), style="dim", no_wrap=True, overflow="ellipsis")
