"""The host gradient after a window is the sum over its micro-batches, for every tensor, window after window."""

from __future__ import annotations

import pytest
import torch
from _engine import engine, rows, tolerance
from _fixtures import tiny_config
from _oracle import relative

from megatrain import AdamW

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("family", ["tiny", "tiny-tied"])
@pytest.mark.parametrize("slots", [1, 6])
def test_sum_over_the_window(family: str, slots: int, device: str) -> None:
    windows = [rows(4, seed=1), rows(4, seed=2)]
    with engine(tiny_config(family), device, slots=slots, optimizer=AdamW(lr=0.0)) as model:
        singles = []
        for window in windows:
            total: dict[str, torch.Tensor] = {}
            for row in window:
                tokens = model.step([row], keep_gradients=True).tokens
                for name, gradient in model.gradients().items():
                    total[name] = total.get(name, torch.zeros(())) + gradient.double() * tokens
            singles.append(total)
        for window, expected in zip(windows, singles, strict=True):
            tokens = model.step(window, keep_gradients=True).tokens
            gradients = model.gradients()
            assert "model.embed_tokens.weight" in gradients
            assert "model.norm.weight" in gradients
            assert gradients.keys() == expected.keys()
            for name, total in expected.items():
                assert relative(gradients[name] * tokens, total) <= tolerance(device), name
