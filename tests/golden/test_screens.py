"""What people read, word for word. A file beside this one is a screen; change it only on purpose."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _runs import arguments, chats, make_model, megatrain, write_rows

from megatrain import doctor, rates, trainer
from megatrain.errors import LaneError
from megatrain.loggers import Checked, StepRecord, Summary
from megatrain.loggers._screens import (
    DataFigures,
    MemoryFigures,
    count,
    data_line,
    disk_size,
    duration,
    memory_line,
    model_line,
    size,
    step_line,
    summary_lines,
)
from megatrain.machine import GIB, Gpu, Machine
from megatrain.machines import keep_measured

HERE = Path(__file__).parent


def screen(name: str) -> str:
    return (HERE / f"{name}.txt").read_text(encoding="utf-8")


def test_help() -> None:
    assert megatrain("--help").stdout == screen("help")


def test_start() -> None:
    lines = [
        model_line("Qwen3-4B", 4_022_468_096, "bfloat16"),
        data_line(DataFigures(4812, 3_100_000, 1_891_000, ((12, "dropped (longer than 4096)"), (0, "cut")))),
        memory_line(MemoryFigures("GPU", int(19.2 * GIB), 24 * GIB, 52 * GIB, 118 * GIB, 48_300_000_000, 412 * 10**9)),
    ]
    assert "\n".join(lines) + "\n" == screen("start")


def test_steps() -> None:
    first = StepRecord(
        step=1,
        total_steps=940,
        epoch=1,
        loss=1.48123,
        lr=3.57e-7,
        grad_norm=4.2,
        skipped=False,
        target_tokens=2000,
        real_tokens=3720,
        padded_tokens=4000,
        seconds=3.0,
        device_peak=int(19.2 * GIB),
        host_bytes=52 * GIB,
        seconds_left=None,
    )
    later = replace(first, step=12, loss=1.4102, lr=4.29e-6, grad_norm=2.02, seconds_left=11520)
    skipped = replace(
        later, step=13, loss=float("nan"), lr=4.64e-6, grad_norm=float("inf"), skipped=True, seconds_left=11460
    )
    assert "\n".join(map(step_line, (first, later, skipped))) + "\n" == screen("steps")


def test_summary() -> None:
    summary = Summary(
        steps=940,
        target_tokens=1_900_000,
        real_tokens=3_100_000,
        padded_tokens=3_300_000,
        seconds=11_520,
        step_seconds=2_500,
        first_loss=1.4812,
        last_loss=0.9123,
        parameters=4_022_468_096,
        exported=Path("runs/first/final"),
        one_step=Checked(predicted=2.61, measured=2.66),
        device_peak=Checked(predicted=19.2 * GIB, measured=18.9 * GIB),
        host_peak=Checked(predicted=52.6 * GIB, measured=51.0 * GIB),
    )
    assert "\n".join(summary_lines(summary)) + "\n" == screen("summary")
    short = replace(summary, one_step=None, device_peak=None)
    assert summary_lines(short)[2] == "checked host 51.0 GiB, predicted 52.6 GiB (+3 %)"


def test_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "model")
    bad = {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}
    write_rows(tmp_path / "chats.jsonl", [*chats(411), bad])
    monkeypatch.chdir(tmp_path)
    result = megatrain("train", *arguments(tmp_path, "data.train=chats.jsonl"))
    assert result.stderr == screen("bad_row")


def test_an_unexpected_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise LaneError("lane optimizer, UPDATE of unit layers.3: disk error")

    make_model(tmp_path / "model")
    write_rows(tmp_path / "chats.jsonl", chats(4))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trainer._Loop, "run_step", fail)
    result = megatrain("train", *arguments(tmp_path, "output_dir=runs/first"))
    assert result.exit_code == 1
    assert result.stderr == screen("failure")
    assert "Traceback" in (tmp_path / "runs" / "first" / "run.log").read_text(encoding="utf-8")


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(
        cores=2,
        cores_present=16,
        memory=64 * GIB,
        memory_free=56 * GIB,
        memory_limited_by="the container (cgroup)",
        locked_limit=65536,
        gpus=(
            Gpu("NVIDIA GeForce RTX 4090", 24 * GIB, 23 * GIB, (8, 9), "580.65"),
            Gpu("Tesla T4", 16 * GIB, 15 * GIB, (7, 5), "580.65"),
        ),
        gpu_problem="",
        system="Linux x86_64, Python 3.12.3",
        wsl=True,
    )
    kept = ("system", "cores", "memory", "gpu", "pinned")
    figures = {
        "h2d_rate": 21.3e9,
        "d2h_rate": 21.3e9,
        "product_rate": 115e12,
        "attention_rate": 95e12,
        "fp32_rate": 31e12,
        "gpu_memory_rate": 880e9,
        "adamw_rate": 0.61e9,
        "speculation_cost": 1.2,
    }
    pinned = ("pinned", "512 MiB of 1.0 GiB could be pinned", "raise ulimit -l, or the memory of WSL")
    disk = ("disk", "writes 1.21 GB/s, reads 3.40 GB/s in runs", "")
    keep_measured(machine, figures, [pinned, ("rates", rates._summary(figures), ""), disk], cpu=False)
    measured = [f for f in doctor.measured_rates(machine, Path(), lambda _: None) if f.subject != "kept"]
    findings = [f for f in doctor.examine(machine, Path()) if f.subject in kept] + measured
    lines = [line for f in findings for line in [f"{f.subject:7} {f.text}", *([f"  fix:   {f.fix}"] if f.fix else [])]]
    lines.append(f"verdict {doctor.verdict(machine, findings)}")
    assert "\n".join(lines) + "\n" == screen("doctor")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (count(950), "950"),
        (count(4812), "4,812"),
        (count(112_345), "112,345"),
        (count(134_515_008), "134.5M"),
        (count(4.02e9), "4.02B"),
        (duration(59.6), "60 s"),
        (duration(119), "119 s"),
        (duration(240), "4 min"),
        (duration(11_520), "3 h 12 min"),
        (duration(190_800), "2 d 5 h"),
        (size(312 << 20), "312 MiB"),
        (size(24 << 30), "24.0 GiB"),
        (disk_size(269e6), "269 MB"),
        (disk_size(1.614e9), "1.6 GB"),
        (disk_size(1_234e9), "1,234 GB"),
    ],
)
def test_figures(text: str, expected: str) -> None:
    assert text == expected


def test_the_first_line_comes_within_two_seconds() -> None:
    program = [sys.executable, "-c", "from megatrain.cli import main; main()", "train", "nowhere.yaml"]
    begun = time.monotonic()
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("megatrain ")
        assert time.monotonic() - begun < 2
        process.communicate(timeout=60)
    assert process.returncode == 2


def test_help_and_doctor_need_no_torch() -> None:
    for words in (["--help"], ["doctor"]):
        program = (
            "import sys; sys.modules['torch'] = None; sys.argv = ['megatrain', *sys.argv[1:]]\n"
            "from megatrain.cli import main; main()"
        )
        result = subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60, check=False
        )
        assert "Traceback" not in result.stderr, result.stderr
    assert "verdict cannot train yet: see torch" in result.stdout
    assert "pip install 'torch>=2.11'" in result.stdout
