"""Bias correction belongs to each unit: one that is left out now and then matches torch run tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain import AdamW
from megatrain.checkpoint import load_state, save_state
from megatrain.kernels import Kernel, load
from megatrain.layout import build_layout
from megatrain.store import Store

UNITS = {f"layers.{i}": build_layout({"mlp.weight": (17, 9), "norm.weight": (9,)}, f"layers.{i}.") for i in range(4)}
NAMES = [name for layout in UNITS.values() for name in layout]
OPTIMIZER = AdamW(lr=1e-2, weight_decay=0.1)


def new_store(kernel: Kernel, dtype: torch.dtype) -> Store:
    store = Store(UNITS, dtype, kernel, lambda m: None, lambda m: None, gradient_dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for layout in UNITS.values():
        for parameter in layout.parameters:
            store.load_master(parameter.name, 0, torch.randn(parameter.numel, generator=generator))
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("resumed", [False, True])
def test_thirty_steps_with_one_unit_frozen_on_odd_ones(resumed: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    kernel = load("auto")
    store = new_store(kernel, dtype)
    plain = {name: torch.nn.Parameter(store.master(name)) for name in NAMES}
    torch_adamw = {
        name: torch.optim.AdamW([p], lr=1e-2, weight_decay=0.1 if p.dim() == 2 else 0.0) for name, p in plain.items()
    }
    generator = torch.Generator().manual_seed(1)
    for step in range(30):
        if resumed and step == 11:
            save_state(tmp_path / "state", store, {"step": step})
            store = new_store(kernel, dtype)
            assert load_state(tmp_path / "state", store)["step"] == step
        for unit, layout in UNITS.items():
            if unit == "layers.2" and step % 2:
                continue
            gradient = torch.zeros(layout.numel)
            for parameter in layout.parameters:
                values = torch.randn(parameter.shape, generator=generator)
                gradient[parameter.offset : parameter.end] = values.flatten()
                plain[parameter.name].grad = values
                torch_adamw[parameter.name].step()
            count = store.step_count(unit) + 1
            OPTIMIZER.update(kernel, store.slab(unit), gradient, lr=1e-2, step=count, scale=1.0)
            store.set_step_count(unit, count)
    assert [store.step_count(unit) for unit in UNITS] == [30, 30, 15, 30]
    for name in NAMES:
        expected = plain[name].detach()
        assert torch.allclose(store.master(name), expected, rtol=2e-6, atol=1e-6), name
