"""Whether a model can be used: open, broken by a step that was dropped, or closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatrain.devices import Device, Ticket
from megatrain.errors import LaneError, UserError

_UNDER_WAY = "it was interrupted in the middle of its work"


class Lifecycle:
    """The state of one model on ``device``."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._broken: str | None = None
        self.closed = False

    @property
    def broken(self) -> bool:
        """Whether masters may be half updated."""
        return self._broken is not None

    def check(self) -> None:
        """Raise `UserError` unless the model can be used."""
        if self.closed:
            raise UserError("this model is closed; load it again with Model.from_pretrained or Model.from_config")
        if self._broken is not None:
            raise UserError(
                f"this model can no longer be used: {self._broken}. Its masters may be half updated: close it, load"
                " the model again and load_state the last checkpoint"
            )

    def settle(self) -> None:
        """Wait until every update has been applied."""
        self.check()
        try:
            self._device.drain()
        except LaneError as error:
            self.abandon(str(error))
            raise

    def complete(
        self, submit: Callable[[], Ticket], wait: Callable[[Ticket], None], finish: Callable[[], None] = lambda: None
    ) -> None:
        """Submit a program and wait for its results, through one Ctrl-C; then ``finish`` its bookkeeping, which may
        `abandon` the model."""
        interrupted = None
        with self.all_or_broken():
            ticket = submit()
            try:
                wait(ticket)
            except KeyboardInterrupt as first:
                interrupted = first
                wait(ticket)
            finish()
        if interrupted is not None:
            raise interrupted

    @contextmanager
    def all_or_broken(self) -> Iterator[None]:
        """What runs inside is completed, refused beforehand, or leaves a model that can no longer be used.

        The model counts as broken until the end, because Ctrl-C may come between any two lines.
        """
        self._broken = _UNDER_WAY
        try:
            yield
        except UserError:
            if self._broken == _UNDER_WAY:
                self._broken = None
            raise
        except LaneError as error:
            self.abandon(str(error))
            raise
        except BaseException as error:
            self.abandon(f"it was interrupted ({type(error).__name__}) and what was left of the step was dropped")
            raise
        if self._broken == _UNDER_WAY:
            self._broken = None

    def abandon(self, reason: str) -> None:
        """What was begun cannot be completed: the model can no longer be used."""
        self._broken = reason
        self._device.abort()
