"""What a lane is: the contract that the engine knows instead of CUDA.

A device runs operations on named lanes. Operations of one lane run in the order of submission; an operation starts
when the tickets it waits for are complete. One file per device, found by its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatrain.errors import UserError

if TYPE_CHECKING:
    import torch

    from megatrain.kernels import DeviceKernel, Kernel

LANES = ("h2d", "compute", "d2h", "optimizer")

TUNER_LEAVES = 1 << 30
"""Bytes of a GPU that the compiler may not take to time its kernels: libraries load their own meanwhile."""

Ticket = tuple[str, int]

Mark = Any
"""A moment in a lane, as its device notes it."""


class Device(ABC):
    """Lanes and memory of one device. Final classes only: nothing concrete is overridden."""

    name: str
    torch_device: torch.device
    poisons: bool
    """Whether released buffers are filled with NaN, so that a late reader is noticed."""
    pins: bool
    """Whether `register` pins memory, so that all its pages are present from then on."""

    @abstractmethod
    def update_kernel(self, host_kernel: Kernel) -> DeviceKernel:
        """The kernel that updates state on this device; ``host_kernel`` is the one of the host."""

    @abstractmethod
    def submit(self, ticket: Ticket, label: str, unit: str, run: Callable[[], None], waits: Sequence[Ticket]) -> None:
        """Queue ``run`` on lane ``ticket[0]``. Returns at once; never blocks on the lanes."""

    @abstractmethod
    def wait(self, ticket: Ticket) -> None:
        """Block until the operation is complete, its results visible to the host.

        Raises `LaneError` when any lane has failed; no operation starts after a failure.
        """

    @abstractmethod
    def drain(self) -> None:
        """Block until every lane is empty. Raises like `wait`."""

    @abstractmethod
    def abort(self) -> None:
        """Drop what is queued; operations already running complete."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device inside a copy lane; asynchronous where the device can."""

    @abstractmethod
    def register(self, memory: torch.Tensor) -> None:
        """Make host memory (uint8, page-aligned) fast to copy from and to. May fall back, with one warning."""

    @abstractmethod
    def unregister(self, memory: torch.Tensor) -> None:
        """Undo `register` before the memory is freed."""

    @property
    @abstractmethod
    def pinned_bytes(self) -> int:
        """Host bytes that `register` has pinned."""

    @abstractmethod
    def limit_pinned(self, nbytes: int | None) -> None:
        """Cap the host memory that `register` pins, where there is such a thing; before the first `register`."""

    @abstractmethod
    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise `UserError` when the device cannot compute in ``dtype``: the one place that answers this."""

    @abstractmethod
    def limit(self, nbytes: int | None) -> None:
        """Cap what this process may take of the device, where the device can enforce it."""

    @property
    @abstractmethod
    def total_memory(self) -> int:
        """Bytes of memory that the device has, or that are a sensible share of the host's."""

    @property
    def capacity(self) -> int:
        """Bytes beyond which nothing can fit."""
        return self.total_memory

    @property
    @abstractmethod
    def measured_peak(self) -> int | None:
        """Most bytes of device memory that were allocated at a time; None where nobody counts them."""

    @abstractmethod
    def warm_up(self, dtype: torch.dtype) -> int:
        """Make libraries take what they keep for good, on the compute lane; returns its bytes of device memory."""

    @abstractmethod
    def tune(self, run: Callable[[], object]) -> None:
        """Run ``run`` on the compute lane where the compiler times its kernels when they first run, with all free
        memory of the device for what that takes."""

    @abstractmethod
    def workspace(self, run: Callable[[], object]) -> int:
        """Peak bytes of device memory that ``run`` takes while it runs, beyond what is allocated before."""

    @abstractmethod
    def seconds(self, run: Callable[[], object], repeats: int = 3) -> float:
        """Median time of ``run`` on the compute lane, after calls that are not counted."""

    @abstractmethod
    def mark(self, lane: str) -> Mark:
        """Note the moment that a lane reaches, from within one of its operations. Waits for nothing."""

    @abstractmethod
    def instants(self, marks: Sequence[Mark]) -> list[float]:
        """Seconds of one clock, of any origin, at which the lanes passed their marks. The lanes must be drained."""

    @abstractmethod
    def close(self) -> None:
        """End threads and free what the device holds. Idempotent."""


def device_name(name: str) -> str:
    """``auto`` as what it means here; raises `UserError` for ``cuda`` where there is none."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("placement.device: cuda: no CUDA device is visible; use device=cpu, or check the driver")
    return name


def open_device(name: str) -> Device:
    """The device ``auto``, ``cuda``, ``cpu`` or ``sim``; raises `UserError` when it does not exist here."""
    name = device_name(name)
    try:
        module = import_module(f"megatrain.devices.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"megatrain.devices.{name}":
            raise
        raise UserError(f"placement.device: {name!r} is unknown; choose auto, cuda, cpu or sim") from None
    device: Device = module.open()
    return device
