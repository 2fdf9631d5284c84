"""What an operation takes of the device while it runs: measured once for each kind of unit and shape.

Autograd decides what it saves and kernels what they need, so this part of memory is not planned by arithmetic but
by running the unit once, before the first step, on whatever its buffers hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatrain.devices import Device
from megatrain.engine.batches import HostBatch
from megatrain.engine.buffers import _nbytes
from megatrain.engine.placement import Mode
from megatrain.engine.template import Batch, Graph, Templates
from megatrain.models.decoder import Arguments, Unit


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a micro-batch: rows, tokens a row, and whether positions are given (packed rows)."""

    rows: int
    tokens: int
    packed: bool

    @staticmethod
    def of(batch: HostBatch) -> Shape:
        """The shape of a micro-batch."""
        return Shape(*batch.shape, packed=batch.position_ids is not None)

    def covers(self, other: Shape) -> bool:
        """Whether a batch of ``other`` needs no more memory than one of this shape."""
        return self.rows >= other.rows and self.tokens >= other.tokens and self.packed >= other.packed


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes for one shape: ``peak[kind, structure]`` while an operation runs, ``held[buffer kind, structure]``
    after it."""

    peak: dict[tuple[str, int], int]
    held: dict[tuple[str, int], int]


Note = Callable[[str, Unit, Callable[[], object]], object]


class Workspaces:
    """Measures and remembers needs."""

    def __init__(
        self,
        device: Device,
        templates: Templates,
        weights: Callable[[str], torch.Tensor],
        gradient: Callable[[str], torch.Tensor],
    ) -> None:
        """``weights(unit)`` lends a flat buffer to read as weights, ``gradient(unit)`` one to write to."""
        self._device, self._templates = device, templates
        self._weights, self._gradient = weights, gradient
        self._known: dict[tuple[Shape, Mode], Need] = {}

    def knows(self, shape: Shape, mode: Mode, *, exactly: bool = False) -> bool:
        """Whether `need` answers without measuring; ``exactly``: with this shape's need, not a larger one's."""
        if exactly:
            return (shape, mode) in self._known
        return any(known == mode and other.covers(shape) for other, known in self._known)

    def need(self, shape: Shape, mode: Mode) -> Need:
        """Need of the smallest measured shape that covers this one."""
        if (shape, mode) in self._known:
            return self._known[shape, mode]
        covering = [k for k in self._known if k[1] == mode and k[0].covers(shape)]
        return self._known[min(covering, key=lambda k: k[0].rows * k[0].tokens)]

    def measure(self, shape: Shape, mode: Mode) -> None:
        """Run every kind of unit on a batch of the shape, on the lane and the stream of the caller."""
        # First for the compiler, what it needs to time its kernels being no part of a step.
        self._device.tune(lambda: self._visit(shape, Need({}, {}), lambda kind, unit, run: run(), mode, once=False))
        need = Need(peak={}, held={})

        def note(kind: str, unit: Unit, run: Callable[[], object]) -> None:
            need.peak[kind, unit.structure] = self._device.workspace(run)

        self._visit(shape, need, note, mode, once=True)
        self._known[shape, mode] = need

    def check_keep(self, unit: Unit, mode: Mode) -> int:
        """Run `Templates.check_keep` inside the engine's own buffers; returns the bytes it took beyond them."""
        numel, weights = unit.layout.numel, self._weights(unit.name)
        spare = self._gradient(unit.name).view(weights.dtype)[:numel]  # FP32: never smaller than the weights
        embedding = self._templates.decoder.units[0].name
        lent = (weights, spare, self._weights(embedding))
        try:
            return self._device.workspace(lambda: self._templates.check_keep(unit, mode, *lent))
        finally:
            for buffer in lent:
                buffer.zero_()

    def seconds(self, shape: Shape, mode: Mode) -> dict[tuple[str, int], float]:
        """Time of each kind of operation on each kind of unit, weights resident and nothing else going on."""
        times: dict[tuple[str, int], float] = {}

        def note(kind: str, unit: Unit, run: Callable[[], object]) -> None:
            if kind != "SCORE":  # no part of a training step
                times[kind, unit.structure] = self._device.seconds(run)

        self._visit(shape, Need(peak={}, held={}), note, mode, once=False)
        timed_together = {u.structure for u in self._templates.decoder.units if mode != "recompute" or u.cheap_graph}
        for structure in timed_together:  # with the forward that made the graph
            whole, forward = (times.get((kind, structure), 0.0) for kind in ("BACKWARD", "FORWARD"))
            times["BACKWARD", structure] = max(0.0, whole - forward)
        return times

    def seconds_together(self, shape: Shape, work: Sequence[tuple[str, int, Unit, Mode]]) -> float:
        """Time of operations ``(kind, micro-batch, unit, mode)`` in order, weights resident, nothing else going on."""
        batch = self._example(shape, alike=False)
        embedding = self._templates.decoder.units[0]
        hidden, context, _ = self._forward(embedding, batch, None, None, "recompute")

        def run() -> None:
            graphs: dict[tuple[int, str], Graph | None] = {}
            for kind, micro, unit, mode in work:
                source = None if unit is embedding else hidden
                if kind == "LOSS":
                    self._loss(unit, batch, hidden)
                elif kind == "FORWARD":
                    own: Mode = "keep" if unit.cheap_graph else mode
                    graphs[micro, unit.name] = self._forward(unit, batch, source, context, own)[2]
                else:
                    self._backward(unit, batch, source, context, graphs.pop((micro, unit.name)), upstream=hidden)

        return self._device.seconds(run, repeats=1)

    def _loss(self, head: Unit, batch: Batch, hidden: torch.Tensor) -> object:
        slots = self._slots(head)
        gradients = {name: self._gradient(name) for name in slots}
        return self._templates.loss(head, slots, batch, hidden, gradients, 1.0, first=True)

    def _visit(self, shape: Shape, need: Need, note: Note, mode: Mode, *, once: bool) -> None:
        """Hand each operation on each kind of unit to ``note``; what it leaves behind goes to ``need.held``.

        A kept graph is good for one backward: unless ``note`` runs it ``once``, it makes its graph each time. What runs
        once is measured for memory, what runs again for time.
        """
        decoder, batch = self._templates.decoder, self._example(shape, alike=once)
        embedding, head = decoder.units[0], decoder.units[-1]
        hidden, context, _ = self._forward(embedding, batch, None, None, "recompute")
        need.held["batch", -1] = _nbytes([batch.input_ids, batch.position_ids, batch.index, batch.targets])
        need.held["context", -1] = _nbytes(context)
        need.held["act", -1] = _nbytes(hidden)
        for unit in {unit.structure: unit for unit in reversed(decoder.units)}.values():
            slots = self._slots(unit)
            if unit is head:
                note("LOSS", head, partial(self._loss, head, batch, hidden))
                note("SCORE", head, partial(self._templates.score, head, slots, batch, hidden))
                continue
            source = None if unit is embedding else hidden
            own: Mode = "keep" if unit.cheap_graph else mode
            forward = partial(self._forward, unit, batch, source, context, own)
            note("FORWARD", unit, forward)
            graph = forward()[2]
            need.held["graph", unit.structure] = 0 if graph is None else graph.nbytes
            backward = partial(self._backward, unit, batch, source, context, upstream=hidden)
            if own != "recompute" and not once:
                del graph  # or there would be two at a time
                note("BACKWARD", unit, partial(_both, forward, backward))
            else:
                note("BACKWARD", unit, partial(backward, graph))
                del graph
            del backward

    def _backward(
        self,
        unit: Unit,
        batch: Batch,
        hidden: torch.Tensor | None,
        context: list[Arguments],
        graph: Graph | None,
        *,
        upstream: torch.Tensor,
    ) -> object:
        seed = 0 if self._templates.decoder.dropout else None
        slots, gradient = self._slots(unit), self._gradient(unit.name)
        return self._templates.backward(
            unit, slots, batch, hidden, context, graph, upstream, gradient, seed, first=True
        )

    def _forward(
        self, unit: Unit, batch: Batch, hidden: torch.Tensor | None, context: list[Arguments] | None, mode: Mode
    ) -> tuple[torch.Tensor, list[Arguments], Graph | None]:
        seed = 0 if self._templates.decoder.dropout else None
        return self._templates.forward(unit, self._slots(unit), batch, hidden, context, seed, mode)

    def _slots(self, unit: Unit) -> dict[str, torch.Tensor]:
        return {name: self._weights(name) for name in (unit.name, *unit.uses)}

    def _example(self, shape: Shape, *, alike: bool) -> Batch:
        """A batch of the shape in which every token has a target.

        Tokens are all ``alike`` where memory is measured: then all go to the same experts, and no batch needs more.
        Where time is measured they are random: on equal rows a GPU draws less power, and is faster than in a step.
        """
        where = self._device.torch_device
        tokens, vocab = shape.rows * shape.tokens, int(self._templates.decoder.config.get_text_config().vocab_size)
        ids = torch.randint(1 if alike else vocab, (tokens,), generator=torch.Generator().manual_seed(0)).to(where)
        positions = torch.arange(shape.tokens, device=where).expand(shape.rows, -1) % max(1, shape.tokens // 2)
        rows = torch.arange(tokens, device=where)
        return Batch(
            ids.view(shape.rows, shape.tokens), positions.contiguous() if shape.packed else None, rows, ids.roll(-1)
        )


def _both(forward: Callable[[], tuple[Any, Any, Graph | None]], backward: Callable[[Graph | None], object]) -> object:
    return backward(forward()[2])
