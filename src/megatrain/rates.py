"""How fast this machine is, measured for the planner in seconds: links, arithmetic, optimizer; and the disk."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatrain import kernels
from megatrain.checks import readable_bytes
from megatrain.devices import Device, open_device
from megatrain.errors import UserError
from megatrain.layout import build_layout
from megatrain.machine import Machine
from megatrain.machines import Line, keep_measured
from megatrain.optimizers.adamw import AdamW
from megatrain.store import Arena, Slab

_LONG_ENOUGH = 0.02  # seconds of one measured piece of arithmetic
_FIRST_TOKENS, _MOST_TOKENS = 8, 8192
_PARAMETERS, _MOST_CORES = 12_000_000, 32  # of an optimizer pass, for each core: more than caches hold
_OPTIMIZER_SECONDS = 2.0  # after which no pass is begun but the second of each kind, the first that counts
_DISK_SECONDS, _DISK_MOST, _DISK_PIECE = 1.5, 512 << 20, 16 << 20


def measure_and_keep(machine: Machine, device: str, folder: Path | None, progress: Callable[[str], None]) -> list[Line]:
    """`measure`, kept for the planner. Raises `UserError`, one line that says why, for all that may go wrong: nothing
    that is measured is needed to train."""
    try:
        figures, lines = measure(machine, device, folder, progress)
        keep_measured(machine, figures, lines, cpu=device == "cpu")
    except (UserError, RuntimeError, OSError, MemoryError) as error:  # lack of device memory is a RuntimeError
        raise UserError(f"rates not measured: {(str(error) or type(error).__name__).splitlines()[0]}") from None
    return lines


def measure(
    machine: Machine, device: str, folder: Path | None, progress: Callable[[str], None]
) -> tuple[dict[str, float], list[Line]]:
    """Figures of a `MachineSpec`, and lines of what was found.

    ``device`` is ``cuda`` or ``cpu``; ``folder`` is where the disk is measured, if it is; ``progress`` is told what
    comes next.
    """
    small = device == "cpu"
    with _opened(device) as (opened, on_compute):
        progress("measuring links")
        figures, lines = _links(opened, small)
        progress("measuring arithmetic")
        figures |= _arithmetic(opened, on_compute, small)
        progress("measuring the optimizer")
        figures |= _optimizer(machine)
    lines.append(("rates", _summary(figures), ""))
    if folder is not None:
        progress("measuring the disk")
        lines.append(("disk", _disk(folder), ""))
    return figures, lines


def transfer_seconds(device: Device, lanes: Sequence[str], nbytes: int, repeats: int, counts: dict[str, int]) -> float:
    """Seconds for ``repeats`` copies of ``nbytes`` on each of ``lanes`` (h2d, d2h) at the same time.

    The copies are the engine's own: registered anonymous memory, the device's copy lanes, one large contiguous copy
    each. ``counts`` are the operations that each lane has had.
    """
    host = {lane: Arena(nbytes, lane) for lane in lanes}
    there = {lane: torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device) for lane in lanes}
    for arena in host.values():
        device.register(arena.memory)
    device.drain()
    start = time.perf_counter()
    for _ in range(repeats):
        for lane in lanes:
            near, far = host[lane].memory[:nbytes], there[lane]
            target, source = (far, near) if lane == "h2d" else (near, far)
            device.submit((lane, counts[lane]), "COPY", "", partial(device.copy, target, source), ())
            counts[lane] += 1
    device.drain()
    taken = time.perf_counter() - start
    for arena in host.values():
        device.unregister(arena.memory)
    return taken


OnCompute = Callable[[Callable[[], object]], float]
"""Seconds of something on the compute lane."""


@contextmanager
def _opened(name: str) -> Iterator[tuple[Device, OnCompute]]:
    device, ran = open_device(name), [0]

    def on_compute(run: Callable[[], object]) -> float:
        taken: list[float] = []
        ticket = ("compute", ran[0])
        device.submit(ticket, "MEASURE", "", lambda: taken.append(device.seconds(run)), ())
        ran[0] += 1
        device.wait(ticket)
        return taken[0]

    try:
        yield device, on_compute
    finally:
        device.close()


def _links(device: Device, small: bool) -> tuple[dict[str, float], list[Line]]:
    """Rates with both directions busy, and lines with those of each alone and with what could be pinned."""
    nbytes, repeats = (64 << 20, 3) if small else (256 << 20, 8)
    counts = {"h2d": 0, "d2h": 0}

    def rate(*lanes: str) -> float:
        transfer_seconds(device, lanes, nbytes, 1, counts)
        return nbytes * repeats / transfer_seconds(device, lanes, nbytes, repeats, counts)

    to, back, both = rate("h2d"), rate("d2h"), rate("h2d", "d2h")
    text = f"{to / 1e9:.1f} GB/s to the device, {back / 1e9:.1f} GB/s back, {both / 1e9:.1f} GB/s each way at once"
    lines = [("links", text, "")]
    if device.pins:
        trial = Arena(1 << 30, "trial of pinning")
        device.register(trial.memory)
        pinned = device.pinned_bytes
        device.unregister(trial.memory)
        if pinned < trial.nbytes:
            found = f"{readable_bytes(pinned)} of {readable_bytes(trial.nbytes)} could be pinned"
            fix = "raise ulimit -l, or the memory of WSL; until then copies of the rest are several times slower"
            lines.append(("pinned", found, fix))
    return {"h2d_rate": both, "d2h_rate": both}, lines


def _arithmetic(device: Device, on_compute: OnCompute, small: bool) -> dict[str, float]:
    """Rates of matrix products, attention and passes over memory."""
    where = device.torch_device
    inner, outer, heads, head_dim, length = (1024, 4096, 8, 64, 256) if small else (4096, 14336, 32, 128, 4096)
    rows = 1 if small else max(1, min(8, device.capacity >> 31))  # at eight, queries in BF16 take 256 MiB

    def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Random values: on equal ones a GPU draws less power, and computes faster than it ever will in training."""
        return torch.empty(shape, dtype=dtype, device=where).normal_(std=0.02)

    def product_rate(dtype: torch.dtype) -> float:
        weight, tokens = drawn(inner, outer, dtype=dtype), _FIRST_TOKENS
        while True:
            hidden = drawn(tokens, inner, dtype=dtype)
            taken = on_compute(partial(torch.matmul, hidden, weight))
            if taken >= _LONG_ENOUGH or tokens >= _MOST_TOKENS:
                return 2 * tokens * inner * outer / taken
            tokens *= 4

    def attention_rate(dtype: torch.dtype) -> float:
        shape = (rows, heads, length, head_dim)
        query, key, value = (drawn(*shape, dtype=dtype).requires_grad_() for _ in range(3))
        upstream = drawn(*shape, dtype=dtype)

        def both_ways() -> object:
            output = scaled_dot_product_attention(query, key, value, is_causal=True)
            return torch.autograd.grad(output, (query, key, value), upstream)

        forward = 2 * prod(shape) * (length + 1)  # causal operations, as `ModelSpec.attention_flops` counts them
        return 3 * forward / on_compute(both_ways)

    half = torch.bfloat16 if _computes(device, torch.bfloat16) else torch.float32
    attention, products, exact = attention_rate(half), product_rate(half), product_rate(torch.float32)
    elements = (64 << 20 if small else 1 << 30) // 4
    first, second = (torch.full((elements,), 0.01, device=where) for _ in range(2))
    return {
        "product_rate": products,
        "attention_rate": attention,
        "fp32_rate": exact,
        "gpu_memory_rate": 12 * elements / on_compute(lambda: first.add_(second)),
    }


def _computes(device: Device, dtype: torch.dtype) -> bool:
    try:
        device.check_dtype(dtype)
    except UserError:
        return False
    return True


def _optimizer(machine: Machine) -> dict[str, float]:
    """Rate of an AdamW pass over training state on the host, and what a speculative pass costs beside it."""
    kernel, optimizer = kernels.load("auto"), AdamW(lr=1e-5)
    layout = build_layout({"weight": (min(_PARAMETERS * min(machine.cores, _MOST_CORES), machine.memory_free // 64),)})
    half = torch.bfloat16
    slab = Slab(layout, Arena(Slab.nbytes(layout, half, half), "trial of the optimizer").take, half, half)
    # Values at which speculation updates every block, as in a run under way.
    for section, value in ((slab.head, 0.02), (slab.exp_avg_sq, 1e-4), (slab.gradient, 1e-3)):
        section.fill_(value)
    waiting = torch.zeros(optimizer.blocks(layout), dtype=torch.uint8)
    passes: list[Callable[[int], None]] = [
        lambda step: optimizer.update(kernel, slab, slab.gradient, lr=1e-5, step=step, scale=1.0),
        lambda step: optimizer.speculate(kernel, slab, slab.gradient, waiting, lr=1e-5, step=step),
    ]
    seconds: list[list[float]] = [[], []]
    started = time.perf_counter()
    for step in range(1, 5):
        if step > 2 and time.perf_counter() - started > _OPTIMIZER_SECONDS:
            break
        for run, taken in zip(passes, seconds, strict=True):
            begun = time.perf_counter()
            run(step)
            taken.append(time.perf_counter() - begun)
    plain, speculative = (min(taken[1:]) for taken in seconds)  # the first touches the memory
    return {"adamw_rate": layout.numel / plain, "speculation_cost": max(1.0, speculative / plain)}


def _summary(figures: Mapping[str, float]) -> str:
    flops = {name: _flops(figures[name]) for name in ("product_rate", "fp32_rate", "attention_rate")}
    return (
        f"products {flops['product_rate']}, in FP32 {flops['fp32_rate']}, attention {flops['attention_rate']};"
        f" AdamW {figures['adamw_rate'] / 1e9:.2f}e9 parameters/s;"
        f" device memory {figures['gpu_memory_rate'] / 1e9:,.0f} GB/s"
    )


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e9:,.3g} GFLOP/s"


def _disk(folder: Path) -> str:
    """Rates of a file in ``folder``, written through to the disk and read back past the cache."""
    piece = memoryview(os.urandom(1 << 20) * (_DISK_PIECE >> 20))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            written, begun = 0, time.perf_counter()
            while written < _DISK_MOST and time.perf_counter() - begun < _DISK_SECONDS:
                written += file.write(piece)
                os.fdatasync(file.fileno())
            wrote = time.perf_counter() - begun
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begun, read = time.perf_counter(), 0
            while time.perf_counter() - begun < _DISK_SECONDS and (data := file.read(_DISK_PIECE)):
                read += len(data)
            taken = time.perf_counter() - begun
    except OSError as error:
        return f"not measured: {error.strerror} ({folder})"
    return f"writes {written / wrote / 1e9:.2f} GB/s, reads {read / taken / 1e9:.2f} GB/s in {folder}"
