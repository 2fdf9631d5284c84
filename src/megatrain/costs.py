"""What the operations of a step cost on a machine: seconds of each, and bytes of each buffer. No torch.

The micro-batches of a step are counted together: in a program they follow each other unit by unit, so their times and
what they hold add up, and one of them alone takes workspace.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from megatrain.engine._rings import Rings
from megatrain.engine.program import Buffer, Op, UnitSpec
from megatrain.layout import mapping_bytes, slab_bytes, store_bytes
from megatrain.machines import MachineSpec
from megatrain.model_spec import ModelSpec, UnitShape

LAUNCH = 20e-6
"""Seconds from one operation of a lane to the next."""

LIBRARIES = 600 << 20
"""Device bytes of the driver's context and the libraries' workspaces."""

_LOSS_ENTRY_BYTES = 12  # of device memory traffic per logit: compiled cross-entropy, both ways
_LOSS_ENTRY_HELD = 6  # bytes per logit of a chunk at its peak
_UPDATE_BYTES = 28  # of traffic per parameter: states and gradient read, states and weights written
_SUM_BYTES = 12  # of traffic per parameter: gradient added, rounded, squared
_RESOLVE = 0.001  # of a plain update, when nothing was clipped
_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step has to do: ``rows`` sequences of ``seq_len`` tokens, in equal micro-batches."""

    rows: int
    seq_len: int
    micro_batches: int
    compute_dtype: str = "bfloat16"
    gradient_dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.seq_len

    @property
    def micro_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.tokens // self.micro_batches

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element in the compute dtype."""
        return _BYTES[self.compute_dtype]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of the gradient as it leaves the device."""
        return _BYTES[self.gradient_dtype]


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of one workload of one model on one machine."""

    model: ModelSpec
    machine: MachineSpec
    workload: Workload

    @cached_property
    def _units(self) -> dict[str, UnitShape]:
        return {unit.name: unit for unit in self.model.units}

    @cached_property
    def _forward(self) -> dict[str, float]:
        """Seconds of a unit's forward over all tokens."""
        half = self.workload.compute_dtype == "bfloat16"
        tokens, machine = self.workload.tokens, self.machine
        layer = machine.layer_rate if half else machine.fp32_rate
        attention = machine.attention_rate if half else machine.fp32_rate
        head = machine.head_rate if half else machine.fp32_rate
        each: dict[str, float] = {}
        for unit in self.model.units:
            rate = head if unit is self.model.units[-1] else layer
            each[unit.name] = tokens * self.model.matrix_flops(unit) / rate
            if unit.structure >= 0:
                each[unit.name] += tokens * self.model.attention_flops(self.workload.seq_len) / attention
        return each

    def seconds(self, op: Op, *, kept: bool) -> float:
        """How long an operation takes; ``kept``: its unit need not compute its activations again."""
        numel = self._units[op.unit].layout.numel if op.unit else 0
        machine, work = self.machine, self.workload
        memory = numel / machine.gpu_memory_rate
        match op.kind:
            case "FETCH":
                return LAUNCH + numel * work.compute_bytes / machine.h2d_rate
            case "DRAIN":
                return LAUNCH + numel * work.gradient_bytes / machine.d2h_rate
            case "FORWARD":
                return LAUNCH * work.micro_batches + self._forward[op.unit]
            case "BACKWARD":
                passes = 2 if kept else 3
                sums = memory * _SUM_BYTES * work.micro_batches
                return LAUNCH * work.micro_batches + passes * self._forward[op.unit] + sums
            case "LOSS":
                entries = work.tokens * self.model.vocabulary * _LOSS_ENTRY_BYTES / machine.gpu_memory_rate
                return LAUNCH * work.micro_batches + 3 * self._forward[op.unit] + entries + memory * _SUM_BYTES
            case "UPDATE" if op.lane == "compute":
                return LAUNCH + memory * _UPDATE_BYTES
            case "UPDATE":
                return LAUNCH + numel / machine.adamw_rate
            case "SPECULATE":
                return LAUNCH + machine.speculation_cost * numel / machine.adamw_rate
            case "RESOLVE":
                return LAUNCH + _RESOLVE * numel / machine.adamw_rate
            case _:
                return LAUNCH

    def buffer_bytes(self, buffer: Buffer) -> int:
        """Device bytes of a buffer that comes and goes, all micro-batches together."""
        work = self.workload
        match buffer[0]:
            case "act" | "dhid":
                return work.tokens * self.model.width * work.compute_bytes
            case "batch":
                return work.tokens * 32  # ids, targets, positions, places: 8 bytes each
            case "context":
                return 2 * work.tokens * self.model.head_dim * work.compute_bytes
            case "graph" if self._units[str(buffer[1])].structure >= 0:
                return work.tokens * self.model.kept_elements * work.compute_bytes
            case _:
                return 0

    def workspace(self, op: Op, *, kept: bool) -> int:
        """Device bytes that an operation takes while it runs."""
        work, unit = self.workload, self._units.get(op.unit)
        if unit is None or op.kind not in ("FORWARD", "BACKWARD", "LOSS"):
            return 0
        token = work.micro_tokens * work.compute_bytes
        if op.kind == "LOSS":
            chunk = min(work.micro_tokens, self.loss_chunk())
            return chunk * (self.model.vocabulary * _LOSS_ENTRY_HELD + 8 * self.model.width) + token * self.model.width
        gradients = unit.layout.numel * work.compute_bytes
        if unit.structure < 0:
            return token * self.model.width + (gradients if op.kind == "BACKWARD" else 0)
        if op.kind == "FORWARD":
            held = self.model.kept_elements if kept else 3 * self.model.intermediate + self.model.width
            return token * (held + self.model.width)
        if kept:
            return token * (self.model.workspace_elements - self.model.kept_elements) + gradients
        return max(
            token * self.model.workspace_elements,
            token * (self.model.intermediate + 2 * self.model.width) + gradients,
        )

    def loss_chunk(self) -> int:
        """Tokens whose logits exist at a time."""
        share = min(8 << 30, self.machine.gpu_memory // 12)
        return max(16, min(8192, share // (16 * self.model.vocabulary)))

    def fixed_device_bytes(self, units: list[UnitSpec], rings: Rings) -> Counter[str]:
        """Device bytes by label of what stays for the whole run."""
        work = self.workload
        fixed: Counter[str] = Counter({"libraries": LIBRARIES})
        resident = [unit.numel for unit in units if unit.state_resident]
        fixed["resident state"] = sum(slab_bytes(n, work.compute_bytes, work.gradient_bytes) for n in resident)
        for ring, numel in rings.slot_numel.items():
            label = "resident weights" if ring.startswith("own ") else "slots"
            fixed[label] += rings.slots[ring] * numel * work.compute_bytes
        for ring, numel in rings.grad_numel.items():
            fixed["gradients"] += rings.buffers[ring] * numel * work.gradient_bytes
        if work.gradient_dtype != "float32":
            fixed["gradient sums"] = 4 * sum(rings.sum_numel.values())
        return +fixed

    def host_bytes(self, units: list[UnitSpec], *, speculative: bool) -> dict[str, int]:
        """Host bytes by label."""
        work = self.workload
        numels = [unit.numel for unit in units if not unit.state_resident]
        state = store_bytes(numels, work.compute_bytes, work.gradient_bytes)
        gradient = sum(numels) * work.gradient_bytes
        marks = sum(mapping_bytes(numel // 4096) for numel in numels) if speculative else 0
        labels = {"masters and moments": state - gradient, "gradients": gradient, "marks of speculation": marks}
        return {label: nbytes for label, nbytes in labels.items() if nbytes}
