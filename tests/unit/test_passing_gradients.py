"""Gradients that only pass through host memory: the same step in 12 bytes a parameter, without a guard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _engine import engine, rows
from _fixtures import tiny_config

from megatrain import UserError
from megatrain.engine.operations import Operations
from megatrain.layout import HUGE_PAGE

pytestmark = [pytest.mark.usefixtures("one_thread")]

PASSING: dict[str, Any] = {"host_gradients": "passing", "max_grad_norm": None}


def masters(device: str, micros: int = 1, **options: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    with engine(tiny_config(tie_word_embeddings=options.pop("tied", False)), device, **options) as model:
        results = [model.step(rows(micros, seed=seed)) for seed in range(3)]
        return model.state_dict(), [number for r in results for number in (r.loss, r.grad_norm)]


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 1},
        {"tied": True, "micros": 2},
        {"compute_dtype": "bfloat16", "micros": 3, "boundaries": "host"},
        {"compute_dtype": "bfloat16", "states_on_device": ["embedding", "layers.2"], "activations": "50%"},
        {"order": "micro_batch", "weights_on_device": "100%", "micros": 2},
        {"gradient_dtype": "float32", "compute_dtype": "bfloat16"},
    ],
)
def test_masters_are_those_of_kept_gradients(options: dict[str, Any], device: str) -> None:
    passing, numbers = masters(device, **options, **PASSING)
    kept, expected = masters(device, **options, max_grad_norm=None, clipping="deferred")
    assert numbers == expected
    for name, master in kept.items():
        assert torch.equal(passing[name], master), name


@pytest.mark.parametrize("tied", [False, True])
def test_host_memory_is_twelve_bytes_a_parameter_and_a_few_buffers(tied: bool) -> None:
    config = tiny_config(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=12, vocab_size=8192, tie_word_embeddings=tied
    )
    reports = {}
    for how in ("kept", "passing"):
        options = {"host_gradients": how, "max_grad_norm": None, "compute_dtype": "bfloat16"}
        with engine(config, "sim", **options) as model:
            reports[how], parameters = model.memory, model.num_parameters
            sizes = {unit: model.store.layout(unit).numel for unit in model.store.units}
    kept, passing = reports["kept"].host_by_label, reports["passing"].host_by_label
    buffers = 2 * sizes["layers.0"] + (1 + (not tied)) * sizes["embedding"] + tied * sizes["head"]
    slack = (len(sizes) + 5) * HUGE_PAGE
    assert 2 * buffers <= passing["gradients"] <= 2 * buffers + slack
    assert kept["gradients"] == 2 * sum(sizes.values())
    assert 12 * parameters <= passing["masters and moments"] <= 12 * parameters + slack
    assert reports["passing"].host_bytes == sum(passing.values())


def test_less_host_memory_is_refused_to_the_byte() -> None:
    with engine(tiny_config(), "sim", **PASSING) as model:
        needed = model.memory.host_bytes
    with engine(tiny_config(), "sim", host_memory=needed, **PASSING) as model:
        model.step(rows(1))
    with (
        pytest.raises(UserError, match=rf"placement\.host_memory: .*\({needed} bytes\)"),
        engine(tiny_config(), "sim", host_memory=needed - 1, **PASSING),
    ):
        pass


def poisoned(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    """The gradient of a unit is not finite, as after an overflow in its backward."""
    finish = Operations._finish

    def broken(self: Operations, op: Any, handles: Any) -> None:
        if op.unit == unit:
            handles.read(op.gradients[unit]).fill_(float("inf"))
        finish(self, op, handles)

    monkeypatch.setattr(Operations, "_finish", broken)


def test_a_gradient_that_is_not_finite_from_the_start_changes_nothing(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a loss that is not: the head's comes first."""
    with engine(tiny_config(), device, **PASSING) as model:
        model.step(rows(1))
        before = model.state_dict()
        with monkeypatch.context() as patch:
            poisoned(patch, "head")
            assert model.step(rows(1, seed=1)).skipped
        for name, master in model.state_dict().items():
            assert torch.equal(master, before[name]), name
        assert not model.step(rows(1, seed=2)).skipped


def test_one_in_the_middle_ends_the_run_and_says_how_to_go_on(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tiny_config(), device, **PASSING) as model:
        model.step(rows(1))
        model.save_state(tmp_path / "save")
        saved = model.state_dict()
        with monkeypatch.context() as patch:
            poisoned(patch, "layers.1")
            with pytest.raises(UserError, match=r"step 1 .*non-finite .* 3 followers .*placement\.gradients=kept"):
                model.step(rows(1, seed=1))
        with pytest.raises(UserError, match="load_state the last checkpoint"):
            model.step(rows(1))
        with pytest.raises(UserError, match="half updated"):
            model.state_dict()
    with engine(tiny_config(), device, **PASSING) as model:
        model.load_state(tmp_path / "save")
        for name, master in model.state_dict().items():
            assert torch.equal(master, saved[name]), name
        model.step(rows(1, seed=1))


def test_ctrl_c_in_such_a_step_leaves_no_model_that_looks_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tiny_config(), "cpu", **PASSING) as model:
        model.step(rows(1))
        wait, calls = model._engine.wait, []

        def interrupted(ticket: Any) -> None:
            calls.append(ticket)
            if len(calls) == 1:
                raise KeyboardInterrupt
            wait(ticket)

        monkeypatch.setattr(model._engine, "wait", interrupted)
        poisoned(monkeypatch, "layers.1")
        with pytest.raises(UserError, match="followers were updated already"):
            model.step(rows(1, seed=1))
        with pytest.raises(UserError, match="half updated"):
            model.state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_norm": 1.0}, r"optim\.max_grad_norm: 1\.0 needs .* use null"),
        ({"clipping": "speculative"}, r"optim\.clipping: speculative .* use auto"),
        ({"host_gradients": "passed"}, r"placement\.gradients: 'passed' is unknown; choose kept or passing"),
    ],
)
def test_what_does_not_go_with_them_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        engine(tiny_config(), "sim", **(PASSING | options))


def test_a_limit_cannot_be_set_later_nor_gradients_be_asked_for() -> None:
    with engine(tiny_config(), "sim", **PASSING) as model:
        with pytest.raises(UserError, match=r"optim\.max_grad_norm: 0\.5 needs"):
            model.max_grad_norm = 0.5
        assert model.max_grad_norm is None
        with pytest.raises(UserError, match=r"keep_gradients: .* host_gradients='kept'"):
            model.step(rows(1), keep_gradients=True)
        model.step(rows(1))
