"""The folder of a run: refused when it holds something, made only when the run can begin, taken back when it cannot."""

from __future__ import annotations

import errno
import fcntl
import logging
import logging.handlers
import os
import re
import shlex
from pathlib import Path

from megatrain._durable import remove_if_abandoned, temporary_of
from megatrain.errors import UserError

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # some network disks
_log = logging.getLogger(__name__)


class RunFolder:
    """``output_dir`` with its files. :meth:`check` only looks, :meth:`claim` makes and locks it, :meth:`create` writes.

    Between ``claim`` and ``create`` the run may still be refused; until then the files of an earlier run in the
    folder stay as they are.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log, self.resolved = path / "run.log", path / "resolved.yaml"
        self.metrics, self.checkpoints, self.final = (
            path / "metrics.jsonl",
            path / "checkpoints",
            path / "final",
        )
        self._lock_file = path / "run.lock"
        self._lock: int | None = None  # descriptor that holds the lock
        self._handler: logging.Handler | None = None
        self._made: list[Path] = []  # what claim() and create() have added, innermost first

    @property
    def created(self) -> bool:
        return self._handler is not None

    @property
    def resume_command(self) -> str:
        """What to type to continue this run."""
        return f"megatrain train {shlex.quote(str(self.resolved))} checkpoint.resume=auto"

    def check(self, resume: str) -> None:
        """Raise :class:`UserError` if another process has the folder, if it holds another run or files and this one
        does not continue it, or if it cannot be made. Changes nothing."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"output_dir: {self.path} is a file\n  fix:   name a new folder")
        self._check_place()
        if self._lock is None and self._lock_file.exists():
            descriptor = os.open(self._lock_file, os.O_RDWR)
            try:
                self._take(descriptor)
            finally:
                os.close(descriptor)
        held = sorted(p.name for p in self.path.iterdir()) if self.path.is_dir() else []
        held = [name for name in held if name != self._lock_file.name]
        if held and resume == "no":
            raise UserError(
                f"output_dir: {self.path} is not empty\n  found: {', '.join(held[:4])}\n"
                f"  fix:   name a new folder, or continue that run with checkpoint.resume=auto"
            )

    def _check_place(self) -> None:
        there = self.path.absolute()
        while not there.is_dir():
            there = there.parent
        if os.statvfs(there).f_blocks == 0:
            raise UserError(
                f"output_dir: {self.path}: {there} is not on a disk: no files can be kept there\n"
                "  fix:   name a folder on a disk"
            )
        if not os.access(there, os.W_OK | os.X_OK):
            raise UserError(
                f"output_dir: {self.path} cannot be written: no right to write to {there}\n"
                "  fix:   name a folder that you may write to"
            )

    def claim(self, resume: str) -> None:
        """Make the folder where it is missing and keep every other process out of it until :meth:`close`.

        Raises :class:`UserError` as :meth:`check` does, and if the folder cannot be written.
        """
        try:
            self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            while self._lock is None:
                descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o644)
                try:
                    self._take(descriptor)
                    if self._is_current(descriptor):  # else its last owner has just removed it: once more
                        self._lock = descriptor
                finally:
                    if self._lock is None:
                        os.close(descriptor)
            os.ftruncate(self._lock, 0)
            os.write(self._lock, str(os.getpid()).encode())
        except OSError as e:
            raise self._unwritable(e) from None
        self.check(resume)

    def _take(self, descriptor: int) -> None:
        """Lock an open lock file, or raise :class:`UserError` naming the process that has it."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
            raise UserError(
                f"output_dir: {self.path} is in use by another megatrain (PID {owner})\n"
                f"  fix:   wait for it, stop it with: kill -INT {owner}; or name another folder"
            ) from None
        except OSError as e:
            if e.errno not in _NO_LOCKS:
                raise
            _log.warning("%s: this disk has no locks: start only one run there", self.path)

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._lock_file))
        except FileNotFoundError:
            return False

    def create(self, resolved: str, early: logging.handlers.MemoryHandler) -> None:
        """Save the configuration, remove what a killed process left half written, and send every log message to
        ``run.log``, those of ``early`` first."""
        self._made = [p for p in (self.log, self.resolved) if not p.exists()] + self._made
        try:
            rewritten = self.resolved.with_suffix(".tmp")
            rewritten.write_text(resolved, encoding="utf-8")
            rewritten.replace(self.resolved)
            for left in self.path.iterdir():
                if temporary_of(left) == self.final.name:
                    remove_if_abandoned(left)
            handler = logging.FileHandler(self.log, encoding="utf-8")
        except OSError as e:
            raise self._unwritable(e) from None
        handler.setFormatter(_PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        early.setTarget(handler)
        early.close()
        logging.getLogger().removeHandler(early)
        logging.getLogger().addHandler(handler)
        self._handler = handler

    def _unwritable(self, error: OSError) -> UserError:
        self.abandon()
        return UserError(
            f"output_dir: {self.path} cannot be written: {error.strerror}\n  fix:   name a folder that you may write to"
        )

    def abandon(self) -> None:
        """Nothing came of the run: remove what :meth:`claim` and :meth:`create` made, and only that."""
        self.close()
        for path in self._made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
            elif path.is_file():
                path.unlink()
        self._made = []

    def close(self) -> None:
        """End the log and let others have the folder."""
        if self._handler:
            logging.getLogger().removeHandler(self._handler)
            self._handler.close()
            self._handler = None
        if self._lock is not None:
            self._lock_file.unlink(missing_ok=True)  # before the lock goes: nobody else has it then
            os.close(self._lock)
            self._lock = None


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
