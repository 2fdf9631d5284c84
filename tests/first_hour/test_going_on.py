"""Going on with a run that a crash, a second start or other options have touched: exact, or refused and unharmed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from _runs import arguments, chats, make_model, megatrain, metrics, write_rows

Breaks = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that saved after each."""
    folder = tmp_path_factory.mktemp("whole")
    make_model(folder / "model")
    write_rows(folder / "chats.jsonl", chats(11))
    words = arguments(folder, "train.epochs=2", "checkpoint.every=1", "checkpoint.keep=20")
    result = megatrain("train", *words)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it as it was after step 3."""
    shutil.copytree(whole / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "final")
    for step in (4, 5):
        shutil.rmtree(save(tmp_path / "run", step))
    return tmp_path / "run"


def save(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08}"


def words(whole: Path, run: Path, *more: str) -> list[str]:
    common = ("train.epochs=2", "checkpoint.every=1", "checkpoint.keep=20", "checkpoint.resume=auto")
    return arguments(whole, *common, f"output_dir={run}", *more)


def weights(run: Path) -> bytes:
    return (run / "final" / "model.safetensors").read_bytes()


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


def flip_a_bit(save: Path) -> None:
    file = max(save.glob("*.safetensors"), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def killed_in_export(run: Path) -> None:
    (run / "final.tmp-999999999").mkdir()
    (run / "final.tmp-999999999" / "model.safetensors").write_bytes(b"half")


def killed_in_metrics(run: Path) -> None:
    (run / "metrics.tmp").write_text("{")


def killed_while_running(run: Path) -> None:
    (run / "run.lock").write_text("999999999")


def mine(run: Path) -> None:
    (run / "notes.txt").write_text("mine")


@pytest.mark.parametrize("left", [killed_in_export, killed_in_metrics, killed_while_running, mine])
def test_what_lies_in_the_folder_does_not_stop_a_resume(whole: Path, run: Path, left: Breaks) -> None:
    left(run)
    result = megatrain("train", *words(whole, run))
    assert result.exit_code == 0, result.output
    assert weights(run) == weights(whole / "run")
    names = {p.name for p in run.iterdir()}
    assert names - {"notes.txt"} == {"run.log", "resolved.yaml", "metrics.jsonl", "checkpoints", "final"}
    assert ("notes.txt" in names) == (left is mine)


def test_a_folder_in_use_is_left_alone(whole: Path, run: Path) -> None:
    with (run / "run.lock").open("w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = contents(run)
        for start in (words(whole, run), words(whole, run, "checkpoint.resume=no")):
            result = megatrain("train", *start)
            assert result.exit_code == 2
            assert f"{run} is in use by another megatrain (PID 4711)" in result.stderr
        assert contents(run) == before


def test_a_run_locks_its_folder_while_it_lasts(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain import trainer

    seen = []

    def second_start(self: object, step: int) -> None:
        seen.append(megatrain("train", *words(whole, tmp_path / "run")))
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer._Loop, "run_step", second_start)
    megatrain("train", *words(whole, tmp_path / "run", "checkpoint.resume=no"))
    assert seen[0].exit_code == 2
    assert f"PID {os.getpid()}" in seen[0].stderr
    assert not (tmp_path / "run" / "run.lock").exists()


REFUSED = {
    "another order": (["train.seed=1"], ["train.seed: 1, but the saved run has 0", "continue with train.seed=0"]),
    "another step size": (["train.batch_size=3"], ["train.batch_size: 3, but the saved run has 4"]),
    "no shuffling": (["data.shuffle=false"], ["data.shuffle: false, but the saved run has true"]),
    "another limit": (["data.max_seq_len=100"], ["data.train: not the rows", "data.max_seq_len null -> 100"]),
    "too short": (["train.max_steps=2"], ["train.max_steps: this run would have 2 steps", "after step 3"]),
    "no memory": (["placement.device_memory=20KiB"], ["placement.device_memory", "too small"]),
    "an older save": (["checkpoint.resume={run}/checkpoints/step-00000001"], ["is older than", "new output_dir"]),
    "damaged": ([], ["every save in", "is damaged"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_resume_changes_nothing(whole: Path, run: Path, name: str) -> None:
    more, expected = REFUSED[name]
    if name == "damaged":
        for step in (1, 2, 3):
            flip_a_bit(save(run, step))
    before = contents(run)
    result = megatrain("train", *words(whole, run, *(word.format(run=run) for word in more)))
    assert result.exit_code == 2, result.output
    missing = [text for text in expected if text not in result.stderr]
    assert not missing, f"{missing} not in: {result.stderr}"
    assert contents(run) == before


def test_a_save_without_a_position_is_refused(whole: Path, run: Path) -> None:
    for file in save(run, 3).glob("state.json"):
        state = json.loads(file.read_text())
        state["meta"]["extra"] = {}
        file.write_text(json.dumps(state))
    result = megatrain("train", *words(whole, run))
    assert result.exit_code == 2
    assert "written by Model.save_state" in result.stderr


def test_harmless_changes_are_named(whole: Path, run: Path) -> None:
    more = ["optim.lr=2e-3", "train.micro_batch_size=4", "checkpoint.every=2", "train.epochs=3"]
    result = megatrain("train", *words(whole, run, *more))
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("changed ")]
    for change in ("optim.lr 0.001 -> 0.002", "train.micro_batch_size 2 -> 4", "checkpoint.every 1 -> 2"):
        assert change in line
    assert len(metrics(run)) == 9


def test_a_damaged_save_is_passed_over(whole: Path, run: Path) -> None:
    flip_a_bit(save(run, 3))
    explicit = megatrain("train", *words(whole, run, f"checkpoint.resume={save(run, 3)}"))
    assert explicit.exit_code == 2
    assert "is damaged" in explicit.stderr
    result = megatrain("train", *words(whole, run))
    assert result.exit_code == 0, result.output
    assert f"passed over {save(run, 3)}" in result.stdout
    assert f"resume  {save(run, 2)}, after step 2 of 6" in result.stdout
    assert weights(run) == weights(whole / "run")
    assert [p.name for p in (run / "checkpoints").glob("*.broken-*")] == [f"step-00000003.broken-{os.getpid()}"]
