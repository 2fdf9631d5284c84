"""What the planner says of a row of the steps' benchmark: its prediction, and with ``--auto`` its choice."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from _shapes import shape_data

from megatrain import machine
from megatrain.checks import readable_bytes
from megatrain.choices import Request
from megatrain.config import parse_bytes
from megatrain.machines import MachineSpec, load_machine, measured_file, this_machine
from megatrain.model_spec import ModelSpec, spec_data, spec_from_data
from megatrain.planner import settings
from megatrain.rates import measure_and_keep
from megatrain.search import Candidate, Search

OPTIONS = {
    "slots": "placement.slots",
    "weights_on_device": "placement.weights",
    "states_on_device": "placement.states",
    "activations": "compute.activations",
    "boundaries": "compute.boundaries",
    "boundary_every": "compute.boundary_every",
    "order": "compute.order",
}
"""Options of a run by what `Model` calls them."""

DEFAULTS = {
    "slots": 2,
    "weights_on_device": None,
    "states_on_device": None,
    "activations": "recompute",
    "boundaries": "device",
    "boundary_every": 1,
    "order": "layer",
}
_MICRO = "train.micro_batch_size"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A row as the planner has it: ``options`` of `Model`, and the figures to set beside the measured ones."""

    options: dict[str, Any]
    micro_batches: int
    figures: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line that concern the planner."""
    parser.add_argument("--auto", action="store_true", help="let the planner choose what no --option sets")
    parser.add_argument("--machine", help="rates to plan with: a known machine or a file; else this one is measured")
    parser.add_argument("--host-memory", help="plan with so much, where the system shows less than there is")


def model_spec(args: argparse.Namespace) -> ModelSpec:
    """The planner's view of the row's model."""
    return spec_from_data(args.shape, spec_data(shape_data(args.shape, args.layers)))


def machine_spec(args: argparse.Namespace) -> MachineSpec:
    """The machine to plan for."""
    if args.machine:
        found = load_machine(args.machine)
    else:
        probed = machine.probe()
        device = "cuda" if probed.gpus else "cpu"
        if not measured_file(probed, cpu=device == "cpu").is_file():
            for subject, text, _ in measure_and_keep(probed, device, None, lambda what: None):
                print(f"  {subject:9} {text}", flush=True)
        found = this_machine(probed)
    given = parse_bytes("--host-memory", args.host_memory)
    return found if given is None else replace(found, host_memory=given)


def planned(
    args: argparse.Namespace, model: ModelSpec, where: MachineSpec, tokens: int, options: Mapping[str, Any]
) -> Planned:
    """The row with what the planner says of it; ``options`` are those of the command line, or with ``--auto`` those
    that it leaves alone."""
    rows = tokens // args.seq_len
    if rows * args.seq_len != tokens or rows % args.micro_batches:
        raise SystemExit(f"--tokens {tokens}: not a whole number of rows in each of {args.micro_batches} micro-batches")
    compute = options.get("compute_dtype") or ("float32" if where.unified else "bfloat16")
    asked = dict(options) if args.auto else DEFAULTS | dict(options)
    fixed = {ours: asked[name] for name, ours in OPTIONS.items() if name in asked}
    if not args.auto or args.micro_batches > 1:
        fixed[_MICRO] = rows // args.micro_batches
    request = Request(
        rows=rows,
        seq_len=args.seq_len,
        clipping=options.get("clipping", "deferred"),
        speculated=options.get("speculated", "100%"),
        passing_gradients=options.get("host_gradients") == "passing",
        selective=model.fused_attention,
        compute_dtype=compute,
        gradient_dtype=options.get("gradient_dtype"),
        device_memory=parse_bytes("device_memory", options.get("device_memory")),
        compiled=options.get("compile", not where.unified),
        fixed=fixed,
    )
    search = Search(model, where, request)
    found = search.best()
    candidate = found[0] if found else search.smallest()
    chosen = settings(search, candidate)
    micro = rows // chosen[_MICRO]
    print(f"  planned for {where.name}: {'' if found else 'does not fit; '}{_text(chosen, candidate)}", flush=True)
    given = {name: chosen[ours] for name, ours in OPTIONS.items() if chosen[ours] != DEFAULTS[name]}
    figures = {
        "rates": where.name,
        "auto": args.auto,
        "predicted_seconds": candidate.timeline.seconds,
        "predicted_device_gib": sum(candidate.device_bytes.values()) / 2**30,
        "predicted_process_gib": (sum(candidate.host_bytes.values()) + search.process_bytes(candidate.choice)) / 2**30,
    }
    return Planned(options={**options, **given}, micro_batches=micro, figures=figures)


def _text(chosen: Mapping[str, Any], candidate: Candidate) -> str:
    sizes = (sum(part.values()) for part in (candidate.device_bytes, candidate.host_bytes))
    words = ", ".join(f"{name.partition('.')[2]}={value}" for name, value in chosen.items())
    device, host = map(readable_bytes, sizes)
    return f"{candidate.timeline.seconds:.2f} s, {device} of the device, {host} of the host; {words}"
