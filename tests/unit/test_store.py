"""Slabs hold what was put there, also beyond 2^31 elements, at the cost of the pages that are touched."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.errors import UserError
from megatrain.kernels import load
from megatrain.layout import ALIGN, HUGE_PAGE, build_layout, mapping_bytes
from megatrain.store import BLOCK, Arena, Slab, Store

MAP_NORESERVE = 0x4000
PAST = (1 << 31) + 70_001
DTYPES = [torch.float32, torch.bfloat16]


def store_of(
    layouts: dict[str, Any],
    dtype: torch.dtype,
    register: Callable[[torch.Tensor], None] = lambda memory: None,
    unregister: Callable[[torch.Tensor], None] = lambda memory: None,
) -> Store:
    return Store(layouts, dtype, load("reference"), register, unregister, gradient_dtype=torch.bfloat16)


def resident() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_unit_of_more_than_two_to_the_31_elements(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MAP_PRIVATE", mmap.MAP_PRIVATE | MAP_NORESERVE)  # 26 GB that nobody has
    monkeypatch.setattr("megatrain.store.ask_huge_pages", lambda memory: None)
    layout = build_layout({"big.weight": (PAST // 7, 7), "small.weight": (300, 3)}, "m.")
    before = resident()
    store = store_of({"unit": layout}, dtype)
    slab, small = store.place("m.small.weight")
    big = store.place("m.big.weight")[1]
    assert small.offset > 1 << 31
    assert small.offset % ALIGN == 0
    values = torch.randn(900)
    store.load_master("m.small.weight", 0, values[:500])
    store.load_master("m.small.weight", 500, values[500:])
    assert torch.equal(store.master("m.small.weight"), values.view(300, 3))
    store.load_master("m.big.weight", big.numel - 64, values[:64])
    at = slice(big.end - 64, big.end)
    assert torch.equal(slab.head[at].float(), values[:64].to(dtype).float()) or dtype is torch.bfloat16
    joined = torch.empty(64)
    if slab.tail is None:
        joined.copy_(slab.head[at])
    else:
        load("reference").join(slab.head[at], slab.tail[at], joined)
    assert torch.equal(joined, values[:64])
    assert not slab.head[big.end - 128 : big.end - 64].any()
    for which in ("exp_avg", "exp_avg_sq"):
        moment = store.moment("m.small.weight", which)
        moment.copy_(values)
        assert torch.equal(getattr(slab, which)[small.offset : small.end], values)
        assert store.moment("m.big.weight", which).numel() == big.numel
        assert not store.moment("m.big.weight", which)[-100:].any()
    store.gradient("unit")[small.offset : small.end] = 1
    assert store.gradient("unit").numel() == layout.numel
    assert store.nbytes > 14 * (1 << 31)
    assert resident() - before < 64 << 20
    store.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_masters_in_blocks(dtype: torch.dtype) -> None:
    layout = build_layout({"a.weight": (2, BLOCK // 2 + 3), "b.bias": (5,)})
    with torch.random.fork_rng():
        values = torch.randn(BLOCK + 6)
    store = store_of({"unit": layout}, dtype)
    for start in range(0, values.numel(), 1 << 20):
        store.load_master("a.weight", start, values[start : start + (1 << 20)])
    store.load_master("b.bias", 0, torch.full((5,), 3.5))
    blocks = list(store.master_blocks("a.weight"))
    assert [block.numel() for block in blocks] == [BLOCK, 6]
    assert torch.equal(torch.cat(blocks), values)
    assert torch.equal(store.master("b.bias"), torch.full((5,), 3.5))
    assert store.master("a.weight").shape == (2, BLOCK // 2 + 3)
    with pytest.raises(KeyError):
        store.place("c")
    store.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_known_beforehand(dtype: torch.dtype) -> None:
    layouts = {f"u{i}": build_layout({"w": (1000 * i + 1, 33)}, f"m.{i}.") for i in range(4)}
    seen: list[torch.Tensor] = []
    store = store_of(layouts, dtype, seen.append)
    assert Store.bytes_needed(layouts.values(), dtype, torch.bfloat16) == store.nbytes
    assert sum(memory.numel() for memory in seen) == store.nbytes
    assert all(memory.data_ptr() % mmap.PAGESIZE == 0 for memory in seen)
    for unit, layout in layouts.items():
        slab = store.slab(unit)
        sections = [section for section in (slab.head, slab.tail, slab.exp_avg, slab.exp_avg_sq) if section is not None]
        assert sum(section.nbytes for section in sections) == 12 * layout.numel
        assert slab.gradient.nbytes == 2 * layout.numel
        assert Slab.nbytes(layout, dtype, torch.bfloat16) == 14 * layout.numel
        assert not any(section.any() for section in sections)
        starts = sorted((section.data_ptr(), section.nbytes) for section in sections)
        assert all(a + size <= b for (a, size), (b, _) in pairwise(starts))
    store.close()


def test_everything_registered_is_unregistered_also_when_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = {f"u{i}": build_layout({"w": (100, 33)}, f"m.{i}.") for i in range(3)}
    held: set[int] = set()

    def register(memory: torch.Tensor) -> None:
        held.add(memory.data_ptr())

    def unregister(memory: torch.Tensor) -> None:
        held.remove(memory.data_ptr())

    store = store_of(layouts, torch.bfloat16, register, unregister)
    store.results(300_000)
    assert len(held) == 5
    store.close()
    assert not held

    make = mmap.mmap
    calls = []

    def refuses(*args: Any, **options: Any) -> mmap.mmap:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(12, "Cannot allocate memory")
        return make(*args, **options)

    monkeypatch.setattr("megatrain.store.mmap.mmap", refuses)
    with pytest.raises(UserError, match=r"host memory: training state of u2 needs .* GiB and the system refused it"):
        store_of(layouts, torch.bfloat16, register, unregister)
    assert not held


def test_arena_maps_whole_huge_pages() -> None:
    for asked in (1, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1):
        arena = Arena(asked, "test")
        assert arena.nbytes == mapping_bytes(asked) == -(-asked // HUGE_PAGE) * HUGE_PAGE
        assert arena.memory.numel() == arena.nbytes
