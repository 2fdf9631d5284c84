"""What was predicted of a run beside what it took: bytes by label at its start, peaks at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from megatrain.auto import request_of
from megatrain.config import RunConfig
from megatrain.loggers import Checked
from megatrain.machines import known_machines, load_machine
from megatrain.model_spec import ModelSpec
from megatrain.results import MemoryReport
from megatrain.search import PROCESS_BYTES, Search

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
    config = replace(config, train=replace(config.train, micro_batch_size=rows))
    request = request_of(config, rows=rows * micro_batches, seq_len=tokens, compute_dtype=dtype)
    # Bytes that stay are the same on every machine, and in every mode but for marks.
    search = Search(spec, load_machine(known_machines()[0]), request)
    choice = search.smallest().choice
    return dict(search.device_labels(choice)), search.host_bytes(choice)


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
