"""Thirty steps follow the plain resident loop, with and without accumulation and clipping."""

from __future__ import annotations

import pytest
from _engine import engine, joined, rows
from _fixtures import tiny_config
from _oracle import Oracle

from megatrain import AdamW

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("max_grad_norm", [pytest.param(None, marks=pytest.mark.slow), 0.5])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_every_point_of_the_curve(accumulation: int, max_grad_norm: float | None, device: str) -> None:
    config = tiny_config()
    steps = [rows(4, tokens=24, seed=seed % 6) for seed in range(30)]  # rows come again, so that there is a curve
    options = {"max_grad_norm": max_grad_norm, "optimizer": AdamW(lr=3e-3)}
    with engine(config, device, **options) as model:
        oracle = Oracle(config, model.state_dict(), own_loss=True, lr=3e-3, max_grad_norm=max_grad_norm, device=device)
        losses = []
        for step in steps:
            micros = step if accumulation == 4 else [joined(step)]
            oracle.step(micros)
            losses.append(model.step(micros).loss)
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6]), "it must learn"
    for mine, theirs in zip(losses, oracle.losses, strict=True):
        assert abs(mine - theirs) <= 1e-4
