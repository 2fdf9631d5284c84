"""The step as a list of operations, each naming its lane and the buffers it reads and writes.

Nothing here waits or copies: `schedule` derives the waits from these declarations, `executor` runs them.

Buffers are named by tuples:

==========================  =============================================================================
``("weights", unit)``       the unit's host weights (the heads of the masters)
``("state", unit)``         the rest of its training state: tails and moments
``("slot", ring, i)``       device buffer with one unit's weights
``("sum", ring)``           device FP32 sum of gradients, where they leave in another dtype
``("grad", ring, i)``       device buffer with one unit's finished gradient, ready to leave
``("hostgrad", unit)``      the gradient where the update finds it: on the host, or on the device beside the state
``("waiting", unit)``       on the host, which blocks of the unit a speculative step has left for its end
``("batch", m)``            token ids, targets and positions of micro-batch m on the device
``("context", m)``          what the model's prologue hands to every layer: positions, rotary pairs, masks
``("act", unit, m)``        the unit's input (boundary activation)
``("graph", unit, m)``      the unit's autograd graph, when activations are kept
``("dhid", m)``             gradient with respect to the current unit's output
``("loss", m)``             sum of token losses
``("norm", unit)``          sum of squares of the unit's gradient
``("clip",)``               gradient norm and clip factor on the device
``("result",)``             losses, norm and factor on the host
``("scores", m)``           log-probabilities of the targets, on the host
==========================  =============================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatrain.layout import size_classes

Buffer = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """What the builder needs to know of a unit."""

    name: str
    numel: int
    uses: tuple[str, ...] = ()
    """Units whose weights it reads besides its own (a tied head reads the embedding's)."""
    weights_resident: bool = False
    """It has a slot of its own; one FETCH a step, after its update."""
    state_resident: bool = False
    """All its training state is on the device: nothing of it is fetched or drained."""
    keeps: bool = False
    """Its activations are kept from forward to backward instead of being computed again."""
    lookup: bool = False
    """Its backward reads no weights: what it keeps is enough."""


@dataclass(slots=True, kw_only=True)
class Op:
    """One operation. ``releases`` names buffers whose content nobody reads after it."""

    kind: str
    lane: str
    unit: str = ""
    micro: int = -1
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    releases: tuple[Buffer, ...] = ()
    weights: dict[str, Buffer] = field(default_factory=dict)
    """Slot of each unit whose weights the operation uses."""
    gradients: dict[str, Buffer] = field(default_factory=dict)
    """Where each unit's gradient is summed."""
    finished: Buffer | None = None
    """Where the last operation of a unit leaves its rounded gradient."""
    first: bool = True
    """The first operation of the step to add to its gradient buffers: it overwrites them."""
    last: bool = True
    """The last one: it rounds the sum and takes its norm."""

    def __str__(self) -> str:
        micro = f"micro-batch {self.micro}" if self.micro >= 0 else ""
        return " ".join(part for part in (self.kind, self.unit, micro) if part)


class Rings:
    """Which slot holds which unit, from step to step, and which gradient buffer is whose.

    Units of similar size share a ring. The vocabulary units (first and last) never share one with the layers: a tied
    gradient stays in its buffer while every layer's passes by. Nor do they share one with each other where the last
    reads the first's weights: both are needed at once.
    """

    def __init__(self, units: Sequence[UnitSpec], slots: int) -> None:
        self.grad_ring, self.grad_numel = _classes(units, units)
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
        self._content: dict[Buffer, str | None] = {
            ("slot", ring, i): None for ring, count in self.slots.items() for i in range(count)
        }
        self._used: dict[Buffer, int] = dict.fromkeys(self._content, 0)
        self._clock = 0
        self._next: dict[str, int] = dict.fromkeys(self.grad_numel, 0)

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

    def forget(self, units: Iterable[str]) -> list[Buffer]:
        """Mark the units' weights in slots as out of date; returns those slots."""
        stale = set(units)
        dropped = [slot for slot, unit in self._content.items() if unit in stale]
        self._content.update(dict.fromkeys(dropped))
        return dropped


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What varies between programs of one model."""

    sum_dtype_differs: bool = False
    """Gradients leave in a dtype other than FP32, so sums need a buffer of their own."""


class Builder:
    """Writes programs for one model. Its rings persist, so a unit that is still in a slot is not fetched again."""

    def __init__(self, units: Sequence[UnitSpec], slots: int, policy: Policy) -> None:
        self.units = list(units)
        self._named = {unit.name: unit for unit in units}
        self.rings = Rings(units, slots)
        self.policy = policy
        self._ops: list[Op] = []

    def training_step(self, micros: int, *, speculative: bool = False) -> list[Op]:
        """Forward, loss and backward through all units, layer-major, then norm, and updates in forward order.

        A ``speculative`` one updates each unit on the host as its gradient lands, and corrects that at the end.
        """
        self._ops = []
        self._speculative = speculative
        self._forward(micros, training=True)
        self._loss(micros)
        for unit in reversed(self.units[:-1]):
            self._backward(unit, micros)
        names = [unit.name for unit in self.units]
        losses: tuple[Buffer, ...] = tuple(("loss", m) for m in range(micros))
        norms: tuple[Buffer, ...] = tuple(("norm", name) for name in names)
        self._add(Op(kind="NORM", lane="compute", reads=norms, writes=(("clip",),)))
        self._add(Op(kind="PUBLISH", lane="d2h", reads=(("clip",), *losses), writes=(("result",),)))
        for unit in self.units:
            self._update(unit)
        self._release_stale(self.rings.forget(names))
        return self._ops

    def scoring(self, micros: int) -> list[Op]:
        """The forward half: log-probabilities of the targets of each micro-batch, copied to the host."""
        self._ops = []
        self._forward(micros, training=False)
        head = self.units[-1]
        slots = self._weights(head)
        for m in range(micros):
            act: Buffer = ("act", head.name, m)
            self._add(
                Op(
                    kind="SCORE",
                    lane="compute",
                    unit=head.name,
                    micro=m,
                    weights=slots,
                    reads=(*slots.values(), act, ("batch", m)),
                    writes=(("loss", m),),
                    releases=(act, ("batch", m)),
                )
            )
            self._add(Op(kind="REPORT", lane="d2h", micro=m, reads=(("loss", m),), writes=(("scores", m),)))
        return self._ops

    def _add(self, op: Op) -> None:
        self._ops.append(op)

    def _weights(self, unit: UnitSpec) -> dict[str, Buffer]:
        """Slots that hold the weights a unit uses, with a FETCH for each that is not there."""
        slots: dict[str, Buffer] = {}
        for name in (unit.name, *unit.uses):
            if self._named[name].state_resident:
                slots[name] = ("weights", name)
                continue
            slot, missing = self.rings.slot(name)
            if missing:
                self._release_stale([slot])
                fetch = Op(kind="FETCH", lane="h2d", unit=name, reads=(("weights", name),), writes=(slot,))
                self._add(fetch)
            slots[name] = slot
        return slots

    def _release_stale(self, slots: Iterable[Buffer]) -> None:
        """Let the last reader of each slot in this program release it."""
        for slot in slots:
            for op in reversed(self._ops):
                if slot in op.reads:
                    op.releases = (*op.releases, slot)
                    break
                if slot in op.writes:
                    break

    def _forward(self, micros: int, *, training: bool) -> None:
        for m in range(micros):
            self._add(Op(kind="INPUT", lane="compute", micro=m, writes=(("batch", m),)))
        for index, unit in enumerate(self.units[:-1]):
            slots = self._weights(unit)
            for m in range(micros):
                reads: tuple[Buffer, ...] = (*slots.values(), ("batch", m))
                writes: tuple[Buffer, ...] = (("act", self.units[index + 1].name, m),)
                if index == 0:
                    writes = (*writes, ("context", m))
                else:
                    reads = (*reads, ("context", m), ("act", unit.name, m))
                if training and unit.keeps:
                    writes = (*writes, ("graph", unit.name, m))
                self._add(
                    Op(
                        kind="FORWARD",
                        lane="compute",
                        unit=unit.name,
                        micro=m,
                        weights=slots,
                        reads=reads,
                        writes=writes,
                    )
                )

    def _sum_buffer(self, unit: str, finished: Buffer, *, several: bool) -> Buffer:
        if several and self.policy.sum_dtype_differs:
            return ("sum", self.rings.grad_ring[unit])
        return finished

    def _loss(self, micros: int) -> None:
        head = self.units[-1]
        slots = self._weights(head)
        self._finished = {name: self._gradient(name) for name in (head.name, *head.uses)}
        # A chunked loss adds to its gradients chunk by chunk, so it always sums.
        sums = {name: self._sum_buffer(name, grad, several=True) for name, grad in self._finished.items()}
        own = self._finished[head.name]
        for m in range(micros):
            last = m == micros - 1
            act: Buffer = ("act", head.name, m)
            finish: tuple[Buffer, ...] = (own, ("norm", head.name)) if last else ()
            self._add(
                Op(
                    kind="LOSS",
                    lane="compute",
                    unit=head.name,
                    micro=m,
                    weights=slots,
                    gradients=sums,
                    finished=own,
                    first=m == 0,
                    last=last,
                    reads=(*slots.values(), act, ("batch", m)),
                    writes=_unique(*sums.values(), *finish, ("dhid", m), ("loss", m)),
                    releases=(act,),
                )
            )
        self._drain(head.name, own)

    def _backward(self, unit: UnitSpec, micros: int) -> None:
        slots = {} if unit.lookup else self._weights(unit)
        started = unit.name in self.units[-1].uses
        finished = self._finished[unit.name] if started else self._gradient(unit.name)
        target = self._sum_buffer(unit.name, finished, several=started or micros > 1)
        first_unit = unit is self.units[0]
        for m in range(micros):
            last = m == micros - 1
            kept: tuple[Buffer, ...] = (("graph", unit.name, m),) if unit.keeps else ()
            act: tuple[Buffer, ...] = () if first_unit else (("act", unit.name, m),)
            finish: tuple[Buffer, ...] = (finished, ("norm", unit.name)) if last else ()
            done: tuple[Buffer, ...] = (("batch", m), ("context", m), ("dhid", m)) if first_unit else ()
            self._add(
                Op(
                    kind="BACKWARD",
                    lane="compute",
                    unit=unit.name,
                    micro=m,
                    weights=slots,
                    gradients={unit.name: target},
                    finished=finished,
                    first=m == 0 and not started,
                    last=last,
                    reads=(*slots.values(), ("batch", m), ("context", m), *act, *kept, ("dhid", m)),
                    writes=_unique(target, *finish, *(() if first_unit else (("dhid", m),))),
                    releases=(*act, *kept, *done),
                )
            )
        self._drain(unit.name, finished)

    def _gradient(self, unit: str) -> Buffer:
        """Where a unit's finished gradient goes: a buffer to drain, or beside the state that it will update."""
        return ("hostgrad", unit) if self._named[unit].state_resident else self.rings.gradient(unit)

    def _drain(self, unit: str, finished: Buffer) -> None:
        if self._named[unit].state_resident:
            return
        self._add(
            Op(
                kind="DRAIN",
                lane="d2h",
                unit=unit,
                reads=(finished,),
                writes=(("hostgrad", unit),),
                releases=(finished,),
            )
        )
        if self._speculative:
            self._add(
                Op(
                    kind="SPECULATE",
                    lane="optimizer",
                    unit=unit,
                    reads=(("hostgrad", unit),),
                    writes=(("weights", unit), ("state", unit), ("waiting", unit)),
                )
            )

    def _update(self, unit: UnitSpec) -> None:
        resident = unit.state_resident
        waiting: tuple[Buffer, ...] = (("waiting", unit.name),) if self._speculative and not resident else ()
        self._add(
            Op(
                kind="RESOLVE" if waiting else "UPDATE",
                lane="compute" if resident else "optimizer",
                unit=unit.name,
                reads=(("hostgrad", unit.name), ("clip",) if resident else ("result",), *waiting),
                writes=(("weights", unit.name), ("state", unit.name)),
                releases=waiting,
            )
        )


def _unique(*buffers: Buffer) -> tuple[Buffer, ...]:
    return tuple(dict.fromkeys(buffers))
