"""Compiled templates: functions of a structure, reused by every layer of it."""

from __future__ import annotations

import logging
import warnings
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._dynamo.exc import TorchDynamoException

from megatrain.losses import TokenLoss

_log = logging.getLogger(__name__)

F = TypeVar("F")


def compiled(function: F, name: str, *, instead: F | None = None, whole: bool = False, random: bool = False) -> F:
    """``function`` compiled at its first call for each shape; where that fails, as it is (or ``instead``), with one
    warning.

    Weights are arguments, not attributes, so all layers of a structure share its graphs. ``whole``: one graph or none.
    ``random``: it draws random numbers, and every graph of the layer must draw the same (inductor has a generator of
    its own, PyTorch's does not depend on the graph).
    """
    # A code object of its own: torch.compile counts recompilations by code object, and structures must not share them.
    assert isinstance(function, FunctionType)
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        closure=function.__closure__,
    )
    result: F = _or_as_it_is(
        torch.compile(own, fullgraph=whole, options={"fallback_random": True} if random else None),
        instead or function,
        name,
    )
    return result


def compiled_token_loss(function: TokenLoss) -> TokenLoss:
    """A loss as one pass over the logits each way; its number of tokens may vary, the vocabulary does not."""
    fast = _or_as_it_is(torch.compile(function), function, "the loss")

    def run(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for tensor in (logits, targets):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        with warnings.catch_warnings():  # torch.compile looks at the gradient of logits, which are no leaf
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            losses: torch.Tensor = fast(logits, targets)
        return losses

    return run


def _or_as_it_is(fast: Any, plain: Any, name: str) -> Any:
    usable = True

    def run(*args: Any) -> Any:
        nonlocal usable
        if usable:
            try:
                return fast(*args)
            except TorchDynamoException as error:
                usable = False
                _log.warning(
                    "torch.compile failed for %s, which runs as it is from here on, some 20 %% slower: %s",
                    name,
                    str(error).strip().splitlines()[0],
                )
        return plain(*args)

    return run
