"""A plan as the command line shows it: bytes by label, the prediction, what to set, and what came next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megatrain.auto import request_of
from megatrain.checks import choice
from megatrain.choices import Request
from megatrain.config import RunConfig
from megatrain.errors import UserError
from megatrain.loggers._screens import count, disk_size, duration, rate, short_time, size
from megatrain.machines import MachineSpec
from megatrain.planner import Option, Plan
from megatrain.search import DEVICE_MARGIN, HOST_MARGIN
from megatrain.timeline_page import page
from megatrain.trace_events import trace_events

DEFAULT_SEQ_LEN = 4096
_LANES = {"compute": "GPU arithmetic", "h2d": "host to GPU", "d2h": "GPU to host", "optimizer": "CPU optimizer"}


def make_request(
    config: RunConfig | None,
    machine: MachineSpec,
    tokens_per_step: int | None,
    seq_len: int | None,
    gradients: str = "kept",
) -> Request:
    """The request of a run's config, or of the command line alone; options of the command line go first.

    Raises `UserError` when neither gives the size of a step, tokens are no whole number of sequences, the device of
    the config is not that of ``machine``, or ``gradients`` is neither ``"kept"`` nor ``"passing"``.
    """
    passing = choice("--gradients", gradients, ("kept", "passing")) == "passing"
    if passing and config is not None:
        raise UserError(
            "--gradients: passing is for --model alone\n"
            "  fix:   optim.max_grad_norm=null placement.gradients=passing behind the run file"
        )
    length = seq_len or (config.data.max_seq_len if config else None) or DEFAULT_SEQ_LEN
    if tokens_per_step is not None and tokens_per_step % length:
        raise UserError(
            f"--tokens-per-step: {tokens_per_step} is no multiple of the sequence length {length}\n"
            f"  fix:   --tokens-per-step {max(1, tokens_per_step // length) * length}"
        )
    if config is None:
        if tokens_per_step is None:
            raise UserError("--tokens-per-step: missing\n  fix:   give it, or a run.yaml with train.batch_size")
        rows = tokens_per_step // length
        return Request(rows=rows, seq_len=length, passing_gradients=passing, **_of_device(machine))
    if config.placement.device == "cpu" and not machine.unified:
        raise UserError(
            f"placement.device: cpu: {machine.name} is planned for its GPU\n"
            "  fix:   placement.device=cuda, or no --machine"
        )
    usual = _of_device(machine)
    return request_of(
        config,
        rows=tokens_per_step // length if tokens_per_step else config.train.batch_size,
        seq_len=length,
        clipping=config.optim.clipping,
        compute_dtype=config.compute.dtype or usual["compute_dtype"],
        compiled=usual["compiled"] if config.compute.compile is None else config.compute.compile,
    )


def _of_device(machine: MachineSpec) -> dict[str, Any]:
    return {"compute_dtype": "float32" if machine.unified else "bfloat16", "compiled": not machine.unified}


def report(plan: Plan, tokens: int) -> Iterator[str]:
    """The lines of a plan; ``tokens``: length of the training run whose time is told."""
    request = plan.request
    active = "" if plan.active_parameters == plan.parameters else f", {count(plan.active_parameters)} of them active"
    yield (
        f"plan    {plan.model} on {plan.machine} · {count(plan.parameters)} parameters{active} · {request.rows} x"
        f" {request.seq_len:,} = {request.rows * request.seq_len:,} tokens a step in {plan.micro_batches}"
        f" micro-batch{'es' * (plan.micro_batches > 1)}"
    )
    yield f"        {request.compute_dtype} compute, FP32 masters; {_stored(plan)}"
    yield f"        {_clipping(plan)}"
    yield from _table(f"{plan.device} memory", plan.device_bytes)
    yield f"  {'total':34} {size(plan.device_peak):>10} of {size(plan.device_limit)}, {DEVICE_MARGIN:.0%} left free"
    yield f"  peak at {plan.peak_at}"
    yield from _table("host memory", plan.host_bytes)
    left = f"{HOST_MARGIN:.0%} and {size(plan.process_bytes)} for the process left free"
    yield f"  {'total':34} {size(plan.host_total):>10} of {size(plan.host_limit)}, {left}"
    yield "disk"
    yield from (f"  {label:34} {disk_size(nbytes):>10}" for label, nbytes in plan.disk_bytes.items())
    yield (
        f"predicted  {short_time(plan.seconds)} a step · {rate(plan.tokens_per_second)} tokens/s ·"
        f" {rate(plan.tflops_6n)} TFLOP/s (6N), {rate(plan.tflops_causal)} of products and causal attention"
        f" · limited by {plan.limited_by}"
    )
    for lane, share in plan.busy.items():
        hidden = f", {plan.hidden[lane]:.0%} of that under arithmetic" if lane in plan.hidden else ""
        yield f"  {_LANES[lane].replace('GPU', plan.device):34} {share:>10.0%} of the step{hidden}"
    yield f"  {count(tokens) + ' tokens':34} {duration(tokens / plan.tokens_per_second):>10}"
    yield "set"
    yield "  " + shlex.join(plan.overrides)
    yield from (f"next    {_next(plan, other)}" for other in plan.next_best)


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan as JSON data, with the totals and without the timeline."""
    data = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name != "timeline"}
    data["request"], data["next_best"] = asdict(plan.request), [asdict(other) for other in plan.next_best]
    return {**data, "device_peak": plan.device_peak, "host_total": plan.host_total}


def write_timeline(plan: Plan, lines: list[str], file: Path) -> None:
    """Write the simulated step as trace events where ``file`` ends in ``.json``, else as an HTML page.

    Raises `UserError` when the file cannot be written.
    """
    title = f"{plan.model} on {plan.machine}: one step"
    if file.suffix == ".json":
        text = json.dumps(trace_events([(f"predicted: {title}", plan.timeline.ops)]))
    else:
        text = page(title, lines, [("predicted", plan.timeline)])
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise UserError(f"--timeline: {file}: {error.strerror}\n  fix:   name a file in a folder that exists") from None


def _table(title: str, labels: dict[str, int]) -> Iterator[str]:
    yield title
    yield from (f"  {label:34} {size(nbytes):>10}" for label, nbytes in labels.items())


def _stored(plan: Plan) -> str:
    every = "every" if plan.boundary_every == 1 else f"every {plan.boundary_every}."
    return f"the input of {every} layer is stored{' on the host' * plan.boundaries_on_host}"


def _clipping(plan: Plan) -> str:
    if plan.request.passing_gradients:
        return "no clipping; each unit is updated as its gradient lands: 12 bytes a parameter, and a few buffers"
    gradient = 4 if (plan.request.gradient_dtype or plan.request.compute_dtype) == "float32" else 2
    kept = f"gradients stay until the norm is known: {12 + gradient} bytes a parameter"
    return f"{plan.clipping} clipping{', no step clipped' * (plan.clipping == 'speculative')}; {kept}"


def _next(plan: Plan, other: Option) -> str:
    """How another placement differs and what that costs."""
    different = [o for o, best in zip(other.overrides, plan.overrides, strict=True) if o != best]
    slower = f"{short_time(other.seconds)} (+{other.seconds / plan.seconds - 1:.1%})"
    memory = f"{plan.device} {size(other.device_peak)}, host {size(other.host_bytes)}"
    return f"{slower}, {memory}: {shlex.join(different)}"
