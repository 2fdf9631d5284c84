"""What `megatrain doctor` measures: by an injected clock, kept for hardware and versions, used by the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _runs import arguments, chats, make_model, megatrain, write_rows

from megatrain import machines, preflight, rates
from megatrain.config_file import load_config
from megatrain.doctor import Finding, measured_rates
from megatrain.errors import UserError
from megatrain.machine import Gpu, Machine, probe
from megatrain.machines import keep_measured, measured_file, this_machine

FIGURES = {
    "h2d_rate": 2e9,
    "d2h_rate": 2e9,
    "product_rate": 25e9,
    "attention_rate": 10e9,
    "fp32_rate": 80e9,
    "gpu_memory_rate": 10e9,
    "adamw_rate": 4e8,
    "speculation_cost": 1.25,
}
LINES: list[machines.Line] = [("links", "2 GB/s", ""), ("disk", "slow", "buy another")]


@pytest.fixture(autouse=True)
def _nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def here() -> Machine:
    return replace(probe(), gpus=())


def quiet(_: str) -> None:
    pass


@pytest.fixture
def tick(monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds that pass between two looks at the clock; what is measured by it is small."""
    ticks: Iterator[int] = count()
    monkeypatch.setattr(rates, "time", SimpleNamespace(perf_counter=lambda: next(ticks) / 8))
    monkeypatch.setattr(rates, "_PARAMETERS", 100_000)
    monkeypatch.setattr(rates, "_DISK_MOST", 32 << 20)
    monkeypatch.setattr(rates, "_FIRST_TOKENS", 1)
    return 1 / 8


def test_figures_are_amounts_by_time(here: Machine, tick: float, tmp_path: Path, one_thread: None) -> None:
    told: list[str] = []
    figures, lines = rates.measure(here, "cpu", tmp_path, told.append)
    assert [text.split()[-1] for text in told] == ["links", "arithmetic", "optimizer", "disk"]
    assert figures["h2d_rate"] == figures["d2h_rate"] == 3 * (64 << 20) / tick
    assert figures["adamw_rate"] == pytest.approx(100_000 * min(here.cores, rates._MOST_CORES) / tick, rel=0.05)
    assert figures["speculation_cost"] == 1
    assert all(figures[name] > 0 for name in FIGURES)
    assert set(figures) == set(FIGURES)
    found = {subject: text for subject, text, _ in lines}
    assert found["links"].startswith(f"{3 * (64 << 20) / tick / 1e9:.1f} GB/s to the device")
    assert f"in {tmp_path}" in found["disk"]
    assert "AdamW" in found["rates"]
    assert list(tmp_path.iterdir()) == [], "the file that the disk was measured with"


def test_a_slow_optimizer_is_passed_over_twice_and_no_more(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    minutes: Iterator[int] = count()
    passes: list[int] = []
    monkeypatch.setattr(rates, "time", SimpleNamespace(perf_counter=lambda: next(minutes) * 60))
    monkeypatch.setattr(rates, "_PARAMETERS", 10_000)
    monkeypatch.setattr(rates.AdamW, "update", lambda *_, step, **__: passes.append(step))
    rates._optimizer(here)
    assert passes == [1, 2]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that were measured, in place of measuring them."""
    devices: list[str] = []

    def measure(machine: Machine, device: str, folder: Path | None, progress: Callable[[str], None]) -> Any:
        devices.append(device)
        return FIGURES, LINES if folder else LINES[:1]

    monkeypatch.setattr(rates, "measure", measure)
    return devices


def test_measured_once_and_shown_again(here: Machine, measured: list[str], tmp_path: Path) -> None:
    first = list(measured_rates(here, tmp_path, quiet))
    assert first[:2] == [Finding("links", "2 GB/s"), Finding("disk", "slow", "buy another")]
    assert first[2].text.startswith(str(measured_file(here, cpu=True)))
    assert list(measured_rates(here, tmp_path, quiet)) == first
    assert measured == ["cpu"]


def test_other_hardware_and_other_versions_are_measured_anew(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("NVIDIA T4", 16 << 30, 15 << 30, (7, 5), "580")
    with_gpu = replace(here, gpus=(gpu,))
    others = [
        measured_file(here, cpu=True),
        measured_file(replace(here, cores=here.cores + 1), cpu=True),
        measured_file(replace(here, memory=here.memory + 1), cpu=True),
        measured_file(replace(here, cpu="another"), cpu=True),
        measured_file(with_gpu, cpu=False),
        measured_file(replace(with_gpu, gpus=(replace(gpu, driver="581"),)), cpu=False),
    ]
    monkeypatch.setattr(machines.metadata, "version", lambda name: f"{name} 99")
    others.append(measured_file(here, cpu=True))
    assert len(set(others)) == len(others)
    busy = replace(with_gpu, memory_free=1, gpus=(replace(gpu, memory_free=1),))
    assert measured_file(busy, cpu=False) == measured_file(with_gpu, cpu=False), "what is free is no hardware"


@pytest.mark.parametrize("text", ["", "{", '{"figures": {}}', "[]"])
def test_a_damaged_file_is_refused_by_name_and_measured_again(
    here: Machine, measured: list[str], tmp_path: Path, text: str
) -> None:
    file = measured_file(here, cpu=True)
    keep_measured(here, FIGURES, LINES, cpu=True)
    file.write_text(text)
    with pytest.raises(UserError, match=rf"machine: {file}: .*\n  fix: +megatrain doctor measures") as error:
        this_machine(here)
    assert "docs/planner.md" not in str(error.value)
    list(measured_rates(here, tmp_path, quiet))
    assert measured == ["cpu"]
    assert this_machine(here).adamw_rate == FIGURES["adamw_rate"]


def test_what_cannot_be_measured_is_told(here: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "measure", failing(RuntimeError("out of memory\nand more")))
    assert list(measured_rates(here, tmp_path, quiet)) == [Finding("rates", "not measured: out of memory")]
    assert not measured_file(here, cpu=True).exists()


def failing(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


T4 = Gpu("NVIDIA T4", 16 << 30, 15 << 30, (7, 5), "580")


def test_plan_goes_by_what_was_measured(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.machine.probe", lambda: replace(here, memory_free=16 << 30))
    words = ("plan", "--model", "smollm2-135m", "--tokens-per-step", "64", "--seq-len", "64", "--json")
    seconds = []
    for rate in (4e8, 4e7):
        keep_measured(here, {**FIGURES, "adamw_rate": rate}, LINES, cpu=True)
        found = json.loads(megatrain(*words).stdout)
        assert found["machine"] == "this machine's CPU (rates measured)"
        seconds.append(found["seconds"])
    assert seconds[1] > seconds[0]


def test_train_goes_by_what_was_measured(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    write_rows(tmp_path / "chats.jsonl", chats(8))
    words = arguments(tmp_path, "--dry-run")
    assert "rates assumed" in megatrain("train", *words).stdout
    keep_measured(probe(), FIGURES, LINES, cpu=True)
    assert "rates measured" in megatrain("train", *words).stdout


def test_train_measures_a_gpu_that_nobody_knows(here: Machine, measured: list[str], tmp_path: Path) -> None:
    """Without the disk, which `megatrain doctor` makes up for."""
    there = replace(here, gpus=(T4,))
    for _ in range(2):
        found = preflight._rated(there, "cuda", lambda *_: None)
        assert (found.gpu_memory, found.product_rate, found.unified) == (15 << 30, FIGURES["product_rate"], False)
    assert measured == ["cuda"]
    assert "disk" in [finding.subject for finding in measured_rates(there, tmp_path, quiet)]
    assert measured == ["cuda", "cuda"]


def test_the_disk_is_left_out_where_no_folder_is_given(
    here: Machine, tick: float, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.setattr(rates, "_disk", failing(AssertionError()))
    assert [subject for subject, _, _ in rates.measure(here, "cpu", None, quiet)[1]] == ["links", "rates"]


@pytest.mark.parametrize(
    ("gpus", "error", "why"),
    [
        ((T4,), RuntimeError("lane compute: MEASURE failed\nand more"), "lane compute: MEASURE failed"),
        ((T4,), torch.OutOfMemoryError("CUDA out of memory"), "CUDA out of memory"),
        ((T4,), OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        ((T4,), MemoryError(), "MemoryError"),
        ((), AssertionError("it is not tried"), "no NVML"),
    ],
)
def test_where_rates_cannot_be_measured_training_goes_on_with_plain_values(
    here: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[Gpu, ...],
    error: Exception,
    why: str,
) -> None:
    """Also with the CPU's rates at hand, which are no GPU's."""
    make_model(tmp_path / "model")
    write_rows(tmp_path / "chats.jsonl", chats(8))
    here = replace(here, gpus=gpus, gpu_problem="no NVML")
    keep_measured(here, FIGURES, LINES, cpu=True)
    monkeypatch.setattr("megatrain.machine.probe", lambda: here)
    monkeypatch.setattr(preflight, "_device_and_dtype", lambda _: ("cuda", "bfloat16"))
    monkeypatch.setattr(rates, "measure", failing(error))
    words = [word for word in arguments(tmp_path) if not word.startswith("train.micro")]
    prepared = preflight.prepare(load_config(None, words), lambda *_: None)
    note = f"plan    not for this machine, so the same as everywhere: rates not measured: {why}"
    assert prepared.choice.lines == (note,)
    assert prepared.config.placement.slots == 2


def test_the_rates_of_the_cpu_are_none_of_a_gpu_that_the_driver_does_not_tell_of(here: Machine) -> None:
    keep_measured(here, FIGURES, LINES, cpu=True)
    with pytest.raises(UserError, match="has no GPU"):
        this_machine(here, "cuda")
