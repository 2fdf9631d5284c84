"""What is asked of the planner, and what it may choose. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatrain.engine.placement import activation_modes, resident_units
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


def micro_batch_counts(rows: int) -> list[int]:
    """How many equal micro-batches a step of ``rows`` may have: powers of two, or of that many rows."""
    halves = [2**i for i in range(rows.bit_length()) if rows % 2**i == 0]
    return sorted({*halves, *(rows // half for half in halves)})


def unit_bytes(model: ModelSpec, request: Request) -> dict[str, dict[str, int]]:
    """Bytes that the state, and the weights, of each unit take on the device."""
    bytes_of = {"bfloat16": 2, "float32": 4}
    compute, gradient = bytes_of[request.compute_dtype], bytes_of[request.gradient_dtype or request.compute_dtype]
    numels = {unit.name: unit.layout.numel for unit in model.units}
    return {
        "states": {name: slab_bytes(numel, compute, gradient) for name, numel in numels.items()},
        "weights": {name: numel * compute for name, numel in numels.items()},
    }


def given_parts(model: ModelSpec, request: Request, sizes: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """The options that a request fixes, as parts of a choice; and ``micro_rows``, the rows of a micro-batch.

    Of shares of activations those that keep most count as the last ones, in whatever order they stand.
    """
    given: dict[str, Any] = {}
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
