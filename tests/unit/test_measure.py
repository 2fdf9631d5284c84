"""The memory that a computation takes beyond the tensors it is given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatrain.devices._measure import count_peak

OUTSIDE = torch.zeros(1000)  # 4000 bytes
SIZE = 4000


def two_after_another() -> torch.Tensor:
    first = OUTSIDE + 1
    del first
    return OUTSIDE + 2


def gradient() -> torch.Tensor:
    weight = OUTSIDE.detach().requires_grad_()
    return torch.autograd.grad((weight * weight).sum(), weight)[0]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda: OUTSIDE[:10], 0),
        (lambda: [OUTSIDE[:10].detach().requires_grad_(), OUTSIDE.view(10, 100).T], 0),
        (lambda: OUTSIDE.add_(0), 0),
        (lambda: OUTSIDE[:10].zero_(), 0),
        (lambda: OUTSIDE + 1, SIZE),
        (lambda: (OUTSIDE + 1)[:10], SIZE),
        (lambda: (OUTSIDE + 1).add_(1), SIZE),
        (lambda: ((OUTSIDE + 1), (OUTSIDE + 1)), 2 * SIZE),
        (lambda: OUTSIDE.split(100), 0),
        (lambda: torch.stack(OUTSIDE.split(100)), SIZE),
        (two_after_another, SIZE),
    ],
)
def test_only_what_is_new_counts_while_it_lives(run: Callable[[], object], expected: int) -> None:
    assert count_peak(run) == expected


def test_a_gradient_counts_what_autograd_takes() -> None:
    assert 2 * SIZE <= count_peak(gradient) <= 4 * SIZE
