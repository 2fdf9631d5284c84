"""Copies that come late, in either direction, change nothing in twenty steps."""

from __future__ import annotations

import pytest
import torch
from _devices import COPY_LANES, delayed
from _engine import engine, rows
from _fixtures import tiny_config

from megatrain.devices import Device

pytestmark = pytest.mark.usefixtures("one_thread")


def twenty_steps(device: str | Device) -> list[torch.Tensor]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    with engine(tiny_config("tiny-tied", **sizes), device, max_grad_norm=0.5) as model:
        losses = [model.step(rows(2, tokens=8, seed=seed)).loss for seed in range(20)]
        return [torch.tensor(losses, dtype=torch.float64), *model.state_dict().values()]


@pytest.mark.parametrize("lane", COPY_LANES)
def test_late_copies_are_waited_for(lane: str, device: str) -> None:
    blocking = "cuda" if device == "cuda" else "sim"  # on the simulator nothing overlaps
    expected = twenty_steps(blocking)
    assert expected[0].isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(twenty_steps(delayed(device, lane)), expected, strict=True))
