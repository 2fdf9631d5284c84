"""PyTorch FSDP2 (fully_shard) with CPU offload, one GPU.

    python benchmarks/rivals/fsdp2_offload.py --shape 7b --tokens 16384 65536 131072

``--option pin_memory=false`` holds parameters in pageable memory: slower, and 16 bytes a parameter instead of 23.
"""

from __future__ import annotations

from typing import Any

import torch
from _rival import DEVICE, LR, MAX_GRAD_NORM, WEIGHT_DECAY, Rival, run
from _shared_model import CausalModel, compile_layers, fill, renew_frequencies
from torch.distributed import init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedConfig


def build(config: PreTrainedConfig, options: dict[str, Any]) -> Rival:
    """The sharded model with random weights and its optimizer."""
    init_process_group("cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo")  # the norm is reduced on the CPU
    mesh = init_device_mesh(DEVICE.type, (1,))
    with torch.device("meta"):
        model = CausalModel(config, reentrant=False)
    pinned = options.get("pin_memory", DEVICE.type == "cuda")
    shard = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned),
    }
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=True, **shard)
    fully_shard(model.model.embed_tokens, reshard_after_forward=True, **shard)
    fully_shard(model.lm_head, reshard_after_forward=False, **shard)  # its backward is next
    fully_shard(model, **shard)
    model.to_empty(device="cpu")
    renew_frequencies(model, config, DEVICE)
    for name, parameter in model.named_parameters():
        fill(name, parameter.to_local())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step(batches: list[dict[str, torch.Tensor]]) -> tuple[Any, Any]:
        for batch in batches:
            loss = model(**batch)
            (loss / len(batches)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm.full_tensor()

    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Rival(parameters, step, lambda: compile_layers(model, config))


if __name__ == "__main__":
    run("FSDP2 CPU offload", {}, build, __doc__)
