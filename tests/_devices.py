"""Devices that are slow or careless on purpose, and what is left of a model's threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from megatrain.devices import Device, Ticket
from megatrain.devices._pinned import Driver, Event, PinnedMemory
from megatrain.devices.cpu import CpuDevice

COPY_LANES = ("h2d", "d2h")


class DelayedCpu(CpuDevice):
    """Every operation of one lane starts late."""

    def __init__(self, lane: str, seconds: float = 0.003) -> None:
        super().__init__()
        self._slow, self._seconds = lane, seconds

    def submit(self, ticket: Ticket, label: str, unit: str, run: Callable[[], None], waits: Sequence[Ticket]) -> None:
        def late() -> None:
            time.sleep(self._seconds)
            run()

        super().submit(ticket, label, unit, late if ticket[0] == self._slow else run, waits)


def delayed(device: str, lane: str) -> Device:
    """A device whose copies of one direction come late: a sleeping thread, or a spinning kernel in the stream."""
    if device != "cuda":
        return DelayedCpu(lane)
    from megatrain.devices.cuda import CudaDevice

    class DelayedCuda(CudaDevice):
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            if target.is_cuda == (lane == "h2d"):
                torch.cuda._sleep(2_000_000)  # cycles, about a millisecond
            super().copy(target, source)

    return DelayedCuda()


class FakeDriver(Driver):
    """Pins at most ``most`` bytes in all and ``at_once`` in a call; keeps what is pinned, and never twice."""

    def __init__(self, most: int = 1 << 62, at_once: int = 1 << 62) -> None:
        self.most, self.at_once = most, at_once
        self.pinned: dict[int, int] = {}
        self.calls: list[int] = []
        self.buffers: list[torch.Tensor] = []

    def pin(self, address: int, nbytes: int) -> int:
        self.calls.append(nbytes)
        taken = sum(self.pinned.values()) + sum(buffer.nbytes for buffer in self.buffers)
        if nbytes > self.at_once or taken + nbytes > self.most:
            return 1 if nbytes > self.at_once else 2
        assert not any(start < address + nbytes and address < start + n for start, n in self.pinned.items())
        self.pinned[address] = nbytes
        return 0

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def buffer(self, nbytes: int) -> torch.Tensor:
        taken = sum(self.pinned.values()) + sum(buffer.nbytes for buffer in self.buffers)
        assert taken + nbytes <= self.most, "no room was left for the ring"
        self.buffers.append(torch.empty(nbytes, dtype=torch.uint8))
        return self.buffers[-1]

    def event(self) -> Event:
        return _Passed()


class _Passed:
    def synchronize(self) -> None:
        """Copies of the CPU are complete when they return."""


class PinningCpu(CpuDevice):
    """Registers and copies host memory as `cuda` does, with a driver that says no. Counts the bytes of its copies."""

    def __init__(self, driver: FakeDriver) -> None:
        super().__init__()
        self.pinned = PinnedMemory(driver)

    def register(self, memory: torch.Tensor) -> None:
        self.pinned.register(memory)

    def unregister(self, memory: torch.Tensor) -> None:
        self.pinned.unregister(memory)

    def limit_pinned(self, nbytes: int | None) -> None:
        self.pinned.limit(nbytes)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        upload = threading.current_thread().name == "megatrain-h2d"
        self.pinned.copy(target, source, upload=upload)


def lane_threads() -> list[str]:
    """Names of the lanes' threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("megatrain")]


def need_cuda(device: str) -> None:
    """Skip where the suite does not run on a GPU."""
    if device != "cuda":
        pytest.skip("needs --device cuda")
