"""Fault 19: a number written as 1e-5 arrives as text. Each numeric option takes every spelling, or names the range."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from megatrain.config import options
from megatrain.config_file import load_config
from megatrain.errors import UserError

BASE = ["model.name_or_path=m", "data.train=d.jsonl", "output_dir=o"]
NUMERIC = {
    name: (f, float if float in (kind, *get_args(kind)) else int)
    for name, (f, kind) in options().items()
    if not f.metadata["size"] and {int, float} & {kind, *get_args(kind)}
}
SPELLINGS = ["1e-5", "1E-5", ".00001", "'1e-5'", "-1", "nan", "1e5", "'abc'", "1", ".inf", "true"]


def value_of(text: str) -> float | None:
    try:
        return float(text.strip("'")) if text != ".inf" else math.inf
    except ValueError:
        return None


@pytest.mark.parametrize("name", NUMERIC)
@pytest.mark.parametrize("text", SPELLINGS)
def test_each_spelling_for_each_numeric_option(name: str, text: str) -> None:
    f, kind = NUMERIC[name]
    value, limits = value_of(text), f.metadata["limits"]
    valid = (
        value is not None
        and math.isfinite(value)
        and (kind is float or value.is_integer())
        and value >= limits.get("ge", -math.inf)
        and value > limits.get("gt", -math.inf)
        and value <= limits.get("le", math.inf)
        and value < limits.get("lt", math.inf)
    )
    if valid:
        read = load_config(None, [*BASE, f"{name}={text}"])
        section, _, key = name.rpartition(".")
        found = getattr(getattr(read, section), key)
        assert type(found) is kind
        assert found == value
    else:
        with pytest.raises(UserError) as e:
            load_config(None, [*BASE, f"{name}={text}"])
        message = str(e.value)
        assert message.startswith(f"{name}: ")
        assert all(f"{limit:g}" in message for limit in limits.values())
