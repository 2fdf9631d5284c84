"""Headers, config (nested too) and the size in the index all say the dtype that was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from _exports import export
from _fixtures import tiny_checkpoint

from megatrain.export import DTYPES
from megatrain.model_files import INDEX, ModelFiles


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", None])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_dtype_is_the_same_everywhere(tmp_path: Path, stored: torch.dtype, dtype: str | None, key: str) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    model = tiny_checkpoint(source, "tiny", dtype=stored)
    text = (source / "config.json").read_text().replace('"dtype"', f'"{key}"')
    nested = text.replace("{", f'{{\n  "text_config": {{"{key}": "{str(stored)[6:]}"}},', 1)
    (source / "config.json").write_text(nested)
    export(model, target, source, dtype, max_shard_bytes=100_000)
    wanted = dtype or str(stored).removeprefix("torch.")
    files = ModelFiles(target)
    assert {files.dtype(name) for name in files.names} == {DTYPES[wanted]}
    config = json.loads((target / "config.json").read_text())
    assert config[key] == config["text_config"][key] == wanted
    before = json.loads(nested)
    assert {k for k in before if before[k] != config[k]} <= {key, "text_config"}
    assert before.keys() == config.keys()
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[wanted]
    total = json.loads((target / INDEX).read_text())["metadata"]["total_size"]
    assert total == files.nbytes == size * sum(p.numel() for p in model.parameters())
