"""Whether a step speculates on its clip factor; decided before it is built, from the norms of recent steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf, isfinite

from megatrain.checks import number
from megatrain.engine.placement import check_passing
from megatrain.errors import UserError
from megatrain.optimizers import Optimizer, SpeculativeOptimizer

RECENT = 16
"""Steps that ``auto`` looks at."""
MOST_CLIPPED = 2
"""How many of them may have exceeded the limit: correcting a step costs about what speculation saves in some."""

MODES = ("auto", "deferred", "speculative")


class Clipping:
    """``deferred``, ``speculative``, or ``auto``: speculative while steps are rarely clipped."""

    def __init__(self, mode: str, max_norm: float | None, optimizer: Optimizer, *, passing: bool = False) -> None:
        """``passing``: gradients are not kept until the norm is known, so nothing can be clipped or taken back."""
        if mode not in MODES:
            raise UserError(f"optim.clipping: {mode!r} is unknown; choose {', '.join(MODES)}")
        self._mode, self._optimizer, self.passing = mode, optimizer, passing
        self.max_norm: float | None = None
        self.limit(max_norm)
        self._norms: deque[float] = deque(maxlen=RECENT)
        if mode == "speculative":
            self._require(optimizer.base_lr)

    def limit(self, max_norm: float | None) -> None:
        """Clip to this norm from the next step on; None: no clipping."""
        if max_norm is not None:
            number("optim.max_grad_norm", max_norm, "> 0, or null for no clipping", above=0)
        if self.passing:
            check_passing(max_norm, self._mode)
        self.max_norm = max_norm

    def speculates(self, lr: float) -> bool:
        """Whether the next step, at this learning rate, does; the same for the same history."""
        if self._mode == "speculative":
            self._require(lr)
            return True
        if self._mode == "deferred" or self.passing or not self._can_take_back(lr):
            return False
        if self.max_norm is None:
            return True
        clipped = sum(1 for norm in self._norms if not norm <= self.max_norm)
        return len(self._norms) == RECENT and clipped <= MOST_CLIPPED

    def note(self, norm: float) -> None:
        """Remember the gradient norm of a step."""
        self._norms.append(norm if isfinite(norm) else inf)

    @property
    def history(self) -> list[float | None]:
        """The recent norms for a checkpoint, oldest first; None for one that was not finite."""
        return [norm if isfinite(norm) else None for norm in self._norms]

    @history.setter
    def history(self, norms: Sequence[float | None]) -> None:
        self._norms = deque((inf if norm is None else norm for norm in norms), maxlen=RECENT)

    def _can_take_back(self, lr: float) -> bool:
        return isinstance(self._optimizer, SpeculativeOptimizer) and self._optimizer.can_take_back(lr)

    def _require(self, lr: float) -> None:
        if not self._can_take_back(lr):
            raise UserError(
                f"optim.clipping: speculative cannot take back an update of {self._optimizer} at a rate of {lr} (for"
                " AdamW both betas and 1 - lr * weight_decay must be at least 0.5); use auto or deferred"
            )
