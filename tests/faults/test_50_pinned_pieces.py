"""Fault 50: one large pinned region fails where several smaller ones work.

The driver here rejects more than 2 MiB in a call, as some reject more than 2 GiB.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from _devices import FakeDriver, PinningCpu
from _engine import engine, joined, rows
from _fixtures import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.devices._pinned import Event, PinnedMemory
from megatrain.layout import HUGE_PAGE, PAGE
from megatrain.store import Arena

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("one_thread")


def trained(device: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = tiny_config(hidden_size=256, intermediate_size=1024)
    with engine(config, device) as model:
        losses = [model.step([joined(rows(4, 32, seed=step))]).loss for step in range(3)]
        return losses, model.state_dict()


def test_a_store_is_cut_into_registrations_and_trains(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver(at_once=2 * MIB)
    device = PinningCpu(driver)
    want = trained("cpu")
    with engine(tiny_config(hidden_size=256, intermediate_size=1024), device) as model:
        assert max(driver.pinned.values()) <= 2 * MIB
        assert sum(driver.pinned.values()) == model.memory.host_bytes, "all of it"
        assert len(driver.pinned) >= model.memory.host_bytes // (2 * MIB)
    assert driver.pinned == {}
    got = trained(PinningCpu(FakeDriver(at_once=2 * MIB)))
    assert got[0] == want[0]
    assert all(torch.equal(got[1][name], master) for name, master in want[1].items())
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING], "nothing is slower, so nothing is said"


def test_the_size_that_works_is_remembered() -> None:
    driver = FakeDriver(at_once=2 * MIB)
    pinned = PinnedMemory(driver)
    arenas = [Arena(32 * MIB, "test") for _ in range(2)]
    pinned.register(arenas[0].memory)
    refused = len(driver.calls) - len(driver.pinned)
    pinned.register(arenas[1].memory)
    assert len(driver.calls) - len(driver.pinned) == refused <= 10


class Late(FakeDriver):
    """Copies that need not wait happen when an event behind them is waited for, or in the end."""

    def __init__(self, **limits: int) -> None:
        super().__init__(**limits)
        self.queue: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self.done = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
        if non_blocking:
            self.queue.append((target, source))
        else:
            COPY(target, source)

    def event(self) -> Event:
        return Mark(self, self.done + len(self.queue))

    def advance(self, to: int) -> None:
        while self.done < to:
            COPY(*self.queue.popleft())
            self.done += 1


@dataclass
class Mark:
    driver: Late
    place: int

    def synchronize(self) -> None:
        self.driver.advance(self.place)


COPY = torch.Tensor.copy_
shares = st.sampled_from([0, 0.3, 0.6, 1])


@pytest.mark.parametrize("upload", [True, False])
@pytest.mark.parametrize("budget", [True, False])
@settings(max_examples=20, deadline=None)
@given(
    mibs=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    at_once=st.sampled_from([HUGE_PAGE, 1 << 30]),
    allowed=shares,
    begin=shares,
    end=shares,
)
def test_every_byte_is_copied_whatever_is_pinned(
    upload: bool, budget: bool, mibs: list[int], at_once: int, allowed: float, begin: float, end: float
) -> None:
    most = int(allowed * sum(mibs) * MIB)
    driver = Late(most=1 << 62 if budget else 64 * MIB + most, at_once=at_once)
    pinned = PinnedMemory(driver)
    pinned.limit(max(1, most) if budget else None)
    arenas = [Arena(mib * MIB, "test") for mib in mibs]
    for arena in arenas:
        pinned.register(arena.memory)
    borders = sorted((start, start + n) for start, n in driver.pinned.items())
    assert all(one[1] <= other[0] for one, other in pairwise(borders))
    assert all(start % PAGE == 0 for start, _ in borders)
    host = arenas[0].memory.view(torch.int32)
    first = int(begin * (host.numel() - 1))
    part = host[first : max(first + 1, int(end * host.numel()))]
    for a, b, registered in pinned._parts(part):
        low, high = part.data_ptr() + 4 * a, part.data_ptr() + 4 * b
        touched = [piece for piece in borders if piece[0] < high and low < piece[1]]
        assert len(touched) == registered, "one copy, one piece"
    there = torch.randint(-9999, 9999, (part.numel(),), dtype=torch.int32)
    want = there.clone()
    if upload:
        part.copy_(want)
        there.zero_()
    middle = part.numel() // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", lambda *args, **options: driver.copy(*args, **options))
        for half in (slice(0, middle), slice(middle, None)):  # the second comes while the first is under way
            source, target = (part[half], there[half]) if upload else (there[half], part[half])
            pinned.copy(target, source, upload=upload)
        landed = [torch.equal(part[a:b], want[a:b]) for a, b, registered in pinned._parts(part) if not registered]
        assert all(landed), "what passes through the ring is there at once"
        driver.event().synchronize()
    assert torch.equal(part, want)
    assert torch.equal(there, want)
    for arena in arenas:
        pinned.unregister(arena.memory)
    assert driver.pinned == {}
