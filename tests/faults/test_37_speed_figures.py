"""Fault 37: speed figures that count padding, or leave out loading and saving."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from _runs import arguments, chats, make_model, megatrain, metrics, write_rows
from _tokenizers import small_tokenizer

from megatrain import Model


def test_tokens_are_the_tokenizer_s_and_the_clock_includes_load_and_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Model.save_pretrained

    def slow_save(self: Model, *args: Any, **kwargs: Any) -> None:
        time.sleep(1.0)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Model, "save_pretrained", slow_save)
    make_model(tmp_path / "model")
    rows = chats(11)
    write_rows(tmp_path / "chats.jsonl", rows)
    begun = time.monotonic()
    result = megatrain("train", *arguments(tmp_path, "train.epochs=2"))
    wall = time.monotonic() - begun
    assert result.exit_code == 0, result.output

    tokenizer = small_tokenizer()
    lengths = [len(tokenizer.apply_chat_template(r["messages"], tokenize=True)["input_ids"]) for r in rows]
    answers = [m["content"] + "<|im_end|>" for r in rows for m in r["messages"] if m["role"] == "assistant"]
    steps = metrics(tmp_path / "run")
    assert sum(s["real_tokens"] for s in steps) == 2 * sum(lengths)
    assert sum(s["target_tokens"] for s in steps) == 2 * sum(len(tokenizer(a)["input_ids"]) for a in answers)
    assert all(s["target_tokens"] < s["real_tokens"] <= s["padded_tokens"] for s in steps)
    assert sum(s["padded_tokens"] for s in steps) > 2 * sum(lengths)

    summary = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["summary"]
    assert summary["real_tokens"] == 2 * sum(lengths)
    assert wall - 0.5 < summary["seconds"] <= wall
    assert summary["step_seconds"] == pytest.approx(sum(s["seconds"] for s in steps))
    assert summary["seconds"] > summary["step_seconds"] + 1.0
    speed = next(line for line in result.stdout.splitlines() if line.startswith("speed"))
    assert f"{2 * sum(lengths) / summary['step_seconds']:,.0f} tokens/s" in speed
