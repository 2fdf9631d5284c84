"""The buffers of a running engine: an operation reaches them only through what it declares."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from megatrain.checks import readable_bytes
from megatrain.engine.program import Buffer, Op
from megatrain.errors import UserError
from megatrain.models.decoder import tensors_in


class DeviceMemory:
    """Accounts device memory by label and refuses what goes beyond the budget.

    ``fixed`` buffers (slots, gradients) live as long as the engine; the rest (boundaries, graphs, inputs) is charged
    as operations produce it.
    """

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self.fixed: Counter[str] = Counter()
        self.live: Counter[str] = Counter()
        self.peak = 0

    def require(self, nbytes: int, what: str) -> None:
        """Raise `UserError` when ``nbytes`` more fixed bytes would exceed the budget: before any is allocated."""
        total = self.fixed.total() + nbytes
        if self.budget is not None and total > self.budget:
            raise over_budget(total, self.budget, what)

    def allocate(self, label: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zeroed fixed buffer; raises `UserError` beyond the budget."""
        self.fixed[label] += numel * dtype.itemsize
        self.check(0, f"{label} buffers")
        return torch.zeros(numel, dtype=dtype, device=device)

    def charge(self, label: str, nbytes: int) -> None:
        """Count bytes that an operation has produced (negative: released)."""
        self.live[label] += nbytes

    def check(self, workspace: int, what: str) -> None:
        """Note the peak, and raise when ``workspace`` bytes more than what is held would exceed the budget."""
        total = self.fixed.total() + self.live.total() + workspace
        self.peak = max(self.peak, total)
        if self.budget is not None and total > self.budget:
            raise over_budget(total, self.budget, what)


def over_budget(needed: int, budget: int, what: str) -> UserError:
    """The one message for a device budget that is too small."""
    return UserError(
        f"placement.device_memory: {readable_bytes(budget)} is too small: {what} brings the need to"
        f" {readable_bytes(needed)} ({needed} bytes); raise it, use slots=1, shorter sequences or fewer rows a"
        " micro-batch"
    )


class Table:
    """Every buffer by name. Fixed ones are tensors that stay; the others come and go with operations."""

    def __init__(self, memory: DeviceMemory, poisons: bool) -> None:
        self._values: dict[Buffer, Any] = {}
        self._fixed: dict[Buffer, None] = {}
        self._charged: dict[Buffer, int] = {}
        self._memory, self._poisons = memory, poisons

    def fix(self, name: Buffer, tensor: torch.Tensor) -> None:
        """Enter a buffer that stays."""
        self._values[name] = tensor
        self._fixed[name] = None

    def remove(self, name: Buffer) -> None:
        """Take out a buffer that `fix` entered."""
        del self._values[name], self._fixed[name]

    @property
    def fixed_names(self) -> tuple[Buffer, ...]:
        """Names of all buffers that stay."""
        return tuple(self._fixed)

    def get(self, name: Buffer) -> Any:
        """Content of a buffer; ``KeyError`` when nothing has been put there."""
        return self._values[name]

    def put(self, name: Buffer, value: Any) -> None:
        """Enter what an operation produced and charge its bytes."""
        self.drop(name)
        nbytes = _nbytes(value) if name[0] in ("act", "graph", "batch", "context", "dhid") else 0
        self._values[name], self._charged[name] = value, nbytes
        self._memory.charge(str(name[0]), nbytes)
        if nbytes:
            self._memory.check(0, f"{name[0]} of {name[1]}")

    def drop(self, name: Buffer) -> None:
        """Forget a buffer that an operation produced."""
        if name in self._values and name not in self._fixed:
            del self._values[name]
            self._memory.charge(str(name[0]), -self._charged.pop(name))

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
        self._charged.clear()

    def release(self, name: Buffer) -> None:
        """End of a buffer's content: freed, or where the device does so, filled with NaN."""
        if name not in self._fixed:
            self.drop(name)
        elif self._poisons:
            self._values[name].fill_(float("nan"))


class Handles:
    """What one operation may touch: its declared buffers."""

    def __init__(self, table: Table, op: Op) -> None:
        self._table, self._op = table, op

    def read(self, name: Buffer) -> Any:
        """A declared input."""
        if name not in self._op.reads and name not in self._op.writes:
            raise PermissionError(f"{self._op} reads {name}, which it does not declare")
        return self._table.get(name)

    def target(self, name: Buffer) -> Any:
        """A declared output that stays in place."""
        self._check(name)
        return self._table.get(name)

    def put(self, name: Buffer, value: Any) -> None:
        """Set a declared output."""
        self._check(name)
        self._table.put(name, value)

    def _check(self, name: Buffer) -> None:
        if name not in self._op.writes:
            raise PermissionError(f"{self._op} writes {name}, which it does not declare")


def _nbytes(value: Any) -> int:
    """Bytes of the distinct storages in a value."""
    if hasattr(value, "nbytes") and isinstance(value.nbytes, int) and not isinstance(value, torch.Tensor):
        return int(value.nbytes)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(value)}
    return sum(storages.values())
