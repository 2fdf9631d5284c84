"""Machine specs: every figure has a source, and mistakes name what is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import UserError
from megatrain.machines import FOLDER, known_machines, load_machine

NAMES = {
    "h200-1.5tb": (139, 1536),
    "h200-128gb": (139, 128),
    "gh200-480gb": (94.5, 447),
    "h100-80gb-512gb": (79.1, 512),
    "a100-80gb-256gb": (79.1, 256),
    "rtx4090-128gb": (23.5, 128),
    "rtx5090-256gb": (31.3, 256),
}


def test_the_machines_that_ship() -> None:
    assert known_machines() == sorted(NAMES)
    for name, (gpu, host) in NAMES.items():
        machine = load_machine(name)
        assert machine.name == name
        assert machine.gpu_memory == int(gpu * 2**30)
        assert machine.host_memory == host * 2**30
        assert len(machine.sources) == 12
        assert all(len(source) > 10 for _, source in machine.sources)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="did you mean h200-128gb") as error:
        load_machine("h200-128")
    assert all(name in str(error.value) for name in NAMES)


def written(folder: Path, change: dict[str, Any]) -> str:
    data = json.loads((FOLDER / "h200-128gb.json").read_text())
    data["figures"] |= change
    data["figures"] = {figure: value for figure, value in data["figures"].items() if value is not None}
    (folder / "mine.json").write_text(json.dumps(data))
    return str(folder / "mine.json")


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    machine = load_machine(written(tmp_path, {"adamw_rate": {"value": 5e9, "source": "measured here"}}))
    assert (machine.name, machine.adamw_rate, machine.cores) == ("mine", 5e9, 16)
    assert ("adamw_rate", "measured here") in machine.sources


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adamw_rate": None}, r"figures\.adamw_rate: must be"),
        ({"adamw_rate": 4e9}, r"figures\.adamw_rate: must be"),
        ({"adamw_rate": {"value": 4e9}}, r"figures\.adamw_rate: must be"),
        ({"adamw_rate": {"value": -1, "source": "x"}}, r"figures\.adamw_rate: -1 is not a number above 0"),
        ({"adamw_rate": {"value": float("nan"), "source": "x"}}, r"figures\.adamw_rate: nan"),
        ({"adam": {"value": 1, "source": "x"}}, r"figures\.adam is unknown\n.*adamw_rate"),
    ],
)
def test_a_wrong_figure_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_machine(written(tmp_path, change))


@pytest.mark.parametrize("text", ["no json", "[]", "{}"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(UserError, match=r"other\.json.*(not a JSON file|has no object 'figures')"):
        load_machine(str(tmp_path / "other.json"))
