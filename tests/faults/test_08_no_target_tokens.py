"""Fault 8: truncation removes every target token, the run reports loss 0 and saves NaN."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from _runs import arguments, chats, make_model, megatrain, metrics, write_rows
from safetensors.torch import load_file

LONG = {"messages": [{"role": "user", "content": "hello, how are you? " * 40}, {"role": "assistant", "content": "yes"}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    return tmp_path


def test_a_row_whose_prompt_fills_the_limit_is_dropped_and_counted(folder: Path) -> None:
    write_rows(folder / "chats.jsonl", [*chats(4), LONG])
    words = ["data.too_long=truncate", "data.max_seq_len=100", "train.batch_size=1", "train.micro_batch_size=1"]
    result = megatrain("train", *arguments(folder, *words))
    assert result.exit_code == 0, result.output
    assert "4 rows" in result.stdout
    assert "1 rows dropped (nothing to train on within the limit)" in result.stdout
    steps = metrics(folder / "run")
    assert len(steps) == 4
    assert all(s["target_tokens"] > 0 and math.isfinite(s["loss"]) for s in steps)
    assert all(t.isfinite().all() for t in load_file(folder / "run" / "final" / "model.safetensors").values())


def test_all_rows_like_that_stop_the_run_naming_the_limit(folder: Path) -> None:
    write_rows(folder / "chats.jsonl", [LONG] * 3)
    result = megatrain("train", *arguments(folder, "data.too_long=truncate", "data.max_seq_len=100"))
    assert result.exit_code == 2
    assert "no row is left to train on" in result.stderr
    assert "data.max_seq_len" in result.stderr
    assert not (folder / "run").exists()
