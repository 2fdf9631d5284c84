"""Devices that are slow or careless on purpose, and what is left of a model's threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from megatrain.devices import Device, Ticket
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


def lane_threads() -> list[str]:
    """Names of the lanes' threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("megatrain")]


def need_cuda(device: str) -> None:
    """Skip where the suite does not run on a GPU."""
    if device != "cuda":
        pytest.skip("needs --device cuda")
