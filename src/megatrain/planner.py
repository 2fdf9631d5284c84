"""Says before a run what fits, how fast it is, and what to change when it does not fit. No torch.

`plan` answers with a frozen `Plan`, or refuses with the bytes that are missing and ways out that were planned
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from megatrain.checks import readable_bytes
from megatrain.choices import Choice, Request
from megatrain.engine.simulate import Timeline
from megatrain.errors import UserError
from megatrain.layout import slab_bytes
from megatrain.loggers._screens import rate, short_time
from megatrain.machines import MachineSpec, known_machines, load_machine
from megatrain.model_spec import ModelSpec, known_models, load_model_spec
from megatrain.search import DEVICE_MARGIN, HOST_MARGIN, Candidate, Search

AskedBy = Literal["train", "plan file", "plan file and step", "plan options"]
"""What can be changed where nothing fits: a run's options, which name neither machine nor model; those and the options
of ``megatrain plan``; these alone."""

_SAVE_BYTES = 12  # a parameter: FP32 master and two FP32 moments
_EXPORT_BYTES = 2  # a parameter: the exported model in bfloat16
_WAYS_OUT = 3
_RUNNERS_UP = 2
_SHORTEST = 128  # tokens of a sequence that a way out proposes
_NAMES = {
    "compute": "GPU arithmetic",
    "h2d": "link to the GPU",
    "d2h": "link from the GPU",
    "optimizer": "CPU optimizer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One placement that fits, as overrides, and its predicted seconds a step."""

    overrides: tuple[str, ...]
    seconds: float
    device_peak: int
    host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The fastest placement that fits. Bytes by label; rates and seconds are predictions."""

    model: str
    machine: str
    parameters: int
    active_parameters: int
    """Those that one token meets, which ``tflops_6n`` counts; a mixture of experts has more."""
    request: Request
    device: str
    """`GPU` or `CPU`."""
    micro_batches: int
    boundary_every: int
    boundaries_on_host: bool
    clipping: str
    """`deferred`: as if every step were clipped; `speculative`: as if none were."""
    overrides: tuple[str, ...]
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    disk_bytes: dict[str, int]
    device_limit: int
    host_limit: int
    process_bytes: int
    """Of the host, that the process takes beside ``host_bytes``."""
    peak_at: str
    seconds: float
    tokens_per_second: float
    tflops_6n: float
    tflops_causal: float
    limited_by: str
    busy: dict[str, float]
    """Share of the step in which each lane works."""
    hidden: dict[str, float]
    """Share of each other lane's work that runs under arithmetic."""
    next_best: tuple[Option, ...]
    timeline: Timeline = field(repr=False)
    """The simulated step."""

    @property
    def device_peak(self) -> int:
        """Device bytes at the peak."""
        return sum(self.device_bytes.values())

    @property
    def host_total(self) -> int:
        """Host bytes of training state."""
        return sum(self.host_bytes.values())


def plan(model: ModelSpec, machine: MachineSpec, request: Request, *, asked_by: AskedBy = "plan file") -> Plan:
    """The fastest placement that fits; raises `UserError` with what is missing and up to three ways out.

    Ways out are what ``asked_by`` takes.
    """
    search = Search(model, machine, request)
    found = search.best(_RUNNERS_UP)
    if found:
        return _plan(search, found)
    raise UserError(refusal(search, asked_by))


def _plan(search: Search, found: list[Candidate]) -> Plan:
    best, request, model = found[0], search.request, search.model
    timeline = best.timeline
    tokens = request.rows * request.seq_len
    busy = {lane: timeline.busy(lane) for lane in _NAMES}
    return Plan(
        model=model.name,
        machine=search.machine.name,
        parameters=model.parameters,
        active_parameters=model.active_parameters,
        request=request,
        device=device_of(search.machine),
        micro_batches=best.choice.micro_batches,
        boundary_every=best.choice.every,
        boundaries_on_host=best.choice.host,
        clipping=_mode(best),
        overrides=_overrides(search, best),
        device_bytes=best.device_bytes,
        host_bytes=best.host_bytes,
        disk_bytes={
            "each save": model.parameters * _SAVE_BYTES,
            "exported model (bfloat16)": model.parameters * _EXPORT_BYTES,
        },
        device_limit=search.device_limit,
        host_limit=search.host_room(best.choice),
        process_bytes=search.process_bytes(best.choice),
        peak_at=best.peak_at,
        seconds=timeline.seconds,
        tokens_per_second=tokens / timeline.seconds,
        tflops_6n=6 * model.active_parameters * tokens / timeline.seconds / 1e12,
        tflops_causal=model.flops_per_token(request.seq_len) * tokens / timeline.seconds / 1e12,
        limited_by=limited_by(search.machine, timeline),
        busy={lane: seconds / timeline.seconds for lane, seconds in busy.items()},
        hidden={lane: timeline.hidden(lane) / busy[lane] for lane in _NAMES if lane != "compute" and busy[lane]},
        timeline=timeline,
        next_best=tuple(
            Option(
                overrides=_overrides(search, other),
                seconds=other.timeline.seconds,
                device_peak=sum(other.device_bytes.values()),
                host_bytes=sum(other.host_bytes.values()),
            )
            for other in found[1:]
        ),
    )


def limited_by(machine: MachineSpec, timeline: Timeline) -> str:
    """The lane that works most, in words."""
    name = _NAMES[max(_NAMES, key=timeline.busy)]
    return name.replace("GPU", device_of(machine))


def device_of(machine: MachineSpec) -> str:
    """What computes, in words."""
    return "CPU" if machine.unified else "GPU"


def _mode(candidate: Candidate) -> str:
    return "speculative" if candidate.choice.speculative else "deferred"


def settings(search: Search, candidate: Candidate) -> dict[str, Any]:
    """The options of a run that make it this candidate, by name; those that the request fixes as it has them."""
    choice, model = candidate.choice, search.model
    work = search.costs(choice.micro_batches, choice.major).workload
    numels = [unit.layout.numel for unit in model.units]
    states = sum(slab_bytes(n, work.compute_bytes, work.gradient_bytes) for n in numels[: choice.states])
    weights = sum(n * work.compute_bytes for n in numels[: choice.weights]) if choice.weights > choice.states else 0
    chosen = {
        "train.micro_batch_size": work.micro_rows,
        "placement.slots": choice.slots,
        "placement.weights": f"{weights // 1024}KiB" if weights else None,
        "placement.states": f"{states // 1024}KiB" if states else None,
        "compute.activations": _activations(choice, model.layers),
        "compute.boundaries": "host" if choice.host else "device",
        "compute.boundary_every": choice.every,
        "compute.order": "micro_batch" if choice.major else "layer",
    }
    return chosen | dict(search.request.fixed)


def _activations(choice: Choice, layers: int) -> str:
    """The option's value that gives these counts: a mode for all layers, or shares."""
    modes = {"keep": choice.kept, "selective": choice.selective}
    if not any(modes.values()):
        return "recompute"
    for mode, count in modes.items():
        if count == layers:
            return mode
    # Rounded up: a share takes whole layers from below.
    shares = {mode: f"{-(-count * 10_000 // layers) / 100:g}%" for mode, count in modes.items() if count}
    return ", ".join(share if mode == "keep" else f"{mode} {share}" for mode, share in shares.items())


def _overrides(search: Search, candidate: Candidate) -> tuple[str, ...]:
    """What to write behind ``megatrain train run.yaml`` to get this candidate."""
    chosen = settings(search, candidate)
    words = {"train.batch_size": search.request.rows} | chosen
    if search.request.passing_gradients:
        words |= {"placement.gradients": "passing", "optim.max_grad_norm": None}
    words |= {"optim.clipping": _mode(candidate), "optim.speculated": search.request.speculated}
    return tuple(f"{name}={'null' if value is None else value}" for name, value in words.items())


def refusal(search: Search, asked_by: AskedBy) -> str:
    """Why nothing fits, and up to three ways out that were planned, as what ``asked_by`` takes."""
    model, machine, request, short = search.model, search.machine, search.request, search.shortage()
    lines = [f"plan: {model.name} does not fit {machine.name} at {request.rows} x {request.seq_len} tokens a step"]
    if short.device_missing:
        what, where = f"{device_of(machine)} memory", f" at {short.where}"
        lines.append(_missing(what, short.device_missing, short.device_need, DEVICE_MARGIN, where))
    if short.host_missing:
        lines.append(_missing("host memory", short.host_missing, short.host_need, HOST_MARGIN))
    ways = [f"  fix:     {way}" for way in islice(_ways_out(model, machine, request, asked_by), _WAYS_OUT)]
    return "\n".join(
        [*lines, *(ways or ["  fix:     a smaller model: no known machine and no smaller step is enough"])]
    )


def _missing(what: str, missing: int, need: int, margin: float, where: str = "") -> str:
    return (
        f"  missing: {readable_bytes(missing)} of {what} ({missing} bytes): the least need is"
        f" {readable_bytes(need)}{where}, and {margin:.0%} stay free"
    )


def _ways_out(model: ModelSpec, machine: MachineSpec, request: Request, asked_by: AskedBy) -> Iterator[str]:
    """Changes that were planned and fit, those that cost least first, each as what to paste and what it gives."""
    for kind in _changes(request, machine, asked_by):
        for text, changed in kind:
            try:
                found = Search(model, machine, changed).best()
            except UserError:  # what stays set needs what was changed
                continue
            if found:
                yield _way(text, found[0], changed)
                break
    unlimited = replace(request, device_memory=None, host_memory=None)
    limits = [name for name in ("device_memory", "host_memory") if getattr(request, name) is not None]
    lifted = "".join(f" placement.{name}=null" for name in limits)
    # What is asked of a CPU (dtype, nothing compiled) is not what would be asked of a GPU.
    for other in [] if machine.unified else _larger_machines(machine):
        found = Search(model, other, unlimited).best()
        if found:
            yield _way(
                f"another machine: {other.name}" if asked_by == "train" else f"--machine {other.name}{lifted}",
                found[0],
                request,
            )
            break
    if asked_by == "train":
        return
    smaller = [spec for spec in map(load_model_spec, known_models()) if spec.parameters < model.parameters]
    for spec in sorted(smaller, key=lambda spec: -spec.parameters):
        found = Search(spec, machine, request).best()
        if found:
            yield _way(f"--model {spec.name}", found[0], request)
            break


def _changes(request: Request, machine: MachineSpec, asked_by: AskedBy) -> Iterator[list[tuple[str, Request]]]:
    """For each kind of change, overrides and what they make of the request, the mildest first."""
    free = [{n: v for n, v in request.fixed.items() if n != name} for name in request.fixed]
    freed = [(f"{name}=auto", replace(request, fixed=left)) for name, left in zip(request.fixed, free, strict=True)]
    if len(freed) > 1:
        freed.append((" ".join(f"{name}=auto" for name in request.fixed), replace(request, fixed={})))
    yield freed
    if request.compute_dtype == "float32":
        gradients = "bfloat16" if request.gradient_dtype else None
        words = "compute.dtype=bfloat16" + (" compute.gradient_dtype=bfloat16" if gradients else "")
        yield [(words, replace(request, compute_dtype="bfloat16", gradient_dtype=gradients))]
    elif request.gradient_dtype == "float32":
        yield [("compute.gradient_dtype=bfloat16", replace(request, gradient_dtype="bfloat16"))]
    if request.device_memory is not None and request.device_memory < machine.gpu_memory:
        yield [(f"placement.device_memory={machine.gpu_memory >> 20}MiB", replace(request, device_memory=None))]
    if request.host_memory is not None and request.host_memory < machine.host_memory:
        yield [(f"placement.host_memory={machine.host_memory >> 20}MiB", replace(request, host_memory=None))]
    fewer = [replace(request, rows=request.rows >> i) for i in range(1, request.rows.bit_length())]
    shorter = [replace(request, seq_len=request.seq_len >> i) for i in range(1, request.seq_len.bit_length())]
    if asked_by in ("train", "plan file"):
        yield [(f"train.batch_size={r.rows}", r) for r in fewer]
        yield [(f"data.max_seq_len={r.seq_len}", r) for r in shorter if r.seq_len >= _SHORTEST]
    else:
        yield [(_step_option(r), r) for r in fewer]
        yield [(f"{_step_option(r)} --seq-len {r.seq_len}", r) for r in shorter if r.seq_len >= _SHORTEST]
    if not request.passing_gradients:
        words = "--gradients passing"
        if asked_by != "plan options":
            words = "optim.max_grad_norm=null optim.clipping=auto placement.gradients=passing"
        yield [(words, replace(request, passing_gradients=True))]


def _step_option(request: Request) -> str:
    return f"--tokens-per-step {request.rows * request.seq_len}"


def _larger_machines(machine: MachineSpec) -> list[MachineSpec]:
    """Known machines with more host or GPU memory: the same GPU first, then by host memory."""
    others = [spec for spec in map(load_machine, known_machines()) if spec.name != machine.name]
    larger = [o for o in others if o.host_memory > machine.host_memory or o.gpu_memory > machine.gpu_memory]
    return sorted(larger, key=lambda o: (o.gpu != machine.gpu, o.host_memory))


def _way(text: str, candidate: Candidate, request: Request) -> str:
    seconds = candidate.timeline.seconds
    return f"{text:40} {short_time(seconds)} a step, {rate(request.rows * request.seq_len / seconds)} tokens/s"
