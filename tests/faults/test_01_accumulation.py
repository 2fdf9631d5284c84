"""One batch or several micro-batches: the same loss and the same gradient, however uneven the rows are."""

from __future__ import annotations

import pytest
import torch
from _engine import engine, tolerance
from _fixtures import tiny_config
from _oracle import Oracle, relative

pytestmark = pytest.mark.usefixtures("one_thread")


def uneven_rows() -> dict[str, torch.Tensor]:
    """Eight rows of 64 tokens with 1 to 60 targets."""
    ids = torch.randint(3, 320, (8, 64), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for row, targets in enumerate((1, 60, 2, 35, 7, 50, 1, 20)):
        labels[row, : 64 - targets] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("size", [8, 4, 2, 1])
def test_every_split_of_the_rows_gives_the_gradient_of_the_whole(size: int, device: str) -> None:
    whole, config = uneven_rows(), tiny_config()
    micros = [{key: value[i : i + size] for key, value in whole.items()} for i in range(0, 8, size)]
    with engine(config, device) as model:
        oracle = Oracle(config, model.state_dict(), own_loss=True, device=device)
        expected = oracle.step([whole])
        result = model.step(micros, keep_gradients=True)
        gradients = model.gradients()
    assert result.tokens == 176
    assert result.loss == pytest.approx(oracle.losses[0], rel=1e-6)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
    assert result.grad_norm == pytest.approx(norm, rel=10 * tolerance(device))
    for name, gradient in expected.items():
        assert relative(gradients[name], gradient) <= 10 * tolerance(device), name
