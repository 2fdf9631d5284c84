"""Where a run is reported to: the contract, and what is reported.

A public file of this folder is one logger. All calls come from the training thread, are blocking and quick.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step. Tokens are those of the step; memory is in bytes; ``seconds`` is the step's wall time.

    ``target_tokens`` are those that the loss is taken on, ``real_tokens`` all without padding, ``padded_tokens`` what
    passed through the model. ``seconds_left`` excludes the slow first step and is None until it can be told.
    """

    step: int
    total_steps: int
    epoch: float
    loss: float
    lr: float
    grad_norm: float
    skipped: bool
    target_tokens: int
    real_tokens: int
    padded_tokens: int
    seconds: float
    device_peak: int
    host_bytes: int
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class Checked:
    """One figure as it was predicted and as it was measured."""

    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The whole run. ``seconds`` is wall time with loading and saving, ``step_seconds`` that of the steps alone.

    ``one_step`` is the time of a recorded steady step, None when there was none; peaks are in bytes, ``device_peak``
    None where the device counts none.
    """

    steps: int
    target_tokens: int
    real_tokens: int
    padded_tokens: int
    seconds: float
    step_seconds: float
    first_loss: float
    last_loss: float
    parameters: int
    exported: Path
    one_step: Checked | None
    device_peak: Checked | None
    host_peak: Checked


class Logger(ABC):
    """One destination. Opened by its constructor; ``close`` is called once, also after a failure."""

    @abstractmethod
    def note(self, text: str) -> None:
        """A line for people."""

    @abstractmethod
    def step(self, record: StepRecord) -> None:
        """A step has been completed."""

    @abstractmethod
    def progress(self, phase: str, done: int, total: int) -> None:
        """Something long is under way; ``done`` of ``total`` (0: not known) in any one unit."""

    @abstractmethod
    def summary(self, summary: Summary) -> None:
        """The run is complete and its model written."""

    @abstractmethod
    def close(self) -> None:
        """No more calls follow."""
