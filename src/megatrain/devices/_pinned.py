"""Host memory that the driver copies by itself, registered in pieces; the rest passes through a small ring of it.

Drivers and kernels limit what may be pinned in one call, and WSL and Windows what may be pinned at all.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from typing import Protocol

import torch

from megatrain.checks import readable_bytes
from megatrain.layout import HUGE_PAGE, PAGE, ranges

_log = logging.getLogger(__name__)

PIECE = 1 << 30
"""Bytes registered in one call at first: some drivers refuse more than 2 GiB, or fail above 512 GiB in all at once."""

BUFFER = 16 << 20
"""Bytes of one buffer of the ring; there are two each way."""

_DIRECTIONS = ("h2d", "d2h")
_SHARE = 16  # of a pinned budget that one buffer takes at most


class Event(Protocol):
    """A point in a queue of copies."""

    def synchronize(self) -> None:
        """Block until all copies before it are complete."""


class Driver(ABC):
    """What pins memory, and marks how far the copies of the calling thread have come."""

    @abstractmethod
    def pin(self, address: int, nbytes: int) -> int:
        """0, or the error code of a refusal."""

    @abstractmethod
    def unpin(self, address: int) -> None:
        """Undo `pin`."""

    @abstractmethod
    def buffer(self, nbytes: int) -> torch.Tensor:
        """Pinned memory (uint8), or other memory where no more can be pinned."""

    @abstractmethod
    def event(self) -> Event:
        """A mark behind the copies that this thread has issued."""


class PinnedMemory:
    """What is registered of a process's host memory, and copies to and from all of it."""

    def __init__(self, driver: Driver, piece: int = PIECE) -> None:
        self._driver, self._piece = driver, piece
        self._pieces: dict[int, int] = {}
        self._starts: list[int] = []
        self._left: int | None = None
        self._buffer_bytes = BUFFER
        self._refused = False
        self._rings: dict[str, list[torch.Tensor]] = {}

    def limit(self, nbytes: int | None) -> None:
        """Pin at most ``nbytes``, ring included; None: what the driver allows."""
        if nbytes is None:
            return
        self._buffer_bytes = max(PAGE, min(BUFFER, nbytes // _SHARE // PAGE * PAGE))
        self._left = max(0, nbytes - 2 * len(_DIRECTIONS) * self._buffer_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes that are registered."""
        return sum(self._pieces.values())

    def register(self, memory: torch.Tensor) -> None:
        """Pin as much of ``memory`` (uint8, page-aligned) as is allowed; says once when that is not all of it."""
        start, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
        code = 0
        while start < end and not self._refused:
            allowed = min(end - start, self._piece, end if self._left is None else self._left // PAGE * PAGE)
            code = self._driver.pin(start, allowed) if allowed else 0
            if allowed and code == 0:
                self._pieces[start] = allowed
                self._left = self._left if self._left is None else self._left - allowed
                start += allowed
            elif allowed > HUGE_PAGE:
                self._piece = max(HUGE_PAGE, allowed // 2)
            else:
                self._refused = True
                self._make_room()
                self._warn(code)
        self._starts = sorted(self._pieces)

    def unregister(self, memory: torch.Tensor) -> None:
        """Undo `register`."""
        for start in [s for s in self._pieces if 0 <= s - memory.data_ptr() < memory.numel()]:
            self._unpin(start)
        self._starts = sorted(self._pieces)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, upload: bool) -> None:
        """Copy between host and device (``upload``: to it), on the queue of the calling thread.

        Registered memory is copied asynchronously. Of other memory every byte has been read when this returns, and
        every byte written: whoever waits for the operation needs nothing else.
        """
        host = source if upload else target
        for first, last, pinned in self._parts(host):
            piece = _part(target, first, last), _part(source, first, last)
            if pinned:
                piece[0].copy_(piece[1], non_blocking=True)
            elif target.dtype is not source.dtype:
                piece[0].copy_(piece[1])
            elif upload:
                self._upload(*map(_raw, piece))
            else:
                self._download(*map(_raw, piece))

    def _parts(self, host: torch.Tensor) -> Iterator[tuple[int, int, bool]]:
        """``(first, last, pinned)`` elements of ``host``, cut where a registered piece begins or ends."""
        size, begin, total = host.element_size(), host.data_ptr(), host.numel()
        at = 0
        while at < total:
            address = begin + at * size
            index = bisect_right(self._starts, address)
            piece = self._starts[index - 1] if index else -1
            pinned = index > 0 and address < piece + self._pieces[piece]
            following = self._starts[index] if index < len(self._starts) else begin + total * size
            border = min(piece + self._pieces[piece], following) if pinned else following
            last = max(at + 1, min(total, (border - begin) // size))
            yield at, last, pinned
            at = last

    def _upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        ring = self._ring("h2d")
        busy: list[Event | None] = [None] * len(ring)
        for turn, (first, last) in enumerate(ranges(source.numel(), self._buffer_bytes)):
            index = turn % len(ring)
            waiting, buffer = busy[index], ring[index][: last - first]
            if waiting is not None:
                waiting.synchronize()
            buffer.copy_(source[first:last])
            target[first:last].copy_(buffer, non_blocking=True)
            busy[index] = self._driver.event()
        for event in busy:
            if event is not None:
                event.synchronize()

    def _download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        ring = self._ring("d2h")
        landing: tuple[Event, torch.Tensor, torch.Tensor] | None = None
        for turn, (first, last) in enumerate(ranges(source.numel(), self._buffer_bytes)):
            buffer = ring[turn % len(ring)][: last - first]
            buffer.copy_(source[first:last], non_blocking=True)
            event = self._driver.event()
            _land(landing)
            landing = event, target[first:last], buffer
        _land(landing)

    def _ring(self, direction: str) -> list[torch.Tensor]:
        """Two buffers of a direction: one is filled while the other is emptied. A direction has one thread."""
        if direction not in self._rings:
            self._rings[direction] = [self._driver.buffer(self._buffer_bytes) for _ in range(2)]
        return self._rings[direction]

    def _make_room(self) -> None:
        """The ring's buffers, out of what is registered where the driver gives no more."""
        need = 2 * len(_DIRECTIONS) * self._buffer_bytes
        while self._left is None and need > 0 and self._pieces:
            last = next(reversed(self._pieces))
            need -= self._pieces[last]
            self._unpin(last)
        for direction in _DIRECTIONS:
            self._ring(direction)

    def _unpin(self, start: int) -> None:
        self._driver.unpin(start)
        nbytes = self._pieces.pop(start)
        self._left = self._left if self._left is None else self._left + nbytes

    def _warn(self, code: int) -> None:
        reason = f"the driver refused more (error {code})" if code else "placement.pinned_memory allows no more"
        _log.warning(
            "pinned memory: %s of host memory are registered and %s; the rest is copied through buffers of %s, which is"
            " several times slower. Raise %s",
            readable_bytes(self.nbytes),
            reason,
            readable_bytes(self._buffer_bytes),
            "the locked-memory limit (ulimit -l), or on WSL the memory of the virtual machine: half of it may be pinned"
            if code
            else "it, or leave it out",
        )


def _land(landing: tuple[Event, torch.Tensor, torch.Tensor] | None) -> None:
    """Wait for a buffer and move its content to where it belongs."""
    if landing is not None:
        event, target, buffer = landing
        event.synchronize()
        target.copy_(buffer)


def _part(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    return tensor if last - first == tensor.numel() else tensor[first:last]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)
