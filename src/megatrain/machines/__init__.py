"""What a machine can do, in figures that each name their source: machines that are not here can be planned for.

Each JSON file of this folder is one machine, found by its name; a user's own file works the same by its path. No torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatrain.errors import UserError
from megatrain.machine import Machine

FOLDER = Path(__file__).parent


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
    layer_rate: float
    """BF16 arithmetic of a compiled decoder layer without its attention products."""
    head_rate: float
    """BF16 matrix products of the output matrix."""
    attention_rate: float
    """Causal attention, both directions, causal operations counted."""
    fp32_rate: float
    """Everything, with FP32 compute."""
    gpu_memory_rate: float
    """What elementwise passes over device memory reach."""
    adamw_rate: float
    """Parameters a second of the optimizer on the host."""
    speculation_cost: float
    """Time of a speculative update as a multiple of a plain one."""
    sources: tuple[tuple[str, str], ...]
    """``(figure, where it is from)``."""


_FIGURES = [f.name for f in fields(MachineSpec) if f.name not in ("name", "gpu", "match", "sources")]
_WHOLE = ("gpu_memory", "host_memory", "cores")


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
    except (OSError, ValueError) as error:
        raise UserError(
            f"machine: {file}: not a JSON file ({error})\n  fix:   see docs/planner.md for the form"
        ) from None
    return _spec(data, str(file), file.stem)


def this_machine(machine: Machine) -> MachineSpec:
    """The machine that was probed: its free memory, with the rates of the known machine that has the same GPU.

    Where several have, that with the nearest host memory. Fewer cores than it has slow the optimizer in proportion.
    Raises `UserError` when there is no GPU, or none of its kind is known.
    """
    known = [load_machine(name) for name in known_machines()]
    fix = f"name one with --machine: {', '.join(spec.name for spec in known)}; or a JSON file with its figures"
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
    return MachineSpec(name=name, **names, sources=sources, **{**values, **whole})  # type: ignore[arg-type]


def _value(figure: Any, where: str) -> float:
    if not isinstance(figure, dict) or set(figure) != {"value", "source"}:
        raise UserError(f'{where}: must be {{"value": number, "source": text}}\n  fix:   add or correct the figure')
    value = figure["value"]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise UserError(f"{where}: {value!r} is not a number above 0\n  fix:   give it in bytes, bytes/s or FLOP/s")
    return float(value)
