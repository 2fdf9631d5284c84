"""Peak memory of a computation: the bytes of every storage that it creates, while they live."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages created under it and still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0

    def _freed(self, nbytes: int) -> None:
        self.live -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A result that lives in an argument's storage (a view, an operation in place) is nothing new, and the storage
        # of an argument that was made outside is not counted.
        known = {_address(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and _address(tensor) not in known:
                storage = tensor.untyped_storage()
                known.add(_address(tensor))
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return result


def _address(tensor: torch.Tensor) -> int:
    """Identifies a storage, also one that holds no data."""
    return int(tensor.untyped_storage()._cdata)


def count_peak(run: Callable[[], object]) -> int:
    """Peak bytes of the storages that ``run`` creates. Tensors it captures from outside count nothing."""
    counter = _LiveBytes()
    # A compiled function that first runs under a dispatch mode would be passed over by torch.compile for good.
    with torch.compiler.set_stance("force_eager"), counter:
        result = run()
    del result
    return counter.peak
