"""Crash-safe training state: FP32 masters, both AdamW moments, step counts and whatever the caller adds.

A saved state is a folder that appears when it is complete and on the disk, or not at all:

    step-00000100/
      state.json                          format, version, size and CRC-32 of every file, step counts, meta
      state-00001-of-00030.safetensors    per unit, for each parameter: master.<name>, exp_avg.<name>,
      exp_avg_sq.<name>

Everything is indexed by parameter name, so that a state loads into another grouping or layout of the same
model. Saving and loading stream; the memory they need is one block.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from megatrain._durable import (
    durable_folder,
    remove_folder,
    remove_if_abandoned,
    require_empty,
    require_space,
    temporary_of,
)
from megatrain._safetensors import (
    BlockReader,
    Entry,
    OutTensor,
    Progress,
    as_dtype,
    byte_counter,
    read_header,
    write_file,
)
from megatrain.errors import UserError

_FORMAT = "megatrain-training-state"
_VERSION = 1
_STATE = "state.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SAVE = re.compile(r"step-(\d+)")


class DamagedSave(UserError):
    """A save whose bytes are not those that were written. The store is partly overwritten; loading another complete
    save replaces all of it."""


class Placed(Protocol):
    """What a layout says of one parameter; only the shape matters here."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class StateStore(Protocol):
    """What the store offers to save and load: state by parameter name, nothing about where it lies."""

    @property
    def units(self) -> Sequence[str]: ...

    def layout(self, unit: str) -> Mapping[str, Placed]:
        """The unit's own parameters; a tied alias is listed by its owner's unit alone."""

    def master_blocks(self, parameter: str) -> Iterable[torch.Tensor]:
        """The FP32 master in order, in pieces."""

    def load_master(self, parameter: str, start: int, block: torch.Tensor) -> None:
        """Set master elements from ``start`` on; the block is reused afterwards."""

    def moment(self, parameter: str, kind: str) -> torch.Tensor | None:
        """The FP32 moment in place, ``kind`` ``exp_avg`` or ``exp_avg_sq``; None if frozen."""

    def step_count(self, unit: str) -> int: ...

    def set_step_count(self, unit: str, count: int) -> None: ...


def step_folder(run_folder: str | Path, step: int) -> Path:
    """Where a run keeps the state after ``step`` optimizer steps."""
    return Path(run_folder) / f"step-{step:08}"


def save_state(
    folder: str | Path, store: StateStore, meta: Mapping[str, Any], progress: Progress | None = None
) -> None:
    """Save ``store`` and ``meta`` as ``folder``; it appears when it is complete and flushed, or not at all.

    ``meta`` holds what JSON can, and uint8 tensors (the states of random generators). A save of that name
    that cannot be loaded is set aside (``.broken-<pid>``); a complete one is never touched.

    Raises UserError when the folder holds something else or a complete state, the disk is too small or fails,
    and when a master or moment is not finite: then the previous states stay as they are and no new one is
    written.
    """
    folder = Path(folder).expanduser().resolve()
    json.dumps(dict(meta), default=_encode)  # a value that cannot be saved fails now, not after the weights
    files = dict(_planned(store))
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    broken = _broken_state(folder)
    if not broken:
        require_empty(folder)
    require_space(folder, total)
    advance = byte_counter("save", total, progress)
    with durable_folder(folder) as temporary:
        written = {}
        for name, tensors in files.items():
            size, crc = write_file(temporary / name, tensors, {"format": _FORMAT}, advance, checksum=True)
            written[name] = {"size": size, "crc32": crc}
        state = {
            "format": _FORMAT,
            "version": _VERSION,
            "files": written,
            "steps": {name: store.step_count(unit) for unit in store.units for name in store.layout(unit)},
            "meta": dict(meta),
        }
        (temporary / _STATE).write_text(json.dumps(state, default=_encode, indent=1), encoding="utf-8")
        if broken:
            set_aside(folder)


def set_aside(folder: Path) -> None:
    """Rename a save that cannot be loaded (``.broken-<pid>``), so that its name is free and nobody loads it."""
    os.replace(folder, folder.with_name(f"{folder.name}.broken-{os.getpid()}"))


def _planned(store: StateStore) -> Iterator[tuple[str, list[OutTensor]]]:
    """(file name, its tensors) for each unit that has parameters."""
    units = [unit for unit in store.units if store.layout(unit)]
    for number, unit in enumerate(units, 1):
        tensors = []
        for name, placed in store.layout(unit).items():
            shape = tuple(placed.shape)
            tensors.append(_out(f"master.{name}", shape, partial(store.master_blocks, name)))
            for kind in _MOMENTS:
                moment = store.moment(name, kind)
                if moment is not None:
                    tensors.append(_out(f"{kind}.{name}", shape, partial(_one, moment)))
        yield f"state-{number:05}-of-{len(units):05}.safetensors", tensors


def _out(name: str, shape: tuple[int, ...], blocks: Callable[[], Iterable[torch.Tensor]]) -> OutTensor:
    return OutTensor(name, "F32", shape, lambda: as_dtype(name, blocks(), "F32"))


def _one(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from (piece.cpu() for piece in tensor.view(-1).split(1 << 22))


def load_state(folder: str | Path, store: StateStore, progress: Progress | None = None) -> dict[str, Any]:
    """Load a saved state into ``store`` in place and return its ``meta``.

    Sizes, headers, names and shapes are checked before anything is written. Checksums are taken in the one
    pass that reads: if a file's is wrong, the UserError says that the model must be loaded again.
    """
    folder = Path(folder).expanduser()
    state, entries = _opened(folder)
    steps = _checked_against(store, state, entries, folder)
    advance = byte_counter("load", sum(entry.end - entry.start for entry in entries), progress)
    for path in dict.fromkeys(entry.path for entry in entries):
        with BlockReader(path, checksum=True) as reader:
            mine = [entry for entry in entries if entry.path == path]
            reader.skip(mine[0].start)
            for entry in mine:
                for start, block in reader.blocks(entry):
                    _put(store, entry, start, block)
                    advance(block.numel() * 4)
        if reader.crc != state["files"][path.name]["crc32"]:
            raise DamagedSave(
                f"{path} is damaged: its checksum is not that of {_STATE}. The state in memory is partly"
                " overwritten: load the model again and resume from another save"
            )
    for unit, count in steps.items():
        store.set_step_count(unit, count)
    meta: dict[str, Any] = state["meta"]
    return meta


def read_meta(folder: str | Path) -> dict[str, Any]:
    """The ``meta`` of a saved state that is complete by sizes and headers; reads no weights."""
    meta: dict[str, Any] = _opened(Path(folder).expanduser())[0]["meta"]
    return meta


def _put(store: StateStore, entry: Entry, start: int, block: torch.Tensor) -> None:
    kind, name = entry.name.split(".", 1)
    if kind == "master":
        store.load_master(name, start, block)
        return
    moment = store.moment(name, kind)
    if moment is not None:
        moment.view(-1)[start : start + block.numel()].copy_(block)


def _opened(folder: Path) -> tuple[dict[str, Any], list[Entry]]:
    """``state.json`` and all tensors in the order of their bytes, complete by size and header; else
    UserError."""
    try:
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"), object_hook=_decode)
        known, version, files = state["format"] == _FORMAT, state["version"], state["files"]
    except FileNotFoundError as error:
        raise UserError(_no_state(folder)) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / _STATE} cannot be read ({error!r}); resume from another save") from error
    if not known or version != _VERSION:
        raise UserError(
            f"{folder / _STATE} has format {state['format']!r}, version {version}; this MegaTrain reads"
            f" {_FORMAT!r}, version {_VERSION}: resume with the one that saved it"
        )
    entries: list[Entry] = []
    for name, facts in files.items():
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        if size != facts["size"]:
            found = "is missing" if size is None else f"has {size} bytes instead of {facts['size']}"
            raise UserError(f"{path} {found}; resume from another save")
        entries += read_header(path).values()
    return state, entries


def _no_state(folder: Path) -> str:
    if any(folder.glob("*.safetensors")) and (folder / "config.json").exists():
        return (
            f"{folder} is an exported model, not a training state: the AdamW moments are not in it, and its"
            " weights may be rounded, so resuming from it would lose precision. Resume from a step-* folder"
            " of the run, or start a new run with this model"
        )
    return f"{folder} is not a training state: it has no {_STATE}; give a step-* folder of a run"


def _checked_against(
    store: StateStore, state: Mapping[str, Any], entries: Iterable[Entry], folder: Path
) -> dict[str, int]:
    """Refuse a state of another model; returns the step count of each unit."""
    wanted = {tensor.name: tensor.shape for _, tensors in _planned(store) for tensor in tensors}
    saved = {entry.name: entry.shape for entry in entries}
    steps = {unit: {state["steps"].get(name) for name in store.layout(unit)} for unit in store.units}
    problems = {
        "missing from it": [name for name in wanted if name not in saved],
        "not in the model": [name for name in saved if name not in wanted],
        "of another shape": [
            f"{name} {list(saved[name])} instead of {list(shape)}"
            for name, shape in wanted.items()
            if saved.get(name, shape) != shape
        ],
        "of several step counts": [unit for unit, counts in steps.items() if len(counts) > 1],
    }
    found = [
        f"{len(names)} {what}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
        for what, names in problems.items()
        if names
    ]
    if found:
        raise UserError(
            f"{folder} is the state of another model: {'; '.join(found)}."
            " Resume with the model and the frozen parameters that it was saved with"
        )
    return {unit: counts.pop() for unit, counts in steps.items() if counts}


def latest_complete(
    run_folder: str | Path, damaged: Container[Path] = ()
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest complete save of a run (None if there is none) and the newer ones passed over, with the
    reason; those in ``damaged`` are left out of both.

    Complete: every file of ``state.json`` is there in full size with a sound header. Contents are checked
    when they are loaded.
    """
    skipped: list[tuple[Path, str]] = []
    for path in _saves(Path(run_folder)):
        if path in damaged:
            continue
        reason = _why_incomplete(path)
        if reason is None:
            return path, skipped
        skipped.append((path, reason))
    return None, skipped


def prune(run_folder: str | Path, keep: int) -> list[Path]:
    """Delete all but the newest ``keep`` complete saves of a run, oldest first; returns what was deleted.

    Nothing goes before the newest has been found complete. What killed saves left behind is deleted too,
    broken saves are left for the user to look at.
    """
    if keep < 1:
        raise UserError(f"checkpoint.keep is {keep}; keep at least 1 save")
    saves = list(_saves(Path(run_folder)))
    complete = [path for path in saves if _why_incomplete(path) is None]
    deleted = []
    for path in reversed(complete[keep:]):
        remove_folder(path)
        deleted.append(path)
    abandoned = [path for path in saves if temporary_of(path) and remove_if_abandoned(path)] if complete else []
    return deleted + abandoned


def _saves(run_folder: Path) -> Iterator[Path]:
    """Folders named as saves, finished or not, the newest first."""
    found = []
    for path in run_folder.iterdir() if run_folder.is_dir() else ():
        match = _SAVE.fullmatch(temporary_of(path) or path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    yield from (path for _, path in sorted(found, reverse=True))


def _why_incomplete(path: Path) -> str | None:
    if temporary_of(path):
        return "the save was not finished"
    try:
        _opened(path)
    except UserError as error:
        return str(error)
    return None


def _broken_state(folder: Path) -> bool:
    """Whether ``folder`` is one of our saves that can no longer be loaded."""
    ours = (folder / _STATE).exists() or any(folder.glob("state-*-of-*.safetensors"))
    return ours and _why_incomplete(folder) is not None


def _encode(value: object) -> dict[str, str]:
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.dim() == 1:
        return {"uint8": base64.b64encode(value.cpu().numpy().tobytes()).decode()}
    raise TypeError(f"training state cannot hold a {type(value).__name__}; use JSON values or 1-D uint8 tensors")


def _decode(value: dict[str, Any]) -> Any:
    if value.keys() == {"uint8"} and isinstance(value["uint8"], str):
        return torch.frombuffer(bytearray(base64.b64decode(value["uint8"])), dtype=torch.uint8)
    return value
