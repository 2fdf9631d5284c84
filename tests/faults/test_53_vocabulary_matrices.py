"""The vocabulary matrices count: with 256k entries they are what the device holds, and the peak says so beforehand."""

from __future__ import annotations

from typing import Any

import pytest
from _engine import engine, rows
from _fixtures import tiny_config

from megatrain import UserError

VOCAB, WIDTH, ELEMENT = 262_144, 16, 4
MATRIX = VOCAB * WIDTH * ELEMENT
OPTIONS: dict[str, Any] = {"loss_chunk_tokens": 4}


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_part_is_reported_and_the_peak_covers_them(tied: bool, counted: Any) -> None:
    config = tiny_config(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, tie_word_embeddings=tied)
    with engine(config, "sim", **OPTIONS) as model:
        parts = dict(model.memory.by_label)
        step = rows(1, tokens=8, vocab=VOCAB)
        model.step(step)
        planned, real = model.memory.device_peak, sum(parts.values()) + counted.peak
    for label in ("slots", "gradients"):  # one matrix at a time, tied or not, and the layers beside it
        assert MATRIX <= parts[label] <= 1.02 * MATRIX, label
    assert set(parts) <= {"slots", "gradients", "libraries"}
    logits = 4 * VOCAB * ELEMENT
    assert 2 * MATRIX + logits <= real <= planned <= 1.02 * real

    with engine(config, "sim", device_memory=planned, **OPTIONS) as model:
        model.step(step)
    with (
        pytest.raises(UserError, match=r"placement\.device_memory"),
        engine(config, "sim", device_memory=planned * 95 // 100, **OPTIONS) as model,
    ):
        model.step(step)
