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
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("activations", ["recompute", "selective", "keep"])
def test_compiled_equals_eager(activations: str, dropout: float, caplog: pytest.LogCaptureFixture) -> None:
    (step,) = random_batches(320, steps=1, micros=2, tokens=64)
    gradients = []
    if dropout and activations == "selective":
        pytest.skip("refused")
    config = tiny_config(attention_dropout=dropout)
    for compile in (False, True):
        counters.clear()
        with Model.from_config(config, seed=3, device="cpu", compile=compile, activations=activations) as model:
            model.step(step, keep_gradients=True)
            gradients.append(model.gradients())
    # forward, gradients, loss: measuring memory before the first step must not keep them from it
    assert counters["stats"]["unique_graphs"] >= (3 if activations == "recompute" else 2)
    assert "torch.compile failed" not in caplog.text
    for name, gradient in gradients[0].items():
        assert relative(gradients[1][name], gradient) < 1e-5, name
    torch._dynamo.reset()


def test_what_cannot_be_compiled_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(function: object, **_: object) -> object:
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
    assert len(warnings) == 3  # the layers' structure, its gradients and the loss, once each
    assert all("no backend here" in warning and "second line" not in warning for warning in warnings)
