"""Models of the engine as the tests of its numbers want them: exact, and the same on every device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatrain import AdamW, Model

Batch = dict[str, torch.Tensor]


def engine(source: Any, device: Any, **options: Any) -> Model:
    """A model from a config or a checkpoint folder: FP32, eager, no clipping; ``options`` override."""
    options = {
        "compute_dtype": "float32",
        "compile": False,
        "max_grad_norm": None,
        "optimizer": AdamW(lr=1e-3),
    } | options
    if isinstance(source, Path):
        return Model.from_pretrained(source, device=device, **options)
    return Model.from_config(source, device=device, **{"seed": 7, **options})


def rows(count: int, tokens: int = 16, vocab: int = 320, seed: int = 0) -> list[Batch]:
    """Micro-batches of one row, all tokens targets."""
    ids = torch.randint(3, vocab, (count, 1, tokens), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def joined(batches: list[Batch]) -> Batch:
    """One micro-batch of all rows."""
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def tolerance(device: str) -> float:
    """Relative, in tensor norm, for FP32: kernels of a GPU sum in another order."""
    return 1e-5 if device == "cuda" else 1e-6
