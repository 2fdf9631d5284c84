"""Training data: what a format is, and how one is found by its name.

A public file of this folder is one format, found by its name (``data.format``). It holds

- ``COLUMNS``: the columns that it reads, under our names; ``data.columns`` may map them to the file's;
- ``recognises(record) -> bool``: whether a record (a dict under our names) has this form, for ``format: auto``;
- ``encode(record, encoder) -> Row``: the token ids of one record and which of them are trained on. Raises
  :class:`BadRow` for a record that cannot be trained on. Blocking, without side effects.
- ``SPLITS``: whether a row that is too long may be split into several.

Files whose name starts with ``_`` are shared parts: reading (``_jsonl``), chat masks (``_chat``), loading with
counts (``_load``) and the resumable order of batches (``_batches``).
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from megatrain.errors import UserError

if TYPE_CHECKING:
    from megatrain.datasets._encode import Encoder


@dataclass(frozen=True, slots=True)
class Row:
    """One training row: token ids (int32) and, of the same length, whether each token is trained on."""

    ids: npt.NDArray[np.int32]
    target: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ids)


class BadRow(Exception):
    """A record that cannot be trained on: the reason, what was found there, and how to correct it."""

    def __init__(self, reason: str, found: str = "", fix: str = "correct the row") -> None:
        super().__init__(reason)
        self.reason, self.found, self.fix = reason, found, fix


class Format(Protocol):
    """What a file of this folder provides (see the module's docstring)."""

    COLUMNS: tuple[str, ...]
    SPLITS: bool

    def recognises(self, record: dict[str, Any]) -> bool: ...

    def encode(self, record: dict[str, Any], encoder: Encoder) -> Row: ...


def format_names() -> list[str]:
    """The formats that this folder holds."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def find_format(name: str) -> Format:
    """The format called ``name``. Raises :class:`UserError` naming those that exist."""
    if name not in format_names():
        raise UserError(
            f"data.format: {name!r} is not a format\n  fix:   write auto or one of {', '.join(format_names())}"
        )
    found: Format = import_module(f"{__name__}.{name}")
    return found
