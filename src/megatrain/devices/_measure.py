"""Peak memory of a computation, counted on tensors that hold no data."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages created under it and still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def _created(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage not in self._seen:
            self._seen.add(storage)
            nbytes = storage.nbytes()
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, nbytes)
        return tensor

    def _freed(self, nbytes: int) -> None:
        self.live -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return tree_map_only(torch.Tensor, self._created, result)


def count_peak(run: Callable[[], object]) -> int:
    """Peak bytes of the storages that ``run`` creates. Tensors it captures from outside count nothing."""
    counter = _LiveBytes()
    with counter:
        result = run()
    del result
    return counter.peak
