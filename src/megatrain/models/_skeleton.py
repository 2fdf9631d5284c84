"""A transformers model whose parameters have shapes but no storage, while its buffers are real.

Non-persistent buffers (rotary frequencies, embedding scales) are in no checkpoint: the model's own constructor computes
them, so they must not be on the meta device when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter

from megatrain.errors import UserError


def read_config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """The transformers config of a checkpoint folder. Raises `UserError` naming ``config.json`` and the field."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (ValueError, KeyError, OSError, TypeError, AttributeError, StrictDataclassError) as error:
        raise UserError(
            f"model.name_or_path: {folder / 'config.json'}: {' '.join(str(error).split())[:200]}\n"
            "  fix:   give a model that this version of transformers knows, or correct config.json"
        ) from error
    return config


def refuse_converted_files(config: PreTrainedConfig) -> None:
    """Raise `UserError` where checkpoints hold other tensors than the model has: experts, one matrix each in files, one
    tensor of all in memory."""
    mapping = get_checkpoint_conversion_mapping(config.model_type) or []
    if any(isinstance(entry, WeightConverter) for entry in mapping):
        raise UserError(
            f"model: checkpoints of type {config.model_type!r} hold each expert apart, where the model holds them in"
            " one tensor; that cannot be converted yet, neither to load nor to save. Use a type whose files hold them"
            " together (gpt_oss), or a dense model"
        )


def supports_sdpa(config: PreTrainedConfig) -> bool:
    """Whether PyTorch's fused attention computes the model's."""
    return bool(getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_supports_sdpa", True))


def check_config(config: PreTrainedConfig, attn_implementation: str) -> None:
    """Raise `UserError` for what a config asks for and layers cannot do one by one."""
    if attn_implementation == "sdpa" and not supports_sdpa(config):
        raise UserError(
            f"model.attn_implementation: sdpa: model type {config.model_type!r} has attention that PyTorch's"
            " scaled_dot_product_attention cannot compute; use model.attn_implementation=eager"
        )
    if getattr(config, "output_router_logits", False):
        raise UserError(
            "model: output_router_logits: true asks for the loss that balances experts, which is not computed layer"
            " by layer yet; set it to false in config.json"
        )
    _check_sizes(config.get_text_config())


def _check_sizes(config: PreTrainedConfig) -> None:
    """Raise `UserError` for sizes that no model has, which transformers would build or stumble over."""
    for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers"):
        size = getattr(config, name, 1)
        if not isinstance(size, int) or size < 1:
            raise UserError(f"model: config.json: {name}: {size!r} is no whole number of at least 1")
    heads = getattr(config, "num_attention_heads", 1)
    shared = getattr(config, "num_key_value_heads", None) or heads
    if isinstance(shared, int) and heads % shared:
        raise UserError(f"model: config.json: num_key_value_heads: {shared} does not divide {heads} attention heads")
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    each = getattr(config, "num_experts_per_tok", None)
    if isinstance(experts, int) and isinstance(each, int) and not 1 <= each <= experts:
        raise UserError(f"model: config.json: num_experts_per_tok: {each} is not between 1 and all {experts} experts")


def build_skeleton(
    config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str, trust_remote_code: bool
) -> PreTrainedModel:
    """The causal language model of ``config`` with parameters on meta and buffers on the CPU.

    Raises `UserError` when transformers has no such model or refuses the config.
    """
    check_config(config, attn_implementation)
    with _parameters_on_meta():
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
            )
        except (ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
            raise UserError(
                f"model: transformers cannot build model type {config.model_type!r} as a causal language model: {error}"
            ) from error
    model.config.use_cache = False
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers to ``device`` and leave parameters alone."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)


def structure_key(module: nn.Module) -> tuple[Any, ...]:
    """What two layers must share to be computed by one template: classes, shapes, plain attributes and buffers.

    ``layer_idx`` is left out: with no cache nothing reads it.
    """
    plain = (bool, int, float, str, type(None), tuple, torch.dtype)
    key: list[Any] = []
    for name, part in module.named_modules():
        attributes = sorted(
            (attribute, repr(value))
            for attribute, value in vars(part).items()
            if isinstance(value, plain) and not attribute.startswith("_") and attribute != "layer_idx"
        )
        shapes = [(k, tuple(p.shape)) for k, p in part._parameters.items() if p is not None]
        buffers = [(k, tuple(b.flatten().tolist())) for k, b in part._buffers.items() if b is not None]
        key.append((name, type(part).__qualname__, tuple(attributes), tuple(shapes), tuple(buffers)))
    return tuple(key)


def has_dropout(module: nn.Module) -> bool:
    """Whether a forward in training mode draws random numbers, by any attribute named for dropout."""
    for part in module.modules():
        if isinstance(part, nn.Dropout) and part.p > 0:
            return True
        for attribute, value in vars(part).items():
            if "dropout" in attribute and isinstance(value, float) and value > 0:
                return True
    return False
