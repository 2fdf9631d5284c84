"""When a step speculates on its clip factor."""

from __future__ import annotations

from math import inf, nan

import pytest

from megatrain import AdamW, UserError
from megatrain.engine.clipping import RECENT, Clipping


def clipping(mode: str = "auto", limit: float | None = 1.0, norms: list[float] | None = None, **options: float) -> bool:
    policy = Clipping(mode, limit, AdamW(**options))  # type: ignore[arg-type]
    for norm in norms or []:
        policy.note(norm)
    return policy.speculates(1e-3)


@pytest.mark.parametrize(
    ("norms", "speculates"),
    [
        ([0.5] * (RECENT - 1), False),
        ([0.5] * RECENT, True),
        ([1.0] * RECENT, True),
        ([2.0] * 2 + [0.5] * 14, True),
        ([2.0] * 3 + [0.5] * 13, False),
        ([2.0] * 10 + [0.5] * 16, True),
        ([nan, inf, 2.0] + [0.5] * 13, False),
    ],
)
def test_auto_looks_at_the_last_16_norms(norms: list[float], speculates: bool) -> None:
    assert clipping(norms=norms) is speculates


def test_the_modes_and_no_limit() -> None:
    assert clipping("auto", None)
    assert clipping("speculative", 1.0, [9.0] * 16)
    assert not clipping("deferred", None)


def test_a_step_that_cannot_be_taken_back_is_deferred_or_refused() -> None:
    assert not clipping("auto", None, weight_decay=600.0)
    with pytest.raises(UserError, match=r"optim\.clipping: speculative cannot take back"):
        clipping("speculative", None, weight_decay=600.0)
    with pytest.raises(UserError, match=r"optim\.clipping: speculative cannot take back"):
        Clipping("speculative", None, AdamW(betas=(0.4, 0.999)))


def test_history_survives_a_checkpoint() -> None:
    policy, other = Clipping("auto", 1.0, AdamW()), Clipping("auto", 1.0, AdamW())
    for norm in [nan, 2.0, *[0.25] * 14]:
        policy.note(norm)
    assert policy.history == [None, 2.0, *[0.25] * 14]
    other.history = policy.history
    assert other.speculates(1e-3)
    other.note(2.0)
    assert other.speculates(1e-3)
    other.note(2.0)
    assert other.speculates(1e-3)
    other.note(2.0)
    assert not other.speculates(1e-3)


def test_a_wrong_mode_is_refused() -> None:
    with pytest.raises(UserError, match=r"optim\.clipping: 'eager' is unknown; choose auto, deferred, speculative"):
        Clipping("eager", 1.0, AdamW())
