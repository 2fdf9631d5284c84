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
``("landing", ring, i)``    host buffer that gradients pass through, where they are not kept
``("square", unit)``        on the host, sum of squares of a gradient that passes
``("waiting", unit)``       on the host, which blocks of the unit a speculative step has left for its end
``("batch", m)``            token ids, targets and positions of micro-batch m on the device
``("context", m)``          what the model's prologue hands to every layer: positions, rotary pairs, masks
``("act", unit, m)``        the unit's input (boundary activation)
``("stage", i)``            fixed device buffer with one boundary, where boundaries live on the host
``("hostact", unit, m)``    the unit's input on the host
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
from itertools import pairwise

from megatrain.engine._rings import Rings, Stages, blocks_of, without_unread_copies

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
    speculates: bool = True
    """In a speculative step it is updated as its gradient lands; otherwise it waits for the norm, as in any step."""


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
    input: Buffer | None = None
    """The boundary that a layer starts from."""
    output: Buffer | None = None
    """The boundary that a forward leaves."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What varies between programs of one model."""

    sum_dtype_differs: bool = False
    """Gradients leave in a dtype other than FP32, so sums need a buffer of their own."""
    boundaries_on_host: bool = False
    """Boundary activations wait for backward on the host."""
    boundary_every: int = 1
    """Layers of a block: only its first layer's input is kept, the others' are computed again before its backward."""
    micro_batch_major: bool = False
    """A micro-batch passes through the whole model, forward and backward, before the next one starts."""
    passing_gradients: bool = False
    """Gradients are not kept on the host: a unit is updated as its own lands, without the norm of all."""


class Builder:
    """Writes programs for one model. Its rings persist, so a unit that is still in a slot is not fetched again."""

    def __init__(self, units: Sequence[UnitSpec], slots: int, policy: Policy) -> None:
        self.units = list(units)
        self._named = {unit.name: unit for unit in units}
        self.rings = Rings(units, slots, policy)
        self.policy = policy
        self._blocks = blocks_of(self.units[1:-1], policy.boundary_every)
        starts = [block[0] for block in self._blocks]
        self._kept = {unit.name for unit in starts}
        # A kept graph holds its input, so that one stays where it is.
        self._offloaded = {unit.name for unit in starts if policy.boundaries_on_host and not unit.keeps}
        self._ops: list[Op] = []

    def training_step(self, micros: int, *, speculative: bool = False) -> list[Op]:
        """Forward, loss and backward through all units, then norm, and updates in forward order.

        Layer-major: all micro-batches pass through a unit before the next one; or micro-batch-major. A ``speculative``
        one updates units on the host as their gradients land, and corrects that at the end.
        """
        together = 1 if self.policy.micro_batch_major else micros
        self._begin(micros, training=True, speculative=speculative)
        # One boundary for each micro-batch under way, one that is written, one whose copy is under way.
        self._stages = Stages(together + 2)
        for start in range(0, micros, together):
            self._forward_and_backward(range(start, start + together))
        names = [unit.name for unit in self.units]
        losses: tuple[Buffer, ...] = tuple(("loss", m) for m in range(micros))
        norms: tuple[Buffer, ...] = tuple(("norm", name) for name in names)
        self._add(Op(kind="NORM", lane="compute", reads=norms, writes=(("clip",),)))
        self._add(Op(kind="PUBLISH", lane="d2h", reads=(("clip",), *losses), writes=(("result",),)))
        for unit in self.units:
            if unit.state_resident or not self.policy.passing_gradients:
                self._update(unit)
        self._release_stale(self.rings.forget(names))
        return without_unread_copies(self._ops)

    def scoring(self, micros: int) -> list[Op]:
        """The forward half: log-probabilities of the targets of each micro-batch, copied to the host."""
        self._begin(micros, training=False)
        self._forward(range(micros))
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
                    input=act,
                    reads=(*slots.values(), act, ("batch", m)),
                    writes=(("loss", m),),
                    releases=(act, ("batch", m), ("context", m)),
                )
            )
            self._add(Op(kind="REPORT", lane="d2h", micro=m, reads=(("loss", m),), writes=(("scores", m),)))
        return self._ops

    def _begin(self, micros: int, *, training: bool, speculative: bool = False) -> None:
        self._ops = []
        self._micros, self._training, self._speculative = micros, training, speculative
        self._finished: dict[str, Buffer] = {}

    def _forward_and_backward(self, group: range) -> None:
        """All of a step's work on micro-batches that go through each unit together."""
        self._forward(group)
        self._loss(group)
        for block in reversed(self._blocks):
            for unit, following in pairwise(block):
                self._run("RECOMPUTE", unit, following, group)
            for unit in reversed(block):
                self._backward(unit, group)
        self._backward(self.units[0], group)

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

    def _forward(self, group: range) -> None:
        for m in group:
            self._add(Op(kind="INPUT", lane="compute", micro=m, writes=(("batch", m),)))
        for unit, following in pairwise(self.units):
            self._run("FORWARD", unit, following, group)

    def _run(self, kind: str, unit: UnitSpec, following: UnitSpec, group: range) -> None:
        """A unit's forward: the first, or in backward once more for the input of the following one."""
        slots = self._weights(unit)
        forward = kind == "FORWARD"
        for m in group:
            act = self._input(unit, m)
            target = self._output(following, m)
            reads: tuple[Buffer, ...] = (*slots.values(), ("batch", m))
            writes: tuple[Buffer, ...] = (target,)
            if act is None:
                writes = (*writes, ("context", m))
            else:
                reads = (*reads, ("context", m), act)
            if forward and self._training and unit.keeps:
                writes = (*writes, ("graph", unit.name, m))
            op = Op(kind=kind, lane="compute", unit=unit.name, micro=m, weights=slots, reads=reads, writes=writes)
            op.input, op.output = act, target
            if act is not None and forward and not (self._training and unit.name in self._kept):
                op.releases = (act,)
            self._add(op)
            if forward and self._is_staged(unit):
                assert act is not None
                self._stages.free(act)
            if self._is_staged(following):
                host = self._on_host(following, m)
                self._add(Op(kind="OFFLOAD", lane="d2h", unit=following.name, micro=m, reads=(target,), writes=(host,)))

    def _is_staged(self, unit: UnitSpec) -> bool:
        return self._training and unit.name in self._offloaded

    def _on_host(self, unit: UnitSpec, m: int) -> Buffer:
        return ("hostact", unit.name, 0 if self.policy.micro_batch_major else m)

    def _output(self, following: UnitSpec, m: int) -> Buffer:
        """Where the following unit's input goes."""
        return self._stages.take((following.name, m)) if self._is_staged(following) else ("act", following.name, m)

    def _input(self, unit: UnitSpec, m: int) -> Buffer | None:
        """Where a unit's input is (the first has none), with a RELOAD if it is no longer on the device."""
        if unit is self.units[0]:
            return None
        if not self._is_staged(unit):
            return ("act", unit.name, m)
        stage = self._stages.find((unit.name, m))
        if stage is None:
            stage, host = self._stages.take((unit.name, m)), self._on_host(unit, m)
            reload = Op(kind="RELOAD", lane="h2d", unit=unit.name, micro=m, reads=(host,), writes=(stage,))
            reload.releases = (host,)
            self._add(reload)
        return stage

    def _sum_buffer(self, unit: str, finished: Buffer, *, several: bool) -> Buffer:
        if several and self.policy.sum_dtype_differs:
            return ("sum", self.rings.sum_ring[unit])
        return finished

    def _loss(self, group: range) -> None:
        head = self.units[-1]
        slots = self._weights(head)
        # A chunked loss adds to its gradients chunk by chunk, so it always sums.
        sums = {name: self._sum_buffer(name, self._gradient(name), several=True) for name in (head.name, *head.uses)}
        own = self._gradient(head.name)
        for m in group:
            last = m == self._micros - 1
            act: Buffer = ("act", head.name, m)
            finish: tuple[Buffer, ...] = (own, ("norm", head.name)) if last else ()
            self._add(
                Op(
                    kind="LOSS",
                    lane="compute",
                    unit=head.name,
                    micro=m,
                    weights=slots,
                    input=act,
                    gradients=sums,
                    finished=own,
                    first=m == 0,
                    last=last,
                    reads=(*slots.values(), act, ("batch", m)),
                    writes=_unique(*sums.values(), *finish, ("dhid", m), ("loss", m)),
                    releases=(act,),
                )
            )
            if last:
                self._drain(head.name, own)

    def _backward(self, unit: UnitSpec, group: range) -> None:
        slots = {} if unit.lookup else self._weights(unit)
        started = unit.name in self.units[-1].uses
        finished = self._gradient(unit.name)
        target = self._sum_buffer(unit.name, finished, several=started or self._micros > 1)
        first_unit = unit is self.units[0]
        for m in group:
            last = m == self._micros - 1
            boundary = self._input(unit, m)
            kept: tuple[Buffer, ...] = (("graph", unit.name, m),) if unit.keeps else ()
            act: tuple[Buffer, ...] = () if boundary is None else (boundary,)
            finish: tuple[Buffer, ...] = (finished, ("norm", unit.name)) if last else ()
            done: tuple[Buffer, ...] = (("batch", m), ("context", m), ("dhid", m)) if first_unit else ()
            self._add(
                Op(
                    kind="BACKWARD",
                    lane="compute",
                    unit=unit.name,
                    micro=m,
                    weights=slots,
                    input=boundary,
                    gradients={unit.name: target},
                    finished=finished,
                    first=m == 0 and not started,
                    last=last,
                    reads=(*slots.values(), ("batch", m), ("context", m), *act, *kept, ("dhid", m)),
                    writes=_unique(target, *finish, *(() if first_unit else (("dhid", m),))),
                    releases=(*act, *kept, *done),
                )
            )
            if boundary is not None and self._is_staged(unit):
                self._stages.free(boundary)
            if last:
                self._drain(unit.name, finished)

    def _gradient(self, unit: str) -> Buffer:
        """Where a unit's finished gradient goes: a buffer to drain, or beside the state that it will update."""
        if self._named[unit].state_resident:
            return ("hostgrad", unit)
        if unit not in self._finished:
            self._finished[unit] = self.rings.gradient(unit)
        return self._finished[unit]

    def _drain(self, unit: str, finished: Buffer) -> None:
        if self._named[unit].state_resident:
            return
        reads: tuple[Buffer, ...] = (finished,)
        arrives: tuple[Buffer, ...] = (("hostgrad", unit),)
        updates: tuple[Buffer, ...] = (("weights", unit), ("state", unit))
        kind = ""
        if self.policy.passing_gradients:
            kind, reads, arrives = "APPLY", (finished, ("norm", unit)), (self.rings.landing(unit), ("square", unit))
        elif self._speculates(unit):
            kind, updates = "SPECULATE", (*updates, ("waiting", unit))
        self._add(Op(kind="DRAIN", lane="d2h", unit=unit, reads=reads, writes=arrives, releases=(finished,)))
        if kind:
            self._add(Op(kind=kind, lane="optimizer", unit=unit, reads=arrives, writes=updates))

    def _speculates(self, name: str) -> bool:
        unit = self._named[name]
        return self._speculative and unit.speculates and not unit.state_resident

    def _update(self, unit: UnitSpec) -> None:
        resident = unit.state_resident
        waiting: tuple[Buffer, ...] = (("waiting", unit.name),) if self._speculates(unit.name) else ()
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
