"""Machine specs: every figure has a source, and mistakes name what is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import UserError
from megatrain.machine import Gpu, Machine, probe
from megatrain.machines import FOLDER, known_machines, load_machine, this_machine

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
        assert len(machine.sources) == 11
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
        ({"adamw_rate": {"value": -1, "source": "x"}}, r"figures\.adamw_rate: -1 is not a number from 1 to"),
        ({"adamw_rate": {"value": 10**400, "source": "x"}}, r"figures\.adamw_rate: 10+ is not a number from 1 to"),
        (
            {"speculation_cost": {"value": 0.5, "source": "x"}},
            r"figures\.speculation_cost: 0\.5 is not a number from 1",
        ),
        ({"adamw_rate": {"value": float("nan"), "source": "x"}}, r"figures\.adamw_rate: nan"),
        ({"adam": {"value": 1, "source": "x"}}, r"figures\.adam is unknown\n.*adamw_rate"),
    ],
)
def test_a_wrong_figure_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_machine(written(tmp_path, change))


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"unified": "true"}', "unified: 'true' is neither true nor false"), ('{"figure": 1}', "figure is unknown")],
)
def test_parts_of_a_file_are_checked(tmp_path: Path, text: str, message: str) -> None:
    file = Path(written(tmp_path, {}))
    file.write_text(json.dumps(json.loads(file.read_text()) | json.loads(text)))
    with pytest.raises(UserError, match=message):
        load_machine(str(file))


@pytest.mark.parametrize("text", ["no json", "[]", "{}", "[" * 200_000])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(UserError, match=r"other\.json.*(not a JSON file|has no object 'figures')"):
        load_machine(str(tmp_path / "other.json"))


def machine_with(gpu: str, host: int, cores: int) -> Machine:
    gpus = (Gpu(gpu, 140 << 30, 130 << 30, (9, 0), "1"),)
    return replace(probe(), gpus=gpus, memory=host << 30, memory_free=(host - 10) << 30, cores=cores)


@pytest.mark.parametrize(
    ("gpu", "host", "base"),
    [
        ("NVIDIA H200", 200, "h200-128gb"),
        ("NVIDIA H200 NVL", 1400, "h200-1.5tb"),
        ("NVIDIA GH200 480GB", 480, "gh200-480gb"),
        ("NVIDIA A100-SXM4-80GB", 100, "a100-80gb-256gb"),
        ("NVIDIA GeForce RTX 4090", 64, "rtx4090-128gb"),
    ],
)
def test_this_machine_has_its_own_memory_and_the_rates_of_its_kind(gpu: str, host: int, base: str) -> None:
    found, known = this_machine(machine_with(gpu, host, 8)), load_machine(base)
    assert base in found.name
    assert (found.gpu_memory, found.host_memory, found.cores) == (130 << 30, (host - 10) << 30, 8)
    assert found.product_rate == known.product_rate
    assert found.adamw_rate == known.adamw_rate * 8 / known.cores
    assert this_machine(machine_with(gpu, host, 128)).adamw_rate == known.adamw_rate
    assert ("host_memory", "found on this machine") in found.sources


def test_a_gpu_whose_rates_nobody_knows_is_refused() -> None:
    with pytest.raises(UserError, match=r"rates of NVIDIA T4 are not known\n.*megatrain doctor.*h200-128gb"):
        this_machine(machine_with("NVIDIA T4", 64, 8))


def test_without_a_gpu_it_is_the_cpu_unless_a_gpu_is_asked_for() -> None:
    here = replace(probe(), gpus=(), gpu_problem="no driver", cores=6)
    found = this_machine(here)
    with_gpu = replace(here, gpus=machine_with("NVIDIA H200", 200, 6).gpus)
    assert found == this_machine(here, "cpu") == this_machine(with_gpu, "cpu")
    assert found.unified
    assert found.gpu_memory == found.host_memory == here.memory_free
    assert ("adamw_rate", "assumed") in found.sources
    with pytest.raises(UserError, match=r"no GPU \(no driver\)\n.*megatrain doctor.*h200-128gb"):
        this_machine(here, "cuda")
