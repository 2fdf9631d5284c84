"""Puts a model together from its parts, or refuses before anything runs: decoder, store and engine on a device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatrain import kernels
from megatrain.checks import choice, readable_bytes, whole
from megatrain.config import parse_bytes
from megatrain.devices import Device
from megatrain.engine._rings import landing_sizes
from megatrain.engine.buffers import DeviceMemory
from megatrain.engine.executor import Engine, EngineOptions
from megatrain.engine.placement import Mode, Placement, activation_modes, check_order, last_units, resident_units
from megatrain.engine.program import UnitSpec
from megatrain.engine.template import Templates
from megatrain.errors import UserError
from megatrain.losses.cross_entropy import token_losses
from megatrain.models._compiled import compiled_token_loss
from megatrain.models.decoder import Decoder
from megatrain.store import Slab, Store

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from megatrain.optimizers import Optimizer

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a model runs, as `Model` takes and documents it."""

    compute_dtype: str | None
    gradient_dtype: str | None
    host_gradients: str
    slots: int
    device_memory: str | int | None
    host_memory: str | int | None
    pinned_memory: str | int | None
    activations: str | Sequence[str]
    speculated: Placement
    boundaries: str
    boundary_every: int
    order: str
    weights_on_device: Placement
    states_on_device: Placement
    loss_chunk_tokens: int | None
    attn_implementation: str
    trust_remote_code: bool
    compile: bool | None
    kernel: str


class Parts(NamedTuple):
    """What a model is made of."""

    decoder: Decoder
    store: Store
    engine: Engine


def assemble(config: PreTrainedConfig, device: Device, optimizer: Optimizer, settings: Settings) -> Parts:
    """The parts of a model on ``device``, weights not set yet.

    Raises `UserError` for a setting that is wrong or does not fit; then the device is closed, and neither threads nor
    pinned memory stay behind.
    """
    with ExitStack() as undo:
        undo.callback(device.close)
        whole("placement.slots", settings.slots, 1)
        compute = _compute_dtype(settings.compute_dtype, device)
        gradient = compute
        if settings.gradient_dtype is not None:
            gradient = _DTYPES[choice("compute.gradient_dtype", settings.gradient_dtype, _DTYPES)]
        _log.info("device: %s, compute dtype %s", device.name, str(compute).removeprefix("torch."))
        kernel = kernels.load(settings.kernel)  # type: ignore[arg-type]
        compiling = device.name == "cuda" if settings.compile is None else settings.compile
        decoder = _decoder(config, compute, device, settings, compiling=compiling)
        budget = parse_bytes("placement.device_memory", settings.device_memory)
        placed = _place(decoder, settings, compute, gradient)
        device.limit(budget)
        device.limit_pinned(parse_bytes("placement.pinned_memory", settings.pinned_memory))
        memory = DeviceMemory(budget)
        store = _store(decoder, device, kernel, optimizer, memory, placed)
        undo.callback(store.close)
        chunk = _chunk_tokens(settings.loss_chunk_tokens, config, budget or device.total_memory)
        token_loss = compiled_token_loss(token_losses) if compiling else token_losses
        templates = Templates(decoder, token_loss, device.torch_device, chunk)
        engine = Engine(device, store, templates, optimizer, kernel, placed, memory)
        undo.pop_all()
    return Parts(decoder, store, engine)


def _compute_dtype(name: str | None, device: Device) -> torch.dtype:
    if name is None:
        name = "bfloat16" if device.name == "cuda" else "float32"
    dtype = _DTYPES[choice("compute.dtype", name, _DTYPES)]
    device.check_dtype(dtype)
    return dtype


def _decoder(
    config: PreTrainedConfig, compute: torch.dtype, device: Device, settings: Settings, *, compiling: bool
) -> Decoder:
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        kind = quantised.get("quant_method", "?") if isinstance(quantised, dict) else type(quantised).__name__
        raise UserError(
            f"model: config.json has a quantization_config ({kind}): quantised weights cannot be trained, and the key"
            " would make others read the result as quantised. Use the unquantised checkpoint, or remove the key where"
            " the weights are plain"
        )
    return Decoder(
        config,
        dtype=compute,
        device=device.torch_device,
        attn_implementation=settings.attn_implementation,
        trust_remote_code=settings.trust_remote_code,
        compile=compiling,
    )


def _place(decoder: Decoder, settings: Settings, compute: torch.dtype, gradient: torch.dtype) -> EngineOptions:
    """What lives where; raises `UserError` when the host's part exceeds ``host_memory``."""
    layouts = {unit.name: unit.layout for unit in decoder.units}
    sizes = {name: Slab.nbytes(layout, compute, gradient) for name, layout in layouts.items()}
    heads = {name: layout.numel * compute.itemsize for name, layout in layouts.items()}
    states = resident_units("placement.states", settings.states_on_device, sizes)
    weights = resident_units("placement.weights", settings.weights_on_device, heads)
    limit = parse_bytes("placement.host_memory", settings.host_memory)
    on_host = [layout for name, layout in layouts.items() if name not in states]
    passing = choice("placement.gradients", settings.host_gradients, ("kept", "passing")) == "passing"
    needed = Store.bytes_needed(on_host, compute, gradient, landings=_landings(decoder, states) if passing else None)
    if limit is not None and needed > limit:
        raise UserError(
            f"placement.host_memory: {readable_bytes(limit)} is too small: masters, moments and gradients take"
            f" {readable_bytes(needed)} ({needed} bytes); raise it, or train a smaller model"
        )
    streamed = [name for name in layouts if name not in weights | states]
    check_order(choice("compute.order", settings.order, ("layer", "micro_batch")), streamed)
    return EngineOptions(
        slots=settings.slots,
        activations=_modes(decoder, settings.activations),
        speculated=last_units("optim.speculated", settings.speculated, sizes),
        compute_dtype=compute,
        gradient_dtype=gradient,
        weights_resident=weights,
        states_resident=states,
        boundaries_on_host=choice("compute.boundaries", settings.boundaries, ("device", "host")) == "host",
        boundary_every=whole("compute.boundary_every", settings.boundary_every, 1),
        micro_batch_major=settings.order == "micro_batch",
        passing_gradients=passing,
        host_budget=limit,
    )


def _landings(decoder: Decoder, on_device: frozenset[str]) -> list[int]:
    return landing_sizes(
        [UnitSpec(u.name, u.layout.numel, u.uses, state_resident=u.name in on_device) for u in decoder.units]
    )


def _store(
    decoder: Decoder,
    device: Device,
    kernel: kernels.Kernel,
    optimizer: Optimizer,
    memory: DeviceMemory,
    placed: EngineOptions,
) -> Store:
    take = partial(_resident, memory, device.torch_device)
    touch = kernel.first_touch() if device.pins else None
    return Store(
        {unit.name: unit.layout for unit in decoder.units},
        placed.compute_dtype,
        kernel,
        device.register,
        device.unregister,
        gradient_dtype=placed.gradient_dtype,
        keeps_gradients=not placed.passing_gradients,
        on_device=dict.fromkeys(placed.states_resident, take),
        first_touch=None if touch is None else partial(_first_touch, optimizer, touch),
    )


def _resident(memory: DeviceMemory, where: torch.device, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return memory.allocate("resident state", numel, dtype, where)


def _first_touch(optimizer: Optimizer, touch: kernels.DeviceKernel, slab: Slab) -> None:
    """An update's own calls say which worker will meet which elements."""
    gradient = slab.gradient if slab.gradient.numel() else slab.head
    optimizer.update(touch, slab, gradient, lr=0.0, step=1, scale=1.0)


def _modes(decoder: Decoder, activations: Any) -> dict[str, Mode]:
    """What each layer keeps, where it is more than its input."""
    modes = activation_modes(activations, [unit.name for unit in decoder.units if unit.structure >= 0])
    if "selective" in modes.values() and decoder.dropout:
        raise UserError(
            f"compute.activations: {activations!r}: attention draws random numbers in this model (dropout), so its"
            " output cannot stand for them; use recompute or keep"
        )
    return modes


def _chunk_tokens(asked: int | None, config: PreTrainedConfig, device_memory: int) -> int:
    """Tokens whose logits, at some 16 bytes a vocabulary entry, take a twelfth of the memory (at most 8 GiB)."""
    if asked is not None:
        return whole("loss_chunk_tokens", asked, 1)
    share = min(8 << 30, device_memory // 12)
    return max(16, min(8192, share // (16 * int(config.get_text_config().vocab_size))))
