"""The C++ kernel: one pass over the unit with AVX-512, AVX2 or plain C++, on every core the process may use.

Needs neither torch nor OpenMP. The compiled module takes addresses: types, lengths and strides are checked
here.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import logging
import os
import struct
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Unpack

from megatrain import numa
from megatrain.kernels._adamw import (
    AdamWSettings,
    adamw_correction,
    adamw_scalars,
    check_factor,
    check_speculation,
    check_waiting,
    common_length,
    dtype_name,
    speculation_reach,
)

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from megatrain.kernels import DeviceKernel

    Buffer = Tensor | np.ndarray[Any, Any]

_log = logging.getLogger(__name__)

_EXTENSION = "megatrain.kernels._native"
_INTERFACE = 3
_HOW_TO_BUILD = (
    "to build it, install a C++17 compiler and Python headers, reinstall MegaTrain with `pip install -v`, "
    "or run `make native` in a checkout"
)


class NativeUnavailable(RuntimeError):
    """The compiled module is missing or does not work; the message says why and what to do."""


class NativeKernel:
    """C++ with explicit SIMD; see ``megatrain.kernels.Kernel``. Thread-safe; concurrent calls take turns.

    ``isa`` is one of ``instruction_sets()``, by default the widest. Raises NativeUnavailable.
    """

    name = "native"

    def __init__(self, isa: str | None = None) -> None:
        self._native = _load_extension()
        self.isa = isa or self._native.instruction_sets()[0]
        self._threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.reason = f"C++, {self.isa}, {self._threads} threads"
        _self_test(self)
        self._nodes = numa.nodes()
        self._native.bind_workers([list(node.cores) for node in numa.deal(self._nodes)])
        if self._nodes:
            self.reason += f" on {len(self._nodes)} NUMA nodes"
            _log.info("NUMA: optimizer: %s, each near its share of the training state", self.reason)

    @property
    def threads(self) -> int:
        return self._threads

    def set_threads(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"threads must be at least 1, got {count}")
        self._threads = count

    def instruction_sets(self) -> list[str]:
        """Those that this processor runs, widest first."""
        return list(self._native.instruction_sets())

    def last_thread_ids(self) -> list[int]:
        """Operating system ids of the threads that worked in the last call of this process."""
        return list(self._native.last_thread_ids())

    def adamw(
        self,
        head: Buffer,
        tail: Buffer | None,
        exp_avg: Buffer,
        exp_avg_sq: Buffer,
        grad: Buffer,
        *,
        grad_scale: float = 1.0,
        **settings: Unpack[AdamWSettings],
    ) -> None:
        scalars = adamw_scalars(grad_scale, settings)
        self._native.adamw(*self._state(head, tail, exp_avg, exp_avg_sq, grad), scalars)

    def adamw_speculate(
        self,
        head: Buffer,
        tail: Buffer | None,
        exp_avg: Buffer,
        exp_avg_sq: Buffer,
        grad: Buffer,
        waiting: Buffer,
        **settings: Unpack[AdamWSettings],
    ) -> None:
        check_speculation(settings)
        scalars, reach = adamw_scalars(1.0, settings), speculation_reach(settings)
        state = self._state(head, tail, exp_avg, exp_avg_sq, grad)
        check_waiting(waiting, len(head))
        self._native.speculate(*state, scalars, _address("waiting", waiting, "uint8"), reach)

    def adamw_resolve(
        self,
        head: Buffer,
        tail: Buffer | None,
        exp_avg: Buffer,
        exp_avg_sq: Buffer,
        grad: Buffer,
        waiting: Buffer,
        *,
        factor: float,
        **settings: Unpack[AdamWSettings],
    ) -> None:
        check_factor(factor)
        check_speculation(settings)
        scalars, correction = adamw_scalars(factor, settings), adamw_correction(factor, settings)
        state = self._state(head, tail, exp_avg, exp_avg_sq, grad)
        check_waiting(waiting, len(head))
        address = _address("waiting", waiting, "uint8")
        self._native.resolve(*state, scalars, address, factor > 0, factor < 1, correction)

    def split(self, master: Buffer, head: Buffer, tail: Buffer) -> None:
        length = common_length(master=master, head=head, tail=tail)
        addresses = _split_addresses(master, head, tail)
        self._native.split(self.isa, self._threads, length, *addresses)

    def join(self, head: Buffer, tail: Buffer, master: Buffer) -> None:
        length = common_length(head=head, tail=tail, master=master)
        at_master, at_head, at_tail = _split_addresses(master, head, tail)
        self._native.join(self.isa, self._threads, length, at_head, at_tail, at_master)

    def first_touch(self) -> DeviceKernel | None:
        return _FirstTouch(self._native, self._threads) if self._nodes else None

    def _state(
        self, head: Buffer, tail: Buffer | None, exp_avg: Buffer, exp_avg_sq: Buffer, grad: Buffer
    ) -> tuple[str, int, int, tuple[int, ...], bool]:
        """What every call on a unit's state begins with, after checking the buffers."""
        buffers = {"head": head, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad}
        if tail is not None:
            buffers["tail"] = tail
        addresses = (
            _address("head", head, "float32" if tail is None else "bfloat16"),
            0 if tail is None else _address("tail", tail, "int16"),
            _address("exp_avg", exp_avg, "float32"),
            _address("exp_avg_sq", exp_avg_sq, "float32"),
            _address("grad", grad, "bfloat16", "float32"),
        )
        is_bfloat16 = dtype_name("grad", grad, "bfloat16", "float32") == "bfloat16"
        return self.isa, self._threads, common_length(**buffers), addresses, is_bfloat16


class _FirstTouch:
    """See ``Kernel.first_touch``."""

    def __init__(self, native: ModuleType, threads: int) -> None:
        self._native, self._threads = native, threads

    def adamw(
        self,
        head: Tensor,
        tail: Tensor | None,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        *,
        grad_scale: Tensor,
        **settings: Unpack[AdamWSettings],
    ) -> None:
        buffers = [buffer for buffer in (head, tail, exp_avg, exp_avg_sq, grad) if buffer is not None]
        sections = [(buffer.data_ptr(), buffer.element_size()) for buffer in buffers]
        self._native.touch(self._threads, head.numel(), sections)


@cache
def _load_extension() -> ModuleType:
    spec = importlib.util.find_spec(_EXTENSION)
    if spec is None or spec.origin is None:
        raise NativeUnavailable(f"it was not built; {_HOW_TO_BUILD}")
    try:
        _refuse_truncated(Path(spec.origin))
        extension = importlib.import_module(_EXTENSION)
    except ImportError as error:
        raise NativeUnavailable(f"it failed to load: {error}; {_HOW_TO_BUILD}") from error
    found = getattr(extension, "INTERFACE", None)
    if found != _INTERFACE:
        raise NativeUnavailable(f"it is of another version: interface {found}, not {_INTERFACE}; {_HOW_TO_BUILD}")
    atexit.register(extension.shutdown)
    return extension


def _refuse_truncated(library: Path) -> None:
    """ImportError if the file ends before its ELF section table, which comes last in it.

    The loader maps the file without looking, and a page beyond its end kills the process with SIGBUS.
    """
    with library.open("rb") as file:
        header = file.read(64)
    if len(header) == 64 and header.startswith(b"\x7fELF\x02\x01"):  # 64-bit, little-endian
        (table_offset,) = struct.unpack_from("<Q", header, 0x28)
        entry_size, entries = struct.unpack_from("<HH", header, 0x3A)
        size = library.stat().st_size
        if size < table_offset + entry_size * entries:
            raise ImportError(f"{library} is cut off after {size} bytes")


def _self_test(kernel: NativeKernel) -> None:
    """One small step against float64: a miscompiled module is refused instead of training on nonsense."""
    import numpy as np

    count = 37  # whole vectors of every width and a rest
    master = np.linspace(-2.0, 2.0, count, dtype=np.float32)
    grad = np.linspace(1.0, -0.5, count, dtype=np.float32)
    head, tail = np.empty(count, np.uint16), np.empty(count, np.int16)
    exp_avg, exp_avg_sq = np.zeros(count, np.float32), np.zeros(count, np.float32)
    result = np.empty(count, np.float32)
    kernel.split(master, head, tail)
    kernel.join(head, tail, result)
    exact = bool((result == master).all())
    settings = {"lr": 0.125, "beta1": 0.875, "beta2": 0.75, "eps": 0.5, "weight_decay": 0.25, "step": 1}
    kernel.adamw(head, tail, exp_avg, exp_avg_sq, grad, **settings)  # type: ignore[arg-type]
    kernel.join(head, tail, result)
    wide = grad.astype(np.float64)
    expected = master * (1 - 0.125 * 0.25) - 0.125 * wide / (np.abs(wide) + 0.5)
    if not exact or not np.allclose(result, expected, rtol=0, atol=1e-6):
        raise NativeUnavailable(f"its self-test failed with {kernel.isa}; {_HOW_TO_BUILD}")


def _address(name: str, buffer: Any, *allowed: str) -> int:
    """The address of the first element, after checking type, place and contiguity."""
    dtype_name(name, buffer, *allowed)
    if hasattr(buffer, "data_ptr"):
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ValueError(f"{name} must be a contiguous tensor in host memory")
        return int(buffer.data_ptr())
    if not (buffer.flags.c_contiguous and buffer.flags.writeable) and name != "grad":
        raise ValueError(f"{name} must be a contiguous, writable array")
    return int(buffer.ctypes.data)


def _split_addresses(master: Buffer, head: Buffer, tail: Buffer) -> tuple[int, int, int]:
    return (
        _address("master", master, "float32"),
        _address("head", head, "bfloat16"),
        _address("tail", tail, "int16"),
    )
