"""The AdamW kernels: reference against torch's fused AdamW and float64; native against reference, bitwise."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _kernels import (
    NATIVES,
    REFERENCE,
    SETTINGS,
    assert_same_bits,
    copies,
    each_kernel,
    each_native,
    joined,
    random_state,
    random_values,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatrain import kernels
from megatrain.kernels.native import NativeKernel
from megatrain.kernels.reference import BLOCK

MIN_EXPONENT = -149  # of the smallest FP32 denormal


def test_native_is_built_where_a_compiler_exists() -> None:
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler here: the plain torch kernel is in use")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("no Python headers here: the plain torch kernel is in use")
    assert NATIVES, "the native kernel is not built; run `make native`"


@each_native
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.sampled_from([0, 1, 7, 8, 9, 15, 16, 17, 31, 4095, 4096, 4097, 16384, 16385, 32769, 50001]),
    kind=st.sampled_from(["normal", "denormal", "extreme"]),
    split=st.booleans(),
    half_gradient=st.booleans(),
    grad_scale=st.sampled_from([1.0, 0.3, 0.0]),
    beta1=st.sampled_from([0.9, 0.5, 0.25, 0.0]),
    step=st.integers(1, 2000),
)
def test_native_is_bitwise_the_reference(
    native: NativeKernel,
    seed: int,
    count: int,
    kind: str,
    split: bool,
    half_gradient: bool,
    grad_scale: float,
    beta1: float,
    step: int,
) -> None:
    expected = random_state(seed, count, kind, split, half_gradient)
    found = copies(expected)
    options = SETTINGS | {"beta1": beta1, "step": step, "grad_scale": grad_scale}
    REFERENCE.adamw(*expected, **options)  # type: ignore[arg-type]
    native.adamw(*found, **options)  # type: ignore[arg-type]
    if split and kind == "extreme":  # the halves of a NaN differ with its payload: compare what they join to
        found[0:2], expected[0:2] = [joined(found)], [joined(expected)]
    assert_same_bits(found, expected)


@each_native
@pytest.mark.parametrize("count", [BLOCK - 1, BLOCK + 17])
def test_native_is_bitwise_the_reference_across_blocks_and_steps(native: NativeKernel, count: int) -> None:
    expected = random_state(1, count, "normal", True, True)
    found = copies(expected)
    for step in range(1, 4):
        REFERENCE.adamw(*expected, step=step, **SETTINGS)  # type: ignore[arg-type]
        native.adamw(*found, step=step, **SETTINGS)  # type: ignore[arg-type]
    assert_same_bits(found, expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.4, 0.95), (0.5, 0.5)])
def test_reference_is_bitwise_fused_adamw_over_ten_steps(threads: int, betas: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(threads)
    count = 3 * 65536
    parameter = torch.nn.Parameter(torch.randn(count, generator=generator))
    options = SETTINGS | {"beta1": betas[0], "beta2": betas[1]}
    oracle = torch.optim.AdamW([parameter], lr=1e-3, betas=betas, eps=1e-8, weight_decay=0.1, fused=True)
    master = parameter.detach().clone()
    exp_avg, exp_avg_sq = torch.zeros(count), torch.zeros(count)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for step in range(1, 11):
            grad = torch.randn(count, generator=generator) * 10.0 ** -(step % 5)
            parameter.grad = grad
            oracle.step()
            REFERENCE.adamw(master, None, exp_avg, exp_avg_sq, grad, step=step, **options)
    finally:
        torch.set_num_threads(before)
    state = oracle.state[parameter]
    assert_same_bits([master, exp_avg, exp_avg_sq], [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]])


def test_units_updated_one_after_another_get_one_bias_correction() -> None:
    """Known fault 34: the step is the caller's; a unit frozen in odd steps keeps its own count."""
    kernel = kernels.load("auto")
    counts = [64, 96, 128]
    masters = [torch.full((count,), 0.5) for count in counts]
    moments = [(torch.zeros(count), torch.zeros(count)) for count in counts]
    parameters = [torch.nn.Parameter(master.clone()) for master in masters]
    oracles = [torch.optim.AdamW([p], lr=1e-3, weight_decay=0.1, fused=True) for p in parameters]
    generator = torch.Generator().manual_seed(0)
    steps = [0, 0, 0]
    for number in range(30):
        for unit, master in enumerate(masters):
            if unit == 1 and number % 2:
                continue
            steps[unit] += 1
            grad = torch.randn(counts[unit], generator=generator)
            parameters[unit].grad = grad
            oracles[unit].step()
            kernel.adamw(master, None, *moments[unit], grad, step=steps[unit], **SETTINGS)
    for master, parameter in zip(masters, parameters, strict=True):
        assert_same_bits([master], [parameter.detach()])


def ulp(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The spacing of FP32 numbers at each magnitude, in float64."""
    exponent = np.frexp(np.abs(values))[1] - 24
    return np.ldexp(1.0, np.maximum(exponent, MIN_EXPONENT))


def assert_sum(found: Tensor, *terms: np.ndarray[Any, Any], ulps: float = 2.0) -> None:
    """``found`` is the sum of the terms to ``ulps`` of the largest; what leaves FP32 is not compared."""
    exact = np.sum(terms, axis=0)
    largest = np.max(np.abs(terms), axis=0)
    representable = largest < float(np.finfo(np.float32).max) / 4
    assert representable.sum() > 1000
    error = np.abs(found.double().numpy() - exact)[representable] / ulp(largest)[representable]
    assert error.max() <= ulps


def float64(value: float) -> float:
    """The FP32 value nearest to a double, which is what a kernel computes with."""
    return float(np.float32(value))


@each_kernel
@pytest.mark.parametrize("kind", ["normal", "denormal", "extreme"])
@pytest.mark.parametrize("grad_scale", [1.0, 0.7])
def test_each_result_is_within_two_ulp_of_its_largest_term(kernel: Any, kind: str, grad_scale: float) -> None:
    """Against float64, from the stored inputs of each sum: the master's from the stored new moments."""
    count = 1 << 16
    head, _, exp_avg, exp_avg_sq, grad = random_state(5, count, kind, False, False)
    assert head is not None
    assert exp_avg is not None
    assert exp_avg_sq is not None
    assert grad is not None
    if kind == "denormal":
        # A denormal step_size * m has few digits left and 1 / eps carries the loss upwards, in torch's
        # kernels too. It is small beside a master of ordinary size.
        head = random_values(np.random.default_rng(6), count, "normal")
    old = [tensor.double().numpy() for tensor in (head, exp_avg, exp_avg_sq)]
    scaled = (grad * grad_scale).double().numpy()
    kernel.adamw(head, None, exp_avg, exp_avg_sq, grad, step=3, grad_scale=grad_scale, **SETTINGS)

    weight = float64(1 - 0.9)
    difference = scaled - old[1]
    in_range = np.abs(difference) < float(np.finfo(np.float32).max)
    assert_sum(exp_avg[torch.from_numpy(in_range)], old[1][in_range], weight * difference[in_range])
    with np.errstate(over="ignore"):
        assert_sum(exp_avg_sq, old[2] * float64(0.999), float64(1 - 0.999) * scaled * scaled)
    moment, square = exp_avg.double().numpy(), exp_avg_sq.double().numpy()
    denominator = np.sqrt(square) / float64(math.sqrt(1 - 0.999**3)) + float64(1e-8)
    with np.errstate(invalid="ignore"):  # infinity / infinity, left out below
        update = float64(-1e-3 / (1 - 0.9**3)) * moment / denominator
    # Where a tiny moment underflows in step_size * m, the digits are lost before the sum.
    comparable = np.isfinite(square) & ((np.abs(moment) > 1e-30) | (kind == "denormal"))
    decayed = old[0] * float64(1 - 1e-4)
    small_update = comparable & (np.abs(update) <= np.abs(decayed) / 4)
    large_update = comparable & ~small_update
    assert_sum(head[torch.from_numpy(small_update)], decayed[small_update], update[small_update])
    if large_update.sum() > 1000:
        # The update is a quotient with five roundings of its own, in torch's kernels too.
        terms = decayed[large_update], update[large_update]
        assert_sum(head[torch.from_numpy(large_update)], *terms, ulps=4.0)


def sweep(kernel: Any, begin: int, end: int) -> None:
    """Split and join all bit patterns in [begin, end): the heads by the formula, the round trip exactly."""
    bits = np.arange(begin, end, dtype=np.uint32)
    master = torch.from_numpy(bits.view(np.float32))
    head, tail = torch.empty(len(bits), dtype=torch.bfloat16), torch.empty(len(bits), dtype=torch.int16)
    result = torch.empty(len(bits))
    kernel.split(master, head, tail)
    kernel.join(head, tail, result)
    assert np.array_equal(result.numpy().view(np.uint32), bits)
    bits += np.uint32(0x8000)
    bits >>= np.uint32(16)
    assert np.array_equal(head.view(torch.uint16).numpy(), bits)


@each_kernel
@pytest.mark.parametrize("top", [0x0000, 0x007F, 0x3F80, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0xFF80, 0xFFFF])
def test_split_round_trips_around_every_special_value(kernel: Any, top: int) -> None:
    """All 65,536 patterns under a head: zeros, denormals, one, the largest, infinities, NaNs, the last."""
    sweep(kernel, top << 16, (top + 1) << 16)


@each_kernel
@given(first=st.integers(0, 2**32 - 5000), count=st.integers(1, 5000))
@settings(deadline=None, max_examples=30)
def test_split_round_trips(kernel: Any, first: int, count: int) -> None:
    sweep(kernel, first, first + count)


@pytest.mark.slow
@each_kernel
def test_split_round_trips_for_all_patterns(kernel: Any) -> None:
    """The reference, some 15 times slower, does every sixteenth block: all exponents and signs."""
    block = 1 << 20  # stays in the cache
    for begin in range(0, 1 << 32, 16 * block if kernel is REFERENCE else block):
        sweep(kernel, begin, begin + block)


@each_native
def test_flush_to_zero_of_the_caller_changes_nothing(native: NativeKernel) -> None:
    expected = random_state(9, 40000, "denormal", False, False)
    found = copies(expected)
    native.adamw(*expected, step=1, **SETTINGS)  # type: ignore[arg-type]
    assert expected[2] is not None
    assert bool(expected[2].any())
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        native.adamw(*found, step=1, **SETTINGS)  # type: ignore[arg-type]
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(found, expected)


@each_native
def test_numpy_arrays_give_the_same_bits(native: NativeKernel) -> None:
    expected = random_state(3, 5000, "normal", True, True)
    arrays = [
        tensor.clone().view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.clone().numpy()
        for tensor in expected
        if tensor is not None
    ]
    native.adamw(*arrays, step=1, **SETTINGS)
    native.adamw(*expected, step=1, **SETTINGS)  # type: ignore[arg-type]
    assert expected[0] is not None
    assert np.array_equal(arrays[0], expected[0].view(torch.uint16).numpy())
    assert np.array_equal(arrays[2], expected[2])


@pytest.mark.parametrize("kernel", [REFERENCE, *NATIVES[:1]], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"step": 0}, ValueError, "step must count from 1, got 0"),
        ({"grad": torch.zeros(9)}, ValueError, "of one length"),
        ({"grad": torch.zeros(8, dtype=torch.float16)}, TypeError, "grad must be bfloat16 or float32"),
        ({"head": torch.zeros(8, dtype=torch.bfloat16)}, TypeError, "head must be float32"),
        ({"tail": torch.zeros(8, dtype=torch.int16)}, TypeError, "head must be bfloat16"),
        ({"exp_avg": torch.zeros(2, 4)}, ValueError, "one-dimensional"),
    ],
)
def test_wrong_buffers_are_refused(kernel: Any, change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {name: torch.zeros(8) for name in ("head", "exp_avg", "exp_avg_sq", "grad")}
    with pytest.raises(error, match=message):
        kernel.adamw(**({"tail": None, "step": 1} | arguments | SETTINGS | change))


@each_native
def test_native_refuses_a_strided_tensor(native: NativeKernel) -> None:
    strided = torch.zeros(16)[::2]
    with pytest.raises(ValueError, match="exp_avg must be a contiguous tensor"):
        native.adamw(torch.zeros(8), None, strided, torch.zeros(8), torch.zeros(8), step=1, **SETTINGS)


COUNT_THREADS = """
import os
from megatrain.kernels.native import NativeKernel
kernel = NativeKernel()
assert "torch" not in __import__("sys").modules
import numpy as np
count = 16384 * kernel.threads
state = [np.ones(count, np.float32) for _ in range(4)]
worked = set()
for step in range(1, 10_001):  # a worker that gets no core in time finds its share done
    kernel.adamw(state[0], None, *state[1:], lr=1e-3, beta1=.9, beta2=.99, eps=1e-8, weight_decay=0, step=step)
    worked |= set(kernel.last_thread_ids())
    if len(worked) == kernel.threads:
        break
print(len(worked), len(os.sched_getaffinity(0)))
"""


def run_python(program: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(not NATIVES, reason="the native kernel is not built")
def test_works_on_all_allowed_cores_with_one_openmp_thread() -> None:
    worked, allowed = run_python(COUNT_THREADS, OMP_NUM_THREADS="1").split()
    assert worked == allowed


@pytest.mark.skipif(not NATIVES, reason="the native kernel is not built")
def test_uses_no_more_threads_than_it_was_told_and_survives_fork_and_shutdown() -> None:
    program = """
import os, sys
import numpy as np
from megatrain.kernels import _native
from megatrain.kernels.native import NativeKernel
kernel = NativeKernel()
kernel.set_threads(3)
def work():
    master = np.ones(200000, np.float32)
    head, tail = np.empty(200000, np.uint16), np.empty(200000, np.int16)
    kernel.split(master, head, tail)
    assert (head == 0x3F80).all()
    assert 1 <= len(set(kernel.last_thread_ids())) <= 3, kernel.last_thread_ids()
    return set(kernel.last_thread_ids())
def work_of_all():
    workers = set()
    while len(workers) < 3:
        workers |= work()
    assert len(workers) == 3, workers
work_of_all()
child = os.fork()
if child == 0:
    work_of_all()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
_native.shutdown()
work_of_all()
kernel.set_threads(1)
master = np.ones(200000, np.float32)
kernel.split(master, np.empty(200000, np.uint16), np.empty(200000, np.int16))
print(len(kernel.last_thread_ids()))
"""
    assert run_python(program).split() == ["1"]


@pytest.mark.skipif(not NATIVES, reason="the native kernel is not built")
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "tgkill"), reason="no signals to single threads here")
def test_a_worker_that_gets_no_core_holds_nobody_up() -> None:
    """One worker stands still, as one whose core another program has taken: the others do its share, bitwise."""
    program = """
import ctypes, os, signal, time
import numpy as np
from pathlib import Path
from megatrain.kernels.native import NativeKernel
libc = ctypes.CDLL(None)
libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
libc.signal.restype = ctypes.c_void_p
# As handlers of signals: one makes the thread wait for another signal, the other does nothing.
libc.signal(signal.SIGUSR1, ctypes.cast(libc.pause, ctypes.c_void_p))
libc.signal(signal.SIGUSR2, ctypes.cast(libc.abs, ctypes.c_void_p))
def status(thread, key):
    lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(key))
def state():
    values = np.random.default_rng(0).standard_normal((4, 1 << 21)).astype(np.float32)
    return values[0], None, values[1], values[2] ** 2, values[3]
def work(kernel, buffers):
    kernel.adamw(*buffers, lr=1e-3, beta1=.9, beta2=.99, eps=1e-8, weight_decay=.1, step=1)
    return set(kernel.last_thread_ids())
kernel = NativeKernel()
kernel.set_threads(3)
workers = set()
while len(workers) < 3:
    workers |= work(kernel, state())
still = max(workers)
while status(still, "State") != "S":
    time.sleep(0.01)
libc.tgkill(os.getpid(), still, signal.SIGUSR1)
while int(status(still, "SigPnd"), 16):
    time.sleep(0.01)
found = state()
assert work(kernel, found) <= workers - {still}
libc.tgkill(os.getpid(), still, signal.SIGUSR2)
while still not in work(kernel, state()):
    pass
kernel.set_threads(1)
expected = state()
work(kernel, expected)
print(all(np.array_equal(a, b) for a, b in zip(found, expected) if a is not None))
"""
    assert run_python(program).split() == ["True"]


@pytest.mark.skipif(not NATIVES, reason="the native kernel is not built")
def test_calls_from_several_threads_do_not_mix() -> None:
    kernel = NATIVES[0]
    states = [random_state(seed, 100_000, "normal", True, True) for seed in range(4)]
    expected = [copies(state) for state in states]

    def train(state: list[Tensor | None]) -> None:
        for step in range(1, 6):
            kernel.adamw(*state, step=step, **SETTINGS)  # type: ignore[arg-type]

    workers = [threading.Thread(target=train, args=(state,)) for state in states]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for state, alone in zip(states, expected, strict=True):
        train(alone)
        assert_same_bits(state, alone)


def test_load_names() -> None:
    from megatrain import UserError

    assert kernels.load("reference").name == "reference"
    assert kernels.load("auto") is kernels.load("auto")
    with pytest.raises(UserError, match="optimizer kernel 'fast' is unknown; choose auto, native or reference"):
        kernels.load("fast")  # type: ignore[arg-type]
