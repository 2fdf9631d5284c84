"""What is asked of the planner, and what it may choose. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from megatrain.engine.placement import activation_modes, check_order, resident_units
from megatrain.layout import slab_bytes
from megatrain.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be trained: a step of ``rows`` x ``seq_len`` tokens, and limits in bytes (None: the machine's)."""

    rows: int
    seq_len: int
    clipping: str = "auto"
    speculated: str = "100%"
    """Share of the model that a speculative step updates early; it is not varied."""
    passing_gradients: bool = False
    """Gradients are not kept on the host, so nothing is clipped."""
    selective: bool = True
    """Whether attention is a fused kernel, whose output can be kept by itself."""
    compute_dtype: str = "bfloat16"
    gradient_dtype: str | None = None
    compiled: bool = True
    device_memory: int | None = None
    host_memory: int | None = None
    loss_memory: int | None = None
    """Device bytes that chunks of the loss are a share of, where it is not the limit."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Placement options that are set already, by their names in a run's config; the others are chosen."""
    steps_differ: bool = False
    """Whether some steps are smaller than the largest."""
    mean_tokens: Mapping[int, float] = field(default_factory=dict)
    """Tokens of a usual step, padding counted, by the rows of a micro-batch; those of the largest where missing."""


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """One candidate: the first ``states`` units live on the device, the last ``kept`` layers keep their activations,
    the ``selective`` ones before them the output of attention."""

    slots: int
    states: int
    kept: int
    micro_batches: int
    speculative: bool
    weights: int = 0
    """The first units whose weights are on the device; of those whose states are there nothing more is needed."""
    every: int = 1
    """Layers of a block that is computed again from its first one's input."""
    host: bool = False
    """Boundary activations wait on the host."""
    major: bool = False
    """Each micro-batch passes through the whole model before the next one."""
    selective: int = 0


class Choices:
    """What may be chosen for one model and request, the same whatever the memory.

    ``unified``: device and host are one memory, so nothing is gained by moving. Raises `UserError` when an option that
    the request fixes is no placement, or an order for which too few weights are to be on the device.
    """

    def __init__(self, model: ModelSpec, request: Request, *, unified: bool) -> None:
        self._model, self._request, self._unified = model, request, unified
        self.given = given_parts(model, request)
        """Parts of a choice that the request fixes."""
        if self.given.get("major") and "weights" in self.given:
            resident = max(*self.values["states"], self.given["weights"])
            check_order("micro_batch", [unit.name for unit in model.units[resident:]])

    @cached_property
    def values(self) -> dict[str, list[Any]]:
        """What each part of a choice may be."""
        units, layers, one = len(self._model.units), self._model.layers, self._unified
        values: dict[str, list[Any]] = {
            "slots": [1, 2] if one else [1, 2, 3, 4],
            "states": [0] if one else _steps(units, 10),
            "weights": [0] if one else _steps(units, 4),
            "kept": _steps(layers, 8),
            "micro_batches": micro_batch_counts(self._request.rows),
            "every": [1, 2, 4],
            "host": [False] if one else [False, True],
            "major": [False] if one else [False, True],
            "selective": [0, layers] if self.fused else [0],
        }
        return values | {name: [value] for name, value in self.given.items()}

    @property
    def fused(self) -> bool:
        """Whether one kernel computes attention. GPUs have none in FP32 for heads that share keys."""
        grouped = self._model.key_value_heads < self._model.heads
        if grouped and self._request.compute_dtype == "float32" and not self._unified:
            return False
        return self._request.selective and self._model.fused_attention

    @cached_property
    def all_groups(self) -> list[Choice]:
        """`groups` with any number of states."""
        return self.groups(self.values["states"])

    def groups(self, number_of_states: Sequence[int]) -> list[Choice]:
        """What differs in more than slots, resident weights and where boundaries wait: those that need least memory."""
        values, units, layers = self.values, len(self._model.units), self._model.layers
        modes = {"auto": (False, True), "deferred": (False,), "speculative": (True,)}[self._request.clipping]
        if self._request.passing_gradients:
            modes = (False,)
        wide = {0, layers // 2, layers, *(values["kept"] if "kept" in self.given else ())}
        names = ("kept", "micro_batches", "every", "major", "selective")
        slots, groups = min(values["slots"]), []
        for kept, micros, every, major, selective in product(*(values[name] for name in names)):
            if kept + selective > layers:
                selective = layers - kept  # all that is left
                if not selective:
                    continue
            # Blocks are for memory that is too small to keep more than their inputs.
            if every > 1 and kept + selective and not {"every", "kept"} <= self.given.keys():
                continue
            # Micro-batch-major is for keeping the activations of one micro-batch of several.
            if major and "major" not in self.given and (micros == 1 or every > 1 or kept not in wide):
                continue
            weights = units if major and "weights" not in self.given else min(values["weights"])
            host = max(values["host"]) and ("host" in self.given or not major)
            for states in number_of_states:
                if major and max(states, weights) < units:
                    continue  # weights that stream
                for speculative in modes[:1] if states == units else modes:  # no host update: nothing to speculate
                    groups.append(
                        Choice(slots, states, kept, micros, speculative, weights, every, host, major, selective)
                    )
        return groups

    def variants(self, group: Choice) -> Iterator[Choice]:
        """The choices of a group, those before others that are never faster (`is_no_slower`)."""
        values = self.values
        hosts = sorted({group.host, min(values["host"])})
        slots, weights = sorted(values["slots"], reverse=True), sorted(values["weights"], reverse=True)
        if group.major or group.states == len(self._model.units):
            slots, weights = [group.slots], [group.weights]
        for host, number, resident in product(hosts, slots, weights):
            if resident > group.states or resident == weights[-1]:
                yield replace(group, host=host, slots=number, weights=resident)

    @cached_property
    def smallest(self) -> list[Choice]:
        """Those that keep as little and split the step as far as they can."""
        most = max(group.micro_batches for group in self.all_groups)
        split = [group for group in self.all_groups if group.micro_batches == most]
        kept = min((group.kept, group.selective) for group in split)
        least = [group for group in split if (group.kept, group.selective) == kept]
        return sorted({*least, *(replace(group, host=min(self.values["host"])) for group in least)})


def is_no_slower(one: Choice, other: Choice) -> bool:
    """Whether one of two choices of a group waits for no more copies than the other."""
    return one.slots >= other.slots and one.weights >= other.weights and one.host <= other.host


def _steps(total: int, parts: int) -> list[int]:
    """Counts from 0 to ``total``: the first few, and even shares."""
    return sorted({n for n in (0, 1, 2, 3, 5, 8) if n <= total} | {total * i // parts for i in range(parts + 1)})


def micro_batch_counts(rows: int) -> list[int]:
    """How many micro-batches a step of ``rows`` may have: equal ones, a power of two or of that many rows, and those of
    a power of two of rows of which the last is smaller."""
    powers = [2**i for i in range(rows.bit_length())]
    halves = [power for power in powers if rows % power == 0]
    return sorted({*halves, *(-(-rows // power) for power in powers)})


def unit_bytes(model: ModelSpec, request: Request) -> dict[str, dict[str, int]]:
    """Bytes that the state, and the weights, of each unit take on the device."""
    bytes_of = {"bfloat16": 2, "float32": 4}
    compute, gradient = bytes_of[request.compute_dtype], bytes_of[request.gradient_dtype or request.compute_dtype]
    numels = {unit.name: unit.layout.numel for unit in model.units}
    return {
        "states": {name: slab_bytes(numel, compute, gradient) for name, numel in numels.items()},
        "weights": {name: numel * compute for name, numel in numels.items()},
    }


def given_parts(model: ModelSpec, request: Request) -> dict[str, Any]:
    """The options that a request fixes, as parts of a choice; and ``micro_rows``, the rows of a micro-batch.

    Of shares of activations those that keep most count as the last ones, in whatever order they stand.
    """
    given: dict[str, Any] = {}
    sizes = unit_bytes(model, request)
    for option, value in request.fixed.items():
        match option:
            case "train.micro_batch_size":
                given["micro_rows"] = min(value, request.rows)
                given["micro_batches"] = -(-request.rows // given["micro_rows"])
            case "placement.slots":
                given["slots"] = value
            case "placement.states" | "placement.weights":
                part = option.partition(".")[2]
                given[part] = len(resident_units(option, value, sizes[part]))
            case "compute.activations":
                modes = activation_modes(value, [unit.name for unit in model.units[1:-1]])
                counts = Counter(modes.values())
                given["kept"], given["selective"] = counts["keep"], counts["selective"]
            case "compute.boundary_every":
                given["every"] = value
            case "compute.boundaries":
                given["host"] = value == "host"
            case "compute.order":
                given["major"] = value == "micro_batch"
    return given
