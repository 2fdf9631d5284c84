"""Steps of a model whose optimizer state would not fit: forward, backward, drain and norm at full size on BF16 weights.

    sudo sysctl vm.overcommit_memory=1
    TORCHINDUCTOR_COMPILE_THREADS=1 python benchmarks/heads.py --shape gpt-oss-120b --tokens 16384 \\
        --option weights_on_device=40GiB

The program is that of passing gradients with an optimizer that changes nothing; of each unit's state only the weights
are touched, so that 2 bytes a parameter are taken and not 12 (addresses for the rest must be granted, hence the first
line; the compiler's worker processes would take some of what is left of 256 GiB). Beside the measured rate of AdamW
these steps are the evidence for plans of machines with more memory. Options are those of ``benchmarks/steps.py``; the
prediction is of the same step with an optimizer that takes no time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from _planned import machine_spec, model_spec, planned
from _rows import parse_options, write
from _shapes import attention_of, random_values, shape_config
from steps import arguments, one_row

from megatrain import Model
from megatrain.devices import Device, open_device
from megatrain.layout import mapping_bytes, slab_bytes
from megatrain.model_spec import ModelSpec
from megatrain.optimizers import Optimizer

ITEM = 2
"""Bytes of a weight, and of a gradient."""


class Frozen(Optimizer):
    """Leaves every parameter as it is."""

    def update(self, *_: object, **__: object) -> None:
        """Change nothing."""

    @property
    def base_lr(self) -> float:
        """Of no consequence."""
        return 0.0


def weights_only(device: Device, weights: Mapping[int, int]) -> Device:
    """The device, pinning of memory as large as some unit's state the weights alone, which come first; ``weights``:
    bytes to pin by bytes of the whole."""
    register = device.register

    def register_part(memory: torch.Tensor) -> None:
        register(memory[: weights.get(memory.numel(), memory.numel())])

    device.register = register_part  # type: ignore[method-assign]
    return device


def main() -> None:
    """Run every row."""
    args = arguments(__doc__)
    options = {"clipping": "deferred", "states_on_device": None, **parse_options(args.option)}
    options |= {"host_gradients": "passing", "compute_dtype": "bfloat16"}
    if options["states_on_device"]:
        raise SystemExit("--option states_on_device: there is no state here; weights_on_device keeps weights there")
    args.max_grad_norm = None
    spec, where = model_spec(args), machine_spec(args)
    where = replace(where, adamw_rate=1e18, host_memory=1 << 50)
    model, placed = None, None
    for tokens in args.tokens:
        plan = planned(args, spec, where, tokens, options)
        plan.figures["predicted_process_gib"] -= saved_bytes(spec) / 2**30
        if model is None:
            model, placed = built(args, spec, plan.options), plan.options
        elif placed != plan.options:
            raise SystemExit(f"{tokens} tokens: another placement is planned; give it a process of its own")
        write(one_row(model, args, tokens, plan, spec.active_parameters, None), args.out, args.commit)
    if model is not None:
        model.close()


def arena_bytes(spec: ModelSpec) -> dict[int, int]:
    """Bytes of the weights of each unit, by those of its whole state."""
    numels = [unit.layout.numel for unit in spec.units]
    return {mapping_bytes(slab_bytes(numel, ITEM, 0)): mapping_bytes(numel * ITEM) for numel in numels}


def saved_bytes(spec: ModelSpec) -> int:
    """Host bytes of the state that is not there."""
    pinned = arena_bytes(spec)
    states = [mapping_bytes(slab_bytes(unit.layout.numel, ITEM, 0)) for unit in spec.units]
    return sum(state - pinned[state] for state in states)


def built(args: argparse.Namespace, spec: ModelSpec, options: Mapping[str, Any]) -> Model:
    """The model with random weights."""
    started, config = time.perf_counter(), shape_config(args.shape, args.layers)
    device = weights_only(open_device("auto"), arena_bytes(spec))
    model = Model(
        config,
        device=device,
        optimizer=Frozen(),
        max_grad_norm=None,
        attn_implementation=attention_of(config),
        **options,
    )
    for name in model.store.parameter_names:
        slab, parameter = model.store.place(name)
        weights = slab.head[parameter.offset : parameter.end]
        for start, values in random_values(name, parameter.numel):
            weights[start : start + values.numel()].copy_(values)
    seconds = time.perf_counter() - started
    print(f"{args.shape}: {model.num_parameters / 1e9:.3f}e9 parameters, built in {seconds:.1f} s", flush=True)
    return model


if __name__ == "__main__":
    main()
