"""An update is one pass over the training state, and nothing refreshes what is sent to the device: the head is that.

Bytes are counted here; `tests/times/test_update.py` has the seconds.
"""

from __future__ import annotations

import mmap
import resource
from collections import Counter
from typing import Any

import pytest
import torch
from _fixtures import tiny_config
from _kernels import NATIVES, SETTINGS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatrain import Model
from megatrain.devices.sim import SimDevice
from megatrain.kernels import blocks_of
from megatrain.kernels.native import NativeKernel
from megatrain.store import Slab

SECTIONS = ("head", "tail", "exp_avg", "exp_avg_sq", "gradient")


class CountingKernel:
    """Notes the elements of every call instead of updating them; no speculated block has to wait."""

    name, reason, threads = "counting", "", 1

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        """Which call, address of the head, elements."""

    def _note(self, call: str, buffers: tuple[torch.Tensor, ...]) -> None:
        assert all(buffer.numel() == buffers[0].numel() for buffer in buffers[:5])
        self.calls.append((call, buffers[0].data_ptr(), buffers[0].numel()))

    def adamw(self, *buffers: torch.Tensor, **settings: Any) -> None:
        self._note("adamw", buffers)

    def adamw_speculate(self, *buffers: torch.Tensor, **settings: Any) -> None:
        self._note("adamw_speculate", buffers)
        buffers[5].zero_()

    def adamw_resolve(self, *buffers: torch.Tensor, factor: float, **settings: Any) -> None:
        assert factor == 1
        self._note("adamw_resolve", buffers)

    def first_touch(self) -> None:
        pass

    def split(self, master: torch.Tensor, head: torch.Tensor, tail: torch.Tensor) -> None:
        self._note("split", (head,))


class Traffic(TorchDispatchMode):
    """Bytes of slabs that torch reads and writes, by (unit, section, "read" or "write"). Views are neither."""

    def __init__(self, slabs: dict[str, Slab]) -> None:
        super().__init__()
        self.bytes: Counter[tuple[str, str, str]] = Counter()
        self._places = {
            range(section.data_ptr(), section.data_ptr() + section.nbytes): (unit, name)
            for unit, slab in slabs.items()
            for name in SECTIONS
            if (section := getattr(slab, name)) is not None
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        written = {id(args[i]) for i, a in enumerate(func._schema.arguments) if a.is_write and i < len(args)}
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                for memory, place in self._places.items():
                    if tensor.data_ptr() in memory:
                        self.bytes[*place, "write" if id(tensor) in written else "read"] += tensor.nbytes
        return result


def traffic(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[CountingKernel, Traffic, dict[str, Slab]]:
    """One step of three micro-batches, its operations all in this thread."""
    kernel = CountingKernel()
    monkeypatch.setattr("megatrain.kernels.load", lambda name: kernel)
    config = tiny_config("qwen2")  # tied, and with biases: parts of a layer do not decay
    rows = torch.randint(3, 320, (3, 2, 16), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": ids, "labels": ids} for ids in rows]
    options = {"compute_dtype": "bfloat16", "compile": False, "max_grad_norm": 1e9, **options}
    with Model.from_config(config, seed=1, device=SimDevice(), **options) as model:
        model.step(batches)
        model._device.drain()
        slabs = {unit: model.store.slab(unit) for unit in model.store.units}
        kernel.calls.clear()
        with Traffic(slabs) as counted:
            model.step(batches)
            model._device.drain()
        return kernel, counted, slabs


def assert_one_pass(kernel: CountingKernel, call: str, slabs: dict[str, Slab]) -> None:
    """Every parameter is in one call of that name, and in no other; only padding is in none."""
    calls = sorted((address, numel) for name, address, numel in kernel.calls if name == call)
    ends = [address + 2 * numel for address, numel in calls]
    assert all(end <= address for end, (address, _) in zip(ends, calls[1:], strict=False))
    for slab in slabs.values():
        heads = range(slab.head.data_ptr(), slab.head.data_ptr() + slab.head.nbytes)
        elements = sum(numel for address, numel in calls if address in heads)
        assert slab.layout.num_parameters <= elements <= slab.layout.numel
    assert sum(numel for _, numel in calls) <= sum(slab.layout.numel for slab in slabs.values())


def assert_nothing_is_refreshed(counted: Traffic, slabs: dict[str, Slab]) -> None:
    """torch sends heads to the device, twice for a layer, and receives each gradient once: nothing else."""
    for unit, slab in slabs.items():
        if not slab.layout.parameters:
            continue
        assert counted.bytes.pop((unit, "gradient", "write")) == slab.gradient.nbytes
        fetched = counted.bytes.pop((unit, "head", "read"))
        assert fetched in (slab.head.nbytes, 2 * slab.head.nbytes)
    assert not counted.bytes


def test_an_update_is_one_pass_and_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, counted, slabs = traffic(monkeypatch, clipping="deferred")
    assert {call for call, _, _ in kernel.calls} == {"adamw"}
    assert_one_pass(kernel, "adamw", slabs)
    assert_nothing_is_refreshed(counted, slabs)


def test_so_is_a_speculative_one_without_a_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, counted, slabs = traffic(monkeypatch, clipping="speculative")
    assert {call for call, _, _ in kernel.calls} == {"adamw_speculate", "adamw_resolve"}
    assert_one_pass(kernel, "adamw_speculate", slabs)
    assert_one_pass(kernel, "adamw_resolve", slabs)
    assert_nothing_is_refreshed(counted, slabs)


@pytest.mark.skipif(not NATIVES, reason="the native kernel is not built")
def test_the_end_of_a_speculative_update_touches_no_state() -> None:
    """Memory that nobody has touched stays so, but for a waiting block's 4,096 elements: 14 pages."""
    count = 1 << 22
    dtypes = (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.bfloat16)
    state = []
    for dtype in dtypes:
        memory = mmap.mmap(-1, count * dtype.itemsize)
        memory.madvise(15)  # MADV_NOHUGEPAGE
        state.append(torch.frombuffer(memory, dtype=dtype))
    waiting = torch.zeros(blocks_of(count), dtype=torch.uint8)
    kernel = NativeKernel()
    kernel.set_threads(2)

    def pages(factor: float) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kernel.adamw_resolve(*state, waiting, factor=factor, step=1, **SETTINGS)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    whole = count * 14 // mmap.PAGESIZE
    assert pages(1.0) < whole // 100
    waiting[7] = 1
    assert 14 <= pages(1.0) < whole // 100
    waiting[7] = 0
    assert pages(0.5) > whole // 2, "a correction passes over all of it"
