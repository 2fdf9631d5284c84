"""A layer as functions of its weights: forward, a forward that keeps attention's output, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.func import functional_call, vjp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

LayerFunction = Callable[[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]], torch.Tensor]
"""``(weights, hidden [rows, tokens, width], arguments) -> output [rows, tokens, width]``."""

LayerGradients = Callable[
    [dict[str, torch.Tensor], torch.Tensor, dict[str, Any], torch.Tensor], Sequence[torch.Tensor | None]
]
"""``(weights, hidden, arguments, gradient of the output) -> gradients of hidden and of each weight, in order``."""

_ATTENTION = {
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    )
}


def layer_function(template: nn.Module) -> LayerFunction:
    """The forward of a layer."""

    def run(weights: dict[str, torch.Tensor], hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        output = functional_call(template, weights, (hidden,), arguments)
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result

    return run


def keeping_attention(function: LayerFunction) -> LayerFunction:
    """``function`` whose autograd graph holds its input and the output of attention; backward computes the rest again.

    Attention is the only part of a layer whose cost grows with the square of the tokens, and its output is one
    activation of the model's width a token. For layers that draw no random numbers.
    """
    context = partial(create_selective_checkpoint_contexts, list(_ATTENTION))

    def run(weights: dict[str, torch.Tensor], hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        output: torch.Tensor
        if torch.compiler.is_compiling():  # the compiler cuts the graph itself, where hooks see what it saves
            output = checkpoint(
                function, weights, hidden, arguments, use_reentrant=False, context_fn=context, preserve_rng_state=False
            )
        else:
            kept: Any = _AttentionKept  # untyped up to torch 2.13
            output = kept.apply(function, arguments, list(weights), hidden, *weights.values())
        return output

    return run


def layer_gradients(function: LayerFunction) -> LayerGradients:
    """Forward once more, then backward."""

    def run(
        weights: dict[str, torch.Tensor], hidden: torch.Tensor, arguments: dict[str, Any], upstream: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        bound = {name: value.detach().requires_grad_() for name, value in weights.items()}
        source = hidden.detach().requires_grad_()
        with torch.enable_grad():
            output = function(bound, source, arguments)
        edge = get_gradient_edge(output)
        del output
        return torch.autograd.grad(edge, [source, *bound.values()], upstream, allow_unused=True)

    return run


def pulled_back(function: LayerFunction) -> LayerGradients:
    """The same as one function without autograd's tape, which a compiler sees as a whole: it leaves out what forward
    computes for its output alone, such as the last matrix product of a layer."""

    def run(
        weights: dict[str, torch.Tensor], hidden: torch.Tensor, arguments: dict[str, Any], upstream: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        def forward(hidden: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
            return function(weights, hidden, arguments)

        with torch.no_grad():
            gradient, gradients = vjp(forward, hidden, weights)[1](upstream)
        return [gradient, *gradients.values()]

    return run


class _AttentionKept(torch.autograd.Function):
    """Weights, input and attention's outputs are saved where the engine's hooks see them."""

    @staticmethod
    def forward(
        ctx: Any,
        function: LayerFunction,
        arguments: dict[str, Any],
        names: list[str],
        hidden: torch.Tensor,
        *values: torch.Tensor,
    ) -> torch.Tensor:
        results: list[tuple[Any, ...]] = []
        # Attention leaves out what its backward needs unless it sees that there will be one; but there is none here.
        with torch.enable_grad(), saved_tensors_hooks(_nothing, _nothing), _Recording(results):
            output = function(dict(zip(names, values, strict=True)), hidden.detach().requires_grad_(), arguments)
        kept, ctx.results = tree_flatten(results)
        ctx.items = [(True, None) if isinstance(item, torch.Tensor) else (False, item) for item in kept]
        ctx.function, ctx.arguments, ctx.names = function, arguments, names
        ctx.save_for_backward(hidden, *values, *(item for item in kept if isinstance(item, torch.Tensor)))
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
        hidden, *saved = ctx.saved_tensors
        values, tensors = saved[: len(ctx.names)], iter(saved[len(ctx.names) :])
        items = [next(tensors) if is_tensor else other for is_tensor, other in ctx.items]
        with _Replaying(tree_unflatten(items, ctx.results)):
            gradients = layer_gradients(ctx.function)(
                dict(zip(ctx.names, values, strict=True)), hidden, ctx.arguments, upstream[0]
            )
        return None, None, None, *gradients


class _Recording(TorchDispatchMode):
    """Notes what attention kernels return. Below autograd: the kernels are the fused ones."""

    def __init__(self, results: list[tuple[Any, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ATTENTION:
            self._results.append(_detached(result))
        return result


class _Replaying(TorchDispatchMode):
    """Returns what `_Recording` has noted, in order, instead of computing it."""

    def __init__(self, results: list[tuple[Any, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = iter(results)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _detached(next(self._results)) if func in _ATTENTION else func(*args, **(kwargs or {}))


def _nothing(_: object) -> Any:
    """Packs what a graph saves that has no backward."""


def _detached(value: Any) -> Any:
    """New tensor objects on the same memory: autograd writes its history into those that it is given."""
    return tree_map_only(torch.Tensor, torch.Tensor.detach, value)
