"""Folders and files that appear whole or not at all, whatever kills the process or the machine in between."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain.errors import UserError

SMALL_FILES = 64 << 20
"""Room that a save or an export is given beside its tensors: headers, tokenizer, config."""

_TEMPORARY = re.compile(r"(?P<name>.+)\.tmp-(?P<pid>\d+)")


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Yield a new ``<folder>.tmp-<pid>`` and remove it at the end, however that comes.

    A killed process leaves it, under a name that ``temporary_of`` recognises. Failures of the disk are raised
    as UserError.
    """
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        if temporary.exists():  # left by a killed process of the same number
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        yield temporary
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way_out = "free space on that disk" if full else "check the disk and the folder's rights"
        raise UserError(f"could not save to {folder}: {error}; {way_out} and save again") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def durable_folder(folder: Path) -> Iterator[Path]:
    """A ``scratch_folder`` that on success is flushed to the disk and renamed to ``folder`` (absent or
    empty)."""
    with scratch_folder(folder) as temporary:
        yield temporary
        for path in sorted(temporary.rglob("*")):
            _sync(path)
        _sync(temporary)
        os.replace(temporary, folder)
        _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_of(path: Path) -> str | None:
    """The final name of a folder that ``durable_folder`` was writing; None for any other folder."""
    match = _TEMPORARY.fullmatch(path.name)
    return match["name"] if match else None


def remove_folder(path: Path) -> None:
    """Remove a folder so that no half of it is ever seen under its name, whatever interrupts."""
    doomed = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    os.replace(path, doomed)
    shutil.rmtree(doomed)


def remove_if_abandoned(path: Path) -> bool:
    """Remove a temporary folder whose writer is no longer alive; True if it was removed."""
    match = _TEMPORARY.fullmatch(path.name)
    if match is None or _alive(int(match["pid"])):
        return False
    shutil.rmtree(path)
    return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # alive, and another user's
        return True
    return True


def require_empty(folder: Path) -> None:
    """Refuse a target that holds anything, so that a save never mixes with files of another."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists and is not an empty folder; choose another folder or remove it")


def cache_folder(kind: str) -> Path:
    """Where things of a kind are kept that could be made again, as ``models``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatrain" / kind


def keep(file: Path, text: str) -> None:
    """Write a cached file, whole or not at all; a cache that cannot be written is no reason to stop."""
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)


def space_for(tensor_bytes: int) -> int:
    """Bytes of disk that a save or an export of so many bytes of tensors must find free."""
    return tensor_bytes + SMALL_FILES


def require_space(folder: Path, tensor_bytes: int) -> None:
    """Refuse a save of ``tensor_bytes`` that the disk of ``folder`` cannot take."""
    parent = next(path for path in (folder, *folder.parents) if path.is_dir())
    free, needed = shutil.disk_usage(parent).free, space_for(tensor_bytes)
    if free < needed:
        raise UserError(
            f"saving to {folder} needs {needed / 2**30:.2f} GiB, the disk has {free / 2**30:.2f} GiB free;"
            " free some space or save elsewhere"
        )
