"""Steps of a model shape: seconds, tokens/s, 6N TFLOP/s, and the share of the compute-only bound in the same run.

    python benchmarks/steps.py --shape 7b --tokens 16384 65536 131072
    python benchmarks/steps.py --shape qwen3-30b-a3b --layers 12 --tokens 65536 --auto

Each row has what the planner predicted of it; with ``--auto`` the planner also chooses what no ``--option`` sets.

The bound is the time of the same layers, head and embedding on the same shapes with all weights resident and nothing
else going on. Loss, clipping and optimizer are inside the timing of a step; the data is random, every token counts.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from _planned import Planned, add_arguments, machine_spec, model_spec, planned
from _rows import parse_options, speed, write
from _shapes import random_batch, random_model, shape_config, shapes

from megatrain import AdamW, Model
from megatrain.checked import peaks
from megatrain.engine.program import Op
from megatrain.engine.stalls import breakdown


def arguments(description: str) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes(), default="7b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536, 131072], help="tokens per step")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a row")
    parser.add_argument("--warm", type=int, default=2, help="steps before those")
    parser.add_argument("--max-grad-norm", type=_limit, default=1.0, help="or none")
    parser.add_argument("--option", action="append", default=[], help="name=value of Model, as JSON where it parses")
    parser.add_argument(
        "--second-moment",
        type=float,
        help="start every exp_avg_sq here, as a run under way has it; at zero, speculation waits for the norm anyway",
    )
    parser.add_argument("--clip-every", type=int, help="then time the first row again with every n-th step clipped")
    parser.add_argument(
        "--serial-optimizer",
        action="store_true",
        help="neither forward nor backward runs beside an update: what overlapping them is worth",
    )
    parser.add_argument("--no-bound", action="store_true")
    parser.add_argument(
        "--breakdown",
        action="store_true",
        help="record one more steady step: the share of it that each lane works, and what it waits for in the rest",
    )
    add_arguments(parser)
    parser.add_argument("--out", type=Path, help="append one JSON line a row")
    parser.add_argument("--commit", help="where git cannot tell")
    return parser.parse_args()


def _limit(text: str) -> float | None:
    return None if text == "none" else float(text)


def time_steps(
    model: Model, batches: list[list[dict[str, torch.Tensor]]], timed: int, clip_every: int | None
) -> tuple[list[float], int]:
    """Seconds of the last ``timed`` steps, each from the end of the step before to its own end; how many of them were
    corrected after their norm was known. A step that is to be clipped is limited to half of the norm before it."""
    seconds, corrected, last = [], 0, time.perf_counter()
    limit, norm = model.max_grad_norm, 1.0
    for index, step in enumerate(batches):
        if clip_every is not None:
            model.max_grad_norm = norm / 2 if (index + 1) % clip_every == 0 else limit
        result = model.step(step)
        norm = result.grad_norm
        corrected += result.corrected and index >= len(batches) - timed
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
        print(f"  {seconds[-1]:7.3f} s  loss {result.loss:.4f}  norm {result.grad_norm:.3f}", flush=True)
    model.max_grad_norm = limit
    return seconds[-timed:], corrected


def lane_shares(model: Model, batches: list[list[dict[str, torch.Tensor]]]) -> dict[str, Any]:
    """Of the last of these steps, which are recorded: its seconds and, by lane, the share of it that the lane works, on
    each kind of operation, and that it waits for each reason."""
    with model.trace() as trace:
        for step in batches:
            model.step(step)
    recorded = trace.steps[-1]
    shares: dict[str, Any] = {"seconds": recorded.seconds}
    for lane, share in breakdown(recorded).items():
        waiting = {why: waited / recorded.seconds for why, waited in share.waiting.items()}
        kinds: Counter[str] = Counter()
        for timed in recorded.ops:
            if timed.op.lane == lane:
                kinds[timed.op.kind] += (timed.end - timed.start) / recorded.seconds
        shares[lane] = {"busy": share.busy / recorded.seconds, "kinds": kinds, "waiting": waiting}
        print(f"  {lane:9} works {share.busy / recorded.seconds:6.1%}: {parts(dict(kinds.most_common()))}")
        print(f"  {'':9} waits for {parts(waiting)}", flush=True)
    return shares


def parts(shares: dict[str, float]) -> str:
    """The shares that count, as text."""
    return ", ".join(f"{part:.1%} {what}" for what, part in shares.items() if part >= 0.001) or "nothing"


def one_row(
    model: Model, args: argparse.Namespace, tokens: int, plan: Planned, active: int, clip_every: int | None
) -> dict[str, Any]:
    """Time one number of tokens a step; ``active`` parameters of the model count."""
    micro_batches = plan.micro_batches
    rows, vocab = tokens // args.seq_len // micro_batches, model.config.vocab_size
    warm, timed = (0, clip_every) if clip_every else (args.warm, args.steps)
    steps = [
        [random_batch(vocab, rows, args.seq_len, 100 * step + micro) for micro in range(micro_batches)]
        for step in range(warm + timed)
    ]
    seconds, corrected = time_steps(model, steps, timed, clip_every)
    on_device, process = peaks(model.memory, "cuda" if torch.cuda.is_available() else "cpu", 0)
    row: dict[str, Any] = {
        "system": "MegaTrain",
        "shape": args.shape,
        "layers": model.config.num_hidden_layers,
        **speed(active, tokens, seconds, mixed=clip_every is not None),
        "all_parameters": model.num_parameters,
        "micro_batches": micro_batches,
        "corrected_steps": corrected,
        "device_peak_gib": model.memory.device_peak / 2**30,
        "device_measured_gib": None if on_device is None else on_device.measured / 2**30,
        "device_used_gib": _used_gib(),
        "host_gib": model.memory.host_bytes / 2**30,
        "process_gib": process.measured / 2**30,
        "pinned_gib": _pinned_gib(),
        "options": plan.options,
        "max_grad_norm": args.max_grad_norm,
        "clip_every": clip_every,
        "serial_optimizer": args.serial_optimizer,
        **plan.figures,
    }
    if not args.no_bound:
        bound = model.compute_bound(rows, args.seq_len, micro_batches)
        at_bound = speed(active, tokens, [bound])["tflops_6n"]
        row |= {"bound_seconds": bound, "bound_tflops_6n": at_bound, "share": bound / row["seconds"]}
    if args.breakdown:
        row["breakdown"] = lane_shares(model, steps[-1:] * 2)
    return row


def serialize_optimizer(model: Model) -> None:
    """Let updates and arithmetic take turns, in the order of the program."""
    builder = model._engine._builder
    training_step = builder.training_step

    def in_turns(micro_batches: int, *, speculative: bool = False) -> list[Op]:
        ops = training_step(micro_batches, speculative=speculative)
        for op in ops:
            if op.lane == "optimizer":
                op.writes = (*op.writes, ("turn",))
            elif op.lane == "compute" and op.micro >= 0:
                op.reads = (*op.reads, ("turn",))
        return ops

    builder.training_step = in_turns  # type: ignore[method-assign]


def _used_gib() -> float | None:
    """What the GPU has given away: the allocator's memory, the driver's context and libraries."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def _pinned_gib() -> float | None:
    """All that PyTorch's own allocator has pinned of the host: staging, and copies of the compiler's tuner."""
    return torch.cuda.host_memory_stats()["allocated_bytes.allocated"] / 2**30 if torch.cuda.is_available() else None


def built(args: argparse.Namespace, options: dict[str, Any]) -> Model:
    """The model with random weights."""
    started = time.perf_counter()
    config = shape_config(args.shape, args.layers)
    model = random_model(config, optimizer=AdamW(lr=1e-5), max_grad_norm=args.max_grad_norm, **options)
    seconds = time.perf_counter() - started
    print(f"{args.shape}: {model.num_parameters / 1e9:.3f}e9 parameters, built in {seconds:.1f} s", flush=True)
    if args.serial_optimizer:
        serialize_optimizer(model)
    if args.second_moment is not None:
        for name in model.store.parameter_names:
            model.store.moment(name, "exp_avg_sq").fill_(args.second_moment)
    return model


def main() -> None:
    """Run every row."""
    args = arguments(__doc__)
    options = parse_options(args.option)
    where, spec = machine_spec(args), model_spec(args)
    model, placed = None, None
    for index, tokens in enumerate(args.tokens):
        plan = planned(args, spec, where, tokens, options)
        if model is None or plan.options != placed:
            if model is not None:
                model.close()
                del model
                gc.collect()
            model, placed = built(args, plan.options), plan.options
        for clip_every in [None, args.clip_every] if index == 0 and args.clip_every else [None]:
            row = one_row(model, args, tokens, plan, spec.active_parameters, clip_every)
            write(row, args.out, args.commit)
    if model is not None:
        model.close()


if __name__ == "__main__":
    main()
