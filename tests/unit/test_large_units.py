"""Kernels on units of more than 2^31 elements, where a 32-bit index would wrap.

Buffers are sparse: untouched pages of an anonymous mapping take no memory. For calls whose length itself
exceeds 2^31 every byte is written, so all pages between the ends are one small file, mapped again and again;
the bytes there are zeros before and after, and the ends are ordinary memory with values to compare.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megatrain.kernels.native import NativeKernel, NativeUnavailable
from megatrain.kernels.reference import ReferenceKernel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd and fixed mappings")

PAST = (1 << 31) + 70_001  # elements: more than int32 can count, and no whole number of blocks
END = 1 << 16  # elements compared at each end
TILE = 16 << 20  # bytes of the file between the ends
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
SETTINGS: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "step": 2,
}
Array = np.ndarray[Any, Any]


@pytest.fixture
def native() -> NativeKernel:
    try:
        return NativeKernel()
    except NativeUnavailable as error:
        pytest.skip(str(error))


class Sparse:
    """``count`` zeros at the cost of the touched pages; ``tiled`` shares those between the two ends."""

    def __init__(self, count: int, dtype: Any, tiled: bool = False) -> None:
        size = -(-count * np.dtype(dtype).itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._size = size
        self._address = self._map(None, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1)
        if tiled:
            file = os.memfd_create("tile")
            os.ftruncate(file, TILE)
            for begin in range(TILE, size - 2 * TILE, TILE):
                self._map(self._address + begin, TILE, mmap.MAP_SHARED | MAP_FIXED, file)
            os.close(file)
        raw = (ctypes.c_uint8 * size).from_address(self._address)
        self.array: Array = np.frombuffer(raw, dtype=dtype)[:count]

    def _map(self, address: int | None, size: int, flags: int, file: int) -> int:
        result = self._libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0)
        if result is None or result == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "mmap failed")
        return int(result)

    def close(self) -> None:
        self._libc.munmap(self._address, self._size)


@pytest.fixture
def sparse() -> Iterator[Any]:
    made: list[Sparse] = []

    def make(count: int, dtype: Any, tiled: bool = False) -> Array:
        made.append(Sparse(count, dtype, tiled))
        return made[-1].array

    yield make
    for mapping in made:
        mapping.close()


def fill(arrays: list[Array], part: slice, seed: int) -> list[Array]:
    """Random state in [head, tail, exp_avg, exp_avg_sq, grad] at ``part``; returns copies."""
    generator = np.random.default_rng(seed)
    for array in arrays:
        length = len(array[part])
        if array.dtype == np.float32:
            array[part] = generator.random(length, dtype=np.float32)
        elif array.dtype == np.uint16:  # bfloat16 between 0.5 and 2
            array[part] = generator.integers(0x3F00, 0x4000, length, dtype=np.uint16)
        else:
            array[part] = generator.integers(-32768, 32768, length, dtype=np.int16)
    return [array[part].copy() for array in arrays]


def expected_after(arrays: list[Array]) -> list[Array]:
    """The reference's result; it takes bfloat16 as torch tensors."""
    import torch

    tensors = [torch.from_numpy(array) for array in arrays]
    halves = [tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor for tensor in tensors]
    ReferenceKernel().adamw(*halves, **SETTINGS)
    return arrays


def state(make: Any, tiled: bool) -> list[Array]:
    return [make(PAST, dtype, tiled) for dtype in (np.uint16, np.int16, np.float32, np.float32, np.uint16)]


def test_a_part_beyond_two_to_the_31_is_updated(native: NativeKernel, sparse: Any) -> None:
    arrays = state(sparse, tiled=False)
    part = slice(PAST - 50_000, PAST - 3)
    expected = expected_after(fill(arrays, part, 1))
    native.adamw(*[array[part] for array in arrays], **SETTINGS)
    for found, right in zip(arrays, expected, strict=True):
        assert np.array_equal(found[part], right)
        assert not found[part.stop :].any()
        assert not found[part.start - 1000 : part.start].any()


@pytest.mark.slow
def test_one_call_on_more_than_two_to_the_31_elements(native: NativeKernel, sparse: Any) -> None:
    arrays = state(sparse, tiled=True)
    ends = [slice(0, END), slice(PAST - END, PAST)]
    expected = [expected_after(fill(arrays, part, seed)) for seed, part in enumerate(ends)]
    native.adamw(*arrays, **SETTINGS)
    for part, rights in zip(ends, expected, strict=True):
        for found, right in zip(arrays, rights, strict=True):
            assert np.array_equal(found[part], right)
    middle = slice(PAST // 2, PAST // 2 + END)
    assert not any(array[middle].any() for array in arrays)


@pytest.mark.slow
def test_split_and_join_of_more_than_two_to_the_31_elements(native: NativeKernel, sparse: Any) -> None:
    master, head, tail = (sparse(PAST, dtype, True) for dtype in (np.float32, np.uint16, np.int16))
    values = np.random.default_rng(0).standard_normal(END).astype(np.float32)
    master[-END:] = values
    native.split(master, head, tail)
    assert np.array_equal(head[-END:], ((values.view(np.uint32) + np.uint32(0x8000)) >> 16).astype(np.uint16))
    master[-END:] = 0
    native.join(head, tail, master)
    assert np.array_equal(master[-END:], values)
