"""Gradients of many micro-batches are summed in FP32, whatever the compute dtype and the dtype they leave in."""

from __future__ import annotations

import pytest
from _engine import engine, rows
from _fixtures import tiny_config
from _oracle import relative

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("gradient_dtype", "family"), [("bfloat16", "tiny"), ("float32", "tiny-tied")])
def test_256_equal_micro_batches_give_the_gradient_of_one(gradient_dtype: str, family: str, device: str) -> None:
    (row,) = rows(1, tokens=8)
    options = {"compute_dtype": "bfloat16", "gradient_dtype": gradient_dtype}
    with engine(tiny_config(family, num_hidden_layers=2), device, **options) as model:
        model.step([row], lr=0.0, keep_gradients=True)
        one = model.gradients()
        model.step([row] * 256, lr=0.0, keep_gradients=True)
        many = model.gradients()
    for name, gradient in one.items():
        # The step divides by 256 times the tokens. One row alone is rounded once more: its first write is in BF16.
        assert relative(many[name], gradient) <= 1e-3, name
