"""The saves of a run: named by step, found again by the newest that is whole, removed beyond the number kept."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from megatrain._durable import remove_if_abandoned
from megatrain.errors import UserError

_NAME = re.compile(r"step-(\d+)")


def save_path(folder: Path, step: int) -> Path:
    """Where the state after ``step`` steps goes."""
    return folder / f"step-{step:06}"


def find_save(resume: str, folder: Path) -> tuple[Path | None, list[str]]:
    """The save that ``checkpoint.resume`` means, None for a new start; and what was passed over, with the reason.

    A folder under its final name is whole, because it is renamed only when everything in it is on the disk; what a
    killed run was still writing has a temporary name. Raises :class:`UserError` for a path that is no save.
    """
    if resume == "no":
        return None, []
    if resume != "auto":
        path = Path(resume)
        if not path.is_dir():
            raise UserError(
                f"checkpoint.resume: {resume}: no such save\n  fix:   write auto, or a folder such as {save_path(folder, 500)}"
            )
        return path, []
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    skipped = [
        f"{p.name}: not complete, its writing was cut off" for p in entries if not _NAME.fullmatch(p.name)
    ]
    whole = [p for p in entries if _NAME.fullmatch(p.name)]
    return (max(whole, key=_step) if whole else None), skipped


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` saves, and what killed runs have left; call it after a save is complete."""
    for path in folder.iterdir():
        remove_if_abandoned(path)
    whole = sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), key=_step)
    for path in whole[:-keep]:
        shutil.rmtree(path)


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])
