"""The learning rate as a function of the optimizer step. No state advances; only steps are counted."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from megatrain.config import ScheduleConfig
from megatrain.errors import UserError


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rate of step 0 to ``total - 1``: linear warm-up over ``warmup`` steps, then the shape down to ``minimum``.

    The shape runs from progress ``anchor_progress`` at ``anchor_step`` to progress 1 at the last step. A run that is
    resumed with another total is anchored where it stopped, so its rate does not jump.
    """

    shape: str
    peak: float
    minimum: float
    warmup: int
    total: int
    anchor_step: int
    anchor_progress: float = 0.0

    @classmethod
    def from_config(cls, config: ScheduleConfig, lr: float, total: int) -> Schedule:
        """The schedule of a new run of ``total`` steps. Raises :class:`UserError` if the warm-up outlasts the run."""
        warmup = round(config.warmup * total) if config.warmup < 1 else int(config.warmup)
        if warmup > total:
            raise UserError(
                f"schedule.warmup: {warmup} steps are more than the run's {total}\n"
                "  fix:   lower schedule.warmup, or give a share below 1"
            )
        return cls(config.type, lr, lr * config.min_lr_ratio, warmup, total, max(0, warmup - 1))

    def rate(self, step: int) -> float:
        """The learning rate of ``step``, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = self.progress(step)
        if self.shape == "constant":
            return self.peak
        left = 1 - done if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.minimum + (self.peak - self.minimum) * left

    def progress(self, step: int) -> float:
        """How much of the decay lies behind ``step``: 0 at the end of the warm-up, 1 at the last step."""
        if step <= self.anchor_step or self.total - 1 <= self.anchor_step:
            return self.anchor_progress
        share = (step - self.anchor_step) / (self.total - 1 - self.anchor_step)
        return self.anchor_progress + (1 - self.anchor_progress) * min(1.0, share)

    def state(self) -> dict[str, Any]:
        """As JSON, for the checkpoint."""
        return asdict(self)

    def resumed(self, saved: dict[str, Any], step: int) -> Schedule:
        """This schedule for a run that continues before ``step``, given the saved run's.

        With the same total the saved one goes on exactly. With another total the shape runs from where the saved one
        stood to the new end; the warm-up stays as it was.
        """
        old = Schedule(**saved)
        if (old.total, old.shape, old.peak, old.minimum) == (self.total, self.shape, self.peak, self.minimum):
            return old
        start = max(step - 1, old.warmup - 1, 0)
        return Schedule(self.shape, self.peak, self.minimum, old.warmup, self.total, start, old.progress(start))
