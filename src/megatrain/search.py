"""The fastest placement that fits, found by simulating candidate programs. No torch.

The candidates of a model and a step are the same whatever the memory, so more memory only adds to what fits: it is
never slower.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, product

from megatrain.costs import Costs, Workload
from megatrain.engine.peak import planned_peak
from megatrain.engine.program import Builder, Op, Policy, UnitSpec
from megatrain.engine.simulate import Timeline, Waiting, derive, simulate
from megatrain.machines import MachineSpec
from megatrain.model_spec import ModelSpec

DEVICE_MARGIN = 0.05
"""Share of device memory that a plan leaves: what fragmentation and the prediction's error may take."""

HOST_MARGIN = 0.10
"""Share of host memory that a plan leaves to the system, the data and the framework."""

PROCESS_BYTES = 600 << 20
"""Host bytes of interpreter, torch, tokenizer and rows."""

_RUNNERS_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be trained: a step of ``rows`` x ``seq_len`` tokens, and limits in bytes (None: the machine's)."""

    rows: int
    seq_len: int
    clipping: str = "auto"
    compute_dtype: str = "bfloat16"
    gradient_dtype: str | None = None
    device_memory: int | None = None
    host_memory: int | None = None


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """One candidate: the first ``states`` units live on the device, the last ``kept`` layers keep their activations."""

    slots: int
    states: int
    kept: int
    micro_batches: int
    speculative: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """A choice that fits, with what it takes."""

    choice: Choice
    timeline: Timeline
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    peak_at: str


@dataclass(frozen=True, slots=True)
class Shortage:
    """Bytes that are missing for the smallest candidate; ``where`` its device peak is reached."""

    device_need: int
    device_missing: int
    host_need: int
    host_missing: int
    where: str


def _steps(total: int, parts: int) -> list[int]:
    """Counts from 0 to ``total``: the first few, and even shares."""
    return sorted({n for n in (0, 1, 2, 3, 5, 8) if n <= total} | {total * i // parts for i in range(parts + 1)})


class Search:
    """All candidates of one model, machine and request."""

    def __init__(self, model: ModelSpec, machine: MachineSpec, request: Request) -> None:
        self.model, self.machine, self.request = model, machine, request
        self.device_limit = _limit(machine.gpu_memory, request.device_memory, DEVICE_MARGIN)
        self.host_limit = _limit(machine.host_memory, request.host_memory, HOST_MARGIN) - PROCESS_BYTES
        self.costs = cache(self._make_costs)
        self._fixed_labels = cache(self._make_fixed_labels)
        self._host_labels = cache(self._make_host_labels)
        self._compute_seconds = cache(self._make_compute_seconds)
        self._update_seconds = cache(self._make_update_seconds)
        self._derived: dict[tuple[int, int, bool], list[Waiting]] = {}

    def best(self) -> list[Candidate]:
        """The fastest candidate that fits and the next two, fastest first; empty when none fits."""
        found: dict[tuple[int, int, bool], Candidate] = {}  # slots and micro-batches alone make no other plan
        ranked: list[Candidate] = []
        for bound, choice in sorted((self._bound(choice), choice) for choice in self._choices):
            if len(ranked) > _RUNNERS_UP and bound >= ranked[_RUNNERS_UP].timeline.seconds:
                break
            candidate = self._candidate(choice)
            if candidate is None:
                continue
            kind = (choice.states, choice.kept, choice.speculative)
            if kind not in found or candidate.timeline.seconds < found[kind].timeline.seconds:
                found[kind] = candidate
                ranked = sorted(found.values(), key=lambda c: (c.timeline.seconds, c.choice))
        return ranked[: _RUNNERS_UP + 1]

    def shortage(self) -> Shortage:
        """What is missing, when nothing fits."""
        smallest = Choice(1, 0, 0, max(c.micro_batches for c in self._choices), self.request.clipping == "speculative")
        need, where = self.peak(smallest)
        fitting = [smallest]
        for choice in self._choices:
            same = choice.slots == 1 and choice.micro_batches == smallest.micro_batches and not choice.kept
            if same and self.peak(choice)[0] <= self.device_limit:
                fitting.append(choice)
        host = min(sum(self.host_bytes(choice).values()) for choice in fitting)
        return Shortage(need, max(0, need - self.device_limit), host, max(0, host - self.host_limit), where)

    @cached_property
    def _choices(self) -> list[Choice]:
        rows = self.request.rows
        micros = [2**i for i in range(rows.bit_length()) if rows % 2**i == 0]
        modes = {"auto": (False, True), "deferred": (False,), "speculative": (True,)}[self.request.clipping]
        grid = product(
            (1, 2, 3), _steps(len(self.model.units), 10), _steps(self.model.layers, 8), sorted({*micros, rows}), modes
        )
        every = len(self.model.units)
        return [Choice(*each) for each in grid if not (each[1] == every and (each[0] > 1 or each[4] is not modes[0]))]

    def _make_costs(self, micro_batches: int) -> Costs:
        """Costs of the step in so many micro-batches."""
        request = self.request
        work = Workload(
            rows=request.rows,
            seq_len=request.seq_len,
            micro_batches=micro_batches,
            compute_dtype=request.compute_dtype,
            gradient_dtype=request.gradient_dtype or request.compute_dtype,
        )
        return Costs(self.model, self.machine, work)

    def units(self, choice: Choice) -> list[UnitSpec]:
        """The units as the engine's builder takes them."""
        kept = self._kept(choice)
        return [
            UnitSpec(
                unit.name,
                unit.layout.numel,
                unit.uses,
                state_resident=index < choice.states,
                keeps=unit.lookup or unit.name in kept,
                lookup=unit.lookup,
            )
            for index, unit in enumerate(self.model.units)
        ]

    def host_bytes(self, choice: Choice) -> dict[str, int]:
        """Host bytes by label."""
        return self._host_labels(choice.states, choice.speculative)

    def peak(self, choice: Choice) -> tuple[int, str]:
        """Peak device bytes and the operation at which it is reached."""
        costs, keeps = self.costs(choice.micro_batches), self._keeps(choice)
        builder = self._builder(choice)
        return planned_peak(
            builder.training_step(1, speculative=choice.speculative),
            self._fixed(choice),
            costs.buffer_bytes,
            lambda op: costs.workspace(op, kept=op.unit in keeps),
        )

    def _candidate(self, choice: Choice) -> Candidate | None:
        host = self.host_bytes(choice)
        if sum(host.values()) > self.host_limit or self._least_device(choice) > self.device_limit:
            return None
        peak, where = self.peak(choice)
        if peak > self.device_limit:
            return None
        return Candidate(choice, self.timeline(choice), self._labels(choice, peak), host, where)

    def timeline(self, choice: Choice) -> Timeline:
        """A steady step of a candidate."""
        costs, keeps = self.costs(choice.micro_batches), self._keeps(choice)
        key = (choice.slots, choice.states, choice.speculative)
        if key not in self._derived:  # keeping activations changes no wait between lanes
            builder = self._builder(choice)
            steps = (builder.training_step(1, speculative=choice.speculative) for _ in range(2))
            self._derived[key] = derive(steps)
        return simulate(self._derived[key], lambda op: costs.seconds(op, kept=op.unit in keeps))

    def _builder(self, choice: Choice) -> Builder:
        differs = (self.request.gradient_dtype or self.request.compute_dtype) != "float32"
        return Builder(self.units(choice), choice.slots, Policy(sum_dtype_differs=differs))

    def _kept(self, choice: Choice) -> set[str]:
        layers = [unit.name for unit in self.model.units[1:-1]]
        return set(layers[len(layers) - choice.kept :])

    def _keeps(self, choice: Choice) -> set[str]:
        return self._kept(choice) | {unit.name for unit in self.model.units if unit.lookup}

    def _fixed(self, choice: Choice) -> int:
        return self._fixed_labels(choice.slots, choice.states).total()

    def _make_fixed_labels(self, slots: int, states: int) -> Counter[str]:
        choice = Choice(slots, states, 0, 1, False)
        return self.costs(1).fixed_device_bytes(self.units(choice), self._builder(choice).rings)

    def _make_host_labels(self, states: int, speculative: bool) -> dict[str, int]:
        units = self.units(Choice(1, states, 0, 1, speculative))
        return self.costs(1).host_bytes(units, speculative=speculative)

    def _least_device(self, choice: Choice) -> int:
        """Device bytes held while the loss runs: no more than the peak, and quick to tell."""
        costs = self.costs(choice.micro_batches)
        boundaries = (self.model.layers + 1) * costs.buffer_bytes(("act", "", 0))
        loss = costs.workspace(Op(kind="LOSS", lane="compute", unit=self.model.units[-1].name), kept=False)
        return self._fixed(choice) + boundaries + choice.kept * self._graph_bytes + loss

    @cached_property
    def _graph_bytes(self) -> int:
        return self.costs(1).buffer_bytes(("graph", self.model.units[1].name, 0))

    def _labels(self, choice: Choice, peak: int) -> dict[str, int]:
        costs = self.costs(choice.micro_batches)
        labels = dict(self._fixed_labels(choice.slots, choice.states))
        labels["boundary activations"] = (self.model.layers + 1) * costs.buffer_bytes(("act", "", 0))
        if choice.kept:
            labels["kept activations"] = choice.kept * self._graph_bytes
        labels["workspace and inputs at the peak"] = max(0, peak - sum(labels.values()))
        return labels

    def _bound(self, choice: Choice) -> float:
        """Seconds that the busiest lane needs: no step is shorter, and quick to tell."""
        compute, saved = self._compute_seconds(choice.micro_batches)
        resident, host = self._update_seconds(choice.speculative)
        return max(compute - saved[choice.kept] + resident[choice.states], host[choice.states])

    def _make_compute_seconds(self, micro_batches: int) -> tuple[float, list[float]]:
        """Seconds of all arithmetic with full recompute, and what keeping the last n layers saves of it."""
        costs, (first, *layers, last) = self.costs(micro_batches), self.model.units

        def seconds(kind: str, unit: str, *, kept: bool = False) -> float:
            return costs.seconds(Op(kind=kind, lane="compute", unit=unit), kept=kept)

        full = [seconds("BACKWARD", unit.name) for unit in layers]
        kept = [seconds("BACKWARD", unit.name, kept=True) for unit in layers]
        saved = list(accumulate((a - b for a, b in zip(reversed(full), reversed(kept), strict=True)), initial=0.0))
        edges = seconds("BACKWARD", first.name, kept=first.lookup) + seconds("LOSS", last.name)
        return sum(full) + edges + sum(seconds("FORWARD", unit.name) for unit in (first, *layers)), saved

    def _make_update_seconds(self, speculative: bool) -> tuple[list[float], list[float]]:
        """Seconds of updates on the device, and on the host, when the first n units live on the device."""
        costs, units = self.costs(1), self.model.units
        kind = "SPECULATE" if speculative else "UPDATE"
        device = [costs.seconds(Op(kind="UPDATE", lane="compute", unit=u.name), kept=False) for u in units]
        host = [costs.seconds(Op(kind=kind, lane="optimizer", unit=u.name), kept=False) for u in units]
        left = list(accumulate(reversed(host), initial=0.0))
        return list(accumulate(device, initial=0.0)), left[::-1]


def _limit(machine: int, asked: int | None, margin: float) -> int:
    return int((machine if asked is None else min(machine, asked)) * (1 - margin))
