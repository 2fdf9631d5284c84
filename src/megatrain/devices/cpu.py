"""The host itself as the device: lanes are threads, and "device memory" is an accounted part of RAM."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatrain.devices import LANES, Device, Ticket
from megatrain.devices._host import HostMemoryDevice
from megatrain.devices._pages import give_back_freed
from megatrain.devices._threads import ThreadLanes


class CpuDevice(HostMemoryDevice):
    """Runs the same programs as `cuda`, truly asynchronously."""

    name = "cpu"

    def __init__(self) -> None:
        self._lanes = ThreadLanes(LANES, perform=lambda _, run: run(), await_other=lambda _, __: None)

    def submit(self, ticket: Ticket, label: str, unit: str, run: Callable[[], None], waits: Sequence[Ticket]) -> None:
        self._lanes.submit(ticket, label, unit, run, waits)

    def wait(self, ticket: Ticket) -> None:
        self._lanes.wait(ticket)

    def drain(self) -> None:
        self._lanes.drain()

    def abort(self) -> None:
        self._lanes.abort()

    def close(self) -> None:
        self._lanes.close()


def open() -> Device:
    """Start the lanes; what a step frees is the host's again."""
    give_back_freed()
    return CpuDevice()
