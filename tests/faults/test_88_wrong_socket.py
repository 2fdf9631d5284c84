"""Threads and memory lie near the GPU that is meant, and the optimizer's workers near the state that they update.

Hosts here are folders that look like /sys; bindings are those that the kernel reports, pages those that it counts.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _fixtures import tiny_config
from _kernels import NATIVES, SETTINGS

from megatrain import AdamW, Model, numa
from megatrain.devices import LANES, _pages
from megatrain.devices._threads import ThreadLanes
from megatrain.devices.cpu import CpuDevice
from megatrain.devices.cuda import nearest_node
from megatrain.kernels.native import NativeKernel

MADV_NOHUGEPAGE = 15
SOCKETS = {0: "0-15,32-47", 1: "16-31,48-63", 2: ""}  # the last: memory of a GPU, as on a Grace Hopper board
FIRST, SECOND = frozenset(range(16)) | set(range(32, 48)), frozenset(range(16, 32)) | set(range(48, 64))
GPUS = [(0, 0x1B, 0), (0, 0x43, 0), (0, 0x52, 0), (1, 0x9D, 0)]
"""Domain, bus and device by the driver's number; the first two are on the first socket."""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sockets, four GPUs; all 64 cores are allowed."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(64)))
    tree(tmp_path, SOCKETS)
    for address, node in zip(GPUS, (0, 0, 1, 1), strict=True):
        attach(tmp_path, address, node)
    return tmp_path


def tree(root: Path, cores: dict[int, str]) -> Path:
    for node, text in cores.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    (root / "devices/system/node/online").write_text("0-2\n")
    return root


def attach(root: Path, address: tuple[int, int, int], node: int) -> None:
    folder = root / "bus/pci/devices" / "{:04x}:{:02x}:{:02x}.0".format(*address)
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{node}\n")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers visible devices as CUDA does: in the order of CUDA_VISIBLE_DEVICES, from 0."""

    def properties(device: torch.device) -> SimpleNamespace:
        visible = [int(number) for number in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
        domain, bus, number = GPUS[visible[device.index]]
        return SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=number)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


@pytest.mark.parametrize(
    ("visible", "expected"), [("3,1", [SECOND, FIRST]), ("0,1,2,3", [FIRST, FIRST, SECOND, SECOND]), ("2", [SECOND])]
)
def test_a_visible_gpu_gets_the_node_of_its_bus_address(
    visible: str, expected: list[set[int]], host: Path, driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = [nearest_node(torch.device("cuda", index), host) for index in range(len(expected))]
    assert [node and (node.number, node.cores) for node in found] == [(int(c == SECOND), c) for c in expected]


def test_only_allowed_cores_are_chosen(host: Path, driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {0, 3, 20, 63})
    near = [nearest_node(torch.device("cuda", index), host) for index in (0, 1)]
    assert [node and node.cores for node in near] == [{20, 63}, {0, 3}]


def no_driver(device: torch.device) -> None:
    raise AssertionError("there is nothing to choose")


@pytest.mark.parametrize(
    ("cores", "allowed"),
    [
        ({0: "0-63"}, range(64)),
        ({0: "0-63", 1: ""}, range(64)),
        (SOCKETS, range(16)),
        (SOCKETS, [17]),
        ({}, range(64)),
        ({0: "0-31", 1: "?"}, range(64)),
    ],
    ids=["one socket", "one with cores", "one allowed", "one core", "nothing known", "unreadable"],
)
def test_without_a_choice_nothing_is_bound(
    cores: dict[int, str], allowed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(allowed))
    monkeypatch.setattr(torch.cuda, "get_device_properties", no_driver)
    if cores:
        tree(tmp_path, cores)
    assert numa.nodes(tmp_path) == ()
    assert numa.deal(numa.nodes(tmp_path)) == []
    assert nearest_node(torch.device("cuda", 0), tmp_path) is None


@pytest.mark.parametrize("known", ["-1", "7", "", None])
def test_a_gpu_of_unknown_node_is_not_bound(
    known: str | None, host: Path, driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    file = host / "bus/pci/devices/0001:9d:00.0/numa_node"
    if known is None:
        file.unlink()
    else:
        file.write_text(known)
    assert nearest_node(torch.device("cuda", 0), host) is None


def test_a_refused_binding_is_no_error(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: int, cores: Any) -> None:
        raise PermissionError("not in this container")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    numa.bind(SECOND)


def test_workers_are_dealt_over_the_nodes(host: Path) -> None:
    dealt = [node.number for node in numa.deal(numa.nodes(host))]
    assert dealt == [0, 1] * 32
    few = numa.nodes(host, allowed=[0, 1, 2, 16])
    assert [node.number for node in numa.deal(few)] == [0, 1, 0, 0]


two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


@pytest.fixture
def halves(tmp_path: Path) -> tuple[numa.Node, ...]:
    """This machine as if its first core were a socket of its own."""
    first, *others = sorted(os.sched_getaffinity(0))
    return numa.nodes(tree(tmp_path, {0: str(first), 1: ",".join(map(str, others))}))


@two_cores
def test_lanes_keep_to_the_cores_of_their_gpu(halves: tuple[numa.Node, ...]) -> None:
    for node in halves:
        found: list[set[int]] = []
        lanes = ThreadLanes(LANES, lambda _, run: run(), lambda _, __: None, near=node)
        for lane in LANES:
            lanes.submit((lane, 0), "TEST", "", lambda found=found: found.append(os.sched_getaffinity(0)), ())
        lanes.drain()
        lanes.close()
        assert found == [node.cores] * len(LANES)
    assert os.sched_getaffinity(0) == halves[0].cores | halves[1].cores


@two_cores
def test_staging_is_touched_near_the_gpu(halves: tuple[numa.Node, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    advise = _pages._advise

    def spy(*arguments: int) -> bool:
        found.append(os.sched_getaffinity(0))
        return advise(*arguments)

    monkeypatch.setattr(_pages, "_advise", spy)
    monkeypatch.setattr(_pages, "_PIECE", 1 << 20)
    for node in halves:
        memory = torch.frombuffer(mmap.mmap(-1, 8 << 20), dtype=torch.uint8)
        found.clear()
        _pages.populate(memory, node)
        assert found == [node.cores] * 8
    _pages.populate(memory, None)
    assert found[8:] == [halves[0].cores | halves[1].cores] * 8


@pytest.fixture
def spread(halves: tuple[numa.Node, ...], monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeKernel]:
    """The native kernel on a host of two nodes."""
    with monkeypatch.context() as patched:
        patched.setattr(numa, "nodes", lambda: halves)
        kernel = NativeKernel()
    kernel.set_threads(2)
    yield kernel
    NativeKernel()  # binds the workers as this machine wants it


COUNT = 1 << 21


def state() -> list[Any]:
    """[head, tail, exp_avg, exp_avg_sq, gradient] of small pages that nobody has touched."""
    buffers = []
    for dtype in (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.bfloat16):
        memory = mmap.mmap(-1, COUNT * dtype.itemsize)
        memory.madvise(MADV_NOHUGEPAGE)
        buffers.append(torch.frombuffer(memory, dtype=dtype))
    return buffers


def faults(threads: list[int]) -> dict[int, int]:
    """Pages that each thread was the first to touch so far."""
    return {t: int(Path(f"/proc/self/task/{t}/stat").read_text().rpartition(")")[2].split()[7]) for t in threads}


@two_cores
@pytest.mark.skipif(not NATIVES, reason="the native kernel is not built")
def test_workers_touch_and_update_their_own_halves(spread: NativeKernel, halves: tuple[numa.Node, ...]) -> None:
    """Both workers fault in exactly half of the pages, however the machine schedules them: none leaves its node."""
    touch = spread.first_touch()
    assert touch is not None
    touched, updated = state(), state()
    spread.adamw(*state(), step=1, **SETTINGS)
    workers = spread.last_thread_ids()
    assert sorted(tuple(os.sched_getaffinity(w)) for w in workers) == sorted(tuple(n.cores) for n in halves)
    start = faults(workers)
    touch.adamw(*touched, grad_scale=torch.empty(0), step=1, **SETTINGS)
    after_touch = faults(workers)
    spread.adamw(*touched, step=1, **SETTINGS)
    again = faults(workers)
    spread.adamw(*updated, step=1, **SETTINGS)
    end = faults(workers)
    half = COUNT * 14 // 2 // mmap.PAGESIZE
    for worker in workers:
        assert abs(after_touch[worker] - start[worker] - half) < 64
        assert again[worker] - after_touch[worker] < 64
        assert abs(end[worker] - again[worker] - half) < 64
    assert not any(buffer.any() for buffer in touched)


class Pinning(CpuDevice):
    """Lanes of the CPU; notes what is registered."""

    pins = True

    def __init__(self, events: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self._events = events

    def register(self, memory: torch.Tensor) -> None:
        self._events.append(("register", memory.data_ptr(), memory.numel()))


class Noting:
    """A kernel that notes the head and the gradient of each call."""

    def __init__(self, events: list[tuple[str, int, int]], what: str, kernel: Any) -> None:
        self._events, self._what, self._kernel = events, what, kernel

    def adamw(self, *buffers: Any, **settings: Any) -> None:
        self._events += [(self._what, b.data_ptr(), b.numel()) for b in buffers if b is not None]
        self._kernel.adamw(*buffers, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


@two_cores
@pytest.mark.skipif(not NATIVES, reason="the native kernel is not built")
def test_what_an_update_works_on_is_touched_before_it_is_pinned(
    spread: NativeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int, int]] = []
    kernel = Noting(events, "update", spread)
    touch = Noting(events, "touch", spread.first_touch())
    monkeypatch.setattr(spread, "first_touch", lambda: touch)
    monkeypatch.setattr("megatrain.kernels.load", lambda name: kernel)
    ids = torch.arange(3, 11)[None]
    config = tiny_config("qwen2")  # biases: an update of a layer is several calls
    with Model.from_config(config, device=Pinning(events), compute_dtype="bfloat16", optimizer=AdamW()) as model:
        setup, events[:] = list(events), []
        model.step([{"input_ids": ids, "labels": ids}])
        units = [model.store.slab(unit) for unit in model.store.units]
    pinned: list[range] = []
    touched = []
    for what, address, numel in setup:
        if what == "register":
            pinned.append(range(address, address + numel))
        else:
            assert not any(address in memory for memory in pinned)
            touched.append((address, numel))
    assert all(any(address in memory for memory in pinned) for address, _ in touched)
    updates = {(address, numel) for what, address, numel in events if what == "update"}
    assert len(units) < len(updates)
    assert set(touched) == updates


@pytest.mark.skipif(not NATIVES, reason="the native kernel is not built")
def test_on_one_node_no_worker_is_bound_and_no_page_touched_early(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(numa, "nodes", lambda: ())
        kernel = NativeKernel()
    assert kernel.first_touch() is None
    assert "NUMA" not in kernel.reason
    kernel.set_threads(2)
    kernel.adamw(*state(), step=1, **SETTINGS)
    assert all(os.sched_getaffinity(w) == os.sched_getaffinity(0) for w in kernel.last_thread_ids())
    NativeKernel()


@two_cores
@pytest.mark.skipif(not NATIVES, reason="the native kernel is not built")
def test_memory_that_is_not_pinned_is_touched_as_it_is_used(
    spread: NativeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never() -> None:
        raise AssertionError("nobody asked for these pages")

    monkeypatch.setattr(spread, "first_touch", never)
    monkeypatch.setattr("megatrain.kernels.load", lambda name: spread)
    Model.from_config(tiny_config(), device="cpu").close()
