"""Memory of devices whose memory is the host's: what `cpu` and `sim` share."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from megatrain.devices import Device, Mark
from megatrain.devices._measure import count_peak
from megatrain.kernels import DeviceKernel, Kernel
from megatrain.kernels.resident import HostResidentKernel

TOTAL_MEMORY = 8 << 30
"""Bytes that count as the memory of such a device: the same everywhere, so that no result depends on the machine."""


ENOUGH_SECONDS = 0.5
"""What takes as long as this in all is timed no more often."""


class HostMemoryDevice(Device):
    """Copies are plain, nothing needs registering, and the engine's own accounting is the limit."""

    torch_device = torch.device("cpu")
    poisons = True
    pins = False

    def update_kernel(self, host_kernel: Kernel) -> DeviceKernel:
        return HostResidentKernel(host_kernel)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def register(self, memory: torch.Tensor) -> None:
        """Nothing to do."""

    def unregister(self, memory: torch.Tensor) -> None:
        """Nothing to do."""

    @property
    def pinned_bytes(self) -> int:
        return 0

    def limit_pinned(self, nbytes: int | None) -> None:
        """Nothing to do."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Every dtype works."""

    def limit(self, nbytes: int | None) -> None:
        """Nothing to do."""

    @property
    def total_memory(self) -> int:
        return TOTAL_MEMORY

    @property
    def capacity(self) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    @property
    def measured_peak(self) -> int | None:
        return None

    def warm_up(self, dtype: torch.dtype) -> int:
        return 0

    def tune(self, run: Callable[[], object]) -> None:
        """Nothing to do: kernels are chosen when they are compiled."""

    def workspace(self, run: Callable[[], object]) -> int:
        return count_peak(run)

    def seconds(self, run: Callable[[], object], repeats: int = 3) -> float:
        run()
        times: list[float] = []
        while len(times) < repeats and sum(times) < ENOUGH_SECONDS:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def mark(self, lane: str) -> Mark:
        return time.perf_counter()

    def instants(self, marks: Sequence[Mark]) -> list[float]:
        return list(marks)
