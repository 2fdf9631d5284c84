"""Folders that appear whole or not at all, whatever kills the process or the machine in between."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain.errors import UserError

_TEMPORARY = re.compile(r"(?P<name>.+)\.tmp-(?P<pid>\d+)")


@contextmanager
def durable_folder(folder: Path) -> Iterator[Path]:
    """Yield ``<folder>.tmp-<pid>`` to write into; on success flush it to the disk and rename it to
    ``folder``.

    ``folder`` must be absent or empty. On any failure the partial folder is removed; a killed process leaves
    it, under a name that ``temporary_of`` recognises. Failures of the disk are raised as UserError.
    """
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    complete = False
    try:
        if temporary.exists():  # left by a killed process of the same number
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        yield temporary
        for path in sorted(temporary.rglob("*")):
            _sync(path)
        _sync(temporary)
        os.replace(temporary, folder)
        complete = True
        _sync(folder.parent)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way_out = "free space on that disk" if full else "check the disk and the folder's rights"
        raise UserError(f"could not save to {folder}: {error}; {way_out} and save again") from error
    finally:
        if not complete:
            shutil.rmtree(temporary, ignore_errors=True)


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


def require_space(folder: Path, needed: int) -> None:
    """Refuse a save of ``needed`` bytes that the disk of ``folder`` cannot take."""
    parent = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UserError(
            f"saving to {folder} needs {needed / 2**30:.2f} GiB, the disk has {free / 2**30:.2f} GiB free;"
            " free some space or save elsewhere"
        )
