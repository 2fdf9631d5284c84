"""Speculative AdamW steps: bitwise without a correction, close to the deferred step with one, exact where they wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from _kernels import (
    REFERENCE,
    SETTINGS,
    assert_same_bits,
    copies,
    each_kernel,
    each_native,
    joined,
    random_state,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatrain.kernels._adamw import SPECULATION_BLOCK, speculation_reach
from megatrain.kernels.native import NativeKernel

STEP = 7
BETAS = {(0.9, 0.999): 2e-6, (0.9, 0.95): 2e-6, (0.95, 0.99): 2e-6, (0.5, 0.999): 3e-6, (0.5, 0.5): 3e-6}
COUNTS = [1, 7, 16, 4095, 4096, 4097, 16384, 20001, 50001]


def blocks_of(count: int) -> int:
    return -(-count // SPECULATION_BLOCK)


def flags(count: int) -> Tensor:
    return torch.full((blocks_of(count),), 9, dtype=torch.uint8)


def gradient_of(generator: np.random.Generator, count: int, kind: str, step: int) -> Tensor:
    """Gradients of one step that are hard on moments: spikes, flipping signs, magnitudes down to denormals, zeros."""
    values = generator.standard_normal(count)
    if kind == "spikes":
        values *= np.where(generator.random(count) < 0.1, 10 ** generator.uniform(0, 6, count), 1.0)
    elif kind == "flips":
        values = (-1) ** step * np.abs(values)
    elif kind == "wide":
        values *= 10 ** generator.uniform(-42, 8, count)
    elif kind == "sparse":
        values *= generator.random(count) < 0.05
    return torch.from_numpy(values.astype(np.float32))


KINDS = ["normal", "spikes", "flips", "wide", "sparse"]


def reached_state(seed: int, count: int, kind: str, split: bool, options: dict[str, Any]) -> list[Tensor | None]:
    """[head, tail, exp_avg, exp_avg_sq, grad] after some steps from zero, with a gradient at the edge of the guard."""
    generator = np.random.default_rng(seed)
    head, tail, first, second, _ = random_state(seed, count, "normal", split, False)
    assert head is not None
    assert first is not None
    assert second is not None
    first.zero_()
    second.zero_()
    for step in range(1, STEP):
        REFERENCE.adamw(head, tail, first, second, gradient_of(generator, count, kind, step), step=step, **options)
    edge = second.double().sqrt() / speculation_reach(options | {"step": STEP}) * (1 - 1e-6)  # type: ignore[arg-type]
    share = torch.from_numpy(generator.choice([-1.0, 1.0, 0.5, -0.01, 0.0], count))
    return [head, tail, first, second, (edge * share).float()]


def assert_close(found: list[Tensor | None], expected: list[Tensor | None], lr: float, bound: float) -> None:
    """The bounds that `Kernel.adamw_resolve` promises."""
    master, moment, square = (values_of(found, i) for i in range(3))
    want, want_moment, want_square = (values_of(expected, i) for i in range(3))
    assert bool(((square - want_square).abs() <= bound * want_square + 2.0**-146).all())
    scale = torch.maximum(want_square.sqrt(), want_moment.abs())
    assert bool(((moment - want_moment).abs() <= bound * scale + 2.0**-148).all())
    unit = 2.0 ** (torch.frexp(torch.maximum(want.abs(), master.abs()))[1].double() - 24)
    assert bool(((master - want).abs() <= 8 * bound * lr + 3 * unit).all())


def values_of(state: list[Tensor | None], index: int) -> Tensor:
    """Master, first or second moment in float64."""
    if index == 0:
        head, tail = state[0:2]
        assert head is not None
        return (head if tail is None else joined(state)).double()
    values = state[index + 1]
    assert values is not None
    return values.double()


@each_native
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.sampled_from(COUNTS),
    kind=st.sampled_from(KINDS),
    split=st.booleans(),
    half_gradient=st.booleans(),
    spikes=st.integers(0, 3),
    factor=st.sampled_from([1.0, 0.999, 0.3, 1e-6, 0.0]),
    betas=st.sampled_from(sorted(BETAS)),
)
def test_native_is_bitwise_the_reference(
    native: NativeKernel,
    seed: int,
    count: int,
    kind: str,
    split: bool,
    half_gradient: bool,
    spikes: int,
    factor: float,
    betas: tuple[float, float],
) -> None:
    options = SETTINGS | {"beta1": betas[0], "beta2": betas[1]}
    expected = reached_state(seed, count, kind, split, options)
    gradient = expected[4]
    assert gradient is not None
    places = np.random.default_rng(seed).integers(0, count, spikes)
    gradient[places] = torch.tensor([1e9, float("inf"), float("nan")])[:spikes]
    expected[4] = gradient.bfloat16() if half_gradient else gradient
    found, waiting, others = copies(expected), flags(count), flags(count)
    REFERENCE.adamw_speculate(*expected, waiting, step=STEP, **options)  # type: ignore[arg-type]
    native.adamw_speculate(*found, others, step=STEP, **options)  # type: ignore[arg-type]
    assert torch.equal(waiting, others)
    assert_same_bits(found, expected)
    if spikes > 1 and factor:  # a block with an infinity may only be left alone: the norm was not finite
        return
    REFERENCE.adamw_resolve(*expected, waiting, factor=factor, step=STEP, **options)  # type: ignore[arg-type]
    native.adamw_resolve(*found, others, factor=factor, step=STEP, **options)  # type: ignore[arg-type]
    assert_same_bits(found, expected)


@each_native
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.5)])
def test_native_guards_the_very_edge_as_the_reference(native: NativeKernel, betas: tuple[float, float]) -> None:
    """A block has one element at the edge, or a few representable numbers beside it; sqrt(v) is rounded there."""
    options = SETTINGS | {"beta1": betas[0], "beta2": betas[1]}
    generator, blocks = np.random.default_rng(5), 300
    squares = 10 ** generator.uniform(-46, 38, blocks)
    squares[::10] = generator.integers(0, 4, len(squares[::10])) * 2.0**-149
    second = squares.astype(np.float32)
    reach = np.float32(speculation_reach(options | {"step": STEP}))  # type: ignore[arg-type]
    edge = np.sqrt(second) / reach
    bits = np.maximum(edge.view(np.int32) + generator.integers(-2, 3, blocks, dtype=np.int32), 0)
    edge = bits.view(np.float32) * generator.choice([-1, 1], blocks).astype(np.float32)
    state = [torch.zeros(blocks * SPECULATION_BLOCK) for _ in range(4)]
    state[2] += 1
    place = np.arange(blocks) * SPECULATION_BLOCK + generator.integers(0, SPECULATION_BLOCK, blocks)
    state[2][place], state[3][place] = torch.from_numpy(second), torch.from_numpy(edge)
    expected: list[Tensor | None] = [state[0], None, *state[1:]]
    found, waiting, others = copies(expected), flags(state[0].numel()), flags(state[0].numel())
    REFERENCE.adamw_speculate(*expected, waiting, step=STEP, **options)  # type: ignore[arg-type]
    native.adamw_speculate(*found, others, step=STEP, **options)  # type: ignore[arg-type]
    assert 50 < int(waiting.sum()) < blocks - 50
    assert torch.equal(waiting, others)
    assert_same_bits(found, expected)


@each_kernel
@pytest.mark.parametrize("kind", ["normal", "denormal", "extreme"])
@pytest.mark.parametrize("split", [False, True])
def test_without_a_correction_the_result_is_bitwise_the_plain_step(kernel: Any, kind: str, split: bool) -> None:
    """Also where some blocks wait and others do not, and from states that Adam cannot reach."""
    count = 6 * SPECULATION_BLOCK + 100
    state = random_state(3, count, kind, split, False)
    gradient, second = state[4], state[3]
    assert gradient is not None
    assert second is not None
    gradient.copy_(second.sqrt())
    gradient[3 * SPECULATION_BLOCK :: 100], second[3 * SPECULATION_BLOCK :: 100] = 1.0, 0.0
    expected, waiting = copies(state), flags(count)
    kernel.adamw_speculate(*state, waiting, step=STEP, **SETTINGS)
    assert waiting.tolist() == [0, 0, 0, 1, 1, 1, 1]
    kernel.adamw_resolve(*state, waiting, factor=1.0, step=STEP, **SETTINGS)
    kernel.adamw(*expected, step=STEP, **SETTINGS)
    assert_same_bits(state, expected)


@each_kernel
@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(KINDS),
    split=st.booleans(),
    factor=st.sampled_from([0.999999, 0.9, 0.5, 0.01, 1e-6, 0.0]),
    betas=st.sampled_from(sorted(BETAS)),
    lr=st.sampled_from([1e-6, 1e-3, 0.1]),
)
def test_a_correction_is_within_its_bounds(
    kernel: Any, seed: int, kind: str, split: bool, factor: float, betas: tuple[float, float], lr: float
) -> None:
    count = 2 * SPECULATION_BLOCK
    options = SETTINGS | {"beta1": betas[0], "beta2": betas[1], "lr": lr}
    state = reached_state(seed, count, kind, split, options)
    expected, waiting = copies(state), flags(count)
    kernel.adamw_speculate(*state, waiting, step=STEP, **options)
    assert waiting.tolist() == [0, 0]
    kernel.adamw_resolve(*state, waiting, factor=factor, step=STEP, **options)
    if factor:
        kernel.adamw(*expected, grad_scale=factor, step=STEP, **options)
    assert_close(state, expected, lr, BETAS[betas])


@each_kernel
@pytest.mark.parametrize("factor", [0.25, 0.0])
@pytest.mark.parametrize("bad", [1e6, float("inf"), float("nan")])
def test_a_block_with_one_bad_element_waits_and_is_exact(kernel: Any, factor: float, bad: float) -> None:
    count = 3 * SPECULATION_BLOCK
    state = reached_state(1, count, "normal", True, SETTINGS)
    gradient = state[4]
    assert gradient is not None
    gradient[SPECULATION_BLOCK + 77] = bad
    before, waiting = copies(state), flags(count)
    kernel.adamw_speculate(*state, waiting, step=STEP, **SETTINGS)
    assert waiting.tolist() == [0, 1, 0]
    middle = slice(SPECULATION_BLOCK, 2 * SPECULATION_BLOCK)
    assert_same_bits([part(x, middle) for x in state], [part(x, middle) for x in before])
    kernel.adamw_resolve(*state, waiting, factor=factor, step=STEP, **SETTINGS)
    if factor:
        kernel.adamw(*before, grad_scale=factor, step=STEP, **SETTINGS)
    assert_same_bits([part(x, middle) for x in state], [part(x, middle) for x in before])
    if factor == 0:
        assert_close(state, before, SETTINGS["lr"], 2e-6)


def part(buffer: Tensor | None, piece: slice) -> Tensor | None:
    return None if buffer is None else buffer[piece]


@each_kernel
def test_where_the_guard_ends(kernel: Any) -> None:
    """(1 - beta1) |g| <= 8 sqrt(v) decides for beta1 = 0.5, (1 - beta2) g^2 <= 8 v for beta2 = 0.5."""
    for betas, edge in (((0.5, 0.999), 16.0), ((0.99, 0.5), 4.0)):
        for size, waits in ((0.999 * edge, 0), (1.001 * edge, 1)):
            head, first, second = torch.ones(64), torch.zeros(64), torch.full((64,), 0.25)
            gradient, waiting = torch.full((64,), 0.5 * size), flags(64)
            options = SETTINGS | {"beta1": betas[0], "beta2": betas[1], "step": STEP}
            kernel.adamw_speculate(head, None, first, second, gradient, waiting, **options)
            assert waiting.tolist() == [waits]


@each_kernel
def test_first_steps_wait_and_zeros_do_not(kernel: Any) -> None:
    """Nothing is known of v yet; padding and unused rows hold no block up."""
    count = 2 * SPECULATION_BLOCK
    gradient = torch.zeros(count)
    gradient[SPECULATION_BLOCK + 5] = 1e-30
    waiting = flags(count)
    state = [torch.ones(count), None, torch.zeros(count), torch.zeros(count), gradient]
    kernel.adamw_speculate(*state, waiting, step=1, **SETTINGS)
    assert waiting.tolist() == [0, 1]


@each_kernel
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"waiting": torch.zeros(2, dtype=torch.uint8)}, ValueError, "waiting must have 1 flags for 8 elements"),
        ({"waiting": torch.zeros(1)}, TypeError, "waiting must be uint8"),
        ({"beta1": 0.4}, ValueError, "at least 0.5"),
        ({"lr": 6.0}, ValueError, "at least 0.5"),
        ({"grad": torch.zeros(9)}, ValueError, "of one length"),
    ],
)
def test_wrong_arguments_are_refused(kernel: Any, change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {name: torch.zeros(8) for name in ("head", "exp_avg", "exp_avg_sq", "grad")}
    arguments |= {"waiting": torch.zeros(1, dtype=torch.uint8), "tail": None, "step": 1}
    with pytest.raises(error, match=message):
        kernel.adamw_speculate(**(arguments | SETTINGS | change))
    with pytest.raises(error, match=message):
        kernel.adamw_resolve(**(arguments | SETTINGS | change), factor=0.5)


@each_kernel
def test_a_factor_out_of_range_is_refused(kernel: Any) -> None:
    state = [torch.zeros(8), None, torch.zeros(8), torch.zeros(8), torch.zeros(8), torch.zeros(1, dtype=torch.uint8)]
    for factor in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="factor must be in"):
            kernel.adamw_resolve(*state, factor=factor, step=1, **SETTINGS)
