"""Compiled layers and loss on the CPU: they are compiled indeed, and differ by rounding only."""

from __future__ import annotations

import pytest
import torch
from _fixtures import tiny_config
from _oracle import random_batches, relative
from torch._dynamo.utils import counters

from megatrain import Model


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    (step,) = random_batches(320, steps=1, micros=2, tokens=64)
    gradients = []
    for compile in (False, True):
        counters.clear()
        with Model.from_config(tiny_config(), seed=3, device="cpu", compile=compile) as model:
            model.step(step, keep_gradients=True)
            gradients.append(model.gradients())
    # forward, forward with backward, loss: measuring memory before the first step must not keep them from it
    assert counters["frames"]["ok"] >= 3
    for name, gradient in gradients[0].items():
        assert relative(gradients[1][name], gradient) < 1e-5, name
    torch._dynamo.reset()
