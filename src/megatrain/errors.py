"""The two errors that MegaTrain raises on purpose."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake that the user can correct.

    The message names the field or file, the value found and the way out. The command line prints
    ``error: <message>`` and exits with code 2; no traceback is shown.
    """


class LaneError(RuntimeError):
    """An operation failed inside a lane; the message names lane, operation and unit.

    The original exception is the ``__cause__``. After it the model's state is undefined and must be reloaded.
    """
