"""What was predicted of a run beside what it took: bytes by label at its start, peaks at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megatrain.config import RunConfig
from megatrain.costs import Costs, Workload
from megatrain.engine._rings import Rings
from megatrain.engine.placement import resident_units
from megatrain.engine.program import Policy, UnitSpec
from megatrain.layout import slab_bytes
from megatrain.loggers import Checked
from megatrain.machines import known_machines, load_machine
from megatrain.model_spec import ModelSpec
from megatrain.results import MemoryReport
from megatrain.search import PROCESS_BYTES

# Of the device: what libraries take is measured, and boundaries are allocated with the first step. Of the host: marks
# come and go in a step.
_NOT_COMPARED = ("libraries", "boundaries", "boundary activations", "marks of speculation")


def planned_memory(
    spec: ModelSpec, config: RunConfig, dtype: str, largest: tuple[int, int, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by label of the device and of the host that stay for the whole run.

    ``dtype`` is the compute dtype, ``largest`` rows, tokens and micro-batches of the largest step.
    """
    rows, tokens, micro_batches = largest
    work = Workload(
        rows=rows * micro_batches,
        seq_len=tokens,
        micro_batches=micro_batches,
        compute_dtype=dtype,
        gradient_dtype=config.compute.gradient_dtype or dtype,
    )
    numels = {unit.name: unit.layout.numel for unit in spec.units}
    slabs = {name: slab_bytes(n, work.compute_bytes, work.gradient_bytes) for name, n in numels.items()}
    heads = {name: n * work.compute_bytes for name, n in numels.items()}
    states = resident_units("placement.states", config.placement.states, slabs)
    weights = resident_units("placement.weights", config.placement.weights, heads)
    units = [
        UnitSpec(
            unit.name,
            unit.layout.numel,
            unit.uses,
            weights_resident=unit.name in weights,
            state_resident=unit.name in states,
        )
        for unit in spec.units
    ]
    policy = Policy(
        sum_dtype_differs=work.gradient_dtype != "float32", micro_batch_major=config.compute.order == "micro_batch"
    )
    costs = Costs(spec, load_machine(known_machines()[0]), work)  # bytes are the same on every machine
    fixed = costs.fixed_device_bytes(units, Rings(units, config.placement.slots, policy))
    return dict(fixed), costs.host_bytes(units, speculative=False)


def mismatches(planned: tuple[dict[str, int], dict[str, int]], memory: MemoryReport) -> Iterator[str]:
    """Labels whose planned bytes are not the allocated ones, with both."""
    for side, expected, allocated in (
        ("device", planned[0], memory.by_label),
        ("host", planned[1], memory.host_by_label),
    ):
        yield from _differences(side, expected, allocated)


def peaks(memory: MemoryReport, device: str) -> tuple[Checked | None, Checked]:
    """Bytes of the device at its peak, None where nobody counts them, and of this process in host memory.

    On the CPU the memory of the ``device`` is the host's.
    """
    measured, planned = memory.device_measured, memory.host_bytes + PROCESS_BYTES
    if device == "cpu":
        planned += memory.device_peak
    on_device = None if measured is None else Checked(memory.device_peak, measured)
    return on_device, Checked(planned, _most_resident())


def _most_resident() -> int:
    """Bytes: the kernel's high water mark of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def _differences(side: str, planned: Mapping[str, int], allocated: Mapping[str, int]) -> Iterator[str]:
    for label in sorted({*planned, *allocated} - set(_NOT_COMPARED)):
        ours, theirs = planned.get(label, 0), allocated.get(label, 0)
        if ours != theirs:
            yield f"{side} {label}: planned {ours:,} bytes, allocated {theirs:,}"
