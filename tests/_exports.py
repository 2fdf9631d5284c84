"""Exporting a plain transformers model as the store would: FP32 values in blocks, by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.export import ExportTensor, write_model
from megatrain.model_files import ModelFiles

if TYPE_CHECKING:  # imported in the functions that need it: measured processes start faster without
    from transformers import PreTrainedModel


def export_tensors(model: PreTrainedModel, reverse: bool = True) -> list[ExportTensor]:
    """The model's parameters (a tied one once), out of the source's order, in uneven pieces."""

    def tensor(name: str, parameter: torch.Tensor) -> ExportTensor:
        def blocks() -> Iterator[torch.Tensor]:
            yield from parameter.detach().float().reshape(-1).split(1000)

        return ExportTensor(name, tuple(parameter.shape), blocks)

    tensors = [tensor(name, parameter) for name, parameter in model.named_parameters()]
    return tensors[::-1] if reverse else tensors


def export(model: PreTrainedModel, folder: Path, source: Path | None, dtype: str | None = None, **options: Any) -> None:
    """``write_model`` with what a transformers model knows."""
    tied = model.all_tied_weights_keys if model.config.tie_word_embeddings else {}
    write_model(folder, export_tensors(model), dtype=dtype, source=source, config=model.config, tied=tied, **options)


def reload(folder: Path) -> PreTrainedModel:
    """Load with transformers; fails on any missing, unexpected or mismatched key."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    return model.eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Of two fixed rows."""
    ids = torch.arange(5, 65).view(2, 30)
    with torch.no_grad():
        return model(ids).logits


def export_files(source: Path, target: Path, dtype: str) -> None:
    """Export a checkpoint folder as it is, without a model."""
    files = ModelFiles(source)
    tensors = [
        ExportTensor(name, files.shape(name), lambda name=name: (block for _, block in files.read_blocks(name)))
        for name in files.names
    ]
    write_model(target, tensors, dtype=dtype, source=files, config=json.loads((source / "config.json").read_text()))
