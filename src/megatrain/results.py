"""What the public calls return."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step."""

    loss: float
    """Mean negative log-likelihood per target token of the step."""
    grad_norm: float
    """Global norm before clipping."""
    tokens: int
    """Target tokens of the step."""
    skipped: bool
    """The gradient was not finite, so nothing was updated."""
    corrected: bool
    """Units were updated before the norm was known, and that was corrected: bitwise results may differ from the same
    step with ``clipping="deferred"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Mean negative log-likelihood over all target tokens of an evaluation."""

    loss: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes in use. ``device_peak`` is what a run like this one needs as its ``device_memory``."""

    device_budget: int | None
    device_peak: int
    device_measured: int | None
    """Most that the device's allocator has had in use so far; None where it does not tell."""
    host_bytes: int
    by_label: dict[str, int]
    """Of the device, without what comes and goes in a step."""
    host_by_label: dict[str, int]
