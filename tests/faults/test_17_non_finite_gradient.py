"""A step with a non-finite gradient changes nothing, says so, and three in a row stop the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _engine import engine, rows
from _fixtures import tiny_config

from megatrain import Model, UserError
from megatrain.engine.operations import Operations
from megatrain.engine.program import Op

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def bad(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Step number -> what one element of a layer's gradient becomes in it, while losses stay finite."""
    values: dict[int, float] = {}
    backward = Operations.backward

    def spoiled(self: Operations, op: Op, handles: Any, run: Any) -> None:
        if op.unit == "layers.2" and op.last and run.step in values:
            hidden = handles.read(("dhid", op.micro))
            handles.put(
                ("dhid", op.micro),
                hidden.clone().index_fill_(1, torch.tensor(3, device=hidden.device), values[run.step]),
            )
        backward(self, op, handles, run)

    monkeypatch.setattr(Operations, "backward", spoiled)
    return values


def state(model: Model) -> list[torch.Tensor]:
    masters = model.state_dict()
    moments = [model._store.moment(name, which).clone() for name in masters for which in ("exp_avg", "exp_avg_sq")]
    counts = torch.tensor([model._store.step_count(unit) for unit in model._store.units])
    return [*masters.values(), *moments, counts]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_one_bad_step_leaves_everything_as_it_was(value: float, dtype: str, bad: dict[int, float], device: str) -> None:
    with engine(tiny_config(), device, compute_dtype=dtype, max_grad_norm=1.0) as model:
        for seed in range(5):
            assert not model.step(rows(2, seed=seed)).skipped
        before = state(model)
        bad[5] = value
        result = model.step(rows(2, seed=5))
        assert result.skipped
        assert result.loss == result.loss < 100
        assert not result.grad_norm < torch.inf
        assert same(state(model), before)
        assert not model.step(rows(2, seed=6)).skipped
        assert not same(state(model), before)
        assert model._store.step_count("layers.0") == 6
        assert all(tensor.isfinite().all() for tensor in state(model))


def test_three_in_a_row_stop_the_run(bad: dict[int, float], device: str) -> None:
    with engine(tiny_config(), device) as model:
        bad.update(dict.fromkeys((1, 2, 4, 5, 6), torch.inf))
        skipped = [model.step(rows(1, seed=seed)).skipped for seed in range(6)]
        assert skipped == [False, True, True, False, True, True]
        before = state(model)
        with pytest.raises(UserError, match="3 steps in a row had a non-finite gradient"):
            model.step(rows(1, seed=6))
        assert same(state(model), before)
