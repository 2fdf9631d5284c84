"""Fault 25: the rate advances per micro-batch, or is computed from the wrong step count."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from _runs import arguments, chats, make_model, megatrain, metrics, write_rows

from megatrain.config import ScheduleConfig
from megatrain.errors import UserError
from megatrain.schedule import Schedule


def rates(schedule: Schedule) -> list[float]:
    return [schedule.rate(step) for step in range(schedule.total)]


def test_the_rate_does_not_depend_on_the_split_into_micro_batches(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    write_rows(tmp_path / "chats.jsonl", chats(8))
    logged = []
    for micro in (4, 1):
        words = ["train.max_steps=10", f"train.micro_batch_size={micro}", f"output_dir={tmp_path}/run{micro}"]
        result = megatrain("train", *arguments(tmp_path, *words, "schedule.warmup=4", "schedule.min_lr_ratio=0.2"))
        assert result.exit_code == 0, result.output
        logged.append([s["lr"] for s in metrics(tmp_path / f"run{micro}")])
    assert logged[0] == logged[1]
    assert logged[0][:4] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert logged[0][-1] == pytest.approx(2e-4)


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_the_last_step_has_the_configured_minimum(shape: str) -> None:
    config = ScheduleConfig(type=shape, warmup=0.1, min_lr_ratio=0.25)  # type: ignore[arg-type]
    found = rates(Schedule.from_config(config, 2.0, 30))
    assert found[2] == 2.0
    assert found[-1] == pytest.approx(0.5)
    assert found[2:] == sorted(found[2:], reverse=True)
    assert found[:3] == pytest.approx([2 / 3, 4 / 3, 2.0])


def test_constant_stays() -> None:
    assert rates(Schedule.from_config(ScheduleConfig(type="constant", warmup=2), 1.0, 5)) == [0.5, 1, 1, 1, 1]


def test_one_step_has_the_full_rate() -> None:
    assert rates(Schedule.from_config(ScheduleConfig(warmup=0), 1.0, 1)) == [1.0]


@pytest.mark.parametrize("total", [12, 20, 40])
@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_another_total_after_a_resume_makes_no_jump(shape: str, total: int) -> None:
    config = ScheduleConfig(type=shape, warmup=3, min_lr_ratio=0.1)  # type: ignore[arg-type]
    old = Schedule.from_config(config, 1.0, 20)
    new = Schedule.from_config(config, 1.0, total).resumed(old.state(), 10)
    assert new.rate(9) == pytest.approx(old.rate(9))
    steps = [old.rate(9), *(new.rate(step) for step in range(10, total))]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == pytest.approx(0.1)
    largest = max(a - b for a, b in pairwise(steps))
    assert largest < 2.5 * (steps[0] - 0.1) / (len(steps) - 1)
    if total == 20:
        assert rates(new) == rates(old)


def test_a_resume_within_the_warm_up_keeps_its_length() -> None:
    config = ScheduleConfig(warmup=0.2)
    old = Schedule.from_config(config, 1.0, 20)
    new = Schedule.from_config(config, 1.0, 100).resumed(old.state(), 2)
    assert [new.rate(s) for s in range(5)] == [0.25, 0.5, 0.75, 1.0, pytest.approx(new.rate(4))]
    assert new.warmup == 4


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    with pytest.raises(UserError, match=r"schedule.warmup: 30 steps are more than the run's 20"):
        Schedule.from_config(ScheduleConfig(warmup=30), 1.0, 20)
