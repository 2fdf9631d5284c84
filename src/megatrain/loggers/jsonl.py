"""One JSON object per step in ``metrics.jsonl``, always written; a resumed run goes on in the same file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatrain.loggers import Logger, StepRecord, Summary


class JsonlLogger(Logger):
    """Appends to ``file`` after dropping the records of steps after ``done_steps``, which will be run again."""

    def __init__(self, file: Path, done_steps: int = 0) -> None:
        kept = [line for line in _lines(file) if "step" in line and line["step"] <= done_steps]
        rewritten = file.with_suffix(".tmp")
        rewritten.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        rewritten.replace(file)
        self._file = file.open("a", encoding="utf-8")

    def step(self, record: StepRecord) -> None:
        self._write(asdict(record))

    def note(self, text: str) -> None:
        """Not kept: it is for people."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """Not kept: only results are."""

    def summary(self, summary: Summary) -> None:
        self._write({"summary": {**asdict(summary), "exported": str(summary.exported)}})

    def close(self) -> None:
        self._file.close()

    def _write(self, record: dict[str, object]) -> None:
        # JSON knows no NaN: a loss that is none becomes null, so that every reader can parse the file.
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(plain) + "\n")
        self._file.flush()


def _lines(file: Path) -> list[dict[str, Any]]:
    """The whole records of ``file``; a line that a crash cut off is left out."""
    records = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records
