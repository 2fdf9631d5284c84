"""DeepSpeed ZeRO-3 with parameters and optimizer on the CPU, one GPU.

    python benchmarks/rivals/deepspeed_zero3.py --shape 7b --tokens 16384 65536 131072

``--option`` sets entries of DeepSpeed's zero_optimization section, with dots for sections inside it:
``--option offload_optimizer.ratio=0.25`` keeps three quarters of the optimizer's state on the GPU.
"""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import torch
from _rival import DEVICE, LR, MAX_GRAD_NORM, WEIGHT_DECAY, Rival, run
from _shared_model import CausalModel, compile_layers, fill, renew_frequencies
from deepspeed.utils import set_z3_leaf_modules
from transformers import PreTrainedConfig


def settings(options: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration: FP32 masters and moments on the host, gradients' norm taken on the device."""
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 500_000_000,
        "stage3_prefetch_bucket_size": 500_000_000,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        "memory_efficient_linear": False,  # saves what checkpointing has already saved, and stops torch.compile
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    for path, value in options.items():
        *sections, name = path.split(".")
        section = zero
        for key in sections:
            section = section[key]
        section[name] = value
    return {
        "train_micro_batch_size_per_gpu": 1,  # only its throughput log reads this: a step takes the batch it is given
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": MAX_GRAD_NORM,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": zero,
    }


def build(config: PreTrainedConfig, options: dict[str, Any]) -> Rival:
    """The engine with random weights."""
    deepspeed.init_distributed(dist_backend="nccl" if DEVICE.type == "cuda" else "gloo")
    final = settings(options)
    # The engine copies parameters into one pinned buffer: pinned one by one before, each would keep its memory, rounded
    # up to a power of two.
    first = copy.deepcopy(final)
    first["zero_optimization"]["offload_param"]["pin_memory"] = False
    with deepspeed.zero.Init(config_dict_or_path=first, dtype=torch.bfloat16):
        model = CausalModel(config, reentrant=True)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            fill(name, parameter)
    renew_frequencies(model, config, DEVICE)
    # A layer is fetched as one, so that it can be compiled as one.
    set_z3_leaf_modules(model, [type(model.model.layers[0])])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=final)

    def step(batches: list[dict[str, torch.Tensor]]) -> tuple[Any, Any]:
        for left, batch in reversed(list(enumerate(reversed(batches)))):
            engine.set_gradient_accumulation_boundary(left == 0)
            loss = engine(**batch)
            engine.backward(loss / len(batches))
            engine.step()
        return loss, engine.get_global_grad_norm()

    parameters = sum(parameter.ds_numel for parameter in model.parameters())
    return Rival(parameters, step, lambda: compile_layers(model, config))


if __name__ == "__main__":
    run("DeepSpeed ZeRO-3 offload", {"deepspeed": deepspeed.__version__}, build, __doc__)
