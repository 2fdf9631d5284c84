"""Reading, truncation, counts, and the resumable order of batches."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _runs import chats, write_rows
from _tokenizers import SMOLLM2, small_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain import datasets
from megatrain.config import DataConfig
from megatrain.datasets import Row, find_format, format_names
from megatrain.datasets._batches import IGNORED, Batches
from megatrain.datasets._load import Dataset, load_dataset
from megatrain.errors import UserError


def load(file: Path, vocab_size: int = 320, positions: int | None = 256, **options: Any) -> Dataset:
    config = DataConfig(train=str(file), **options)
    tokenizer = small_tokenizer(SMOLLM2)
    return load_dataset(config, tokenizer, vocab_size=vocab_size, positions=positions, progress=lambda *_: None)


def row(length: int, targets: Iterable[int] = (), first: int = 3) -> Row:
    target = np.zeros(length, dtype=np.bool_)
    target[list(targets)] = True
    return Row(np.arange(first, first + length, dtype=np.int32), target)


def batches(rows: list[Row], **options: Any) -> Batches:
    defaults = {"batch_size": 4, "micro_batch_size": 2, "seed": 0, "shuffle": True, "pad_id": 2, "fingerprint": "f"}
    return Batches(rows, **(defaults | options))


def test_formats_are_found_by_being_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert format_names() == ["messages", "prompt_completion", "text"]
    (tmp_path / "upper.py").write_text(
        "COLUMNS, SPLITS = ('shout',), False\n"
        "def recognises(record): return 'shout' in record\n"
        "def encode(record, encoder): return encoder.document(record['shout'], [(0, len(record['shout']))])\n"
    )
    monkeypatch.setattr(datasets, "__path__", [*datasets.__path__, str(tmp_path)])
    assert "upper" in format_names()
    loaded = load(write_rows(tmp_path / "rows.jsonl", [{"shout": "hello"}]))
    assert loaded.format == "upper"
    with pytest.raises(UserError, match=r"data.format: 'uper' is not a format"):
        find_format("uper")


def test_counts_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    rows = chats(9)
    loaded = load(write_rows(tmp_path / "rows.jsonl", rows))
    tokenizer = small_tokenizer(SMOLLM2)
    rendered = [tokenizer.apply_chat_template(r["messages"], tokenize=True)["input_ids"] for r in rows]
    assert [r.ids.tolist() for r in loaded.rows] == rendered
    answers = [m["content"] + "<|im_end|>" for r in rows for m in r["messages"] if m["role"] == "assistant"]
    assert loaded.target_tokens == sum(len(tokenizer(a)["input_ids"]) for a in answers)


def test_text_is_split_so_that_each_token_is_predicted_once(tmp_path: Path) -> None:
    text = "What is the capital of France? hello, how are you today? " * 3
    loaded = load(write_rows(tmp_path / "rows.jsonl", [{"text": text}]), max_seq_len=16)
    whole = [*small_tokenizer()(text)["input_ids"], 2]
    assert max(len(r) for r in loaded.rows) == 16
    assert [t for i, r in enumerate(loaded.rows) for t in r.ids.tolist()[1 if i else 0 :]] == whole
    assert loaded.target_tokens == len(whole) - 1
    assert loaded.cut == 1


def test_truncation_keeps_the_start(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", chats(6))
    whole = load(file)
    limit = max(len(r) for r in whole.rows) - 2
    cut = load(file, too_long="truncate", max_seq_len=limit)
    assert cut.cut == sum(len(r) > limit for r in whole.rows) > 0
    assert [r.ids.tolist() for r in cut.rows] == [r.ids[:limit].tolist() for r in whole.rows]


def test_ids_beyond_the_embedding_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 1: token .* has id \d+, but the model's embedding has 200 rows"):
        load(write_rows(tmp_path / "rows.jsonl", chats(1)), vocab_size=200)


def test_padding_is_on_the_right_and_ignored_whatever_its_id() -> None:
    ids = np.array([5, 2, 7, 2], dtype=np.int32)  # the pad id stands in the row itself
    target = np.array([False, True, True, True])
    step = batches([Row(ids, target), row(6, [5])], batch_size=2).next_step()
    micro = step.micro_batches[0]
    short = micro["input_ids"].tolist().index([5, 2, 7, 2, 2, 2])
    assert micro["labels"][short].tolist() == [IGNORED, 2, 7, 2, IGNORED, IGNORED]
    assert micro["input_ids"].dtype == micro["labels"].dtype == torch.int64
    assert (step.target_tokens, step.real_tokens, step.padded_tokens) == (4, 10, 12)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(2, 20), min_size=1, max_size=30),
    batch_size=st.integers(1, 9),
    micro=st.integers(1, 9),
    seed=st.integers(0, 3),
    stop=st.integers(0, 40),
)
def test_each_epoch_visits_each_row_once_and_a_restored_position_goes_on(
    lengths: list[int], batch_size: int, micro: int, seed: int, stop: int
) -> None:
    rows = [row(n, [n - 1], first=3 + 50 * i) for i, n in enumerate(lengths)]
    options = {"batch_size": batch_size, "micro_batch_size": micro, "seed": seed}
    one = batches(rows, **options)
    total = 2 * one.steps_per_epoch
    stop = min(stop, total)
    steps, state = [], None
    for i in range(total):
        if i == stop:
            state = json.loads(json.dumps(one.state()))
        steps.append([m["input_ids"].tolist() for m in one.next_step().micro_batches])
    seen = [ids[0] for step in steps for m in step for ids in m]
    firsts = sorted(int(r.ids[0]) for r in rows)
    assert sorted(seen[: len(rows)]) == sorted(seen[len(rows) :]) == firsts
    again = batches(rows, **options)
    if state is not None:
        again.restore(state)
        rest = [[m["input_ids"].tolist() for m in again.next_step().micro_batches] for _ in range(total - stop)]
        assert rest == steps[stop:]
    largest_rows, largest_tokens, most = one.largest
    assert all(len(m) <= largest_rows and len(m[0]) <= largest_tokens for step in steps for m in step)
    assert max(len(step) for step in steps) <= most


@pytest.mark.parametrize(
    ("lengths", "options", "ragged"),
    [
        ([6] * 8, {}, False),
        ([6] * 8, {"batch_size": 3, "micro_batch_size": 3}, True),  # the last step of an epoch has two rows
        ([6] * 8, {"micro_batch_size": 3}, True),
        ([6] * 3, {"micro_batch_size": 4}, False),
        ([6] * 4 + [5] * 4, {}, True),
    ],
)
def test_micro_batches_of_one_shape_are_known_beforehand(
    lengths: list[int], options: dict[str, Any], ragged: bool
) -> None:
    """What a GPU compiles within steps, and pins for it, depends on it."""
    of = batches([row(length, [1]) for length in lengths], **options)
    shapes = {batch["input_ids"].shape for _ in range(2 * of.steps_per_epoch) for batch in of.next_step().micro_batches}
    assert of.ragged == ragged == (len(shapes) > 1)


def test_other_rows_are_not_continued() -> None:
    state = batches([row(4, [3])]).state()
    with pytest.raises(UserError, match=r"data.train: not the rows"):
        batches([row(4, [3])], fingerprint="g").restore(state)


def test_the_order_differs_by_epoch_and_seed_and_is_the_file_s_without_shuffle() -> None:
    rows = [row(4, [3], first=10 * i) for i in range(20)]

    def order(seed: int, shuffle: bool = True) -> list[int]:
        found = batches(rows, batch_size=1, seed=seed, shuffle=shuffle)
        return [int(found.next_step().micro_batches[0]["input_ids"][0, 0]) for _ in range(40)]

    assert order(0) == order(0)
    assert order(0)[:20] != order(0)[20:]
    assert order(0) != order(1)
    assert order(0, shuffle=False) == [10 * i for i in range(20)] * 2
