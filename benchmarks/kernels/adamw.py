"""Time one AdamW pass: native (each instruction set), reference, torch fused.

Prints the median of the rounds. Rounds alternate between the candidates, so that other load on the machine
meets all of them.

    python benchmarks/kernels/adamw.py --millions 64 --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from megatrain.kernels import load
from megatrain.kernels.native import NativeKernel

SETTINGS = {"lr": 1e-5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


def candidates(count: int) -> dict[str, Callable[[int], object]]:
    """One callable per row of the table; each takes the step number."""
    grad = torch.randn(count) * 1e-3
    half_grad = grad.bfloat16()
    master, exp_avg, exp_avg_sq = torch.randn(count), torch.zeros(count), torch.zeros(count)
    head, tail = torch.empty(count, dtype=torch.bfloat16), torch.empty(count, dtype=torch.int16)
    load("reference").split(master, head, tail)
    parameter = torch.nn.Parameter(master.clone())
    parameter.grad = grad
    fused = torch.optim.AdamW([parameter], fused=True, lr=1e-5, weight_decay=0.01)
    rows: dict[str, Callable[[int], object]] = {"torch fused, fp32": lambda step: fused.step()}
    kernels = {"reference": load("reference")}
    kernels |= {f"native {isa}": NativeKernel(isa) for isa in NativeKernel().instruction_sets()}
    for name, kernel in kernels.items():
        rows[f"{name}, fp32"] = lambda step, kernel=kernel: kernel.adamw(
            master, None, exp_avg, exp_avg_sq, grad, step=step, **SETTINGS
        )
        rows[f"{name}, split master, bf16 gradient"] = lambda step, kernel=kernel: kernel.adamw(
            head, tail, exp_avg, exp_avg_sq, half_grad, step=step, grad_scale=0.5, **SETTINGS
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, default=64, help="parameters, in 2^20")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    count = options.millions << 20
    rows = candidates(count)
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for step in range(1, options.rounds + 2):
        for name, run in rows.items():
            begin = time.perf_counter()
            run(step)
            if step > 1:  # the first round touches the memory
                seconds[name].append(time.perf_counter() - begin)
    print(f"{options.millions} Mi parameters, {load('native').threads} threads, torch {torch.__version__}")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:48} {median * 1e3:8.1f} ms {count / median / 1e9:6.2f} Gparam/s")


if __name__ == "__main__":
    main()
