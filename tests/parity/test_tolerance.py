"""Where the arithmetic differs from the plain loop's: other kernels, another loss, other sums. Stated tolerances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _fixtures import FAMILIES, tiny_config
from _oracle import Oracle, random_batches, relative

from megatrain import AdamW, Model

STEPS = 10
MAX_NORM = 0.5


def engine(config: Any, device: str, **options: Any) -> Model:
    defaults = {"compute_dtype": "float32", "optimizer": AdamW(lr=1e-3), "max_grad_norm": MAX_NORM, "compile": False}
    return Model.from_config(config, seed=7, device=device, **(defaults | options))


def spread(make: Callable[[], Oracle], batches: list[Any]) -> tuple[Oracle, dict[str, torch.Tensor], float]:
    """An oracle after all steps, its last gradients, and how far its masters move when it re-splits its rows."""
    whole, split = make(), make()
    for step in batches:
        gradients = whole.step([{k: torch.cat([micro[k] for micro in step]) for k in step[0]}])
        split.step(step)
    other = split.state_dict()
    distance = max(relative(other[name], master) for name, master in whole.state_dict().items())
    return whole, gradients, distance


@pytest.mark.parametrize("micros", [1, 2, 4])
@pytest.mark.parametrize("family", ["tiny", "tiny-tied"])
def test_native_kernel_own_loss_active_clipping_any_split(family: str, micros: int, device: str) -> None:
    config = tiny_config(family)
    batches = random_batches(config.vocab_size, steps=STEPS, micros=micros)
    with engine(config, device, loss_chunk_tokens=13) as model:
        weights = model.state_dict()

        def make() -> Oracle:
            return Oracle(config, weights, own_loss=True, max_grad_norm=MAX_NORM, device=device)

        first = make()
        expected = first.step(batches[0])
        result = model.step(batches[0], keep_gradients=True)
        assert result.grad_norm > MAX_NORM, "clipping must be active"
        assert abs(result.loss - first.losses[0]) <= 1e-6 * first.losses[0]
        for name, gradient in model.gradients().items():
            assert relative(gradient, expected[name]) <= 1e-6, name
        losses = [result.loss] + [model.step(step, keep_gradients=True).loss for step in batches[1:]]
        oracle, last, own_spread = spread(make, batches)
        for mine, theirs in zip(losses, oracle.losses, strict=True):
            assert abs(mine - theirs) <= 1e-6 * theirs
        for name, gradient in model.gradients().items():
            assert relative(gradient, last[name]) <= 1e-4, name
        masters = model.state_dict()
        distance = max(relative(masters[name], master) for name, master in oracle.state_dict().items())
        assert distance <= 1e-4
        if micros > 1:
            assert distance <= 2 * own_spread


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_against_its_own_forward(family: str, device: str) -> None:
    config = tiny_config(family)
    (step,) = random_batches(config.vocab_size, steps=1, micros=2, tokens=80)
    with engine(config, device) as model:
        oracle = Oracle(config, model.state_dict(), own_loss=True, device=device)
        result = model.step(step, keep_gradients=True)
        expected = oracle.step(step)
        assert abs(result.loss - oracle.losses[0]) <= 1e-6 * result.loss
        for name, gradient in model.gradients().items():
            assert relative(gradient, expected[name]) <= 2e-6, name


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows(family: str, device: str) -> None:
    """Positions that restart keep documents apart: the loss of a packed row is that of its documents."""
    config = tiny_config(family)
    (step,) = random_batches(config.vocab_size, steps=1, rows=2, tokens=24)
    ids, labels = step[0]["input_ids"], step[0]["labels"]
    labels[1, 0] = -100
    packed = {
        "input_ids": ids.view(1, -1),
        "labels": labels.view(1, -1),
        "position_ids": torch.arange(24).repeat(2)[None],
    }
    with engine(config, device) as model:
        apart = model.evaluate([{"input_ids": ids, "labels": labels}])
        together = model.evaluate([packed])
    assert together.tokens == apart.tokens
    assert together.loss == pytest.approx(apart.loss, rel=1e-6)
