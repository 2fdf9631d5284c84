"""The safetensors file format: headers, blocks read as FP32, files written as a stream.

An own reader and writer of one page, because the library's maps whole files (pages that stay resident count
against the loading peak) and wants whole tensors in memory to save them. Plain reads and writes need one
block. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatrain.errors import UserError

BLOCK_ELEMENTS = 1 << 22
"""Elements of an FP32 block (16 MiB): what reading or writing a tensor of any size needs in memory."""

FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The dtypes that weights are trained from and exported to; all convert to FP32 without loss."""

Progress = Callable[[str, int, int], None]
"""``progress(phase, done_bytes, total_bytes)``."""

_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_MAX_HEADER = 100_000_000  # bytes, the format's own limit


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: ``dtype`` as safetensors spells it (``"BF16"``), bytes [start, end) of the
    file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


def item_bytes(dtype: str) -> int:
    """Bytes of one element; 1 for the packed sub-byte types, which are only ever copied."""
    return _ITEM_BYTES.get(dtype, 1)


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file in the order of their bytes; reads the header alone.

    Raises UserError when the file cannot be read, is no safetensors file, or is shorter or longer than its
    header says.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = _header_bytes(file, size, path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check that the file exists and its rights") from error
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        begin = 8 + len(raw)
        entries = [_entry(path, name, item, begin) for name, item in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_safetensors(path, f"its header is not valid ({error})") from error
    entries.sort(key=lambda entry: (entry.start, entry.end))
    end = begin
    for entry in entries:
        if entry.start != end:
            raise _not_safetensors(path, f"the bytes of tensor {entry.name!r} overlap others or leave a gap")
        end = entry.end
    if size != end:
        raise UserError(
            f"{path} is {'truncated' if size < end else 'longer than it should be'}: its header describes"
            f" {end} bytes, the file has {size}; download or copy this file again"
        )
    return {entry.name: entry for entry in entries}


def _header_bytes(file: BinaryIO, size: int, path: Path) -> bytes:
    start = file.read(8)
    if start.startswith(b"version "):
        raise UserError(f"{path} is a Git LFS pointer, not the weights; run 'git lfs pull' in that folder")
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= _MAX_HEADER:
        raise _not_safetensors(path, f"it has {size} bytes and no valid header length")
    if size < 8 + length:
        raise UserError(
            f"{path} is truncated: its header alone has {length} bytes, the file has {size};"
            " download or copy this file again"
        )
    return file.read(length)


def _entry(path: Path, name: str, item: Mapping[str, Any], begin: int) -> Entry:
    start, end = item["data_offsets"]
    entry = Entry(path, name, item["dtype"], tuple(item["shape"]), begin + start, begin + end)
    if not all(isinstance(size, int) and size >= 0 for size in entry.shape):
        raise ValueError(f"tensor {name!r}: shape {list(entry.shape)}")
    if entry.dtype in _ITEM_BYTES and entry.numel * _ITEM_BYTES[entry.dtype] != end - start:
        raise ValueError(f"tensor {name!r}: {end - start} bytes for shape {list(entry.shape)} of {entry.dtype}")
    return entry


def _not_safetensors(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is not a sound safetensors file: {reason}; download or copy this file again")


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; writing to the view writes to the tensor."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def byte_counter(phase: str, total: int, progress: Progress | None) -> Callable[[int], None]:
    """A function to call with the size of each piece done; it reports the running sum to ``progress``."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(phase, done, total)

    return advance


class BlockReader:
    """Reads byte ranges of one file and, if asked, takes the CRC-32 of all that passed through it.

    Context manager. ``fill`` writes any element range of an entry into an FP32 tensor; the memory needed
    beside it is one block.
    """

    def __init__(self, path: Path, checksum: bool = False) -> None:
        self.path = path
        self.crc = 0
        self._checksum = checksum
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._block = torch.empty(0)

    def __enter__(self) -> BlockReader:
        self._file = self.path.open("rb", buffering=0)
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def read(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with the bytes from ``offset`` on; UserError if the file ends before."""
        done = 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            if not count:
                raise UserError(f"{self.path} became shorter while it was read; restore the file and start again")
            done += count
        if self._checksum:
            self.crc = zlib.crc32(view, self.crc)

    def skip(self, end: int) -> None:
        """Pass over the bytes before ``end``, for the checksum: the header."""
        self.read(memoryview(bytearray(end)), 0)

    def fill(self, entry: Entry, start: int, out: torch.Tensor) -> None:
        """``out`` (FP32, one dimension) = elements [start, start + out.numel()) of ``entry``, exactly."""
        if entry.dtype not in FLOAT_DTYPES:
            raise UserError(
                f"tensor {entry.name!r} in {entry.path} has dtype {entry.dtype}; weights are trained from"
                " BF16, F16 or F32: use an unquantised checkpoint of this model"
            )
        width = item_bytes(entry.dtype)
        for first in range(0, out.numel(), BLOCK_ELEMENTS):
            piece = out[first : first + BLOCK_ELEMENTS]
            offset = entry.start + (start + first) * width
            if entry.dtype == "F32":
                self.read(byte_view(piece), offset)
                continue
            if self._staging.numel() < piece.numel() * width:
                self._staging = torch.empty(piece.numel() * width, dtype=torch.uint8)
            staged = self._staging[: piece.numel() * width]
            self.read(byte_view(staged), offset)
            piece.copy_(staged.view(FLOAT_DTYPES[entry.dtype]))

    def blocks(self, entry: Entry) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, FP32 block) over ``entry`` in order; a block is valid until the next one is
        taken."""
        if self._block.numel() < min(entry.numel, BLOCK_ELEMENTS):
            self._block = torch.empty(min(entry.numel, BLOCK_ELEMENTS))
        for start in range(0, entry.numel, BLOCK_ELEMENTS):
            block = self._block[: min(BLOCK_ELEMENTS, entry.numel - start)]
            self.fill(entry, start, block)
            yield start, block


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor to write: ``blocks()`` yields pieces, in order, whose bytes are those of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * item_bytes(self.dtype)


def as_dtype(name: str, blocks: Iterable[torch.Tensor], dtype: str) -> Iterator[torch.Tensor]:
    """FP32 ``blocks`` of tensor ``name`` rounded to ``dtype`` to the nearest, ties to even, as ``Tensor.to``
    does.

    Raises UserError when a value is not finite, or too large for ``dtype``: such weights are never written.
    """
    for whole in blocks:
        flat = whole.reshape(-1)
        for start in range(0, flat.numel(), BLOCK_ELEMENTS):
            block = flat[start : start + BLOCK_ELEMENTS]
            rounded = block.to(FLOAT_DTYPES[dtype])
            if not _finite(rounded):
                raise UserError(
                    f"tensor {name!r} holds values beyond the range of {dtype}; export as bfloat16 or float32"
                    if _finite(block)
                    else f"tensor {name!r} holds NaN or infinity, so nothing was saved; go back to the last saved state"
                )
            yield rounded


def _finite(block: torch.Tensor) -> bool:
    if not block.numel():
        return True
    low, high = torch.aminmax(block)  # NaN passes through, and there is no mask of the block's size
    return bool(torch.isfinite(low) & torch.isfinite(high))


def write_file(
    path: Path,
    tensors: Iterable[OutTensor],
    metadata: Mapping[str, str],
    on_bytes: Callable[[int], None] = lambda count: None,
    checksum: bool = False,
) -> tuple[int, int]:
    """Write a new safetensors file as a stream, one block in memory; returns its size and CRC-32 (0 if not
    asked).

    The bytes of the tensors follow in the given order, wider dtypes first, so that each is aligned for its
    readers. ``on_bytes`` is called with the size of each piece written. The caller makes the file durable.
    """
    ordered = sorted(tensors, key=lambda tensor: -item_bytes(tensor.dtype))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb", buffering=0) as file:
        crc = _write(file, memoryview(struct.pack("<Q", len(text)) + text), 0, checksum)
        for tensor in ordered:
            left = tensor.nbytes
            for block in tensor.blocks():
                view = byte_view(block)
                left -= len(view)
                crc = _write(file, view, crc, checksum)
                on_bytes(len(view))
            if left:
                raise RuntimeError(f"{tensor.name}: its blocks are {-left} bytes longer than its shape")
    return 8 + len(text) + end, crc


def _write(file: BinaryIO, view: memoryview, crc: int, checksum: bool) -> int:
    if checksum:
        crc = zlib.crc32(view, crc)
    while view:
        view = view[file.write(view) :]
    return crc
