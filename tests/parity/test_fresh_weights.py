"""Fresh weights are drawn for every parameter, the output matrix included."""

from __future__ import annotations

import pytest
from _fixtures import FAMILIES, tiny_config

from megatrain import Model


@pytest.mark.parametrize("family", FAMILIES)
def test_no_matrix_is_left_at_zero(family: str) -> None:
    with Model.from_config(tiny_config(family), device="cpu", compute_dtype="float32", kernel="reference") as model:
        for name, values in model.state_dict().items():
            if values.dim() >= 2:
                assert 0.015 < values.std() < 0.025, name
