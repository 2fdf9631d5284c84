"""Whenever a save is killed, resuming takes the last complete one, says what it skipped, and lost nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _exports import export
from _fixtures import tiny_model
from _stores import UNITS, PlainStore

from megatrain import UserError
from megatrain.checkpoint import latest_complete, load_state, prune, save_state, step_folder


class Killed(BaseException):
    """Stands for SIGKILL: nothing that runs after it may touch the disk."""


def kill_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> Callable[[], int]:
    """Die before the n-th call that changes the disk (open, fsync, rename, delete); returns a call
    counter."""
    calls = 0

    def hook(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= moment:
                raise Killed
            return real(*args, **kwargs)

        return call

    for module, name in (
        (os, "fsync"),
        (os, "replace"),
        (shutil, "rmtree"),
        (Path, "open"),
        (Path, "write_text"),
    ):
        monkeypatch.setattr(module, name, hook(getattr(module, name)))
    return lambda: calls


def test_killed_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = PlainStore(UNITS, 1)
    moment = 0
    finished = False
    while not finished:
        moment += 1
        run = tmp_path / f"run-{moment}"
        save_state(step_folder(run, 1), first, {"step": 1})
        with monkeypatch.context() as patch:
            kill_at(patch, moment)
            try:
                save_state(step_folder(run, 2), PlainStore(UNITS, 2), {"step": 2})
                finished = True
            except Killed:
                pass
        latest, skipped = latest_complete(run)
        assert latest is not None
        again = PlainStore(UNITS, 9)
        step = load_state(latest, again)["step"]
        assert again.same(PlainStore(UNITS, step))
        assert latest == step_folder(run, step)
        for path, reason in skipped:
            assert path.name.startswith("step-00000002.tmp-")
            assert reason == "the save was not finished"
        save_state(step_folder(run, 3), PlainStore(UNITS, 3), {"step": 3})
        prune(run, keep=1)
        assert step_folder(run, 3).is_dir()
        if step == 1 and not skipped:
            assert moment < 3, "a save killed in the middle must be reported"
    assert moment > 12


def test_killed_at_every_moment_of_pruning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for moment in range(1, 8):
        run = tmp_path / str(moment)
        for step in range(1, 5):
            save_state(step_folder(run, step), PlainStore(UNITS, step), {"step": step})
        with monkeypatch.context() as patch:
            kill_at(patch, moment)
            with contextlib.suppress(Killed):
                prune(run, keep=1)
        assert latest_complete(run) == (step_folder(run, 4), [])
        prune(run, keep=1)
        assert latest_complete(run) == (step_folder(run, 4), [])


def test_killed_halfway_through_deleting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 4):
        save_state(step_folder(tmp_path, step), PlainStore(UNITS, step), {"step": step})

    def delete_one_file(path: Path) -> None:
        next(path.glob("*.safetensors")).unlink()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", delete_one_file)
        with pytest.raises(Killed):
            prune(tmp_path, keep=1)
    named = [path for path in tmp_path.iterdir() if path.name in ("step-00000001", "step-00000002")]
    assert named == [step_folder(tmp_path, 2)]  # the oldest went first, and no half of it keeps its name
    load_state(named[0], PlainStore(UNITS))


def test_killed_export_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("tiny")
    for moment in range(1, 9):
        target = tmp_path / str(moment)
        with monkeypatch.context() as patch:
            kill_at(patch, moment)
            with pytest.raises(Killed):
                export(model, target, None, max_shard_bytes=100_000)
        assert not target.exists()


def test_interrupted_save_cleans_up(tmp_path: Path) -> None:
    def interrupt(phase: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_state(step_folder(tmp_path, 1), PlainStore(UNITS), {}, interrupt)
    assert not list(tmp_path.iterdir())


def test_a_process_that_is_really_killed(tmp_path: Path) -> None:
    save_state(step_folder(tmp_path, 1), PlainStore(UNITS, 1), {"step": 1})
    program = f"""
        import os, signal, sys
        sys.path[:0] = {sys.path!r}
        from pathlib import Path
        from _stores import UNITS, PlainStore
        from megatrain.checkpoint import save_state, step_folder

        def die(phase, done, total):
            if done > total // 2:
                os.kill(os.getpid(), signal.SIGKILL)

        save_state(step_folder({str(tmp_path)!r}, 2), PlainStore(UNITS, 2), {{}}, die)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert result.returncode == -signal.SIGKILL
    latest, skipped = latest_complete(tmp_path)
    assert latest == step_folder(tmp_path, 1)
    assert [reason for _, reason in skipped] == ["the save was not finished"]
    assert prune(tmp_path, keep=1) == [skipped[0][0]]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_failing_disk_keeps_the_last_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(step_folder(tmp_path, 1), PlainStore(UNITS, 1), {"step": 1})

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match="Input/output error; check the disk"):
        save_state(step_folder(tmp_path, 2), PlainStore(UNITS, 2), {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
