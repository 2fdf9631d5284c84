"""What an update takes beside the time to read and write as many bytes: `make check-times`, on an idle machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch
from _kernels import NATIVES, SETTINGS

from megatrain.store import Arena

pytestmark = pytest.mark.times


@pytest.mark.skipif(not NATIVES, reason="the native kernel is not built")
def test_update_of_300_million_parameters_takes_at_most_half_as_long_again_as_its_bytes() -> None:
    """Known fault 22. Refreshing what is sent to the device takes nothing: the head is that."""
    count = 300_000_000
    take = Arena(count * (14 + 13) + (1 << 20), "update").take
    head, tail = take(count, torch.bfloat16), take(count, torch.int16)
    first, second, gradient = take(count, torch.float32), take(count, torch.float32), take(count, torch.bfloat16)
    gradient.fill_(1e-3)
    moved = take(count * 13 // 8, torch.int64)  # 26 bytes a parameter, half read and half written
    kernel = NATIVES[0]
    torch.set_num_threads(kernel.threads)
    settings = {"step": 1, **SETTINGS}
    candidates: dict[str, Callable[[], object]] = {
        "update": lambda: kernel.adamw(head, tail, first, second, gradient, **settings),
        "bytes": lambda: moved.bitwise_not_(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(8):
        for name, run in candidates.items():
            begin = time.perf_counter()
            run()
            if turn:  # the first touches the memory
                seconds[name].append(time.perf_counter() - begin)
    update, floor = (statistics.median(seconds[name]) for name in candidates)
    assert update <= 1.5 * floor, f"{count / update / 1e9:.2f} Gparam/s, {26 * count / floor / 1e9:.1f} GB/s"
