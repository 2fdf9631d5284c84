"""What each kind of operation does, once its waits are met.

Every method takes the operation, handles on its declared buffers and what is common to the step. All run inside a
lane: nothing here reads a device value on the host, except `update`, `apply`, `resolve` and `report`, whose lanes are
the host's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch

from megatrain.devices import Device
from megatrain.engine.batches import HostBatch
from megatrain.engine.buffers import Handles
from megatrain.engine.placement import Mode
from megatrain.engine.program import Buffer, Op
from megatrain.engine.template import Batch, Templates, norm_squared, unit_seed
from megatrain.kernels import Kernel
from megatrain.optimizers import Optimizer, SpeculativeOptimizer
from megatrain.store import Store


@dataclass(slots=True, kw_only=True)
class Run:
    """What is common to the operations of one program, and where its results arrive."""

    batches: Sequence[HostBatch]
    training: bool
    step: int = 0
    seed: int = 0
    lr: float = 0.0
    max_grad_norm: float | None = None
    speculative: bool = False
    """Units on the host are updated before the clip factor is known."""
    counts: dict[str, int] = field(default_factory=dict)
    """Which update of each unit this step's is, from 1."""
    result: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Host FP64: loss of each micro-batch (a sum of token losses), then gradient norm, then clip factor."""
    squares: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Host FP64: sum of squares of each unit's gradient, where gradients are not kept."""
    applied: int = 0
    """Units that were updated without waiting for the norm of all."""
    stopped: bool = False
    """One of them had a gradient that is not finite, and those after it were left as they were."""
    scores: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Target tokens of all micro-batches."""
        return sum(batch.targets.numel() for batch in self.batches)


class Operations:
    """The implementations, by kind."""

    def __init__(
        self,
        device: Device,
        store: Store,
        templates: Templates,
        optimizer: Optimizer,
        kernel: Kernel,
        modes: Mapping[str, Mode],
    ) -> None:
        """``modes`` names what layers keep whose activations are not simply recomputed."""
        self._device, self._store, self._templates, self._modes = device, store, templates, modes
        self._optimizer, self._kernel = optimizer, kernel
        self._device_kernel = device.update_kernel(kernel)
        self._units = {unit.name: unit for unit in templates.decoder.units}
        self.width = int(templates.decoder.config.get_text_config().hidden_size)
        self._index = {unit.name: i for i, unit in enumerate(templates.decoder.units)}

    def perform(self, op: Op, handles: Handles, run: Run) -> None:
        """Run one operation."""
        getattr(self, op.kind.lower())(op, handles, run)

    def input(self, op: Op, handles: Handles, run: Run) -> None:
        """Copy a micro-batch to the device. On the compute lane: a few KB, and so their memory has one lane."""
        source, where = run.batches[op.micro], self._device.torch_device
        positions = source.position_ids
        handles.put(
            ("batch", op.micro),
            Batch(
                source.input_ids.to(where, non_blocking=True),
                None if positions is None else positions.to(where, non_blocking=True),
                source.index.to(where, non_blocking=True),
                source.targets.to(where, non_blocking=True),
            ),
        )

    def fetch(self, op: Op, handles: Handles, run: Run) -> None:
        """Copy a unit's weights into a slot."""
        head = handles.read(("weights", op.unit))
        self._device.copy(handles.target(op.writes[0])[: head.numel()], head)

    def forward(self, op: Op, handles: Handles, run: Run) -> None:
        """One unit, one micro-batch; only the output is kept, or with it the graph."""
        unit, m = self._units[op.unit], op.micro
        first = self._index[op.unit] == 0
        keeps = ("graph", op.unit, m) in op.writes
        self._templates.decoder.train(run.training)
        output, context, graph = self._templates.forward(
            unit,
            self._slots(op.weights, handles),
            handles.read(("batch", m)),
            None if first else self._input(op, handles, run),
            None if first else handles.read(("context", m)),
            self._seed(op, run),
            self._modes.get(op.unit, "keep") if keeps else "recompute",
        )
        if first:
            handles.put(("context", m), context)
        if keeps:
            handles.put(("graph", op.unit, m), graph)
        assert op.output is not None
        if op.output[0] == "stage":
            handles.target(op.output)[: output.numel()].view(output.shape).copy_(output)
        else:
            handles.put(op.output, output)

    def recompute(self, op: Op, handles: Handles, run: Run) -> None:
        """`forward` once more, in backward, for the following unit's input."""
        self.forward(op, handles, run)

    def offload(self, op: Op, handles: Handles, run: Run) -> None:
        """Copy a boundary to the host."""
        numel = self._boundary_shape(op, run).numel()
        self._device.copy(handles.target(op.writes[0])[:numel], handles.read(op.reads[0])[:numel])

    def reload(self, op: Op, handles: Handles, run: Run) -> None:
        """Copy a boundary back to the device."""
        self.offload(op, handles, run)

    def loss(self, op: Op, handles: Handles, run: Run) -> None:
        """Loss of one micro-batch, gradient of its hidden states, and the head's gradients."""
        unit, m = self._units[op.unit], op.micro
        self._templates.decoder.train(run.training)
        total, downstream = self._templates.loss(
            unit,
            self._slots(op.weights, handles),
            handles.read(("batch", m)),
            self._input(op, handles, run),
            self._slots(op.gradients, handles),
            1.0 / run.tokens,
            first=op.first,
        )
        handles.put(("loss", m), total)
        handles.put(("dhid", m), downstream)
        self._finish(op, handles)

    def backward(self, op: Op, handles: Handles, run: Run) -> None:
        """One unit, one micro-batch: recompute unless its graph was kept, then backward."""
        unit, m = self._units[op.unit], op.micro
        kept: Buffer = ("graph", op.unit, m)
        self._templates.decoder.train(run.training)
        (gradient,) = self._slots(op.gradients, handles).values()
        downstream = self._templates.backward(
            unit,
            self._slots(op.weights, handles),
            handles.read(("batch", m)),
            None if op.input is None else self._input(op, handles, run),
            handles.read(("context", m)),
            handles.read(kept) if kept in op.reads else None,
            handles.read(("dhid", m)),
            gradient,
            self._seed(op, run),
            first=op.first,
        )
        if downstream is not None:
            handles.put(("dhid", m), downstream)
        self._finish(op, handles)

    def drain(self, op: Op, handles: Handles, run: Run) -> None:
        """Copy a unit's gradient to the host; one that passes with its sum of squares."""
        numel = self._units[op.unit].layout.numel
        self._device.copy(handles.target(op.writes[0])[:numel], handles.read(op.reads[0])[:numel])
        if len(op.writes) > 1:
            square = run.squares[self._index[op.unit]]
            self._device.copy(square, handles.read(("norm", op.unit)))
            handles.put(op.writes[1], square)

    def norm(self, op: Op, handles: Handles, run: Run) -> None:
        """Global gradient norm and clip factor, as in ``torch.nn.utils.clip_grad_norm_``."""
        total = torch.stack([handles.read(buffer) for buffer in op.reads]).sum().sqrt()
        factor = torch.ones_like(total)
        if run.max_grad_norm is not None:
            factor = (run.max_grad_norm / (total + 1e-6)).clamp(max=1.0)
        handles.put(("clip",), torch.stack([total, factor]))

    def publish(self, op: Op, handles: Handles, run: Run) -> None:
        """Copy losses, norm and factor to the host."""
        for m in range(len(run.batches)):
            self._device.copy(run.result[m], handles.read(("loss", m)))
        self._device.copy(run.result[-2:], handles.read(("clip",)))
        handles.put(("result",), run.result)

    def update(self, op: Op, handles: Handles, run: Run) -> None:
        """Update one unit where its state is; a step with a non-finite gradient leaves everything as it was."""
        slab, gradient = self._store.slab(op.unit), handles.read(("hostgrad", op.unit))
        step = run.counts[op.unit]
        if op.lane == "compute":
            clip = handles.read(("clip",))
            self._optimizer.update(self._device_kernel, slab, gradient, lr=run.lr, step=step, scale=clip)
            return
        norm, factor = handles.read(("result",))[-2:].tolist()
        if isfinite(norm):
            self._optimizer.update(self._kernel, slab, gradient, lr=run.lr, step=step, scale=factor)

    def apply(self, op: Op, handles: Handles, run: Run) -> None:
        """Update one unit whose gradient passes, unless it or one before it in this step is not finite."""
        run.stopped |= not isfinite(handles.read(("square", op.unit)).item())
        if run.stopped:
            return
        slab = self._store.slab(op.unit)
        gradient = handles.read(op.reads[0])[: slab.layout.numel]
        self._optimizer.update(self._kernel, slab, gradient, lr=run.lr, step=run.counts[op.unit], scale=1.0)
        run.applied += 1

    def speculate(self, op: Op, handles: Handles, run: Run) -> None:
        """Update those blocks of a unit whose update can be corrected, as if nothing were clipped."""
        slab, gradient = self._store.slab(op.unit), handles.read(("hostgrad", op.unit))
        optimizer, step = self._speculative_optimizer(), run.counts[op.unit]
        waiting = torch.empty(optimizer.blocks(slab.layout), dtype=torch.uint8)
        optimizer.speculate(self._kernel, slab, gradient, waiting, lr=run.lr, step=step)
        handles.put(("waiting", op.unit), waiting)

    def resolve(self, op: Op, handles: Handles, run: Run) -> None:
        """Complete or correct what `speculate` did; a step with a non-finite gradient is taken back."""
        slab, gradient = self._store.slab(op.unit), handles.read(("hostgrad", op.unit))
        waiting, step = handles.read(("waiting", op.unit)), run.counts[op.unit]
        norm, factor = handles.read(("result",))[-2:].tolist()
        if not isfinite(norm):
            factor = 0.0
        self._speculative_optimizer().resolve(
            self._kernel, slab, gradient, waiting, lr=run.lr, step=step, factor=factor
        )

    def score(self, op: Op, handles: Handles, run: Run) -> None:
        """Log-probabilities of one micro-batch's targets."""
        unit, m = self._units[op.unit], op.micro
        self._templates.decoder.train(run.training)
        slots = self._slots(op.weights, handles)
        batch, hidden = handles.read(("batch", m)), self._input(op, handles, run)
        handles.put(("loss", m), self._templates.score(unit, slots, batch, hidden))

    def report(self, op: Op, handles: Handles, run: Run) -> None:
        """Copy log-probabilities to the host."""
        run.scores[op.micro] = handles.read(("loss", op.micro)).cpu()
        handles.put(("scores", op.micro), run.scores[op.micro])

    def _boundary_shape(self, op: Op, run: Run) -> torch.Size:
        """``[rows, tokens, width]`` of the micro-batch's boundary activations."""
        return torch.Size((*run.batches[op.micro].shape, self.width))

    def _input(self, op: Op, handles: Handles, run: Run) -> torch.Tensor:
        """The unit's input ``[rows, tokens, width]``."""
        assert op.input is not None
        boundary: torch.Tensor = handles.read(op.input)
        if op.input[0] == "act":
            return boundary
        shape = self._boundary_shape(op, run)
        return boundary[: shape.numel()].view(shape)

    def _speculative_optimizer(self) -> SpeculativeOptimizer:
        if not isinstance(self._optimizer, SpeculativeOptimizer):
            raise TypeError(f"{type(self._optimizer).__name__} cannot correct an update")
        return self._optimizer

    def _slots(self, names: dict[str, Buffer], handles: Handles) -> dict[str, torch.Tensor]:
        layouts = {unit: self._units[unit].layout.numel for unit in names}
        return {unit: handles.read(buffer)[: layouts[unit]] for unit, buffer in names.items()}

    def _finish(self, op: Op, handles: Handles) -> None:
        """After a unit's last micro-batch: round its sum to the dtype that leaves, and take the norm of that."""
        if not op.last or op.finished is None:
            return
        layout = self._units[op.unit].layout
        finished = handles.target(op.finished)[: layout.numel]
        total = op.gradients[op.unit]
        if total != op.finished:
            finished.copy_(handles.read(total)[: layout.numel])
        handles.put(("norm", op.unit), norm_squared(finished))

    def _seed(self, op: Op, run: Run) -> int | None:
        if not (run.training and self._templates.decoder.dropout):
            return None
        return unit_seed(run.seed, run.step, op.micro, self._index[op.unit])
