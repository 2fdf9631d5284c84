"""Command line, timing and rows of the rivals: same shapes, weights, tokens and row format as benchmarks/steps.py.

Rows run in a process of their own: one that runs out of memory, on the device or on the host, costs its row alone.
Import this module first: it puts the folder of the benchmarks on the path.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _rows import parse_options, speed, write
from _shapes import random_batch, shape_config, shapes

Step = Callable[[list[dict[str, torch.Tensor]]], tuple[Any, Any]]
"""A whole training step on micro-batches of equally many targets; returns the last one's loss and the norm of the
gradients before clipping."""

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_GRAD_NORM = 1.0
LR, WEIGHT_DECAY = 1e-5, 0.01
_WARM_UP = 2
_GOODBYE = 120  # seconds that a process may take to let its memory go
_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass
class Rival:
    """A system set up for one shape."""

    parameters: int
    step: Step
    compile_layers: Callable[[], None]


Build = Callable[[PreTrainedConfig, dict[str, Any]], Rival]


def run(system: str, versions: dict[str, str], build: Build, doc: str) -> None:
    """Measure every row of the command line with the system that ``build`` sets up from a config and options."""
    args = _arguments(doc)
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    common = {
        "system": system,
        **versions,
        "shape": args.shape,
        "layers": shape_config(args.shape, args.layers).num_hidden_layers,
        "max_grad_norm": MAX_GRAD_NORM,
    }
    cases = [(mode, tokens, micro_batches) for mode in args.modes for tokens, micro_batches in args.tokens]
    context = multiprocessing.get_context("spawn")
    while cases:
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=_measure, args=(build, args, common, cases, sender))
        worker.start()
        sender.close()
        ready, error = False, None
        try:
            while True:
                event, error = receiver.recv()
                ready |= event == "ready"
                if event == "row":
                    cases.pop(0)
        except EOFError:
            worker.join(_GOODBYE)
            worker.kill()
            worker.join()
        if cases:
            error = error or f"the process ended with exit code {worker.exitcode}" + (
                ": killed, as a system out of memory does" if worker.exitcode == -9 else ""
            )
            # What fails before the first row would fail for every row.
            failed, cases = (cases[:1], cases[1:]) if ready else (cases, [])
            for mode, tokens, micro_batches in failed:
                asked = {"tokens": tokens, "micro_batches": micro_batches, "options": _row_options(args, mode)}
                row = asked | {"error": error}
                write(common | row, args.out, args.commit)


def _arguments(doc: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes(), default="7b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument(
        "--tokens",
        type=_step_tokens,
        nargs="+",
        default=[(16384, 1), (65536, 1), (131072, 1)],
        help="tokens per step; 65536/4: in four micro-batches",
    )
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after two that are not")
    parser.add_argument("--modes", choices=["eager", "compiled"], nargs="+", default=["eager", "compiled"])
    parser.add_argument("--option", action="append", default=[], help="name=value of the system's settings")
    parser.add_argument("--out", type=Path, help="append one JSON line a row")
    parser.add_argument("--commit", help="where git cannot tell")
    args = parser.parse_args()
    for tokens, micro_batches in args.tokens:
        if micro_batches < 1 or tokens < 1 or tokens % (micro_batches * args.seq_len):
            parser.error(
                f"--tokens {tokens}/{micro_batches}: not so many micro-batches of whole rows of {args.seq_len}"
            )
    return args


def _step_tokens(text: str) -> tuple[int, int]:
    """Tokens of a step, and micro-batches that share them."""
    tokens, _, micro_batches = text.partition("/")
    return int(tokens), int(micro_batches or 1)


def _row_options(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    return parse_options(args.option) | ({"compiled": True} if mode == "compiled" else {})


def _measure(
    build: Build,
    args: argparse.Namespace,
    common: dict[str, Any],
    cases: list[tuple[str, int, int]],
    sender: Connection,
) -> None:
    try:
        config = shape_config(args.shape, args.layers)
        start = time.perf_counter()
        rival = build(config, parse_options(args.option))
        print(
            f"{common['system']}, {args.shape}: {rival.parameters / 1e9:.3f}e9 parameters, set up in"
            f" {time.perf_counter() - start:.1f} s, {_resident_gib():.1f} GiB resident",
            flush=True,
        )
        sender.send(("ready", None))
        compiled = False
        for mode, tokens, micro_batches in cases:
            print(f"{mode}, {tokens} tokens a step, {micro_batches} micro-batches", flush=True)
            if mode == "compiled" and not compiled:
                rival.compile_layers()
                compiled = True
            seconds = _time_steps(rival.step, config.vocab_size, tokens, micro_batches, args)
            row = speed(rival.parameters, tokens, seconds) | {"micro_batches": micro_batches}
            if DEVICE.type == "cuda":
                row["device_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            row |= {"host_gib": _resident_gib(), "options": _row_options(args, mode)}
            write(common | row, args.out, args.commit)
            sender.send(("row", None))
    except Exception as error:
        sender.send(("failed", f"{type(error).__name__}: {error}".splitlines()[0]))
        raise


def _time_steps(step: Step, vocab: int, tokens: int, micro_batches: int, args: argparse.Namespace) -> list[float]:
    """Seconds of the timed steps, each from the end of the step before to its own end."""
    rows = tokens // args.seq_len // micro_batches
    batches = [
        [random_batch(vocab, rows, args.seq_len, 100 * index + micro) for micro in range(micro_batches)]
        for index in range(_WARM_UP + args.steps)
    ]
    seconds: list[float] = []
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with sdpa_kernel(_ATTENTION, set_priority=True):
        last = time.perf_counter()
        for batch in batches:
            loss, norm = step([{name: t.to(DEVICE, non_blocking=True) for name, t in micro.items()} for micro in batch])
            loss, norm = float(loss.detach()), float(norm)
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
            print(f"  {seconds[-1]:7.3f} s  loss {loss:.4f}  norm {norm:.3f}", flush=True)
    return seconds[_WARM_UP:]


def _resident_gib() -> float:
    """What this process holds of the host's memory, pinned memory included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
