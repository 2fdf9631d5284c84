"""The folder of a run: refused when it holds something, made only when the run can begin, taken back when it cannot."""

from __future__ import annotations

import logging
import logging.handlers
import re
from pathlib import Path

from megatrain.errors import UserError

_OWN = {"run.log", "resolved.yaml", "metrics.jsonl", "checkpoints", "final"}
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


class RunFolder:
    """``output_dir`` with its files. :meth:`check` only looks; :meth:`create` writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log, self.resolved = path / "run.log", path / "resolved.yaml"
        self.metrics, self.checkpoints, self.final = (
            path / "metrics.jsonl",
            path / "checkpoints",
            path / "final",
        )
        self._handler: logging.Handler | None = None
        self._made: list[Path] = []  # what create() has added, innermost first

    @property
    def created(self) -> bool:
        return self._handler is not None

    def check(self, resume: str) -> None:
        """Raise :class:`UserError` if the folder holds another run or other files, or cannot be made."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"output_dir: {self.path} is a file\n  fix:   name a new folder")
        held = sorted(p.name for p in self.path.iterdir()) if self.path.is_dir() else []
        foreign = [n for n in held if n not in _OWN]
        if held and (resume == "no" or foreign):
            raise UserError(
                f"output_dir: {self.path} is not empty\n  found: {', '.join((foreign or held)[:4])}\n"
                f"  fix:   name a new folder, or continue that run with checkpoint.resume=auto"
            )

    def create(self, resolved: str, early: logging.handlers.MemoryHandler) -> None:
        """Make the folder, save the configuration and send every log message to ``run.log``, those of ``early``
        first."""
        path = self.path
        self._made = [p for p in (self.log, self.resolved, path, *path.parents) if not p.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.resolved.write_text(resolved, encoding="utf-8")
            handler = logging.FileHandler(self.log, encoding="utf-8")
        except OSError as e:
            self.abandon()
            raise UserError(
                f"output_dir: {path} cannot be written: {e.strerror}\n  fix:   name a folder that you may write to"
            ) from None
        handler.setFormatter(_PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        early.setTarget(handler)
        early.close()
        logging.getLogger().removeHandler(early)
        logging.getLogger().addHandler(handler)
        self._handler = handler

    def abandon(self) -> None:
        """Nothing came of the run: remove what :meth:`create` made, and only that."""
        self.close()
        for path in self._made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
            elif path.is_file():
                path.unlink()
        self._made = []

    def close(self) -> None:
        if self._handler:
            logging.getLogger().removeHandler(self._handler)
            self._handler.close()
            self._handler = None


class _PlainFormatter(logging.Formatter):
    """Without control characters, so that the log reads well everywhere."""

    def format(self, record: logging.LogRecord) -> str:
        return _CONTROL.sub("", super().format(record))


def quiet_libraries() -> logging.handlers.MemoryHandler:
    """Keep the messages of all libraries off the terminal; returns the handler that holds them until there is a
    log file."""
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    logging.captureWarnings(True)
    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    for library in ("transformers", "huggingface_hub"):  # each has a handler of its own that writes to the terminal
        logging.getLogger(library).handlers.clear()
        logging.getLogger(library).propagate = True
    early = logging.handlers.MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1)
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(early)
    return early
