"""Speculative steps against deferred ones: bitwise without a correction, close with one, undone without a norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _fixtures import tiny_config
from _oracle import random_batches

from megatrain import AdamW, Model
from megatrain.engine.buffers import Handles
from megatrain.engine.operations import Operations
from megatrain.engine.program import Op

LR = 1e-3
Moments = dict[str, torch.Tensor]


def open_model(clipping: str, limit: float | None, variance: float = 1.0, **options: Any) -> Model:
    """A model whose second moments are large beside its gradients, so that nothing waits, unless ``variance`` is 0."""
    tied = options.pop("tied", False)
    options = {"device": "cpu", "compute_dtype": "float32", "kernel": "auto", "compile": False} | options
    config = tiny_config(tie_word_embeddings=tied)
    optimizer = AdamW(lr=LR, weight_decay=0.1)
    model = Model.from_config(config, seed=3, clipping=clipping, max_grad_norm=limit, optimizer=optimizer, **options)
    for name in model.store.parameter_names:
        model.store.moment(name, "exp_avg_sq").fill_(variance)
    return model


def moments(model: Model) -> Moments:
    return {
        f"{which} {name}": model.store.moment(name, which).clone()
        for name in model.store.parameter_names
        for which in ("exp_avg", "exp_avg_sq")
    }


def steps_of(model: Model) -> list[int]:
    return [model.store.step_count(unit) for unit in model.store.units]


def assert_equal(found: Moments, expected: Moments) -> None:
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


def master_bound(values: torch.Tensor) -> float:
    """Of the change, which is at most 8 times the rate, and of three roundings of the largest value."""
    return 16e-6 * LR + 3 * 2.0 ** (values.abs().max().frexp()[1].item() - 24)


def assert_close(found: Model, expected: Model, masters: Moments, wanted: Moments) -> None:
    """Masters and both moments within the bound of one correction."""
    for name, want in wanted.items():
        error = (masters[name] - want).abs().max().item()
        assert error <= master_bound(want), name
        second = expected.store.moment(name, "exp_avg_sq").double()
        other = found.store.moment(name, "exp_avg_sq").double()
        assert bool(((other - second).abs() <= 2e-6 * second).all()), name
        first = (found.store.moment(name, "exp_avg") - expected.store.moment(name, "exp_avg")).double()
        assert bool((first.abs() <= 2e-6 * second.sqrt()).all()), name


@pytest.mark.parametrize("variance", [1.0, 0.0])
@pytest.mark.parametrize("limit", [None, 1e3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": True, "compute_dtype": "bfloat16"},
        {"states_on_device": ["head"]},
        {"speculated": "50%"},
        {"speculated": ["layers.1"], "tied": True},
    ],
)
def test_without_a_correction_it_is_bitwise(options: dict[str, Any], limit: float | None, variance: float) -> None:
    with (
        open_model("deferred", limit, variance, **options) as deferred,
        open_model("speculative", limit, variance, **options) as speculative,
    ):
        for step in random_batches(320, steps=4, micros=2):
            one, other = deferred.step(step), speculative.step(step)
            assert one == other
            assert not other.corrected
        assert_equal(speculative.state_dict(), deferred.state_dict())
        assert_equal(moments(speculative), moments(deferred))
        assert steps_of(speculative) == steps_of(deferred) == [4] * 6


@pytest.mark.parametrize("options", [{}, {"tied": True, "compute_dtype": "bfloat16"}])
def test_with_a_correction_it_is_close(options: dict[str, Any]) -> None:
    (step,) = random_batches(320, steps=1, micros=2)
    with (
        open_model("deferred", 0.1, **options) as deferred,
        open_model("speculative", 0.1, **options) as speculative,
    ):
        before = speculative.state_dict()
        assert not deferred.step(step).corrected
        assert speculative.step(step).corrected
        assert_close(speculative, deferred, speculative.state_dict(), deferred.state_dict())
        assert any(not torch.equal(before[name], value) for name, value in speculative.state_dict().items())


def test_first_steps_wait_and_are_bitwise_though_clipped() -> None:
    (step,) = random_batches(320, steps=1, micros=1)
    with open_model("deferred", 0.1, 0.0) as deferred, open_model("speculative", 0.1, 0.0) as speculative:
        deferred.step(step)
        assert speculative.step(step).corrected
        assert_equal(speculative.state_dict(), deferred.state_dict())
        assert_equal(moments(speculative), moments(deferred))


@pytest.mark.parametrize("unit", ["embedding", "layers.2"])
def test_a_gradient_that_is_not_finite_is_undone(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that were updated before it was known are put back."""
    finish = Operations._finish

    def spoiled(self: Operations, op: Op, handles: Handles) -> None:
        if op.unit == unit and op.last:
            handles.target(op.gradients[unit])[0] = torch.inf
        finish(self, op, handles)

    first, second = random_batches(320, steps=2, micros=1)
    with open_model("speculative", 1e3) as model:
        model.step(first)
        before, kept = model.state_dict(), moments(model)
        monkeypatch.setattr(Operations, "_finish", spoiled)
        result = model.step(second)
        assert result.skipped
        assert result.corrected
        assert steps_of(model) == [1] * 6
        after = model.state_dict()
        for name, values in before.items():
            assert (after[name] - values).abs().max() <= master_bound(values), name
        for name, values in moments(model).items():
            scale = kept[name] if "exp_avg_sq" in name else torch.ones(())
            assert bool(((values - kept[name]).abs() <= 2e-6 * scale).all()), name


def test_auto_goes_on_as_it_would_have_after_a_checkpoint(tmp_path: Path) -> None:
    """The recent norms decide between two ways of the same step, so they are part of the state."""
    batches = random_batches(320, steps=20, micros=1)
    with open_model("auto", 5.0) as model:
        results = [model.step(step) for step in batches[:18]]
        assert max(result.grad_norm for result in results) < 5.0
        model.save_state(tmp_path / "save")
        history = model._clipping.history
        assert model._clipping.speculates(LR)
    with open_model("auto", 5.0) as model:
        assert not model._clipping.speculates(LR)
        model.load_state(tmp_path / "save")
        assert model._clipping.history == history
        assert model._clipping.speculates(LR)
