"""Runs programs: allocates what they name, checks memory before the first operation, hands each to its lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import TypeVar

import torch

from megatrain.checks import readable_bytes
from megatrain.devices import Device, Ticket
from megatrain.engine.boundaries import Boundaries
from megatrain.engine.boundaries import Need as BoundaryNeed
from megatrain.engine.buffers import DeviceMemory, Handles, Table, over_budget
from megatrain.engine.operations import Operations, Run
from megatrain.engine.peak import planned_peak
from megatrain.engine.placement import Mode
from megatrain.engine.program import Buffer, Builder, Op, Policy, UnitSpec
from megatrain.engine.schedule import WaitTracker
from megatrain.engine.simulate import Timeline, Waiting, simulate
from megatrain.engine.template import Templates
from megatrain.engine.trace import MicroBatch, Trace
from megatrain.engine.workspace import Need, Shape, Workspaces
from megatrain.errors import UserError
from megatrain.kernels import Kernel
from megatrain.optimizers import Optimizer
from megatrain.store import Store

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the engine runs; the meaning of a step does not depend on any of it."""

    slots: int
    compute_dtype: torch.dtype
    gradient_dtype: torch.dtype
    weights_resident: frozenset[str] = frozenset()
    states_resident: frozenset[str] = frozenset()
    activations: Mapping[str, Mode] = field(default_factory=dict)
    """Layers that keep something from forward to backward; the others recompute."""
    speculated: frozenset[str]
    boundaries_on_host: bool = False
    boundary_every: int = 1
    micro_batch_major: bool = False
    passing_gradients: bool = False
    host_budget: int | None = None


class Engine:
    """One model's lanes, buffers and programs."""

    def __init__(
        self,
        device: Device,
        store: Store,
        templates: Templates,
        optimizer: Optimizer,
        kernel: Kernel,
        options: EngineOptions,
        memory: DeviceMemory,
    ) -> None:
        self._device, self._store, self._options = device, store, options
        self._units = templates.decoder.units
        self.memory = memory
        self.trace: Trace | None = None
        """What training steps are recorded in, while they are."""
        differs = options.gradient_dtype is not torch.float32
        specs = [
            UnitSpec(
                unit.name,
                unit.layout.numel,
                unit.uses,
                weights_resident=unit.name in options.weights_resident,
                state_resident=unit.name in options.states_resident,
                keeps=unit.cheap_graph or unit.name in options.activations,
                lookup=unit.cheap_graph,
                speculates=unit.name in options.speculated,
            )
            for unit in self._units
        ]
        policy = Policy(
            sum_dtype_differs=differs,
            boundaries_on_host=options.boundaries_on_host,
            boundary_every=options.boundary_every,
            micro_batch_major=options.micro_batch_major,
            passing_gradients=options.passing_gradients,
        )
        self._builder = Builder(specs, options.slots, policy)
        self._table = Table(self.memory, device.poisons)
        self._boundaries = Boundaries(store, self._table, memory, device.torch_device, options.host_budget)
        self._tracker = WaitTracker()
        self._operations = Operations(device, store, templates, optimizer, kernel, options.activations)
        self._on_compute(self._warm_up, "WARM UP")
        self._allocate()
        rings = self._builder.rings
        self._workspaces = Workspaces(
            device,
            templates,
            weights=lambda unit: self._lend(
                ("slot", rings.slot_ring[unit], 0) if unit in rings.slot_ring else ("weights", unit), unit
            ),
            gradient=lambda unit: self._lend(self._scratch(unit, differs=differs), unit),
        )
        try:
            self._check_kept()
        except BaseException:  # who is refused tries again, and a second copy of the state may not fit
            self.close()
            raise

    def _check_kept(self) -> None:
        """Raise `UserError` unless layers of every kind can keep what they are to keep."""
        modes = self._options.activations
        kinds = {(unit.structure, modes[unit.name]): unit for unit in self._units if unit.name in modes}
        for (_, mode), unit in kinds.items():
            label = f"trying whether {unit.name} can be kept"
            self.memory.check(self._try_on_compute(partial(self._workspaces.check_keep, unit, mode), label), label)

    def train(self, run: Run) -> Ticket:
        """Submit one training step; returns the ticket after which ``run.result`` holds its results."""
        passing = len(self._units) if self._options.passing_gradients else 0
        results = self._store.results(passing + len(run.batches) + 2)
        run.squares, run.result = results[:passing], results[passing:]
        run.counts = {unit: self._store.step_count(unit) + 1 for unit in self._store.units}
        shapes = [Shape.of(batch) for batch in run.batches]
        self.admit(shapes, training=True)
        ops = self._builder.training_step(len(shapes), speculative=run.speculative)
        if self.trace is not None:
            self.trace.micro_batches[run.step] = [MicroBatch.of(batch) for batch in run.batches]
        need = self._boundary_need(ops, shapes)
        if not self._boundaries.is_ready(need):
            self._boundaries.make_room(need)
            self._on_compute(partial(self._boundaries.provide, need, self._options.compute_dtype), "PROVIDE boundaries")
        return self._submit(ops, run, until="PUBLISH")

    def score(self, run: Run) -> Ticket:
        """Submit a forward pass; returns the ticket after which ``run.scores`` is complete."""
        self.admit([Shape.of(batch) for batch in run.batches], training=False)
        return self._submit(self._builder.scoring(len(run.batches)), run, until="REPORT")

    def admit(self, shapes: Sequence[Shape], *, training: bool) -> None:
        """Raise `UserError` when micro-batches of these shapes cannot run within the budget."""
        activations = self._options.activations if training else {}
        modes = {_mode(activations, unit.name) for unit in self._units}
        for shape in shapes:
            self._measure_missing(shape, modes)
        budget = self.memory.budget
        peak, where = self._plan(shapes, activations, training=training)
        if budget is not None and peak > budget:  # so far perhaps by what a larger shape needs
            for shape in shapes:
                self._measure_missing(shape, modes, exactly=True)
            peak, where = self._plan(shapes, activations, training=training)
            if peak > budget:
                raise over_budget(peak, budget, where)
        self.memory.peak = max(self.memory.peak, peak)

    def _measure_missing(self, shape: Shape, modes: set[Mode], *, exactly: bool = False) -> None:
        for mode in modes:
            if not self._workspaces.knows(shape, mode, exactly=exactly):
                self._refuse_hopeless(shape)
                self._measure(shape, mode)

    def _refuse_hopeless(self, shape: Shape) -> None:
        """Raise when a layer's input and output alone exceed the memory: where a system promises memory that it does
        not have, trying would end the process."""
        hidden = shape.rows * shape.tokens * self._operations.width * self._options.compute_dtype.itemsize
        limit = self._device.capacity if self.memory.budget is None else self.memory.budget
        if self.memory.fixed.total() + 2 * hidden > limit:
            raise self._too_small(shape)

    def _plan(self, shapes: Sequence[Shape], activations: Mapping[str, Mode], *, training: bool) -> tuple[int, str]:
        """Peak device bytes of a program on measured shapes, and where it is reached."""

        def need(unit: str, micro: int) -> Need:
            return self._workspaces.need(shapes[micro], _mode(activations, unit))

        builder = Builder(self._builder.units, self._options.slots, self._builder.policy)
        ops = builder.training_step(len(shapes)) if training else builder.scoring(len(shapes))
        boundaries = self._boundary_need(ops, shapes)
        self._boundaries.check_host(boundaries)
        structure = {unit.name: unit.structure for unit in self._units}
        return planned_peak(
            ops,
            self.memory.fixed.total() + self._boundaries.more_device_bytes(boundaries),
            size=partial(_size, need, structure),
            workspace=partial(_workspace, need, structure),
        )

    def _boundary_need(self, ops: Sequence[Op], shapes: Sequence[Shape]) -> BoundaryNeed:
        tokens = max(shape.rows * shape.tokens for shape in shapes)
        return BoundaryNeed.of(ops, tokens * self._operations.width * self._options.compute_dtype.itemsize)

    def count(self, run: Run) -> None:
        """The step's updates, applied or under way, count from now on, unless there was nothing to apply."""
        if not isfinite(run.result[-2].item()):
            return
        for unit, count in run.counts.items():
            self._store.set_step_count(unit, count)

    def wait(self, ticket: Ticket) -> None:
        """Block until an operation is complete; raises `LaneError` when a lane has failed."""
        self._device.wait(ticket)
        self._tracker.observe(ticket)

    def forget_weights(self) -> None:
        """Weights on the host have changed outside a program: what the slots hold is out of date."""
        self._builder.rings.forget([unit.name for unit in self._units])

    def close(self) -> None:
        """Drop every buffer."""
        self._table.clear()
        self._boundaries.close()

    def compute_bound(self, shape: Shape, micro_batches: int) -> float:
        """Seconds of a step's arithmetic alone: every forward, loss, recompute and backward in order, weights resident;
        the second of two such steps, since the first one of them brings the device to the clocks of steady work."""
        builder = Builder(self._builder.units, self._options.slots, self._builder.policy)
        units = {unit.name: unit for unit in self._units}
        work = [
            (_measured_as(op), op.micro, units[op.unit], _mode(self._options.activations, op.unit))
            for op in builder.training_step(micro_batches)
            if _is_arithmetic(op)
        ]
        return self._try_on_compute(partial(self._workspaces.seconds_together, shape, work), f"TIME {shape}")

    def predict(self, trace: Trace) -> Timeline:
        """The last step of a trace, simulated: its arithmetic takes what it takes alone, measured now on its largest
        micro-batch, in proportion to tokens (the loss: targets), and everything else its typical time in the trace."""
        last = trace.micro_batches[max(trace.micro_batches)]
        largest = max((micro_batch.shape for micro_batch in last), key=lambda shape: shape.rows * shape.tokens)
        alone = self._time_alone(largest)
        typical = trace.typical_seconds({unit.name: unit.structure for unit in self._units})

        def seconds(waiting: Waiting) -> float:
            op = waiting.op
            if not _is_arithmetic(op):
                return typical(op)
            micro_batch = trace.micro_batches[waiting.step][op.micro]
            shape = micro_batch.shape
            share = shape.rows * shape.tokens / (largest.rows * largest.tokens)
            return alone(op) * share * (micro_batch.targets if op.kind == "LOSS" else 1)

        program = [timed.waiting for timed in trace.ops]
        costs = {id(waiting.op): seconds(waiting) for waiting in program}
        one_processor = self._device.torch_device.type == "cpu"
        return simulate(program, lambda op: costs[id(op)], one_processor=one_processor)

    def _time_alone(self, shape: Shape) -> Callable[[Op], float]:
        """Seconds of each arithmetic operation on a micro-batch of the shape, weights resident and nothing else going
        on; measured now."""
        activations = self._options.activations
        times: dict[Mode, dict[tuple[str, int], float]] = {}
        structure = {unit.name: unit.structure for unit in self._units}

        def measure() -> None:
            for mode in {_mode(activations, unit.name) for unit in self._units}:
                times[mode] = self._workspaces.seconds(shape, mode)

        self._on_compute(measure, f"TIME {shape}")
        return lambda op: times[_mode(activations, op.unit)][_measured_as(op), structure[op.unit]]

    def _warm_up(self) -> None:
        self.memory.fixed["libraries"] += self._device.warm_up(self._options.compute_dtype)

    def _measure(self, shape: Shape, mode: Mode) -> None:
        """It writes to the gradient buffers; of the slots it reads whatever they hold."""
        try:
            self._try_on_compute(partial(self._workspaces.measure, shape, mode), f"MEASURE {shape}")
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise self._too_small(shape) from error

    def _too_small(self, shape: Shape) -> UserError:
        budget = self.memory.budget
        limit = "the device's memory" if budget is None else readable_bytes(budget)
        return UserError(
            f"placement.device_memory: {limit} is too small for a micro-batch of {shape.rows} x {shape.tokens} tokens;"
            " use shorter sequences or fewer rows a micro-batch"
        )

    def _try_on_compute(self, run: Callable[[], T], label: str) -> T:
        """Result of ``run`` on the compute lane, whose allocations and streams are the step's. `UserError` and lack of
        memory, as `MemoryError` or `torch.OutOfMemoryError`, are raised here and are no failure of the lane."""
        results: list[T] = []
        failures: list[Exception] = []

        def attempt() -> None:
            try:
                results.append(run())
            except (UserError, torch.OutOfMemoryError, MemoryError) as error:
                failures.append(error)
            except RuntimeError as error:
                if "allocate memory" not in str(error):  # what torch raises on the host
                    raise
                failures.append(MemoryError(str(error)))

        self._on_compute(attempt, label)
        if failures:
            raise failures.pop()
        return results[0]

    def _on_compute(self, run: Callable[[], None], label: str) -> None:
        ticket, waits = self._tracker.add(Op(kind=label, lane="compute", writes=self._gradient_buffers))
        self._device.submit(ticket, label, "", run, waits)
        self.wait(ticket)

    def _submit(self, ops: Sequence[Op], run: Run, until: str) -> Ticket:
        last: Ticket | None = None
        for op in ops:
            ticket, waits = self._tracker.add(op)
            perform: Callable[[], None] = partial(self._perform, op, run)
            if self.trace is not None and run.training:
                perform = self.trace.timing(Waiting(op, run.step, ticket, tuple(waits)), perform)
            self._device.submit(ticket, str(op), op.unit, perform, waits)
            if op.kind == until:
                last = ticket
        assert last is not None
        return last

    def _perform(self, op: Op, run: Run) -> None:
        self._operations.perform(op, Handles(self._table, op), run)
        for buffer in op.releases:
            self._table.release(buffer)

    def _allocate(self) -> None:
        """Slots and gradient buffers on the device; weights, gradients on the host."""
        rings, where = self._builder.rings, self._device.torch_device
        compute, gradient_dtype = self._options.compute_dtype, self._options.gradient_dtype

        wanted: list[tuple[Buffer, str, int, torch.dtype]] = []
        for ring, numel in rings.slot_numel.items():
            label = "resident weights" if ring.startswith("own ") else "slots"
            wanted += [(("slot", ring, i), label, numel, compute) for i in range(rings.slots[ring])]
        for ring, numel in rings.grad_numel.items():
            wanted += [(("grad", ring, i), "gradients", numel, gradient_dtype) for i in range(rings.buffers[ring])]
        if self._builder.policy.sum_dtype_differs:
            wanted += [
                (("sum", ring), "gradient sums", numel, torch.float32) for ring, numel in rings.sum_numel.items()
            ]
        need = sum(numel * dtype.itemsize for _, _, numel, dtype in wanted)
        self.memory.require(need, "holding slots and gradients, before any activation,")
        for name, label, numel, dtype in wanted:
            self._table.fix(name, self.memory.allocate(label, numel, dtype, where))
        for unit in self._units:
            self._table.fix(("weights", unit.name), self._store.slab(unit.name).head)
            self._table.fix(("hostgrad", unit.name), self._store.gradient(unit.name))
        for ring, (numel, count) in rings.landings.items():
            for i in range(count):
                self._table.fix(("landing", ring, i), self._store.landing(numel, gradient_dtype))

    @property
    def _gradient_buffers(self) -> tuple[Buffer, ...]:
        resident = self._options.states_resident
        return tuple(
            name
            for name in self._table.fixed_names
            if name[0] in ("grad", "sum") or (name[0] == "hostgrad" and name[1] in resident)
        )

    def _scratch(self, unit: str, *, differs: bool) -> Buffer:
        """A gradient buffer to write to while measuring."""
        rings = self._builder.rings
        if differs:
            return ("sum", rings.sum_ring[unit])
        return ("hostgrad", unit) if unit in self._options.states_resident else ("grad", rings.grad_ring[unit], 0)

    def _lend(self, name: Buffer, unit: str) -> torch.Tensor:
        buffer: torch.Tensor = self._table.get(name)
        return buffer[: self._store.layout(unit).numel]


def _mode(activations: Mapping[str, Mode], unit: str) -> Mode:
    return activations.get(unit, "recompute")


def _size(need: Callable[[str, int], Need], structure: dict[str, int], buffer: Buffer) -> int:
    kind, micro = str(buffer[0]), buffer[-1]
    if kind in ("act", "dhid", "batch", "context"):
        return need("", int(micro)).held["act" if kind == "dhid" else kind, -1]
    if kind == "graph":
        unit = str(buffer[1])
        return need(unit, int(micro)).held["graph", structure[unit]]
    return 0


def _workspace(need: Callable[[str, int], Need], structure: dict[str, int], op: Op) -> int:
    if op.micro < 0 or not op.unit:
        return 0
    return need(op.unit, op.micro).peak[_measured_as(op), structure[op.unit]]


def _is_arithmetic(op: Op) -> bool:
    """Whether it is a unit's work on a micro-batch, which `Workspaces` times."""
    return op.lane == "compute" and op.micro >= 0 and op.unit != ""


def _measured_as(op: Op) -> str:
    return "FORWARD" if op.kind == "RECOMPUTE" else op.kind
