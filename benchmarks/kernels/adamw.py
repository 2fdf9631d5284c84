"""Time one AdamW pass: native (each instruction set), reference, torch fused; and what the memory gives.

Prints the median of the rounds. Rounds alternate between the candidates, so that other load on the machine
meets all of them. The last column is the bytes that a pass has to read and write, as a share of what the machine
moves when it reads and writes as many in place without arithmetic.

    python benchmarks/kernels/adamw.py --millions 64 --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from megatrain.kernels import blocks_of, load
from megatrain.kernels.native import NativeKernel
from megatrain.store import Arena

SETTINGS = {"lr": 1e-5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
BANDWIDTH = "read and write in place"
FP32, SPLIT = 28, 26
"""Bytes a parameter: master and moments are read and written, the gradient is read."""


def candidates(count: int) -> dict[str, tuple[int, Callable[[int], object]]]:
    """Bytes a parameter and one callable per row of the table; each takes the step number."""
    take = Arena(count * (16 + 6 + SPLIT), "benchmark").take  # pages as in training
    master, exp_avg, exp_avg_sq, grad = (take(count, torch.float32) for _ in range(4))
    head, half_grad = (take(count, torch.bfloat16) for _ in range(2))
    tail = take(count, torch.int16)
    moved = take(count * SPLIT // 16, torch.int64)
    master.normal_()
    grad.normal_().mul_(1e-3)
    half_grad.copy_(grad)
    load("reference").split(master, head, tail)
    parameter = torch.nn.Parameter(master.clone())
    parameter.grad = grad
    fused = torch.optim.AdamW([parameter], fused=True, lr=1e-5, weight_decay=0.01)
    waiting = torch.zeros(blocks_of(count), dtype=torch.uint8)
    rows: dict[str, tuple[int, Callable[[int], object]]] = {
        BANDWIDTH: (SPLIT, lambda step: moved.bitwise_not_()),
        "torch fused, fp32": (FP32, lambda step: fused.step()),
    }
    kernels = {"reference": load("reference")}
    kernels |= {f"native {isa}": NativeKernel(isa) for isa in NativeKernel().instruction_sets()}
    for name, kernel in kernels.items():
        rows[f"{name}, fp32"] = (
            FP32,
            lambda step, kernel=kernel: kernel.adamw(master, None, exp_avg, exp_avg_sq, grad, step=step, **SETTINGS),
        )
        rows[f"{name}, split master, bf16 gradient"] = (
            SPLIT,
            lambda step, kernel=kernel: kernel.adamw(
                head, tail, exp_avg, exp_avg_sq, half_grad, step=step, grad_scale=0.5, **SETTINGS
            ),
        )
        rows[f"{name}, the same, speculating"] = (
            SPLIT,
            lambda step, kernel=kernel: kernel.adamw_speculate(
                head, tail, exp_avg, exp_avg_sq, half_grad, waiting, step=step, **SETTINGS
            ),
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, default=64, help="parameters, in 10^6")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    # Not 2^20: arrays that lie a power of two apart share banks of memory and take half as long again.
    count = options.millions * 10**6
    torch.set_num_threads(load("native").threads)
    rows = candidates(count)
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for step in range(1, options.rounds + 2):
        for name, (_, run) in rows.items():
            begin = time.perf_counter()
            run(step)
            if step > 1:  # the first round touches the memory
                seconds[name].append(time.perf_counter() - begin)
    print(f"{options.millions} M parameters, {load('native').threads} threads, torch {torch.__version__}")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rates = {name: rows[name][0] * count / median / 1e9 for name, median in medians.items()}
    for name, median in medians.items():
        rate, share = count / median / 1e9, rates[name] / rates[BANDWIDTH]
        print(f"{name:48} {median * 1e3:8.1f} ms {rate:6.2f} Gparam/s {rates[name]:6.1f} GB/s {share:5.0%}")


if __name__ == "__main__":
    main()
