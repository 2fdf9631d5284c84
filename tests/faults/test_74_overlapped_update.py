"""An update that overlaps backward keeps clipping and accumulation right: once a step, with the clipped sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _fixtures import tiny_config
from _oracle import random_batches

from megatrain import AdamW, Model

STEPS = 6


def trained(clipping: str, limit: float, beta2: float) -> tuple[dict[str, torch.Tensor], list[Any], list[int]]:
    """Masters, results and step counts after steps of three micro-batches; gradients of step 3 on are far larger."""
    with Model.from_config(
        tiny_config(),
        seed=5,
        device="cpu",
        compute_dtype="float32",
        compile=False,
        clipping=clipping,
        max_grad_norm=limit,
        optimizer=AdamW(lr=1e-3, betas=(0.9, beta2)),
    ) as model:
        for name in model.store.parameter_names:
            model.store.moment(name, "exp_avg_sq").fill_(1e-2)
        results = [model.step(step) for step in random_batches(320, steps=STEPS, micros=3)]
        return model.state_dict(), results, [model.store.step_count(unit) for unit in model.store.units]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_without_a_correction_the_result_is_bitwise_the_same() -> None:
    masters, results, counts = trained("speculative", 1e3, 0.999)
    expected, wanted, _ = trained("deferred", 1e3, 0.999)
    assert counts == [STEPS] * 6
    assert results == wanted
    assert all(torch.equal(masters[name], value) for name, value in expected.items())


def test_clipped_steps_are_those_of_the_deferred_update_to_their_bound() -> None:
    masters, results, counts = trained("speculative", 0.5, 0.999)
    expected, wanted, _ = trained("deferred", 0.5, 0.999)
    assert counts == [STEPS] * 6
    assert all(result.corrected for result in results)
    for result, want in zip(results, wanted, strict=True):
        assert result.grad_norm > 0.5
        assert result.grad_norm == pytest.approx(want.grad_norm, rel=1e-5)
        assert result.loss == pytest.approx(want.loss, rel=1e-6)
    for name, value in expected.items():
        assert (masters[name] - value).abs().max() < 1e-3 * STEPS * 1e-3, name
