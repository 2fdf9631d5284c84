"""Tiny models, big random checkpoints and the memory of a child process, for every test folder.

Weights written here come from transformers, or from a short writer that shares nothing with the package.
"""

from __future__ import annotations

import json
import multiprocessing
import struct
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # imported in the functions that need it: measured processes start faster without
    from transformers import PreTrainedConfig, PreTrainedModel

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING = ["sliding_attention", "full_attention"] * 2

# name -> (config class, arguments beside the common sizes)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("LlamaConfig", {"tie_word_embeddings": False}),
    "tiny-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False, "head_dim": 16}),
    "mistral": ("MistralConfig", {"tie_word_embeddings": False, "sliding_window": 32}),
    "phi3": ("Phi3Config", {"tie_word_embeddings": False}),
    "olmo2": ("Olmo2Config", {"tie_word_embeddings": False}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 16, "layer_types": _SLIDING},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 16, "layer_types": _SLIDING},
    ),
    "smollm3": ("SmolLM3Config", {"tie_word_embeddings": True, "no_rope_layers": [1, 1, 1, 0]}),
}
FAMILIES = tuple(_FAMILIES)
_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
            "tie_word_embeddings": False,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
}


def tiny_config(family: str = "tiny", **changes: Any) -> PreTrainedConfig:
    """A fresh 4-layer, width 64, vocabulary 320 config of a family; ``changes`` override any field."""
    import transformers

    class_name, extra = (_FAMILIES | _EXPERTS)[family]
    config: PreTrainedConfig = getattr(transformers, class_name)(**{**_SIZES, **extra, **changes})
    return config


def tiny_model(
    family: str = "tiny", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A random model in evaluation mode, the same for the same arguments; no norm is all ones."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(tiny_config(family, **changes))
        with torch.no_grad():
            for parameter in model.parameters():  # norms of ones and biases of zeros would hide mistakes
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return round_parameters(model.eval(), dtype)


def round_parameters(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Round the parameters alone, in place: ``model.to(dtype)`` would round the rotary frequencies too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def tiny_checkpoint(
    folder: Path,
    family: str = "tiny",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **changes: Any,
) -> PreTrainedModel:
    """Save ``tiny_model`` as transformers does and return it; ``max_shard_size="100KB"``: several shards."""
    model = tiny_model(family, seed, dtype, **changes)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def random_checkpoint(
    folder: Path, total_bytes: int, shards: int = 8, dtype: torch.dtype = torch.bfloat16, tied: bool = False
) -> PreTrainedConfig:
    """Write a random Llama checkpoint of about ``total_bytes`` in many layers, as fast as the disk takes it.

    All tensors are slices of one block of normal noise (standard deviation 0.02). Returns the config.
    """
    import transformers

    element = torch.empty(0, dtype=dtype).element_size()
    hidden = next(h for h in (64, 128, 256, 512, 1024, 2048) if h == 2048 or 128 * 13 * h * h * element >= total_bytes)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=1,
        num_attention_heads=hidden // 64 or 1,
        num_key_value_heads=hidden // 64 or 1,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        dtype=dtype,
        architectures=["LlamaForCausalLM"],
    )
    fixed, layer = 1024 * hidden * (1 if tied else 2) + hidden, 13 * hidden * hidden + 2 * hidden
    config.num_hidden_layers = max(2, round((total_bytes / element - fixed) / layer))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    per_shard = -(-sum(s.numel() for s in shapes.values()) // shards) * element
    groups: list[dict[str, torch.Size]] = [{}]
    room = per_shard
    for name, shape in shapes.items():
        if room <= 0 and len(groups) < shards:
            groups.append({})
            room = per_shard
        groups[-1][name] = shape
        room -= shape.numel() * element
    noise = (torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    block = memoryview(noise.view(torch.uint8).numpy())
    weight_map = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        weight_map |= dict.fromkeys(group, file)
        _write_shard(folder / file, group, _DTYPE_NAMES[dtype], element, block)
    total = sum(s.numel() for s in shapes.values()) * element
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return config


def _write_shard(path: Path, shapes: dict[str, torch.Size], dtype: str, element: int, block: memoryview) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + shape.numel() * element
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = 0
        for shape in shapes.values():
            left = shape.numel() * element
            start = (start + 7919 * element) % (len(block) // 2)  # tensors of one shape differ
            while left:
                piece = block[start : start + left]
                left -= file.write(piece)
                start = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of a child process: before a call, at most during it, after it with the result held."""

    before: int
    peak: int
    after: int


def peak_rss(function: Callable[..., Any], *args: Any) -> Memory:
    """Run ``function(*args)`` in a fresh process and measure its resident memory, mapped files included.

    ``function`` must be importable (module level); what it returns is kept alive for ``after``.
    Linux only: the kernel's own high-water mark, so no peak is too short. A failure is raised here.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        result = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the measured process died with exit code {process.exitcode}") from None
    process.join()
    if isinstance(result, BaseException):
        raise result
    return Memory(*result)


def _measure(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        torch.zeros(1).sum()  # the first operation loads libraries
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        held = function(*args)
        pipe.send((before, _status("VmHWM"), _status("VmRSS")))
        del held
    except Exception as error:
        pipe.send(error)


def _status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024
