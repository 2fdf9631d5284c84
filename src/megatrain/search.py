"""The fastest placement that fits, found by simulating candidate programs. No torch.

The candidates of a model and a step are the same whatever the memory, so more memory only adds to what fits: it is
never slower.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import product

from megatrain.bounds import Arithmetic, Updates
from megatrain.choices import Choice, Choices, Request, is_no_slower, unit_bytes
from megatrain.costs import Costs, Workload, process_bytes, resident_bytes
from megatrain.devices import TUNER_LEAVES
from megatrain.engine._rings import Rings, blocks_of
from megatrain.engine.peak import planned_peak
from megatrain.engine.placement import Mode, last_units
from megatrain.engine.program import Builder, Op, Policy, UnitSpec
from megatrain.engine.simulate import Timeline, Waiting, derive, simulate
from megatrain.machines import MachineSpec
from megatrain.model_spec import ModelSpec

DEVICE_MARGIN = 0.05
"""Share of device memory that a plan leaves: what fragmentation and the prediction's error may take."""

HOST_MARGIN = 0.10
"""Share of host memory that a plan leaves to the system, the data and the framework."""

_FEW = 3  # micro-batches of a micro-batch-major program: the first, the last, and one that stands for all others
_SAME = 1 + 1e-9  # factor between step times that do not differ


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


class Search:
    """All candidates of one model, machine and request.

    ``device_margin`` and ``host_margin``: shares of memory that stay free. Raises `UserError` when an option that the
    request fixes is no placement.
    """

    def __init__(
        self,
        model: ModelSpec,
        machine: MachineSpec,
        request: Request,
        *,
        device_margin: float = DEVICE_MARGIN,
        host_margin: float = HOST_MARGIN,
    ) -> None:
        self.model, self.machine, self.request = model, machine, request
        self.device_limit = _limit(machine.gpu_memory, request.device_memory, device_margin)
        self._process = process_bytes(on_gpu=not machine.unified)
        self.host_limit = _limit(machine.host_memory, request.host_memory, host_margin) - self._process
        self.costs = cache(self._make_costs)
        self._fixed_labels = cache(self._make_fixed_labels)
        self._host_labels = cache(self._make_host_labels)
        self._moving_peak = cache(self._make_moving_peak)
        self._starts = cache(self._make_starts)
        self._arithmetic = cache(self._make_arithmetic)
        self._updates = cache(self._make_updates)
        self._derived: dict[Choice, list[Waiting]] = {}
        self.choices = Choices(model, request, unified=machine.unified)
        self._early = last_units("optim.speculated", request.speculated, unit_bytes(model, request)["states"])

    def best(self, others: int = 0) -> list[Candidate]:
        """The fastest candidate that fits and so many ``others``, fastest first; empty when none fits."""
        found: dict[Choice, Candidate] = {}  # slots, resident weights and micro-batches alone make no other plan
        ranked: list[Candidate] = []
        possible = self.choices.groups(sorted(self._possible_states))
        groups = [group for group in possible if self._least_device(group) <= self.device_limit]
        for bound, group in sorted((self._bound(group), group) for group in groups):
            if len(ranked) > others and bound >= ranked[-1].timeline.seconds:
                break
            if not self._may_fit(group):
                continue
            candidate = self._fastest(group)
            if candidate is None:
                continue
            kind = replace(group, micro_batches=0, host=candidate.choice.host)
            if kind not in found or candidate.timeline.seconds < found[kind].timeline.seconds:
                found[kind] = candidate
                ranked = sorted(found.values(), key=lambda c: (c.timeline.seconds, c.choice))[: others + 1]
        return [*map(self._frugal, ranked[:1]), *ranked[1:]]

    def smallest(self) -> Candidate:
        """The candidate that takes least of the device, whether it fits or not."""
        choice = min(self.choices.smallest, key=lambda choice: self.peak(choice)[0])
        peak, where = self.peak(choice)
        return Candidate(choice, self.timeline(choice), self._labels(choice, peak), self.host_bytes(choice), where)

    def shortage(self) -> Shortage:
        """What is missing, when nothing fits."""
        smallest = self.smallest()
        need = sum(smallest.device_bytes.values())
        fitting = [choice for choice in self.choices.smallest if self.peak(choice)[0] <= self.device_limit]
        fitting = fitting or self.choices.smallest
        host = min(self.host_need(choice) for choice in fitting)
        return Shortage(need, max(0, need - self.device_limit), host, max(0, host - self.host_limit), smallest.peak_at)

    @cached_property
    def _possible_states(self) -> set[int]:
        """How many units may have their state on the device, were there nothing but state, slots and gradients."""
        possible, values = set(), self.choices.values
        for states in values["states"]:
            labels = self._fixed_labels(min(values["slots"]), states, min(values["weights"]), False)
            device, host = labels.total(), sum(self._host_labels(states, False, 0).values())
            if device <= self.device_limit and host + device * self.machine.unified <= self.host_limit:
                possible.add(states)
        return possible

    def _may_fit(self, group: Choice) -> bool:
        """Whether any choice of a group could fit; quick to tell where none does."""
        if self._least_device(group) > self.device_limit:
            return False
        places = {group.host, min(self.choices.values["host"])}
        return any(self._fits(replace(group, host=host)) for host in places)

    def _fits(self, choice: Choice) -> bool:
        if sum(self.host_bytes(choice).values()) > self.host_limit or self.peak(choice)[0] > self.device_limit:
            return False
        return self.host_need(choice) <= self.host_limit

    def _fastest(self, group: Choice) -> Candidate | None:
        """The fastest of a group that fits: more slots, more resident weights and fewer copies are never slower."""
        found: list[Candidate] = []
        for choice in self.choices.variants(group):
            if any(is_no_slower(other.choice, choice) for other in found):
                continue
            candidate = self._candidate(choice)
            if candidate is not None:
                found.append(candidate)
        return min(found, key=lambda c: (c.timeline.seconds, c.choice), default=None)

    def _frugal(self, candidate: Candidate) -> Candidate:
        """The same at the same speed without resident weights, or with fewer slots, where these gain nothing."""
        choice = candidate.choice
        slots = [n for n in sorted(self.choices.values["slots"]) if n <= choice.slots and not choice.major]
        for weights, number in product(sorted({min(self.choices.values["weights"]), choice.weights}), slots):
            less = replace(choice, slots=number, weights=weights)
            if less != choice and self.timeline(less).seconds <= candidate.timeline.seconds * _SAME:
                return self._candidate(less) or candidate
        return candidate

    def units(self, choice: Choice) -> list[UnitSpec]:
        """The units as the engine's builder takes them."""
        modes = self._modes(choice)
        return [
            UnitSpec(
                unit.name,
                unit.layout.numel,
                unit.uses,
                weights_resident=choice.states <= index < choice.weights,
                state_resident=index < choice.states,
                keeps=unit.name in modes,
                lookup=unit.lookup,
                speculates=unit.name in self._early,
            )
            for index, unit in enumerate(self.model.units)
        ]

    def host_bytes(self, choice: Choice) -> dict[str, int]:
        """Host bytes by label."""
        boundaries = self._starts(choice.kept + choice.selective, choice.every)[0] if choice.host else 0
        costs = self._costs_of(choice)
        nbytes = boundaries * costs.workload.micro_batches * costs.pooled_boundary_bytes
        return self._host_labels(choice.states, choice.speculative, nbytes)

    def peak(self, choice: Choice) -> tuple[int, str]:
        """Peak device bytes and the operation at which it is reached."""
        alike = replace(choice, slots=1, states=0, weights=len(self.model.units) * choice.major, speculative=False)
        moving, where = self._moving_peak(alike)
        return self.device_labels(choice).total() + moving, where

    def timeline(self, choice: Choice) -> Timeline:
        """A steady step of a candidate."""
        costs, modes = self._costs_of(choice), self._modes(choice)
        # Elsewhere keeping changes no wait between lanes.
        held = choice.kept + choice.selective if choice.host or choice.every > 1 else -1
        count = self._program_micros(choice)
        key = replace(choice, kept=held, selective=0, micro_batches=count)
        if key not in self._derived:
            builder = self._builder(choice)
            steps = (builder.training_step(count, speculative=choice.speculative) for _ in range(2))
            self._derived[key] = derive(steps)
        others = max(1, choice.micro_batches - _FEW + 1)  # that the one in the middle stands for

        def seconds(op: Op) -> float:
            times = others if choice.major and op.micro == 1 else 1
            return costs.seconds(op, modes.get(op.unit, "recompute")) * times

        return simulate(self._derived[key], seconds, one_processor=self.machine.unified)

    def device_labels(self, choice: Choice) -> Counter[str]:
        """Device bytes by label of what stays for the whole run."""
        labels = self._fixed_labels(choice.slots, choice.states, choice.weights, choice.major)
        if choice.host and self._starts(choice.kept + choice.selective, choice.every)[0]:
            # A boundary for each micro-batch under way, one that is written, one whose copy is under way.
            costs = self._costs_of(choice)
            return labels + Counter({"boundaries": (costs.workload.micro_batches + 2) * costs.pooled_boundary_bytes})
        return labels

    def _candidate(self, choice: Choice) -> Candidate | None:
        if self._least_device(choice) > self.device_limit or not self._fits(choice):
            return None
        peak, where = self.peak(choice)
        return Candidate(choice, self.timeline(choice), self._labels(choice, peak), self.host_bytes(choice), where)

    def host_room(self, choice: Choice) -> int:
        """What of `host_limit` is left for `host_bytes`, and for the device where that is the CPU."""
        return self.host_limit - self._compiler_bytes(choice)

    def process_bytes(self, choice: Choice) -> int:
        """Host bytes that the process takes at its peak beside those of `host_bytes`."""
        return self._process + self._compiler_bytes(choice)

    def host_need(self, choice: Choice) -> int:
        """Host bytes that must fit `host_limit`."""
        shared = resident_bytes(self.peak(choice)[0]) if self.machine.unified else 0
        return sum(self.host_bytes(choice).values()) + self._compiler_bytes(choice) + shared

    def _compiler_bytes(self, choice: Choice) -> int:
        """Host bytes of compiling. Layers are tuned one by one, with what stays on the device in its place."""
        others = self.model.layers - choice.kept - choice.selective
        variants = sum(layers > 0 for layers in (choice.kept, choice.selective, others))
        costs, layer = self._costs_of(choice), Op(kind="BACKWARD", lane="compute", unit=self.model.units[1].name)
        held = self.device_labels(choice).total() + costs.workspace(layer, "recompute")
        return costs.compiler_bytes(variants) + costs.tuning_bytes(self.device_limit - TUNER_LEAVES - held)

    def _make_costs(self, micro_batches: int, major: bool) -> Costs:
        """Costs of the step in so many micro-batches, or of one of them where each passes through the whole model."""
        request = self.request
        rows = self.choices.given.get("micro_rows", -(-request.rows // micro_batches))
        mean = request.mean_tokens.get(rows)
        work = Workload(
            rows=rows if major else request.rows,
            seq_len=request.seq_len,
            micro_rows=rows,
            compute_dtype=request.compute_dtype,
            gradient_dtype=request.gradient_dtype or request.compute_dtype,
            mean_tokens=mean / micro_batches if mean and major else mean,
            ragged=request.steps_differ or request.rows % rows > 0,
            compiled=request.compiled,
            passing_gradients=request.passing_gradients,
            fused_attention=self.choices.fused,
        )
        device = self.machine.gpu_memory
        loss_memory = request.loss_memory or min(device, request.device_memory or device)
        return Costs(self.model, self.machine, work, loss_memory)

    def _costs_of(self, choice: Choice) -> Costs:
        return self.costs(choice.micro_batches, choice.major)

    def _builder(self, choice: Choice) -> Builder:
        return Builder(self.units(choice), choice.slots, self._policy(choice))

    def _policy(self, choice: Choice) -> Policy:
        return Policy(
            sum_dtype_differs=(self.request.gradient_dtype or self.request.compute_dtype) != "float32",
            boundaries_on_host=choice.host,
            boundary_every=choice.every,
            micro_batch_major=choice.major,
            passing_gradients=self.request.passing_gradients,
        )

    @staticmethod
    def _program_micros(choice: Choice) -> int:
        """Micro-batches of the program: layer-major ones are counted together."""
        return min(choice.micro_batches, _FEW) if choice.major else 1

    def _modes(self, choice: Choice) -> dict[str, Mode]:
        """What units keep, where it is more than their input."""
        backward = [unit.name for unit in reversed(self.model.units[1:-1])]
        modes: dict[str, Mode] = {unit.name: "keep" for unit in self.model.units if unit.lookup}
        modes |= dict.fromkeys(backward[: choice.kept + choice.selective], "selective")
        return modes | dict.fromkeys(backward[: choice.kept], "keep")

    def _make_starts(self, held: int, every: int) -> tuple[int, int]:
        """How many layers' inputs wait for their block where the last ``held`` hold more, and how many layers are
        computed for such an input."""
        layers = self.units(Choice(1, 0, held, 1, False))[1:-1]
        blocks = [block for block in blocks_of(layers, every) if not block[0].keeps]
        return len(blocks), sum(len(block) - 1 for block in blocks)

    def _make_fixed_labels(self, slots: int, states: int, weights: int, major: bool) -> Counter[str]:
        choice = Choice(slots, states, 0, 1, False, weights, major=major)
        units = tuple(self.units(choice))
        return self._costs_of(choice).fixed_device_bytes(list(units), _rings(units, slots, self._policy(choice)))

    def _make_host_labels(self, states: int, speculative: bool, boundaries: int) -> dict[str, int]:
        units = self.units(Choice(1, states, 0, 1, speculative))
        return self.costs(1, False).host_bytes(units, speculative=speculative, boundaries=boundaries)

    def _make_moving_peak(self, choice: Choice) -> tuple[int, str]:
        """Most device bytes of what comes and goes, and where."""
        costs, modes = self._costs_of(choice), self._modes(choice)

        def mode(unit: str | int) -> Mode:
            return modes.get(str(unit), "recompute")

        return planned_peak(
            _step(tuple(self.units(choice)), choice.slots, self._policy(choice), self._program_micros(choice)),
            0,
            lambda buffer: costs.buffer_bytes(buffer, mode(buffer[1])) if len(buffer) > 1 else 0,
            lambda op: costs.workspace(op, mode(op.unit)),
        )

    def _least_device(self, choice: Choice) -> int:
        """Device bytes held while the loss runs, without stages: at most the peak, and quick to tell."""
        costs = self._costs_of(choice)
        loss = costs.workspace(Op(kind="LOSS", lane="compute", unit=self.model.units[-1].name), "recompute")
        fixed = self._fixed_labels(choice.slots, choice.states, choice.weights, choice.major).total()
        return fixed + self._boundaries(choice) * costs.boundary_bytes + sum(self._graph_bytes(choice)) + loss

    def _boundaries(self, choice: Choice) -> int:
        """Inputs of layers and head that are on the device while the loss runs."""
        held = choice.kept + choice.selective
        return held + 1 + (0 if choice.host else self._starts(held, choice.every)[0])

    def _graph_bytes(self, choice: Choice) -> tuple[int, int]:
        """Of layers that keep all that they saved, and of those that keep the output of attention."""
        costs, graph = self._costs_of(choice), ("graph", self.model.units[1].name, 0)
        kept, selective = costs.buffer_bytes(graph, "keep"), costs.buffer_bytes(graph, "selective")
        return choice.kept * kept, choice.selective * selective

    def _labels(self, choice: Choice, peak: int) -> dict[str, int]:
        labels = dict(self.device_labels(choice))
        labels["boundary activations"] = self._boundaries(choice) * self._costs_of(choice).boundary_bytes
        if choice.kept + choice.selective:
            labels["kept activations"] = sum(self._graph_bytes(choice))
        labels["workspace and inputs at the peak"] = max(0, peak - sum(labels.values()))
        return labels

    def _bound(self, group: Choice) -> float:
        """Seconds that no step of the group is shorter than, quick to tell: of the busiest lane; and from one loss to
        the next, between which the host does all its updates.

        Deferred ones wait for the whole backward. The others run from the last layer to the first, whose weights are
        the first to be fetched for forward; where some are late, those follow in forward order.
        """
        work, updates = self._arithmetic(group.micro_batches), self._updates(group.speculative)
        again = self._starts(group.kept + group.selective, group.every)[1] * work.shortest if group.every > 1 else 0.0
        saves = work.saved[group.kept] + group.selective * work.attention
        step = work.step - saves + again
        at_once = group.micro_batches if group.major else 1  # only the last micro-batch's gradients are complete
        forward = max(work.forward[group.states] / at_once, updates.fetch[group.states])
        loss = work.loss / at_once
        if group.speculative or self.request.passing_gradients:
            turn = max(updates.early[group.states] + forward, updates.host[group.states]) + loss
        else:
            turn = updates.host[group.states] + step - work.forward[0] / at_once
        return max(step + updates.resident[group.states], turn, updates.link[group.states])

    def _make_arithmetic(self, micro_batches: int) -> Arithmetic:
        return Arithmetic.of(self.costs(micro_batches, False), self.model.units)

    def _make_updates(self, speculative: bool) -> Updates:
        return Updates.of(self.costs(1, False), self.model.units, self._early if speculative else None)


@lru_cache(maxsize=256)
def _rings(units: tuple[UnitSpec, ...], slots: int, policy: Policy) -> Rings:
    return Rings(units, slots, policy)


@lru_cache(maxsize=256)
def _step(units: tuple[UnitSpec, ...], slots: int, policy: Policy, micro_batches: int) -> list[Op]:
    """A first step, which searches for the same model share."""
    return Builder(units, slots, policy).training_step(micro_batches)


def _limit(machine: int, asked: int | None, margin: float) -> int:
    return int((machine if asked is None else min(machine, asked)) * (1 - margin))
