"""Full-precision training of models larger than your GPU.

The public names load lazily: ``import megatrain`` imports no torch, opens no device and starts no thread.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain.errors import UserError
    from megatrain.model import Model
    from megatrain.optimizers.adamw import AdamW

__version__ = "0.1.0"
__all__ = ["AdamW", "Model", "UserError", "__version__"]

_HOMES = {"Model": "megatrain.model", "AdamW": "megatrain.optimizers.adamw", "UserError": "megatrain.errors"}


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'megatrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
