"""Stopping and going on: the resumed run is the uninterrupted one, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _runs import arguments, chats, make_model, megatrain, metrics, write_rows

from megatrain import Model
from megatrain.errors import UserError

STEPS = 9  # three epochs of three steps
SAME = ("loss", "lr", "grad_norm", "epoch", "target_tokens", "real_tokens", "padded_tokens")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saved after each step and was never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    make_model(folder / "model", attention_dropout=0.1)
    write_rows(folder / "chats.jsonl", chats(11))
    words = arguments(folder, "train.epochs=3", "checkpoint.every=1", "checkpoint.keep=20")
    result = megatrain("train", *words)
    assert result.exit_code == 0, result.output
    return folder


def weights(run: Path) -> bytes:
    return (run / "final" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("step", [1, 3, 7])  # in the middle of an epoch, at its end, in the middle of the last
def test_a_resumed_run_is_the_uninterrupted_one(whole: Path, tmp_path: Path, step: int) -> None:
    save = whole / "run" / "checkpoints" / f"step-{step:08}"
    words = arguments(whole, "train.epochs=3", f"output_dir={tmp_path}/run", f"checkpoint.resume={save}")
    result = megatrain("train", *words)
    assert result.exit_code == 0, result.output
    assert f"after step {step} of {STEPS}" in result.stdout
    assert weights(tmp_path / "run") == weights(whole / "run")
    again, before = metrics(tmp_path / "run"), metrics(whole / "run")[step:]
    assert [[r[k] for k in SAME] for r in again] == [[r[k] for k in SAME] for r in before]


def test_auto_takes_the_newest_save_and_metrics_go_on(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole / "run", run)
    shutil.rmtree(run / "final")
    for step in (6, 7, 8):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08}")
    (run / "checkpoints" / "step-00000008.tmp-1").mkdir()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "los')  # a crash in the middle of a line
    words = arguments(whole, "train.epochs=3", f"output_dir={run}", "checkpoint.resume=auto")
    result = megatrain("train", *words)
    assert result.exit_code == 0, result.output
    assert "passed over" in result.stdout
    assert "the save was not finished" in result.stdout
    assert [r["step"] for r in metrics(run)] == list(range(1, STEPS + 1))
    assert weights(run) == weights(whole / "run")


def test_a_save_can_be_exported(whole: Path, tmp_path: Path) -> None:
    result = megatrain("export", str(whole / "run" / "checkpoints" / "step-00000002"), str(tmp_path / "two"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "two" / "model.safetensors").is_file()
    again = megatrain("export", str(whole / "run"), str(tmp_path / "two"))
    assert again.exit_code == 2
    assert "not empty" in again.stderr


def test_other_rows_are_refused(whole: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "chats.jsonl", chats(10))
    save = whole / "run" / "checkpoints" / "step-00000001"
    words = [f"output_dir={tmp_path}/run", f"checkpoint.resume={save}", f"data.train={tmp_path}/chats.jsonl"]
    result = megatrain("train", *arguments(whole, *words))
    assert result.exit_code == 2
    assert "not the rows that the saved run was trained on" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    make_model(tmp_path / "model")
    write_rows(tmp_path / "chats.jsonl", chats(12))
    command = [sys.executable, "-c", "from megatrain.cli import main; main()", "train"]
    words = arguments(tmp_path, "train.max_steps=100000")
    with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        metrics_file, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
        while not (metrics_file.exists() and metrics_file.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(process.pid, number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert "stopped after step" in output
    resume = next(line for line in output.splitlines() if line.startswith("resume  megatrain train "))
    stopped = max(r["step"] for r in metrics(tmp_path / "run"))
    result = megatrain(*resume.removeprefix("resume  megatrain ").split(), f"train.max_steps={stopped + 2}")
    assert result.exit_code == 0, result.output
    assert [r["step"] for r in metrics(tmp_path / "run")] == list(range(1, stopped + 3))


def test_an_interrupt_before_the_first_step_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    make_model(tmp_path / "model")
    write_rows(tmp_path / "chats.jsonl", chats(4))
    monkeypatch.setattr(Model, "_load", interrupted)
    result = megatrain("train", *arguments(tmp_path))
    assert result.exit_code == 130
    assert result.stderr == "interrupted (exit 130, nothing was written)\n"
    assert not (tmp_path / "run").exists()


def test_a_full_disk_in_the_middle_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise UserError("could not save: No space left on device; free space on that disk and save again")

    make_model(tmp_path / "model")
    write_rows(tmp_path / "chats.jsonl", chats(12))
    monkeypatch.setattr(Model, "save_state", full)
    result = megatrain("train", *arguments(tmp_path, "checkpoint.every=2"))
    assert result.exit_code == 2
    assert "No space left on device" in result.stderr
    assert f"to go on: megatrain train {tmp_path}/run/resolved.yaml checkpoint.resume=auto" in result.stderr
    monkeypatch.undo()
    again = megatrain("train", f"{tmp_path}/run/resolved.yaml", "checkpoint.resume=auto")
    assert again.exit_code == 0, again.output
    assert "starting from the beginning" in again.stdout
    assert [r["step"] for r in metrics(tmp_path / "run")] == [1, 2, 3]
