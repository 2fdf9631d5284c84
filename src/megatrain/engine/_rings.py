"""What the builder of programs keeps count of: which buffer of a ring serves which unit or boundary, and blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatrain.layout import size_classes

if TYPE_CHECKING:
    from megatrain.engine.program import Buffer, Op, Policy, UnitSpec


class Rings:
    """Which slot holds which unit, from step to step, and which gradient buffer is whose.

    Units of similar size share a ring. The vocabulary units (first and last) never share one with the layers: a tied
    gradient stays in its buffer while every layer's passes by. Nor do they share one with each other where the last
    reads the first's weights: both are needed at once.
    """

    def __init__(self, units: Sequence[UnitSpec], slots: int, policy: Policy) -> None:
        shared, own = _classes(units, units), _own(units)
        # Sums that live from the first micro-batch to the last need a buffer a unit; what is only rounded and sent
        # away does not.
        self.sum_ring, self.sum_numel = own if policy.micro_batch_major else shared
        sums_in_place = policy.micro_batch_major and not policy.sum_dtype_differs
        self.grad_ring, self.grad_numel = own if sums_in_place else shared
        streamed = [unit for unit in units if not (unit.weights_resident or unit.state_resident)]
        self.slot_ring, self.slot_numel = _classes(units, streamed)
        for unit in units:
            if unit.weights_resident and not unit.state_resident:
                self.slot_ring[unit.name] = f"own {unit.name}"
                self.slot_numel[f"own {unit.name}"] = unit.numel
        drained = {unit.name for unit in units if not unit.state_resident}
        self.slots = {ring: self._count(ring, self.slot_ring, slots, len(units)) for ring in self.slot_numel}
        self.buffers = {
            ring: min(slots, 2, max(1, members - 1)) if members else 0
            for ring in self.grad_numel
            for members in [sum(1 for name in drained if self.grad_ring[name] == ring)]
        }
        self._landing_ring, self.landings = landing_rings(units) if policy.passing_gradients else ({}, {})
        self._content: dict[Buffer, str | None] = {
            ("slot", ring, i): None for ring, count in self.slots.items() for i in range(count)
        }
        self._used: dict[Buffer, int] = dict.fromkeys(self._content, 0)
        self._clock = 0
        self._next: dict[str, int] = dict.fromkeys(self.grad_numel, 0)
        self._next_landing: dict[str, int] = dict.fromkeys(self.landings, 0)

    @staticmethod
    def _count(ring: str, ring_of: dict[str, str], slots: int, units: int) -> int:
        members = sum(1 for other in ring_of.values() if other == ring)
        # Two uses far apart gain nothing from a second slot; with a slot for every unit, all stay.
        return 1 if members <= 2 and slots < units else min(slots, members)

    def slot(self, unit: str) -> tuple[Buffer, bool]:
        """The unit's slot and whether it must be fetched; evicts the least recently used one of its ring."""
        self._clock += 1
        candidates = [slot for slot in self._content if slot[1] == self.slot_ring[unit]]
        held = next((slot for slot in candidates if self._content[slot] == unit), None)
        chosen = held or min(candidates, key=lambda slot: self._used[slot])
        self._used[chosen], self._content[chosen] = self._clock, unit
        return chosen, held is None

    def gradient(self, unit: str) -> Buffer:
        """The next gradient buffer of the unit's ring, in turn."""
        ring = self.grad_ring[unit]
        self._next[ring] += 1
        return ("grad", ring, self._next[ring] % self.buffers[ring])

    def landing(self, unit: str) -> Buffer:
        """The next host buffer that the unit's gradient passes through, in turn."""
        ring = self._landing_ring[unit]
        self._next_landing[ring] += 1
        return ("landing", ring, self._next_landing[ring] % self.landings[ring][1])

    def forget(self, units: Iterable[str]) -> list[Buffer]:
        """Mark the units' weights in slots as out of date; returns those slots."""
        stale = set(units)
        dropped = [slot for slot, unit in self._content.items() if unit in stale]
        self._content.update(dict.fromkeys(dropped))
        return dropped


def landing_rings(units: Sequence[UnitSpec]) -> tuple[dict[str, str], dict[str, tuple[int, int]]]:
    """Where gradients that are not kept on the host land: ring of each unit, and each ring's elements of a buffer and
    buffers. One is filled while the other is read."""
    ring_of, numel_of = _classes(units, [unit for unit in units if not unit.state_resident])
    members = list(ring_of.values())
    return ring_of, {ring: (numel, min(2, members.count(ring))) for ring, numel in numel_of.items()}


def landing_sizes(units: Sequence[UnitSpec]) -> list[int]:
    """Elements of each of those host buffers."""
    return [numel for numel, count in landing_rings(units)[1].values() for _ in range(count)]


class Stages:
    """Which device buffer of the staging ring holds which boundary activation, while boundaries live on the host.

    A boundary is held from `take` or `find` to `free`; after that its content stays until the buffer is taken again.
    """

    def __init__(self, count: int) -> None:
        self._free: deque[Buffer] = deque(("stage", i) for i in range(count))
        self._content: dict[Buffer, tuple[str, int]] = {}

    def take(self, boundary: tuple[str, int]) -> Buffer:
        """The buffer that has been free for longest, for a new content."""
        stage = self._free.popleft()
        self._content[stage] = boundary
        return stage

    def find(self, boundary: tuple[str, int]) -> Buffer | None:
        """The buffer that still has the boundary, held again."""
        stage = next((stage for stage, content in self._content.items() if content == boundary), None)
        if stage is not None and stage in self._free:
            self._free.remove(stage)
        return stage

    def free(self, stage: Buffer) -> None:
        """The buffer may be taken for another boundary."""
        self._free.append(stage)


def _own(units: Sequence[UnitSpec]) -> tuple[dict[str, str], dict[str, int]]:
    """A ring of its own for every unit."""
    return {unit.name: f"own {unit.name}" for unit in units}, {f"own {unit.name}": unit.numel for unit in units}


def _classes(units: Sequence[UnitSpec], members: Sequence[UnitSpec]) -> tuple[dict[str, str], dict[str, int]]:
    """Ring of each of ``members`` and the elements of each ring's buffers."""
    first, last = units[0], units[-1]
    families: dict[str, dict[str, int]] = {}
    for unit in members:
        edge = "first" if unit is first else "last"
        family = "layer" if unit not in (first, last) else edge if last.uses else "edge"
        families.setdefault(family, {})[unit.name] = unit.numel
    ring_of, numel_of = {}, {}
    for family, sizes in families.items():
        for name, numel in size_classes(sizes).items():
            ring_of[name] = f"{family}{numel}"
            numel_of[ring_of[name]] = numel
    return ring_of, numel_of


def blocks_of(layers: Sequence[UnitSpec], every: int) -> list[list[UnitSpec]]:
    """Runs of at most ``every`` layers that are recomputed together. A layer that keeps its activations is no part of
    one: its input is held anyway."""
    blocks: list[list[UnitSpec]] = []
    for layer in layers:
        if blocks and len(blocks[-1]) < every and not (layer.keeps or blocks[-1][0].keeps):
            blocks[-1].append(layer)
        else:
            blocks.append([layer])
    return blocks


def without_unread_copies(ops: Sequence[Op]) -> list[Op]:
    """Leave out each OFFLOAD whose boundary is still on the device when backward needs it."""
    wanted: set[Buffer] = set()
    kept: list[Op] = []
    for op in reversed(ops):
        if op.kind == "OFFLOAD" and op.writes[0] not in wanted:
            continue
        if op.kind == "RELOAD":
            wanted.add(op.reads[0])
        elif op.kind == "OFFLOAD":
            wanted.discard(op.writes[0])
        kept.append(op)
    return kept[::-1]
