"""What only a GPU can show: no synchronisation inside a step, the device kernel, compiled templates, pinned memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from _fixtures import tiny_config
from _oracle import random_batches, relative

from megatrain import AdamW, Model
from megatrain.kernels import load

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64}


def model(device: str, sizes: dict[str, int] = SIZES, **options: Any) -> Model:
    options = {"compute_dtype": "bfloat16", "optimizer": AdamW(lr=1e-3), "compile": False} | options
    return Model.from_config(tiny_config(**sizes), seed=3, device=device, **options)


@contextmanager
def refusing_synchronisation() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode announces that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, {"states_on_device": 1.0}, {"activations": "keep"}, {"compile": True}])
def test_a_step_never_synchronises(gpu: str, compiling: None, options: dict[str, Any]) -> None:
    steps = random_batches(320, steps=3, micros=2, tokens=64)
    with model(gpu, **options) as trained:
        trained.step(steps[0])
        with refusing_synchronisation():
            for step in steps[1:]:
                trained.step(step)


@pytest.mark.parametrize("options", [{}, {"states_on_device": ["embedding"], "activations": "keep"}])
def test_tracing_never_synchronises_inside_a_step(gpu: str, options: dict[str, Any]) -> None:
    steps = random_batches(320, steps=4, micros=2, tokens=64)
    with model(gpu, **options) as trained:
        trained.step(steps[0])
        with trained.trace() as trace, refusing_synchronisation():
            for step in steps[1:]:
                trained.step(step)
        assert trained.predict(trace).seconds > 0
    assert len(trace.steps) == 2
    assert all(timeline.busy("compute") > 0 for timeline in trace.steps)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("norm", [3.0, float("inf")])
def test_the_device_kernel_is_the_reference(gpu: str, split: bool, norm: float) -> None:
    from megatrain.kernels.triton import TritonKernel

    n = 100_003
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(n, generator=generator)
    moments = [torch.randn(n, generator=generator) * 0.01, torch.rand(n, generator=generator) * 0.01]
    grad = torch.randn(n, generator=generator).to(torch.bfloat16 if split else torch.float32)
    kernel = load("reference")
    head, tail = master.clone(), None
    if split:
        head, tail = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
        kernel.split(master, head, tail)
    state = [head, tail, *moments]
    on_gpu = [None if part is None else part.cuda() for part in state]
    scalars = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "step": 7}
    before = [None if part is None else part.clone() for part in state]
    kernel.adamw(*state, grad, **scalars, grad_scale=0.25)
    clip = torch.tensor([norm, 0.25], dtype=torch.float64, device="cuda")
    TritonKernel().adamw(*on_gpu, grad.cuda(), **scalars, grad_scale=clip)
    expected = state if norm == 3.0 else before
    for mine, theirs in zip(on_gpu, expected, strict=True):
        if mine is None:
            continue
        if norm != 3.0:
            assert torch.equal(mine.cpu(), theirs)
        elif theirs.is_floating_point():
            assert relative(mine.cpu(), theirs) < 1e-7
    if split and norm == 3.0:
        joined = [torch.empty(n), torch.empty(n)]
        kernel.join(on_gpu[0].cpu(), on_gpu[1].cpu(), joined[0])
        kernel.join(head, tail, joined[1])
        assert relative(*joined) < 1e-7


def test_compiled_templates_equal_eager_ones(gpu: str, compiling: None) -> None:
    (step,) = random_batches(320, steps=1, micros=2, tokens=64)
    gradients = []
    for compile in (False, True):
        with model(gpu, compute_dtype="float32", compile=compile) as trained:
            trained.step(step, keep_gradients=True)
            gradients.append(trained.gradients())
    for name, gradient in gradients[0].items():
        assert relative(gradients[1][name], gradient) < 1e-5, name


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_placements_change_nothing(gpu: str, activations: str, dtype: str) -> None:
    """FP32: to the rounding of sums that a GPU takes in any order, which Adam's first steps enlarge.

    BF16: losses only, to its 8 bits, since Adam turns a rounding of a gradient near zero into a whole step.
    """
    steps = random_batches(320, steps=4, micros=2, tokens=64)
    results = []
    states: list[dict[str, Any]] = [{"states_on_device": share} for share in (0.5, 1.0)]
    for placement in ({}, {"weights_on_device": 1.0}, *states, {"slots": 1}):
        with model(gpu, activations=activations, compute_dtype=dtype, **placement) as trained:
            losses = [trained.step(step).loss for step in steps]
            results.append((losses, trained.state_dict()))
    for losses, masters in results[1:]:
        assert losses == pytest.approx(results[0][0], rel=1e-5 if dtype == "float32" else 4e-3)
        for name, master in masters.items() if dtype == "float32" else ():
            assert relative(master, results[0][1][name]) < 1e-3, name


def pinned_so_far() -> int:
    """Bytes that PyTorch's own allocator has pinned since the process began."""
    torch.cuda.init()
    return int(torch.cuda.host_memory_stats()["allocated_bytes.allocated"])


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_tuning_pins_nothing_where_the_device_has_room(
    gpu: str, compiling: None, activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler's tuner copies what a kernel changes: here 256 MiB of a gated product."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # or another test's kernels may be tuned already
    (step,) = random_batches(320, steps=1, tokens=4096)
    allocated = torch.cuda.memory_allocated()
    before = pinned_so_far()
    with model(gpu, compile=True, activations=activations, sizes=SIZES | {"intermediate_size": 8192}) as trained:
        trained.step(step)
        peak, measured = trained.memory.device_peak, trained.memory.device_measured
    assert pinned_so_far() - before < 128 << 20
    assert measured is not None
    assert measured - allocated < 1.05 * peak + (8 << 20), "what tuning took is no part of the peak"


def test_device_memory_budget_holds_on_the_device(gpu: str) -> None:
    (step,) = random_batches(320, steps=1, tokens=64)
    allocated = torch.cuda.memory_allocated()
    with model(gpu) as trained:
        trained.step(step)
        peak, measured = trained.memory.device_peak, trained.memory.device_measured
    assert measured is not None
    assert 0.8 * peak < measured - allocated < 1.05 * peak + (8 << 20), "blocks are larger than what was asked for"
    requested = "requested_bytes.all."  # what was asked for; recycled blocks may be up to 1 MiB larger
    base = torch.cuda.memory_stats()[requested + "current"]
    with model(gpu, device_memory=peak) as trained:
        trained.step(step)
        torch.cuda.reset_peak_memory_stats()
        trained.step(step)
        assert torch.cuda.memory_stats()[requested + "peak"] - base <= peak + (1 << 16)
