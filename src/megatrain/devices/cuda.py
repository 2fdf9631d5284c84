"""One NVIDIA GPU: a lane is a thread that issues work, and a stream that runs it.

A thread of its own for each lane, because a wait for host work (a FETCH that needs an UPDATE) must hold up neither
kernels nor copies that are ready. Between streams an operation waits by an event on the device; the host blocks only in
the optimizer lane, and where the user's thread waits for a result.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatrain import numa
from megatrain.devices import LANES, TUNER_LEAVES, Device, Mark, Ticket
from megatrain.devices._pages import populate
from megatrain.devices._pinned import Driver, PinnedMemory
from megatrain.devices._threads import ThreadLanes
from megatrain.errors import UserError
from megatrain.kernels import DeviceKernel, Kernel

LOADED_SECONDS = 0.5
"""Load before a measurement of time: a GPU at its power limit soon lowers its clocks, and steps run at those."""

CAP_SLACK = 256 << 20
"""Bytes above the budget at which the process is cut off: the allocator's blocks are coarser than tensors."""


_log = logging.getLogger(__name__)


class CudaDriver(Driver):
    """Registers host memory with CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, address: int, nbytes: int) -> int:
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code:
            self._take_last_error()
        return code

    def unpin(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)

    def buffer(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # what CUDA raises when it pins no more
            return torch.empty(nbytes, dtype=torch.uint8)

    def event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _take_last_error(self) -> None:
        """A refusal stays the runtime's last error, and the next kernel would be blamed for it: this one is."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)


class CudaDevice(Device):
    """The current CUDA device."""

    name = "cuda"
    poisons = False
    pins = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        streams = {lane: torch.cuda.Stream(self.torch_device) for lane in LANES if lane != "optimizer"}
        self._streams = streams
        self._events: dict[str, dict[int, torch.cuda.Event]] = {lane: {} for lane in streams}
        self._complete: dict[str, int] = dict.fromkeys(streams, -1)
        # cuDNN's attention is twice as fast as the others on Hopper, and absent or slower before it.
        first = SDPBackend.CUDNN_ATTENTION
        others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        hopper = torch.cuda.get_device_capability(self.torch_device) >= (9, 0)
        self._attention = [first, *others] if hopper else [*others[:2], first, others[2]]
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._peak = 0
        """What was allocated at most before the allocator's own figure was last reset."""
        self._near = nearest_node(self.torch_device)
        self._pinned = PinnedMemory(CudaDriver(self.torch_device))
        self._lanes = ThreadLanes(LANES, perform=self._perform, await_other=self._await_other, near=self._near)

    def update_kernel(self, host_kernel: Kernel) -> DeviceKernel:
        from megatrain.kernels.triton import TritonKernel  # triton comes with CUDA builds of torch only

        return TritonKernel()

    def submit(self, ticket: Ticket, label: str, unit: str, run: Callable[[], None], waits: Sequence[Ticket]) -> None:
        self._lanes.submit(ticket, label, unit, run, waits)

    def wait(self, ticket: Ticket) -> None:
        self._lanes.wait(ticket)
        event = self._event(ticket)
        if event is not None:
            event.synchronize()

    def drain(self) -> None:
        self._lanes.drain()
        torch.cuda.synchronize(self.torch_device)

    def abort(self) -> None:
        self._lanes.abort()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._pinned.copy(target, source, upload=target.is_cuda)

    def register(self, memory: torch.Tensor) -> None:
        populate(memory, self._near)
        self._pinned.register(memory)

    def unregister(self, memory: torch.Tensor) -> None:
        torch.cuda.synchronize(self.torch_device)
        self._pinned.unregister(memory)

    def limit_pinned(self, nbytes: int | None) -> None:
        self._pinned.limit(nbytes)

    @property
    def pinned_bytes(self) -> int:
        return self._pinned.nbytes

    def check_dtype(self, dtype: torch.dtype) -> None:
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        if dtype is torch.bfloat16 and (major, minor) < (8, 0):
            raise UserError(
                f"compute.dtype: bfloat16 needs compute capability 8.0, and {torch.cuda.get_device_name()} has"
                f" {major}.{minor}; set compute.dtype=float32"
            )

    def limit(self, nbytes: int | None) -> None:
        taken = torch.cuda.memory_reserved(self.torch_device)
        share = 1.0 if nbytes is None else min(1.0, (taken + nbytes + CAP_SLACK) / self.total_memory)
        torch.cuda.set_per_process_memory_fraction(share, self.torch_device)

    @property
    def total_memory(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    @property
    def measured_peak(self) -> int | None:
        return max(self._peak, torch.cuda.max_memory_allocated(self.torch_device))

    def warm_up(self, dtype: torch.dtype) -> int:
        # cuBLAS takes a workspace for each pair of thread and stream, and only this lane multiplies.
        torch.cuda.synchronize(self.torch_device)
        before = self._requested("current")
        matrix = torch.ones(64, 64, dtype=dtype, device=self.torch_device)
        torch.mm(matrix, matrix)
        del matrix
        torch.cuda.synchronize(self.torch_device)
        return self._requested("current") - before

    def tune(self, run: Callable[[], object]) -> None:
        # What a kernel changes is copied before each trial: on the device as long as that stays below the allocator's
        # peak so far, and else to pinned memory, gigabytes of it. So the peak is raised to all that is free.
        self._forget_peak()
        room = self._room()
        if room > 0:
            with suppress(torch.OutOfMemoryError):
                torch.empty(room, dtype=torch.uint8, device=self.torch_device)
            torch.cuda.empty_cache()
        try:
            run()
            torch.cuda.synchronize(self.torch_device)
        finally:
            torch._C._host_emptyCache()  # what was pinned after all: the allocator would keep it
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.torch_device)

    def _room(self) -> int:
        """Bytes that may still be allocated, but for some that are left free."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(self.torch_device) * total)
        reserved = torch.cuda.memory_reserved(self.torch_device)
        return min(free + reserved - TUNER_LEAVES, allowed) - torch.cuda.memory_allocated(self.torch_device)

    def workspace(self, run: Callable[[], object]) -> int:
        self._forget_peak()
        before = self._requested("current")
        run()
        torch.cuda.synchronize(self.torch_device)
        return self._requested("peak") - before

    def _forget_peak(self) -> None:
        """Start the allocator's figures anew, with nothing allocated that is freed by and by."""
        gc.collect()
        torch.cuda.synchronize(self.torch_device)
        self._peak = max(self._peak, torch.cuda.max_memory_allocated(self.torch_device))
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def _requested(self, when: str) -> int:
        """Bytes that were asked for. The blocks that serve them may be up to 1 MiB larger each, by what was free."""
        return int(torch.cuda.memory_stats(self.torch_device)[f"requested_bytes.all.{when}"])

    def seconds(self, run: Callable[[], object], repeats: int = 3) -> float:
        until = time.perf_counter() + LOADED_SECONDS
        while True:
            run()
            torch.cuda.synchronize(self.torch_device)
            if time.perf_counter() >= until:
                break
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) / 1000)
        return statistics.median(times)

    def mark(self, lane: str) -> Mark:
        if lane not in self._streams:
            return time.perf_counter()
        return self._streams[lane].record_event(torch.cuda.Event(enable_timing=True))

    def instants(self, marks: Sequence[Mark]) -> list[float]:
        # The device's clock meets the host's here, to some 10 microseconds; over the seconds before they drift by less
        # than a millisecond.
        last = torch.cuda.current_stream(self.torch_device).record_event(torch.cuda.Event(enable_timing=True))
        last.synchronize()
        now = time.perf_counter()
        return [now - m.elapsed_time(last) / 1000 if isinstance(m, torch.cuda.Event) else m for m in marks]

    def close(self) -> None:
        self._lanes.close()
        torch.cuda.synchronize(self.torch_device)
        torch._C._cuda_clearCublasWorkspaces()  # they are kept by stream, and these streams end here
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, self.torch_device)

    def _perform(self, ticket: Ticket, run: Callable[[], None]) -> None:
        lane, index = ticket
        stream = self._streams.get(lane)
        with ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            if lane == "compute":
                stack.enter_context(sdpa_kernel(self._attention, set_priority=True))
                # Autograd's own thread would free what it used some time after the call, and have a cuBLAS workspace.
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            run()
        if stream is None:
            return
        events = self._events[lane]
        events[index] = stream.record_event(torch.cuda.Event(blocking=True))
        for old in list(events)[:-1]:
            if not events[old].query():
                break
            self._complete[lane] = old
            del events[old]

    def _event(self, ticket: Ticket) -> torch.cuda.Event | None:
        """The event of an operation that has been issued, or ``None`` when it is known to be complete."""
        lane, index = ticket
        if lane not in self._streams or self._complete[lane] >= index:
            return None
        return self._events[lane].get(index)

    def _await_other(self, lane: str, other: Ticket) -> None:
        event = self._event(other)
        if event is None:
            return
        if lane in self._streams:
            self._streams[lane].wait_event(event)
        else:
            event.synchronize()


def nearest_node(device: torch.device, root: Path = numa.SYS) -> numa.Node | None:
    """The NUMA node that a GPU is attached to, None where there is no choice of nodes.

    By bus address, which the driver gives for the device that is meant: numbers count only the visible ones.
    """
    among = numa.nodes(root)
    if not among:
        return None
    gpu = torch.cuda.get_device_properties(device)
    address = numa.pci_address(gpu.pci_domain_id, gpu.pci_bus_id, gpu.pci_device_id)  # type: ignore[attr-defined]
    node = numa.nearest(address, among, root)
    if node is None:
        _log.info("NUMA: GPU %s is on none of the %d nodes: its lanes are not bound", address, len(among))
    else:
        _log.info("NUMA: lanes and staging of GPU %s keep to node %d, %d cores", address, node.number, len(node.cores))
    return node


def open() -> Device:
    """Lanes on the current CUDA device."""
    return CudaDevice()
