"""Steps of a model shape: seconds, tokens/s, 6N TFLOP/s, and the share of the compute-only bound in the same run.

    python benchmarks/steps.py --shape 7b --tokens 16384 65536 131072

The bound is the time of the same layers, head and embedding on the same shapes with all weights resident and nothing
else going on. Loss, clipping and optimizer are inside the timing of a step; the data is random, every token counts.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from _rows import parse_options, speed, write
from _shapes import SHAPES, random_batch, random_model, shape_config

from megatrain import AdamW, Model
from megatrain.engine.stalls import breakdown


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536, 131072], help="tokens per step")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a row")
    parser.add_argument("--warm", type=int, default=2, help="steps before those")
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--option", action="append", default=[], help="name=value of Model, as JSON where it parses")
    parser.add_argument(
        "--second-moment",
        type=float,
        help="start every exp_avg_sq here, as a run under way has it; at zero, speculation waits for the norm anyway",
    )
    parser.add_argument("--clip-every", type=int, help="then time the first row again with every n-th step clipped")
    parser.add_argument("--no-bound", action="store_true")
    parser.add_argument(
        "--breakdown",
        action="store_true",
        help="record one more steady step: the share of it that each lane works, and what it waits for in the rest",
    )
    parser.add_argument("--out", type=Path, help="append one JSON line a row")
    parser.add_argument("--commit", help="where git cannot tell")
    return parser.parse_args()


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


def one_row(model: Model, args: argparse.Namespace, tokens: int, clip_every: int | None) -> dict[str, Any]:
    """Time one number of tokens a step."""
    rows, vocab = tokens // args.seq_len // args.micro_batches, model.config.vocab_size
    warm, timed = (0, clip_every) if clip_every else (args.warm, args.steps)
    steps = [
        [random_batch(vocab, rows, args.seq_len, 100 * step + micro) for micro in range(args.micro_batches)]
        for step in range(warm + timed)
    ]
    seconds, corrected = time_steps(model, steps, timed, clip_every)
    row: dict[str, Any] = {
        "system": "MegaTrain",
        "shape": args.shape,
        "layers": model.config.num_hidden_layers,
        **speed(model.num_parameters, tokens, seconds, mixed=clip_every is not None),
        "corrected_steps": corrected,
        "device_peak_gib": model.memory.device_peak / 2**30,
        "host_gib": model.memory.host_bytes / 2**30,
        "options": parse_options(args.option),
        "max_grad_norm": args.max_grad_norm,
        "clip_every": clip_every,
    }
    if not args.no_bound:
        bound = model.compute_bound(rows, args.seq_len, args.micro_batches)
        at_bound = speed(model.num_parameters, tokens, [bound])["tflops_6n"]
        row |= {"bound_seconds": bound, "bound_tflops_6n": at_bound, "share": bound / row["seconds"]}
    if args.breakdown:
        row["breakdown"] = lane_shares(model, steps[-1:] * 2)
    return row


def main() -> None:
    """Run every row."""
    args = arguments()
    options = parse_options(args.option)
    config = shape_config(args.shape, args.layers)
    started = time.perf_counter()
    model = random_model(config, optimizer=AdamW(lr=1e-5), max_grad_norm=args.max_grad_norm, **options)
    print(
        f"{args.shape}: {model.num_parameters / 1e9:.3f}e9 parameters, built in {time.perf_counter() - started:.1f} s"
    )
    if args.second_moment is not None:
        for name in model.store.parameter_names:
            model.store.moment(name, "exp_avg_sq").fill_(args.second_moment)
    for index, tokens in enumerate(args.tokens):
        for clip_every in [None, args.clip_every] if index == 0 and args.clip_every else [None]:
            write(one_row(model, args, tokens, clip_every), args.out, args.commit)
    model.close()


if __name__ == "__main__":
    main()
