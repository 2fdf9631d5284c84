"""Buffers are reached only as declared, slow lanes change nothing, and no failure or Ctrl-C hangs or goes unseen."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _devices import COPY_LANES, DelayedCpu, delayed, lane_threads, need_cuda
from _world import batches, outcome, same, small_config

from megatrain import AdamW, Model, UserError
from megatrain.devices import LANES, Device
from megatrain.devices.cpu import CpuDevice
from megatrain.devices.sim import SimDevice
from megatrain.engine import executor
from megatrain.engine.operations import Operations
from megatrain.engine.program import Op
from megatrain.engine.schedule import Ticket, WaitTracker
from megatrain.errors import LaneError

pytestmark = pytest.mark.timeout(120)

CASES: dict[str, dict[str, Any]] = {
    "untied, one slot": {"slots": 1},
    "tied, two slots": {"slots": 2, "config": {"tie_word_embeddings": True}},
    "kept, bf16": {"slots": 2, "activations": "keep", "compute_dtype": "bfloat16"},
    "all resident": {"slots": 5},
    "boundaries on the host": {"slots": 2, "boundaries": "host", "config": {"num_hidden_layers": 5}},
}


def options_of(case: str) -> dict[str, Any]:
    options = dict(CASES[case])
    return options | {"config": small_config(**options.get("config", {}))}


@pytest.fixture(params=["cpu", "sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def each_device(request: pytest.FixtureRequest, device: str) -> str:
    if request.param == "cuda":
        need_cuda(device)
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    assert not lane_threads()


def small_model(device: Device | str, **options: Any) -> Model:
    options = {"compute_dtype": "float32", "kernel": "reference", "compile": False, "config": small_config()} | options
    return Model.from_config(
        options.pop("config"), seed=1, device=device, max_grad_norm=0.5, optimizer=AdamW(lr=1e-2), **options
    )


# --- undeclared buffers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["read", "target", "put"])
def test_an_undeclared_buffer_is_refused(each_device: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = Operations.backward

    def curious(self: Operations, op: Op, handles: Any, run: Any) -> None:
        if op.unit == "layers.1":
            other = ("hostgrad", "layers.2")
            handles.put(other, torch.zeros(1)) if how == "put" else getattr(handles, how)(other)
        declared(self, op, handles, run)

    monkeypatch.setattr(Operations, "backward", curious)
    with (
        small_model(each_device) as model,
        pytest.raises(LaneError, match=r"BACKWARD layers\.1 .*\('hostgrad', 'layers\.2'\).*not declare"),
    ):
        model.step(batches()[0])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("make", [SimDevice, CpuDevice])
def test_nan_in_released_buffers_changes_nothing(case: str, make: Any) -> None:
    careless = type("Careless", (make,), {"poisons": False})
    options = options_of(case)
    assert same(outcome(make(), **options), outcome(careless(), **options))


def test_released_slots_do_hold_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_model(SimDevice(), slots=2) as model:
        model.step(batches()[0])
        model.state_dict()
        fixed = [model._engine._table.get(name) for name in model._engine._table.fixed_names if name[0] == "slot"]
        assert fixed
        assert all(bool(slot.isnan().all()) for slot in fixed)


# --- slow lanes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lane", LANES)
def test_a_slow_lane_changes_nothing(case: str, lane: str) -> None:
    options = options_of(case) | {"steps": 5}
    assert same(outcome(DelayedCpu(lane, 0.001), **options), outcome(SimDevice(), **options))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lane", COPY_LANES)
def test_slow_copies_change_nothing_on_a_gpu(case: str, lane: str, device: str) -> None:
    need_cuda(device)
    options = options_of(case) | {"steps": 5}
    assert same(outcome(delayed("cuda", lane), **options), outcome("cuda", **options))


class Deaf(WaitTracker):
    """Forgets every wait for one lane."""

    ignored = ""

    def add(self, op: Op) -> tuple[Ticket, list[Ticket]]:
        ticket, waits = super().add(op)
        return ticket, [wait for wait in waits if wait[0] != self.ignored]


@pytest.mark.parametrize("lane", LANES)
def test_without_its_waits_a_slow_lane_shows(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The delay is long enough to notice a missing wait."""
    options = options_of("untied, one slot") | {"steps": 5}
    expected = outcome(SimDevice(), **options)
    monkeypatch.setattr(executor, "WaitTracker", Deaf)
    monkeypatch.setattr(Deaf, "ignored", lane)
    try:
        noticed = not same(outcome(DelayedCpu(lane), **options), expected)
    except (LaneError, UserError):
        noticed = True
    assert noticed


# --- failures ----------------------------------------------------------------------------------------------------

FAILURES = {
    "input": ("compute", "INPUT micro-batch 1", ""),
    "fetch": ("h2d", "FETCH layers.1", "layers.1"),
    "forward": ("compute", "FORWARD layers.1 micro-batch 1", "layers.1"),
    "loss": ("compute", "LOSS head micro-batch 1", "head"),
    "backward": ("compute", "BACKWARD layers.1 micro-batch 1", "layers.1"),
    "drain": ("d2h", "DRAIN layers.1", "layers.1"),
    "norm": ("compute", "NORM", ""),
    "publish": ("d2h", "PUBLISH", ""),
    "update": ("optimizer", "UPDATE layers.1", "layers.1"),
    "offload": ("d2h", "OFFLOAD layers.1 micro-batch 1", "layers.1"),
    "reload": ("h2d", "RELOAD layers.1 micro-batch 1", "layers.1"),
    "recompute": ("compute", "RECOMPUTE layers.1 micro-batch 1", "layers.1"),
}


FIVE = {"num_hidden_layers": 5}
OPTIONS: dict[str, dict[str, Any]] = {
    "offload": {"boundaries": "host", "config": small_config(**FIVE)},
    "reload": {"boundaries": "host", "config": small_config(**FIVE)},
    "recompute": {"boundary_every": 3},
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_in_any_lane_is_raised_by_name(kind: str, each_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lane, label, unit = FAILURES[kind]
    works = getattr(Operations, kind)

    def fails(self: Operations, op: Op, handles: Any, run: Any) -> None:
        if run.step == 1 and str(op) == label:
            raise ZeroDivisionError("by design")
        works(self, op, handles, run)

    steps = batches(4)
    with small_model(each_device, **OPTIONS.get(kind, {})) as model:
        model.step(steps[0])
        monkeypatch.setattr(Operations, kind, fails)

        def step_and_settle() -> None:  # an update fails after the step's results are known: the next call tells
            model.step(steps[1])
            model.state_dict()

        with pytest.raises(LaneError) as caught:
            step_and_settle()
        message = str(caught.value)
        assert f"lane {lane}" in message
        assert f"operation {label}" in message
        assert unit in message
        assert "by design" in message
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        for call in (
            lambda: model.step(steps[2]),
            model.state_dict,
            lambda: model.logprobs(steps[2][0]),
            lambda: model.reserve(1, 4, 1),
            lambda: model.save_state("nowhere"),
        ):
            with pytest.raises(UserError, match=r"no longer be used: .*load the model again and load_state"):
                call()
    model.close()
    with pytest.raises(UserError, match="closed"):
        model.step(steps[3])


@pytest.mark.parametrize("kind", ["score", "report"])
def test_a_failure_while_scoring(kind: str, each_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Operations, op: Op, handles: Any, run: Any) -> None:
        raise ZeroDivisionError("by design")

    monkeypatch.setattr(Operations, kind, fails)
    with small_model(each_device) as model:
        with pytest.raises(LaneError, match=kind.upper()):
            model.logprobs(batches()[0][0])
        with pytest.raises(UserError, match="load the model again"):
            model.logprobs(batches()[0][0])


def test_a_failure_while_measuring(each_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("by design")

    monkeypatch.setattr(executor.Workspaces, "measure", fails)
    with small_model(each_device) as model:
        with pytest.raises(LaneError, match=r"MEASURE.*by design"):
            model.reserve(2, 6, 1)
        with pytest.raises(UserError, match="load the model again"):
            model.step(batches()[0])


# --- several models ----------------------------------------------------------------------------------------------


def test_two_models_at_once_and_one_after_the_other(each_device: str) -> None:
    steps = batches(2)

    def alone() -> dict[str, torch.Tensor]:
        with small_model(each_device) as model:
            for step in steps:
                model.step(step)
            return model.state_dict()

    expected = alone()
    with small_model(each_device) as one, small_model(each_device) as two:
        for step in steps:
            one.step(step)
            two.step(step)
        for model in (one, two):
            assert all(torch.equal(master, expected[name]) for name, master in model.state_dict().items())
    assert all(torch.equal(master, expected[name]) for name, master in alone().items())


def test_a_constructor_that_fails_leaves_no_thread(each_device: str) -> None:
    with pytest.raises(UserError, match=r"placement\.device_memory"):
        small_model(each_device, device_memory=1000)
    assert not lane_threads()


# --- Ctrl-C ------------------------------------------------------------------------------------------------------


def interrupted(call: Callable[[], object], *delays: float) -> bool:
    """Run ``call`` in the main thread with a Ctrl-C after each delay; whether one was raised."""
    main = threading.main_thread().ident
    assert main is not None
    timers = [threading.Timer(delay, signal.pthread_kill, (main, signal.SIGINT)) for delay in delays]
    hit = False
    try:
        for timer in timers:
            timer.start()
        call()
    except KeyboardInterrupt:
        hit = True
    try:
        for timer in timers:
            timer.join()
        time.sleep(0.02)
    except KeyboardInterrupt:  # it came after the call
        pass
    return hit


def masters_after(steps: Any) -> list[torch.Tensor]:
    with small_model(SimDevice(), config=small_config(attention_dropout=0.2)) as model:
        for step in steps:
            model.step(step)
        return list(model.state_dict().values())


@pytest.mark.parametrize("slow", ["compute", "h2d", "d2h", "optimizer"])
def test_ctrl_c_completes_the_step_or_the_next_call_raises(slow: str) -> None:
    first, second = batches(2)
    after_both, never_begun = masters_after([first, second]), masters_after([second])
    raised = 0
    for delay in (0.0, 0.001, 0.01, 0.03, 0.06, 0.1):
        with small_model(DelayedCpu(slow), config=small_config(attention_dropout=0.2)) as model:
            raised += interrupted(lambda model=model: model.step(first), delay)  # type: ignore[misc]
            try:
                model.step(second)
            except UserError as error:
                assert "load the model again" in str(error)  # noqa: PT017 - either outcome is right
                continue
            masters = list(model.state_dict().values())
        assert same(masters, after_both) or same(masters, never_begun), f"half a step after Ctrl-C at {delay} s"
    assert raised


def test_ctrl_c_while_waiting_completes_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = batches(2)
    works, main = Operations.norm, threading.main_thread().ident
    assert main is not None

    def signals(self: Operations, op: Op, handles: Any, run: Any) -> None:
        if run.step == 0:
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.1)
        works(self, op, handles, run)

    monkeypatch.setattr(Operations, "norm", signals)
    with small_model(DelayedCpu("compute"), config=small_config(attention_dropout=0.2)) as model:
        model.reserve(2, 6, 2)
        with pytest.raises(KeyboardInterrupt):
            model.step(first)
        model.step(second)
        masters = list(model.state_dict().values())
        assert model._step == 2
    monkeypatch.undo()
    assert same(masters, masters_after([first, second]))


def test_a_second_ctrl_c_drops_the_step() -> None:
    with small_model(DelayedCpu("compute", 0.02)) as model:
        model.reserve(2, 6, 2)
        assert interrupted(lambda: model.step(batches()[0]), 0.08, 0.16)
        with pytest.raises(UserError, match=r"interrupted.*load the model again"):
            model.step(batches()[1])


def test_ctrl_c_inside_an_operation_of_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """There operations run in the main thread: one that was cut off must not run a second time."""
    works, calls = Operations.backward, []

    def cut_off(self: Operations, op: Op, handles: Any, run: Any) -> None:
        works(self, op, handles, run)
        calls.append(str(op))
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Operations, "backward", cut_off)
    with small_model("sim") as model:
        with pytest.raises((KeyboardInterrupt, LaneError)):
            model.step(batches()[0])
        assert len(calls) == len(set(calls)) == 3
        with pytest.raises(UserError, match="load the model again"):
            model.step(batches()[1])
