"""Advice about host pages, to the kernel and to the C library."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from megatrain import numa
from megatrain.layout import PAGE, ranges

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_PIECE = 64 << 20
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_GIVEN_BACK = 8 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def ask_huge_pages(memory: torch.Tensor) -> None:
    """Prefer huge pages for page-aligned memory; a kernel without them ignores it."""
    _advise(memory.data_ptr(), memory.numel(), _MADV_HUGEPAGE)


def populate(memory: torch.Tensor, near: numa.Node | None) -> None:
    """Touch every page, on all allowed cores: pinning would do it on one. Pages that are new lie ``near`` a node."""

    def touch(piece: tuple[int, int]) -> None:
        start, end = piece
        if not _advise(memory.data_ptr() + start, end - start, _MADV_POPULATE_WRITE):  # before Linux 5.14
            memory[start:end:PAGE] = 0

    def settle() -> None:
        if near is not None:
            numa.bind(near.cores)

    threads = len(os.sched_getaffinity(0) if near is None else near.cores)
    with ThreadPoolExecutor(threads, initializer=settle) as pool:
        list(pool.map(touch, ranges(memory.numel(), _PIECE)))


def give_back_freed() -> None:
    """Have blocks of 8 MiB and more go back to the system when they are freed, and all threads share one heap for the
    others, in the whole process from now on.

    By itself glibc comes to keep blocks of up to 32 MiB, in one heap a thread, where they lie scattered: after some
    steps 380 MiB, for steps that use 108 at a time. A lower limit costs page faults: at 1 MiB steps of 57 million
    parameters took a quarter longer on a virtual machine. Other C libraries have no such settings.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _GIVEN_BACK)
        mallopt(_M_ARENA_MAX, 1)


def _advise(address: int, length: int, advice: int) -> bool:
    return bool(_libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice) == 0)
