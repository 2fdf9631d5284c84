"""Boundary activations that wait for backward on the host: their pinned memory and the device buffers they pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatrain.checks import readable_bytes
from megatrain.engine.buffers import DeviceMemory, Table
from megatrain.engine.program import Buffer, Op
from megatrain.errors import UserError
from megatrain.store import Store

LABEL = "boundaries"


@dataclass(frozen=True, slots=True)
class Need:
    """What one program names: staging buffers on the device and boundaries on the host, of equal size."""

    stages: tuple[Buffer, ...]
    hosts: tuple[Buffer, ...]
    nbytes: int
    """Of one boundary: the largest micro-batch's."""

    @staticmethod
    def of(ops: Sequence[Op], nbytes: int) -> Need:
        """The need of a program whose largest boundary has ``nbytes``."""
        named = dict.fromkeys(buffer for op in ops for buffer in (*op.reads, *op.writes))
        stages, hosts = (tuple(b for b in named if b[0] == kind) for kind in ("stage", "hostact"))
        return Need(stages, hosts, nbytes)


class Boundaries:
    """One pool on each side, as large as the largest step so far has needed, cut anew for each step.

    Every use of a stage or of a boundary on the host is over when a step's results are known: the backward of a layer
    waits for its RELOAD, and that for the OFFLOAD. So the pools may be cut in another way for the next step.
    """

    def __init__(
        self, store: Store, table: Table, memory: DeviceMemory, device: torch.device, host_budget: int | None
    ) -> None:
        self._store, self._table, self._memory, self._device = store, table, memory, device
        self._host_budget = host_budget
        self._pool: torch.Tensor | None = None
        self._cut: Need | None = None

    def more_device_bytes(self, need: Need) -> int:
        """What the device pool has to grow by."""
        return max(0, len(need.stages) * need.nbytes - self._memory.fixed[LABEL])

    def check_host(self, need: Need) -> None:
        """Raise `UserError` when boundaries on the host go beyond ``placement.host_memory``."""
        total = self._store.nbytes_with_boundaries(len(need.hosts) * need.nbytes)
        if self._host_budget is not None and total > self._host_budget:
            raise UserError(
                f"placement.host_memory: {readable_bytes(self._host_budget)} is too small: with boundary activations"
                f" the need is {readable_bytes(total)} ({total} bytes); raise it, use shorter sequences, fewer rows a"
                " step, a larger compute.boundary_every, or compute.boundaries=device"
            )

    def is_ready(self, need: Need) -> bool:
        """Whether `provide` has nothing to do."""
        return not need.stages or self._cut == need

    def make_room(self, need: Need) -> None:
        """Grow the host's pool; `UserError` when the system refuses. What was cut before is gone."""
        for name in () if self._cut is None else (*self._cut.stages, *self._cut.hosts):
            self._table.remove(name)
        self._cut = None
        self._store.boundaries(len(need.hosts) * need.nbytes)

    def provide(self, need: Need, dtype: torch.dtype) -> None:
        """Enter what the program names. On the compute lane, whose stream the device pool belongs to."""
        numel = need.nbytes // dtype.itemsize
        if self._pool is None or self._pool.numel() < len(need.stages) * numel:
            self._pool = None
            self._memory.fixed[LABEL] = 0
            self._pool = self._memory.allocate(LABEL, len(need.stages) * numel, dtype, self._device)
        host = self._store.boundaries(len(need.hosts) * need.nbytes).view(dtype)
        for names, pool in ((need.stages, self._pool), (need.hosts, host)):
            for i, name in enumerate(names):
                # .data: a version counter of its own, or autograd takes a write to one piece for one to all.
                self._table.fix(name, pool[i * numel : (i + 1) * numel].data)
        self._cut = need

    def close(self) -> None:
        """Drop the device's pool; the host's is the store's."""
        self._pool = None
