"""What a machine can do, in figures that each name their source: machines that are not here can be planned for.

Each JSON file of this folder is one machine, found by its name; a user's own file works the same by its path. No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatrain import __version__
from megatrain._durable import cache_folder, keep
from megatrain.errors import UserError
from megatrain.machine import Machine

FOLDER = Path(__file__).parent

Line = tuple[str, str, str]
"""Subject, what was found, and the way out where something is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """One GPU and its host. Memory in bytes, links and memory in bytes/s, arithmetic in FLOP/s.

    Rates are those that a training step reaches, not those of a datasheet.
    """

    name: str
    gpu: str
    match: str
    """What the driver's name of this GPU contains."""
    gpu_memory: int
    host_memory: int
    cores: int
    h2d_rate: float
    """Host to device, while the other direction is busy too."""
    d2h_rate: float
    """Device to host, likewise."""
    product_rate: float
    """BF16 matrix products, of random values."""
    attention_rate: float
    """Causal attention, both directions, causal operations counted."""
    fp32_rate: float
    """Matrix products and attention with FP32 compute."""
    gpu_memory_rate: float
    """What a long elementwise pass over device memory reaches."""
    adamw_rate: float
    """Parameters a second of the optimizer on the host."""
    speculation_cost: float
    """Time of a speculative update as a multiple of a plain one."""
    sources: tuple[tuple[str, str], ...]
    """``(figure, where it is from)``."""
    unified: bool = False
    """Device memory is part of host memory: the device is the CPU."""


_FIGURES = [f.name for f in fields(MachineSpec) if f.name not in ("name", "gpu", "match", "sources", "unified")]
_FORM = 4  # of a measured file
_PARTS = {"gpu", "match", "unified", "figures", "lines"}  # of a machine's file
_MOST = 1e30  # of any figure
_CPU_NAME = "this machine's CPU"
_WHOLE = ("gpu_memory", "host_memory", "cores")
_CORE = {  # rates of one core of a server CPU with AVX2, where nothing was measured
    "h2d_rate": 2e9,
    "d2h_rate": 2e9,
    "product_rate": 10e9,
    "attention_rate": 5e9,
    "fp32_rate": 30e9,
    "gpu_memory_rate": 4e9,
    "adamw_rate": 2e8,
}


def known_machines() -> list[str]:
    """Names of the machines that ship with MegaTrain."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def load_machine(name_or_file: str) -> MachineSpec:
    """The machine of a known name, or of a JSON file of the same form.

    Raises `UserError` naming the known machines, or the figure of the file that is missing or wrong.
    """
    known = known_machines()
    file = FOLDER / f"{name_or_file}.json" if name_or_file in known else Path(name_or_file)
    if name_or_file not in known and not file.is_file():
        near = get_close_matches(name_or_file, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(
            f"--machine: {name_or_file!r} is neither a known machine nor a file\n"
            f"  fix:   {hint}known machines are {', '.join(known)}; or give a JSON file of the same form"
        )
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"machine: {file}: not a JSON file ({error})\n  fix:   see docs/planner.md for the form"
        ) from None
    return _spec(data, str(file), file.stem)


def this_machine(machine: Machine, device: str = "auto") -> MachineSpec:
    """The machine that was probed: its free memory, with the rates that `keep_measured` has kept of it.

    Without those they are the rates of the known machine that has the same GPU, of several that with the nearest host
    memory; fewer cores than it has slow the optimizer in proportion. Without a GPU, or where ``device`` is ``cpu``, it
    is the CPU. Raises `UserError` when what was kept is damaged, or nothing was measured and no GPU of its kind is
    known.
    """
    cpu = device == "cpu" or (device == "auto" and not machine.gpus)
    file = measured_file(machine, cpu=cpu)
    if file.is_file() and (cpu or machine.gpus):
        free = machine.memory_free
        return replace(
            _kept(file),
            name=f"{_CPU_NAME if cpu else 'this machine'} (rates measured)",
            gpu_memory=free if cpu else machine.gpus[0].memory_free,
            host_memory=free,
            cores=machine.cores,
        )
    if cpu:
        return _cpu(machine)
    known = [load_machine(name) for name in known_machines()]
    fix = (
        "megatrain doctor measures this machine; or name one with --machine:"
        f" {', '.join(spec.name for spec in known)}; or a JSON file with its figures"
    )
    if not machine.gpus:
        raise UserError(f"--machine: this machine has no GPU ({machine.gpu_problem})\n  fix:   {fix}")
    gpu = machine.gpus[0]
    alike = [spec for spec in known if spec.match in gpu.name]
    if not alike:
        raise UserError(f"--machine: the rates of {gpu.name} are not known\n  fix:   {fix}")
    base = min(alike, key=lambda spec: (-len(spec.match), abs(spec.host_memory - machine.memory)))
    found = dict.fromkeys(("gpu_memory", "host_memory", "cores"), "found on this machine")
    return replace(
        base,
        name=f"this machine (rates of {base.name})",
        gpu_memory=gpu.memory_free,
        host_memory=machine.memory_free,
        cores=machine.cores,
        adamw_rate=base.adamw_rate * min(1.0, machine.cores / base.cores),
        sources=tuple((figure, found.get(figure, source)) for figure, source in base.sources),
    )


def measured_file(machine: Machine, *, cpu: bool) -> Path:
    """Where the measured rates of this machine's GPU, or its CPU, are kept: a name for hardware and versions."""
    gpu = None if cpu or not machine.gpus else machine.gpus[0]
    hardware = [machine.cpu, machine.cores, machine.memory, machine.system]
    hardware += [] if gpu is None else [gpu.name, gpu.memory, gpu.driver]
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    native = find_spec("megatrain.kernels._native") is not None
    key = json.dumps([_FORM, __version__, torch, native, hardware])
    return cache_folder("machines") / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def keep_measured(machine: Machine, figures: Mapping[str, float], lines: list[Line], *, cpu: bool) -> None:
    """Keep what was measured as a machine's file; ``lines`` come back from `measured_lines`."""
    gpu = "CPU" if cpu else machine.gpus[0].name
    found = {"gpu_memory": machine.memory if cpu else machine.gpus[0].memory, "host_memory": machine.memory}
    values = {**found, "cores": machine.cores, **figures}
    source = f"megatrain doctor, {machine.cpu or machine.system}, {machine.cores} cores"
    data = {
        "gpu": gpu,
        "match": "" if cpu else gpu,
        "unified": cpu,
        "lines": lines,
        "figures": {figure: {"value": values[figure], "source": source} for figure in _FIGURES},
    }
    keep(measured_file(machine, cpu=cpu), json.dumps(data, indent=1))


def _kept(file: Path) -> MachineSpec:
    """What `keep_measured` wrote; raises `UserError` naming the file when it is damaged."""
    try:
        return load_machine(str(file))
    except UserError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{reason}\n  fix:   megatrain doctor measures this machine again") from None


def measured_lines(file: Path) -> list[Line]:
    """The lines of a file that `keep_measured` wrote; empty when there is none, or it is damaged."""
    try:
        load_machine(str(file))
        lines = json.loads(file.read_text(encoding="utf-8"))["lines"]
        return [(subject, text, fix) for subject, text, fix in lines]
    except (UserError, OSError, ValueError, KeyError, TypeError):
        return []


def _cpu(machine: Machine) -> MachineSpec:
    """The CPU as the device, whose memory is the host's; rates are assumed."""
    rates = {figure: rate * machine.cores for figure, rate in _CORE.items()}
    found = dict.fromkeys(("gpu_memory", "host_memory", "cores"), "found on this machine")
    return MachineSpec(
        name=f"{_CPU_NAME} (rates assumed)",
        gpu="CPU",
        match="",
        gpu_memory=machine.memory_free,
        host_memory=machine.memory_free,
        cores=machine.cores,
        **rates,
        speculation_cost=1.2,
        sources=tuple((figure, found.get(figure, "assumed")) for figure in _FIGURES),
        unified=True,
    )


def _spec(data: Any, where: str, name: str) -> MachineSpec:
    figures = data.get("figures") if isinstance(data, dict) else None
    if not isinstance(figures, dict):
        raise UserError(f"machine: {where}: has no object 'figures'\n  fix:   see docs/planner.md for the form")
    unknown = sorted(set(figures) - set(_FIGURES))
    if unknown:
        raise UserError(
            f"machine: {where}: figures.{unknown[0]} is unknown\n  fix:   the figures are {', '.join(_FIGURES)}"
        )
    values = {figure: _value(figures.get(figure), f"machine: {where}: figures.{figure}") for figure in _FIGURES}
    whole = {figure: int(values[figure]) for figure in _WHOLE}
    sources = tuple((figure, str(figures[figure]["source"])) for figure in _FIGURES)
    names = {key: str(data.get(key, "")) for key in ("gpu", "match")}
    unified = data.get("unified", False)
    if not isinstance(unified, bool):
        raise UserError(
            f"machine: {where}: unified: {unified!r} is neither true nor false\n  fix:   correct or remove it"
        )
    other = sorted(set(data) - _PARTS)
    if other:
        raise UserError(f"machine: {where}: {other[0]} is unknown\n  fix:   the parts are {', '.join(sorted(_PARTS))}")
    return MachineSpec(name=name, **names, sources=sources, unified=unified, **{**values, **whole})  # type: ignore[arg-type]


def _value(figure: Any, where: str) -> float:
    if not isinstance(figure, dict) or set(figure) != {"value", "source"}:
        raise UserError(f'{where}: must be {{"value": number, "source": text}}\n  fix:   add or correct the figure')
    value = figure["value"]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= _MOST:
        told = f"{value!r}"[:40]
        raise UserError(
            f"{where}: {told} is not a number from 1 to {_MOST:.0e}\n  fix:   give it in bytes, bytes/s or FLOP/s"
        )
    return float(value)
