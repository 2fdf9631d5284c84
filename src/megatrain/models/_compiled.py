"""Compiled templates: one function a structure, reused by every layer of it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.func import functional_call

from megatrain.losses import TokenLoss

_log = logging.getLogger(__name__)

LayerFunction = Callable[[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]], Any]


def layer_function(template: nn.Module) -> LayerFunction:
    """``(weights, hidden, arguments) -> output`` of a layer."""

    def run(weights: dict[str, torch.Tensor], hidden: torch.Tensor, arguments: dict[str, Any]) -> Any:
        return functional_call(template, weights, (hidden,), arguments)

    return run


def compiled(function: LayerFunction, name: str) -> LayerFunction:
    """``function`` compiled at its first call for each shape; where that fails, as it is, with one warning.

    Weights are arguments, not attributes, so all layers of a structure share two graphs: forward alone, and forward
    with backward.
    """
    # A code object of its own: torch.compile counts recompilations by code object, and structures must not share them.
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        closure=function.__closure__,
    )
    return _or_as_it_is(torch.compile(own), function, name)


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


def _or_as_it_is(fast: Callable[..., Any], plain: Callable[..., Any], name: str) -> Callable[..., Any]:
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
