"""Fault 86: it looks hung. Something is printed all the time, and the time left leaves the slow first step out."""

from __future__ import annotations

import io
import logging
import logging.handlers
import time
from pathlib import Path
from typing import Any

import pytest
from _runs import arguments, chats, make_model, megatrain, metrics, write_rows
from rich.console import Console

from megatrain import Model
from megatrain.loggers import console as console_module
from megatrain.loggers.console import ConsoleLogger
from megatrain.run_folder import RunFolder


def test_the_default_breaks_the_silence_within_ten_seconds() -> None:
    assert console_module._SILENCE + 1.0 <= 10


def test_phase_and_percent_are_printed_while_nothing_else_is() -> None:
    out = io.StringIO()
    logger = ConsoleLogger(Console(file=out), silence=0.1)
    logger.progress("loading", 43, 100)
    time.sleep(0.35)
    logger.progress("step 3 of 8", 2, 8)
    time.sleep(0.35)
    logger.close()
    lines = out.getvalue().splitlines()
    assert sum(line.startswith("        loading · 43 % · ") for line in lines) >= 2
    assert sum(line.startswith("        step 3 of 8 · 25 % · ") for line in lines) >= 2
    assert "\x1b" not in out.getvalue()


def test_a_terminal_shows_it_in_place() -> None:
    out = io.StringIO()
    logger = ConsoleLogger(Console(file=out, force_terminal=True, width=80), silence=0.1)
    logger.progress("loading", 43, 100)
    time.sleep(0.6)
    logger.note("model   m")
    logger.close()
    assert "loading · 43 %" in out.getvalue()
    assert "model   m" in out.getvalue()


def test_loading_first_step_and_saving_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk and slow steps, at a fiftieth of the scale."""
    monkeypatch.setattr(console_module.ConsoleLogger.__init__, "__defaults__", (1, 0.1))
    step, save, files = Model.step, Model.save_pretrained, Model._load
    steps: list[float] = []

    def slow_step(self: Model, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.8 if not steps else 0.1)
        steps.append(time.monotonic())
        return step(self, *args, **kwargs)

    def slow_load(self: Model, files_: Any, progress: Any) -> None:
        progress("loading", 1, 2)
        time.sleep(0.4)
        files(self, files_, progress)

    def slow_save(self: Model, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.4)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Model, "step", slow_step)
    monkeypatch.setattr(Model, "_load", slow_load)
    monkeypatch.setattr(Model, "save_pretrained", slow_save)
    make_model(tmp_path / "model")
    write_rows(tmp_path / "chats.jsonl", chats(8))
    result = megatrain("train", *arguments(tmp_path, "train.max_steps=12"))
    assert result.exit_code == 0, result.output
    assert "loading · 50 %" in result.stdout
    assert "step 1 of 12 · " in result.stdout
    assert "writing " in result.stdout

    told = [s["seconds_left"] for s in metrics(tmp_path / "run")]
    assert told[0] is None
    actual = steps[-1] - steps[4]  # from the fifth step on
    assert told[5] == pytest.approx(actual, rel=0.35)
    assert told[-1] == 0


def test_the_log_file_holds_no_control_characters(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.claim("no")
    run.create("a: 1\n", logging.handlers.MemoryHandler(10))
    logging.getLogger("other").error("\x1b[31mred\x1b[0m\r 40%|####\x07\x00 done")
    run.close()
    text = run.log.read_text(encoding="utf-8")
    assert "red 40%|#### done" in text
    assert all(c.isprintable() or c == "\n" for c in text)
