"""Forward and backward of one unit as functions of the buffers that hold its weights.

Weights are bound as views of a slot for the length of a call. Gradients are taken with respect to the per-parameter
views and added to the layout's views of a gradient buffer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from megatrain.engine.placement import Mode
from megatrain.errors import UserError
from megatrain.layout import Layout, gaps
from megatrain.losses import TokenLoss
from megatrain.losses._chunked import chunked_log_probs, chunked_loss
from megatrain.models.decoder import EMBEDDING, Arguments, Decoder, Unit, tensors_in

Slots = Mapping[str, torch.Tensor]
"""Unit name -> flat buffer ``[unit numel or more]`` with its weights (or its gradient)."""


@dataclass(slots=True)
class Batch:
    """One micro-batch on the device; ``index [n]`` are the flat positions that predict ``targets [n]``."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor | None
    index: torch.Tensor
    targets: torch.Tensor


@dataclass(slots=True)
class Graph:
    """A unit's forward, ready for its backward."""

    hidden: torch.Tensor | None
    parameters: list[torch.Tensor]
    output: GradientEdge
    """Where the gradient of its output enters; the output itself is not held."""
    saved: _Saved

    @property
    def nbytes(self) -> int:
        """Bytes that only this graph holds: neither weights, nor the input, nor the layers' common arguments."""
        return self.saved.nbytes


class _Saved:
    """Saves weights as (unit, place), so that backward reads them from whichever slot holds the unit by then.

    A slot is recycled between forward and backward, and PyTorch does not notice: version counters miss writes
    through views.
    """

    def __init__(self, slots: Slots, shared: Sequence[torch.Tensor]) -> None:
        self.slots = dict(slots)
        self.nbytes = 0
        self._units = {flat.untyped_storage().data_ptr(): unit for unit, flat in slots.items()}
        self._starts = {unit: flat.storage_offset() for unit, flat in slots.items()}
        self._counted = {tensor.untyped_storage().data_ptr() for tensor in shared}

    def hooks(self) -> saved_tensors_hooks:
        """The context in which to run the forward."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        unit = self._units.get(storage.data_ptr())
        if unit is not None:
            return unit, tensor.size(), tensor.stride(), tensor.storage_offset() - self._starts[unit]
        if storage.data_ptr() not in self._counted:
            self._counted.add(storage.data_ptr())
            self.nbytes += storage.nbytes()
        return (
            tensor.detach()
        )  # an operation that saves its own output would hold itself for ever, unless backward runs

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        unit, size, stride, offset = saved
        flat = self.slots[unit]
        return flat.as_strided(size, stride, flat.storage_offset() + offset)


def unit_seed(seed: int, step: int, micro: int, unit: int) -> int:
    """Seed of the random numbers that one unit draws for one micro-batch of one step; the same on recompute."""
    digest = hashlib.blake2b(f"{seed} {step} {micro} {unit}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw from ``seed`` inside the block and leave the process's generators as they were; ``None``: no effect."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def views(layout: Layout, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Local parameter name -> view of ``flat`` in the parameter's shape."""
    return {p.local: flat[p.offset : p.end].view(p.shape) for p in layout.parameters}


def norm_squared(flat: torch.Tensor) -> torch.Tensor:
    """FP64 sum of squares of a flat buffer, in pieces so that no copy of it is made."""
    # A GPU sums in a tree, where FP32 is as good as exact; a CPU nearly in sequence.
    inner = torch.float32 if flat.is_cuda else torch.float64
    pieces = flat.split(1 << 24 if flat.is_cuda else 1 << 22)
    return torch.stack([torch.linalg.vector_norm(piece, dtype=inner) for piece in pieces]).double().square().sum()


class Templates:
    """Binds weights to a decoder's modules and runs them, one unit at a time."""

    def __init__(self, decoder: Decoder, token_loss: TokenLoss, device: torch.device, chunk_tokens: int) -> None:
        self.decoder, self._token_loss, self._device = decoder, token_loss, device
        self.chunk_tokens = chunk_tokens
        self._units = {unit.name: unit for unit in decoder.units}

    def forward(
        self,
        unit: Unit,
        slots: Slots,
        batch: Batch,
        hidden: torch.Tensor | None,
        context: list[Arguments] | None,
        seed: int | None,
        mode: Mode,
    ) -> tuple[torch.Tensor, list[Arguments], Graph | None]:
        """Output of the embedding or of a layer, the layers' arguments, and unless ``recompute`` the autograd graph."""
        if mode == "recompute":
            with torch.no_grad(), seeded(seed, self._device):
                output, context = self._run(unit, self._bind(unit, slots), batch, hidden, context)
            return output, context, None
        weights = self._bind(unit, slots, grad=True)
        source = None if hidden is None else hidden.detach().requires_grad_()
        saved = _Saved(slots, tensors_in([hidden, context, batch.input_ids, batch.position_ids]))
        with torch.enable_grad(), seeded(seed, self._device), saved.hooks():
            output, context = self._run(unit, weights, batch, source, context, selective=mode == "selective")
        graph = Graph(source, list(weights.values()), get_gradient_edge(output), saved)
        return output.detach(), context, graph

    def backward(
        self,
        unit: Unit,
        slots: Slots,
        batch: Batch,
        hidden: torch.Tensor | None,
        context: list[Arguments],
        graph: Graph | None,
        upstream: torch.Tensor,
        gradient: torch.Tensor,
        seed: int | None,
        *,
        first: bool,
    ) -> torch.Tensor | None:
        """Add the unit's gradient to ``gradient``; returns the gradient of its input (none for the embedding)."""
        if graph is not None:
            grads = _backward(graph, slots, upstream)
        elif hidden is not None:
            with seeded(seed, self._device):
                grads = self.decoder.layer_gradients(
                    unit, self._bind(unit, slots), hidden, self._arguments(unit, context), upstream
                )
        else:
            graph = self.forward(unit, slots, batch, None, None, seed, "keep")[2]
            assert graph is not None
            grads = _backward(graph, slots, upstream)
        _add(unit.layout, gradient, grads[-len(unit.layout.parameters) :], first=first)
        return None if hidden is None else grads[0]

    def check_keep(
        self, unit: Unit, mode: Mode, weights: torch.Tensor, spare: torch.Tensor, embedding_weights: torch.Tensor
    ) -> None:
        """Raise `UserError` unless a layer's graph of this mode can outlive its slot.

        A custom autograd function may hold its weights by itself, where no hook sees them; its backward would then
        read whatever the slot holds. Tried on random weights: forward, ruin the slot, backward from another. The
        three flat buffers are overwritten: two of the unit's weights, one of the embedding's.
        """
        ids = torch.arange(8, device=self._device)[None] % self.decoder.config.get_text_config().vocab_size
        batch = Batch(ids, None, ids[0], ids[0])
        embedding = self.decoder.units[0]
        embedding_weights.normal_()
        hidden, context, _ = self.forward(
            embedding, {embedding.name: embedding_weights}, batch, None, None, None, "recompute"
        )
        spare.copy_(weights.normal_(std=0.02))
        graph = self.forward(unit, {unit.name: weights}, batch, hidden, context, 0, mode)[2]
        assert graph is not None
        if mode == "selective" and graph.nbytes == 0:
            raise UserError(
                f"compute.activations: selective: {unit.name} ({self.decoder.config.model_type}) uses no fused"
                f" attention kernel here in {str(weights.dtype).removeprefix('torch.')}, so there is no output of it to"
                " keep; use model.attn_implementation=sdpa, compute.dtype=bfloat16, or recompute or keep"
            )
        weights.fill_(float("nan"))
        if not all(bool(g.isfinite().all()) for g in _backward(graph, {unit.name: spare}, hidden) if g is not None):
            raise UserError(
                f"compute.activations: {mode}: the backward of {unit.name} ({self.decoder.config.model_type}) reads its"
                " weights behind autograd's back, so its activations cannot be kept while weights stream; use recompute"
            )

    def loss(
        self,
        unit: Unit,
        slots: Slots,
        batch: Batch,
        hidden: torch.Tensor,
        gradients: dict[str, torch.Tensor],
        scale: float,
        *,
        first: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """FP64 sum of token losses and the gradient of ``hidden``; adds the head's gradients to ``gradients``."""
        if first:
            for flat in gradients.values():
                flat.zero_()
        weights = self._bind(unit, slots, grad=True)
        targets = self._bind(unit, gradients)
        in_place = self.decoder.output_matrix
        head_gradient = None if in_place is None else targets[in_place]

        def add(grads: Sequence[torch.Tensor | None]) -> None:
            for target, grad in zip(targets.values(), grads, strict=True):
                if grad is not None:
                    target += grad

        total, downstream = chunked_loss(
            lambda chunk: self.decoder.logits(weights, chunk, head_gradient),
            self._token_loss,
            hidden.reshape(-1, hidden.shape[-1]),
            batch.index,
            batch.targets,
            scale=scale,
            chunk_tokens=self.chunk_tokens,
            parameters=list(weights.values()),
            add_gradients=add,
        )
        return total, downstream.view(hidden.shape)

    def score(self, unit: Unit, slots: Slots, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """FP32 log-probabilities ``[n]`` of the micro-batch's targets."""
        weights = self._bind(unit, slots)
        with torch.no_grad():
            return chunked_log_probs(
                lambda chunk: self.decoder.logits(weights, chunk),
                self._token_loss,
                hidden.reshape(-1, hidden.shape[-1]),
                batch.index,
                batch.targets,
                chunk_tokens=self.chunk_tokens,
            )

    def _run(
        self,
        unit: Unit,
        weights: Mapping[str, torch.Tensor],
        batch: Batch,
        hidden: torch.Tensor | None,
        context: list[Arguments] | None,
        *,
        selective: bool = False,
    ) -> tuple[torch.Tensor, list[Arguments]]:
        if unit.name == EMBEDDING:
            return self.decoder.prologue(weights, batch.input_ids, batch.position_ids)
        assert hidden is not None
        assert context is not None
        arguments = self._arguments(unit, context)
        return self.decoder.layer(unit, weights, hidden, arguments, selective=selective), context

    def _arguments(self, unit: Unit, context: list[Arguments]) -> Arguments:
        return context[self.decoder.units.index(unit) - 1]

    def _bind(self, unit: Unit, slots: Slots, *, grad: bool = False) -> dict[str, torch.Tensor]:
        weights = views(unit.layout, slots[unit.name])
        for alias, owner, name in unit.aliases:
            place = self._units[owner].layout[name]
            weights[alias] = slots[owner][place.offset : place.end].view(place.shape)
        if grad:
            return {name: view.detach().requires_grad_() for name, view in weights.items()}
        return weights


def _backward(graph: Graph, slots: Slots, upstream: torch.Tensor) -> Sequence[torch.Tensor | None]:
    """Gradients of the input, where it has one, and of every parameter, read from the slots of now."""
    graph.saved.slots = dict(slots)
    inputs = ([] if graph.hidden is None else [graph.hidden]) + graph.parameters
    return torch.autograd.grad(graph.output, inputs, upstream, allow_unused=True)


def _add(layout: Layout, flat: torch.Tensor, grads: Sequence[torch.Tensor | None], *, first: bool) -> None:
    """Write or add gradients, in the layout's order, into a flat buffer. A parameter without one gets zeros."""
    if first:
        for start, end in gaps(layout):
            flat[start:end].zero_()
    for target, grad in zip(views(layout, flat).values(), grads, strict=True):
        if grad is None:
            if first:
                target.zero_()
        elif first:
            target.copy_(grad)
        else:
            target += grad
