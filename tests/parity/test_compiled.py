"""Compiled layers and loss on the CPU: they are compiled indeed, and differ by rounding only."""

from __future__ import annotations

import pytest
import torch
from _fixtures import tiny_config
from _oracle import random_batches, relative
from torch._dynamo.exc import TorchDynamoException
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


def test_what_cannot_be_compiled_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(function: object) -> object:
        def run(*_: object) -> None:
            raise TorchDynamoException("no backend here\nsecond line")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    (step,) = random_batches(320, steps=1, micros=2, tokens=16)
    losses = []
    for compile in (False, True):
        with Model.from_config(tiny_config(), seed=3, device="sim", compile=compile) as model:
            losses.append(model.step(step).loss)
    assert losses[0] == losses[1]
    warnings = [record.getMessage() for record in caplog.records if "torch.compile failed" in record.getMessage()]
    assert len(warnings) == 2  # the layers' structure and the loss, once each
    assert all("no backend here" in warning and "second line" not in warning for warning in warnings)
