"""What the operations of a step cost on a machine: seconds of each, and bytes of each buffer. No torch.

The micro-batches of a workload are counted together: where they follow each other unit by unit, their times and what
they hold add up, and one of them alone takes workspace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from megatrain.engine._rings import Rings, landing_sizes
from megatrain.engine.placement import Mode
from megatrain.engine.program import Buffer, Op, UnitSpec
from megatrain.layout import mapping_bytes, slab_bytes, store_bytes
from megatrain.machines import MachineSpec
from megatrain.model_spec import ModelSpec, UnitShape

LAUNCH = 20e-6
"""Seconds from one operation of a lane to the next."""

EAGER_LAUNCH = 500e-6
"""The same where a layer's kernels are started one by one: some fifty of them."""

LIBRARIES = 600 << 20
"""Device bytes of the driver's context and the libraries' workspaces."""

_CPU_PROCESS, _GPU_PROCESS = 500 << 20, 1900 << 20
"""Host bytes of interpreter and torch (400 to 480 MiB measured); and with tokenizer, rows, a GPU's libraries and the
compiler."""

_CPU_COMPILER, _VARIANT, _EXPERTS_VARIANT = 100 << 20, 40 << 20, 160 << 20
"""Host bytes of the compiler where there is no GPU (93 MiB measured), and of each variant of a layer that it makes, by
what the layer keeps, without and with experts (fitted to ten processes beside a GPU, of 1.70 to 2.15 GiB)."""

EAGER_KEPT = 1.7
"""What autograd saves of a layer that is not compiled, as a multiple of what a compiled one keeps and queries and keys
before rotation: 1.25 to 1.65 over Llama, Qwen and Phi layers in both dtypes, measured on the CPU."""

_LOSS_ENTRY_BYTES = 12  # of device memory traffic per logit: compiled cross-entropy, both ways
_LOSS_ENTRY_HELD = 6  # bytes per logit of a chunk at its peak
_EAGER_LOSS_HELD = 17  # the same where nothing is compiled
_UPDATE_BYTES = 28  # of traffic per parameter: states and gradient read, states and weights written
_SUM_ITEM = 4  # bytes of an element of the sum over micro-batches
_TOGETHER = 2  # intermediates that a compiled recompute and backward hold beyond those of kept activations
_PAIR_PASSES = 8  # over the weights of every pair of tokens: scores, mask, maximum, exponentials, sum, quotient
_PAIRS_KEPT = 3  # of them that autograd saves: scores, weights, weights without a sink
_PASS_SHARE = 0.5  # of `gpu_memory_rate`, that passes in a layer reach, experts' gathers and scatters among them (fit)
_UPDATE_SHARE = 0.87  # of `gpu_memory_rate`, that an update on the device reaches: 57 ms for 7.6e9 parameters measured
_ADAMW_SHARE = 0.9  # of `adamw_rate`, that updates on the host reach beside the copies of a step (fit)
_IDLE_OUTPUTS = 66 * 128 * 128  # of a product, lost to processors that its last wave leaves idle: half of an H200's
_RESOLVE = 0.001  # of a plain update, when nothing was clipped
_BYTES = {"bfloat16": 2, "float32": 4}


def resident_bytes(device_bytes: int) -> int:
    """Host bytes of a device that is the CPU: what it holds at its peak, and a quarter of that, which small blocks that
    were freed keep."""
    return device_bytes + device_bytes // 4


def device_room(host_bytes: int) -> int:
    """What a device that is the CPU may hold at its peak where so many host bytes are left for it."""
    return host_bytes * 4 // 5


def process_bytes(*, on_gpu: bool) -> int:
    """Host bytes that a process takes beside all state and the compiler."""
    return _GPU_PROCESS if on_gpu else _CPU_PROCESS


def compiler_bytes(variants: int, *, on_gpu: bool, experts: bool = False) -> int:
    """Host bytes that the compiler and so many variants of a layer take for good."""
    return (0 if on_gpu else _CPU_COMPILER) + variants * (_EXPERTS_VARIANT if experts else _VARIANT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a program has to do: ``rows`` sequences of ``seq_len`` tokens, ``micro_rows`` of them at a time."""

    rows: int
    seq_len: int
    micro_rows: int
    compute_dtype: str = "bfloat16"
    gradient_dtype: str = "bfloat16"
    mean_tokens: float | None = None
    """Tokens of a usual step, padding counted: its times are those of this many; its bytes are those of the largest."""
    ragged: bool = False
    """Whether some micro-batches are smaller than the largest."""
    compiled: bool = True
    passing_gradients: bool = False
    """Gradients pass through host memory instead of staying until the norm is known."""
    fused_attention: bool = True
    """Whether a kernel computes attention without holding the weights of every pair of tokens."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the workload."""
        return -(-self.rows // self.micro_rows)

    @property
    def tokens(self) -> int:
        """Tokens of the largest step."""
        return self.rows * self.seq_len

    @property
    def timed_tokens(self) -> float:
        """Tokens of the step whose times are told."""
        return self.tokens if self.mean_tokens is None else self.mean_tokens

    @property
    def micro_tokens(self) -> int:
        """Tokens of the largest micro-batch."""
        return self.micro_rows * self.seq_len

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
    """Seconds and bytes of one workload of one model on one machine.

    ``loss_memory``: device bytes that chunks of the loss are a share of.
    """

    model: ModelSpec
    machine: MachineSpec
    workload: Workload
    loss_memory: int

    @cached_property
    def _units(self) -> dict[str, UnitShape]:
        return {unit.name: unit for unit in self.model.units}

    @cached_property
    def _routed(self) -> dict[str, int]:
        return {unit.name: self.model.routed_elements(unit) for unit in self.model.units}

    @property
    def _half(self) -> bool:
        return self.workload.compute_dtype == "bfloat16"

    @cached_property
    def _attention(self) -> float:
        """Seconds of one layer's attention products in forward over all tokens."""
        tokens, work = self.workload.timed_tokens, self.workload
        flops = tokens * self.model.attention_flops(tokens / work.rows)
        if work.fused_attention:
            return flops / (self.machine.attention_rate if self._half else self.machine.fp32_rate)
        pairs = tokens * self.model.heads * tokens / work.rows
        products = 2 * flops / self._product_rate  # of all pairs
        return products + _PAIR_PASSES * pairs * work.compute_bytes / self.machine.gpu_memory_rate

    @property
    def _product_rate(self) -> float:
        return self.machine.product_rate if self._half else self.machine.fp32_rate

    @cached_property
    def _forward(self) -> dict[str, float]:
        return self._of_each(lambda unit: self._forward_seconds(unit, last=True))

    @cached_property
    def _again(self) -> dict[str, float]:
        """Seconds of what backward computes again of a unit's forward: where it is compiled, without a layer's last
        product, of which only the layer's output needs the result."""
        compiled = self.workload.compiled
        return self._of_each(lambda unit: self._forward_seconds(unit, last=not compiled or unit.structure < 0))

    def _of_each(self, seconds: Callable[[UnitShape], float]) -> dict[str, float]:
        """By unit; layers of one structure take the same time."""
        layers = {unit.structure: unit for unit in self.model.units if unit.structure >= 0}
        by_structure = {structure: seconds(unit) for structure, unit in layers.items()}
        units = self.model.units
        return {unit.name: by_structure[unit.structure] if unit.structure >= 0 else seconds(unit) for unit in units}

    def _forward_seconds(self, unit: UnitShape, *, last: bool) -> float:
        """A unit's forward over all tokens, with a layer's ``last`` product: products, of which a micro-batch takes at
        least the time to read the weights; and in layers attention, and passes over what is between the products."""
        machine, work, model = self.machine, self.workload, self.model
        micros, item = work.micro_batches, work.compute_bytes
        idle = 0 if machine.unified else 2 * model.inner_elements(unit) * _IDLE_OUTPUTS
        products = work.timed_tokens * model.matrix_flops(unit) + idle * micros
        read: float = model.matrix_elements(unit)
        if not last:
            products -= work.timed_tokens * model.last_product_flops
            read -= model.last_product_flops / 2
        seconds = max(products / self._product_rate, micros * read * item / machine.gpu_memory_rate)
        if unit.structure < 0:
            return seconds
        passed = work.timed_tokens * model.passed_elements(unit) * item
        return seconds + self._attention + passed / (_PASS_SHARE * machine.gpu_memory_rate)

    def _summing(self, op: Op) -> float:
        """Seconds per parameter to sum a gradient: written for the first micro-batch, added for others, and after the
        last rounded, where it leaves in another dtype, and read for the norm."""
        work, leaves = self.workload, self.workload.gradient_bytes
        if work.micro_batches == 1 and op.first and op.last:
            return (work.compute_bytes + 2 * leaves) / self.machine.gpu_memory_rate
        traffic = work.micro_batches * (work.compute_bytes + 2 * _SUM_ITEM) - (_SUM_ITEM if op.first else 0)
        if op.last:
            traffic += leaves if leaves == _SUM_ITEM else _SUM_ITEM + 2 * leaves
        return traffic / self.machine.gpu_memory_rate

    def seconds(self, op: Op, mode: Mode) -> float:
        """How long an operation takes; ``mode``: what its unit keeps for its backward."""
        numel = self._units[op.unit].layout.numel if op.unit else 0
        machine, work = self.machine, self.workload
        updating = numel / (_ADAMW_SHARE * machine.adamw_rate)
        match op.kind:
            case "FETCH":
                return LAUNCH + numel * work.compute_bytes / machine.h2d_rate
            case "DRAIN":
                return LAUNCH + numel * work.gradient_bytes / machine.d2h_rate
            case "OFFLOAD" | "RELOAD":
                boundary = work.timed_tokens * self.model.width * work.compute_bytes
                rate = machine.d2h_rate if op.kind == "OFFLOAD" else machine.h2d_rate
                return LAUNCH * work.micro_batches + boundary / rate
            case "FORWARD" | "RECOMPUTE":
                return self._launch * work.micro_batches + self._forward[op.unit]
            case "BACKWARD":
                forward, sums = self._forward[op.unit], numel * self._summing(op)
                whole = self._again[op.unit]
                again = {"keep": 0.0, "selective": whole - self._attention, "recompute": whole}[mode]
                return self._launch * work.micro_batches + 2 * forward + again + sums
            case "LOSS":
                summed = sum(self._units[unit].layout.numel for unit in op.gradients) or numel  # a tied head: two
                entries = work.timed_tokens * self.model.vocabulary * _LOSS_ENTRY_BYTES / machine.gpu_memory_rate
                return LAUNCH * work.micro_batches + 3 * self._forward[op.unit] + entries + summed * self._summing(op)
            case "UPDATE" if op.lane == "compute":
                return LAUNCH + numel * _UPDATE_BYTES / (_UPDATE_SHARE * machine.gpu_memory_rate)
            case "UPDATE" | "APPLY":
                return LAUNCH + updating
            case "SPECULATE":
                return LAUNCH + machine.speculation_cost * updating
            case "RESOLVE":
                return LAUNCH + _RESOLVE * updating
            case _:
                return LAUNCH

    @property
    def _launch(self) -> float:
        return LAUNCH if self.workload.compiled else EAGER_LAUNCH

    def buffer_bytes(self, buffer: Buffer, mode: Mode) -> int:
        """Device bytes of a buffer that comes and goes, all micro-batches together; ``mode``: that of its unit."""
        work = self.workload
        match buffer[0]:
            case "act" | "dhid":
                return self.boundary_bytes
            case "batch":
                return work.tokens * 32  # ids, targets, positions, places: 8 bytes each
            case "context":
                return 2 * work.tokens * self.model.head_dim * work.compute_bytes
            case "graph" if self._units[str(buffer[1])].structure >= 0:
                return work.tokens * self._graph_bytes(mode)
            case _:
                return 0

    @property
    def boundary_bytes(self) -> int:
        """Of one unit's input, all micro-batches together."""
        return self.workload.tokens * self.model.width * self.workload.compute_bytes

    @property
    def pooled_boundary_bytes(self) -> int:
        """Of one unit's input in a pool, where each micro-batch has the place of the largest."""
        return self.workload.micro_tokens * self.model.width * self.workload.compute_bytes

    def _graph_bytes(self, mode: Mode) -> int:
        """Of a token's part in one layer's graph, besides its input."""
        if mode == "selective":
            return self.model.selective_bytes(self.workload.compute_bytes)
        return self._kept_bytes if mode == "keep" else 0

    @cached_property
    def _kept_bytes(self) -> int:
        return self._held_bytes(self.model.kept_elements) if self.workload.compiled else self._all_held_bytes

    @cached_property
    def _all_held_bytes(self) -> int:
        """Of a token's part in a layer where nothing is left out that a backward could compute again."""
        model = self.model
        elements = model.kept_elements + (0 if model.has_query_norm else model.rotated_elements)
        return self._held_bytes(elements * (1 if self.workload.compiled else EAGER_KEPT))

    def _held_bytes(self, elements: float) -> int:
        pairs = 0 if self.workload.fused_attention else _PAIRS_KEPT * self.model.heads * self.workload.seq_len
        scalars = 4 * (self.model.heads + 2)  # in FP32: logarithms of attention's sums, what both norms multiply by
        return int(elements + pairs) * self.workload.compute_bytes + scalars

    def workspace(self, op: Op, mode: Mode) -> int:
        """Device bytes that an operation takes while it runs; ``mode``: what its unit keeps for its backward."""
        work, unit = self.workload, self._units.get(op.unit)
        if unit is None or op.kind not in ("FORWARD", "RECOMPUTE", "BACKWARD", "LOSS"):
            return 0
        token = work.micro_tokens * work.compute_bytes
        if op.kind == "LOSS":
            chunk = min(work.micro_tokens, self.loss_chunk())
            held = _LOSS_ENTRY_HELD if work.compiled else _EAGER_LOSS_HELD
            return chunk * (self.model.vocabulary * held + 8 * self.model.width) + token * self.model.width
        gradients = unit.layout.numel * work.compute_bytes
        if unit.structure < 0:
            return token * self.model.width + (gradients if op.kind == "BACKWARD" else 0)
        model = self.model
        routed = self._routed[unit.name]
        if op.kind != "BACKWARD":
            passing = model.width if mode == "keep" else 3 * model.intermediate + 2 * model.width + 2 * routed
            return work.micro_tokens * self._graph_bytes(mode) + token * passing
        passing = (model.intermediate if work.compiled else 2 * model.intermediate) + model.width + routed
        if mode == "keep":
            return token * passing + gradients
        again = work.micro_tokens * self._all_held_bytes
        most = passing + (_TOGETHER * model.intermediate if work.compiled else 0)
        return max(again + token * most, token * (passing + model.width) + gradients)

    def compiler_bytes(self, variants: int) -> int:
        """`compiler_bytes` of this model and machine, if anything is compiled."""
        if not self.workload.compiled:
            return 0
        return compiler_bytes(variants, on_gpu=not self.machine.unified, experts=self.model.experts > 0)

    def tuning_bytes(self, room: int) -> int:
        """Host bytes that are pinned for a while as the compiler times its kernels for a GPU, which copies what they
        change: no copy that ``room`` bytes of the device hold, unless some micro-batches are smaller, since kernels for
        those are timed within a step. Each copy is rounded up to a power of two; copies of one rounded size share a
        block, others add up.

        Changed are taken to be (fitted, sequences of 1024) the gated product; with experts also all rows that go in and
        come out, and gate and up in one; without fused attention the weights of every pair of tokens, with a sink and
        without.
        """
        work, model = self.workload, self.model
        if self.machine.unified or not work.compiled:
            return 0
        elements = {model.intermediate}
        if model.experts:
            elements |= {2 * model.intermediate, *self._routed.values()} - {0}
        if not work.fused_attention:
            elements |= {model.heads * work.seq_len, model.heads * (work.seq_len + 1)}
        copies = {work.micro_tokens * each * work.compute_bytes for each in elements}
        return sum({1 << (copy - 1).bit_length() for copy in copies if work.ragged or copy > room})

    def loss_chunk(self) -> int:
        """Tokens whose logits exist at a time."""
        share = min(8 << 30, self.loss_memory // 12)
        return max(16, min(8192, share // (16 * self.model.vocabulary)))

    def fixed_device_bytes(self, units: list[UnitSpec], rings: Rings) -> Counter[str]:
        """Device bytes by label of what stays for the whole run."""
        work = self.workload
        fixed: Counter[str] = Counter({"libraries": 0 if self.machine.unified else LIBRARIES})
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

    def host_bytes(self, units: list[UnitSpec], *, speculative: bool, boundaries: int = 0) -> dict[str, int]:
        """Host bytes by label; ``boundaries`` of them wait there for backward."""
        work = self.workload
        numels = [unit.numel for unit in units if not unit.state_resident]
        gradient = sum(numels) * work.gradient_bytes
        state = store_bytes(numels, work.compute_bytes, work.gradient_bytes) - gradient
        if work.passing_gradients:
            state = store_bytes(numels, work.compute_bytes, 0)
            gradient = sum(mapping_bytes(numel * work.gradient_bytes) for numel in landing_sizes(units))
        early = [unit.numel for unit in units if unit.speculates and not unit.state_resident] if speculative else []
        marks = sum(mapping_bytes(numel // 4096) for numel in early)
        labels = {
            "masters and moments": state,
            "gradients": gradient,
            "marks of speculation": marks,
            "boundary activations": mapping_bytes(boundaries) if boundaries else 0,
        }
        return {label: nbytes for label, nbytes in labels.items() if nbytes}
