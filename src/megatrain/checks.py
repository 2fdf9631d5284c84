"""Checks of values that users give, each with the one message for its kind of mistake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from megatrain.errors import UserError


def whole(field: str, value: Any, least: int) -> int:
    """``value`` as a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{field}: {value!r} is not a whole number; give one of at least {least}")
    if value < least:
        raise UserError(f"{field}: {value} is out of range; it must be at least {least}")
    return value


def number(field: str, value: Any, range_text: str, *, above: float | None = None, least: float | None = None) -> float:
    """``value`` as a finite number above ``above`` or of at least ``least``; ``range_text`` says so in words."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{field}: {value!r} is not a number; it must be {range_text}")
    if not isfinite(value) or (above is not None and value <= above) or (least is not None and value < least):
        raise UserError(f"{field}: {value} is out of range; it must be {range_text}")
    return float(value)


def choice(field: str, value: Any, choices: Sequence[str] | Mapping[str, Any]) -> str:
    """``value`` as one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise UserError(f"{field}: {value!r} is unknown; choose {' or '.join(choices)}")
    return value


def readable_bytes(nbytes: int) -> str:
    """``nbytes`` in the largest binary unit that gives at least one of it."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
