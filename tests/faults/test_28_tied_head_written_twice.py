"""An export of a tied model lists the embedding once and no output head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from _exports import export, logits, reload
from _fixtures import tiny_checkpoint, tiny_model

from megatrain.model_files import INDEX


@pytest.mark.parametrize("family", ["tiny-tied", "qwen2", "gemma2"])
@pytest.mark.parametrize("with_source", [True, False])
def test_tied_embedding_is_listed_once(tmp_path: Path, family: str, with_source: bool) -> None:
    source = tmp_path / "source"
    model = tiny_checkpoint(source, family) if with_source else tiny_model(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        ids = torch.arange(5, 35)[None]
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    export(model, tmp_path / "out", source if with_source else None, max_shard_bytes=100_000)
    names = list(json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"])
    assert names.count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" not in names
    assert torch.equal(logits(reload(tmp_path / "out")), logits(model))
