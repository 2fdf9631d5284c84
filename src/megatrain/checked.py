"""What was predicted of a run beside what it took: bytes by label at its start, peaks at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megatrain.auto import compiles, request_of
from megatrain.config import RunConfig
from megatrain.costs import compiler_bytes, process_bytes, resident_bytes
from megatrain.datasets import Row
from megatrain.datasets._batches import Batches
from megatrain.loggers import Checked
from megatrain.machines import known_machines, load_machine
from megatrain.model_spec import ModelSpec
from megatrain.results import MemoryReport
from megatrain.search import Search

_ENTRY_BYTES, _ROW_BYTES = 1200, 180  # an entry of a tokenizer; a row beside its tokens: measured

# Of the device: what libraries take is measured, and boundaries are allocated with the first step. Of the host: marks
# come and go in a step.
_NOT_COMPARED = ("libraries", "boundaries", "boundary activations", "marks of speculation")


class PlannedMemory(NamedTuple):
    """Bytes by label that stay for the whole run, and what the process takes at its peak beside them."""

    device: dict[str, int]
    host: dict[str, int]
    process: int


def planned_memory(
    spec: ModelSpec, config: RunConfig, device: str, dtype: str, batches: Batches, gpu_memory: int | None
) -> PlannedMemory:
    """What a run is planned to take on ``device`` (``cpu``, ``cuda``).

    ``dtype`` is the compute dtype, ``gpu_memory`` the bytes that were free before the run began, where there is a GPU.
    """
    rows, tokens, micro_batches = batches.largest
    config = replace(config, train=replace(config.train, micro_batch_size=rows))
    request = request_of(
        config,
        rows=rows * micro_batches,
        seq_len=tokens,
        steps_differ=batches.ragged,
        compute_dtype=dtype,
        compiled=compiles(config, device),
    )
    # Bytes that stay are the same on every machine of its kind, and in every mode but for marks.
    where = replace(load_machine(known_machines()[0]), unified=device == "cpu")
    search = Search(spec, replace(where, gpu_memory=gpu_memory or where.gpu_memory), request)
    choice = search.smallest().choice
    return PlannedMemory(dict(search.device_labels(choice)), search.host_bytes(choice), search.process_bytes(choice))


def least_process_bytes(config: RunConfig, device: str) -> int:
    """Host bytes that the process of a run takes at least beside its training state, whatever its model."""
    on_gpu = device == "cuda"
    return process_bytes(on_gpu=on_gpu) + (compiler_bytes(1, on_gpu=on_gpu) if compiles(config, device) else 0)


def input_bytes(device: str, entries: int, rows: Sequence[Row]) -> int:
    """Host bytes of a tokenizer with so many ``entries`` and of ``rows`` in memory, beside the process; one with a GPU
    (``device`` ``cuda``) has room for them."""
    if device == "cuda":
        return 0
    return entries * _ENTRY_BYTES + sum(_ROW_BYTES + row.ids.nbytes + row.target.nbytes for row in rows)


def mismatches(planned: PlannedMemory, memory: MemoryReport) -> Iterator[str]:
    """Labels whose planned bytes are not the allocated ones, with both."""
    for side, expected, allocated in (
        ("device", planned.device, memory.by_label),
        ("host", planned.host, memory.host_by_label),
    ):
        yield from _differences(side, expected, allocated)


def peaks(memory: MemoryReport, device: str, process: int) -> tuple[Checked | None, Checked]:
    """Bytes of the device at its peak, None where nobody counts them, and of this process in host memory.

    On the CPU the memory of the ``device`` is the host's. ``process``: what it is planned to take beside all state.
    """
    measured, planned = memory.device_measured, memory.host_bytes + process
    if device == "cpu":
        planned += resident_bytes(memory.device_peak)
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
