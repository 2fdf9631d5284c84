"""A missing, truncated or contradicted shard stops before training with its name; nothing starts
uninitialised."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from _fixtures import tiny_checkpoint
from safetensors.torch import load_file, save_file

from megatrain import UserError
from megatrain.model_files import INDEX, ModelFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_checkpoint(tmp_path, "tiny", max_shard_size="100KB")
    ModelFiles(tmp_path)
    return tmp_path


def _shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[2]


def test_deleted_shard(folder: Path) -> None:
    shard = _shard(folder)
    shard.unlink()
    with pytest.raises(UserError, match=rf"1 of \d+ shards .* missing \({shard.name}\)"):
        ModelFiles(folder)


def test_truncated_shard(folder: Path) -> None:
    shard = _shard(folder)
    os.truncate(shard, shard.stat().st_size - 100)
    with pytest.raises(UserError, match=rf"{shard.name} is truncated.*download or copy this file again"):
        ModelFiles(folder)


def test_shard_cut_inside_its_header(folder: Path) -> None:
    shard = _shard(folder)
    os.truncate(shard, 100)
    with pytest.raises(UserError, match=f"{shard.name} is truncated"):
        ModelFiles(folder)


def test_shard_with_bytes_appended(folder: Path) -> None:
    shard = _shard(folder)
    with shard.open("ab") as file:
        file.write(b"\0" * 8)
    with pytest.raises(UserError, match=f"{shard.name} is longer"):
        ModelFiles(folder)


def test_key_dropped_from_the_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"model\.norm\.weight in model-0"):
        ModelFiles(folder)


def test_key_in_the_index_that_no_shard_has(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.unknown.weight"] = _shard(folder).name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=rf"not in their shard.*model\.unknown\.weight in {_shard(folder).name}"):
        ModelFiles(folder)


def test_key_in_two_shards(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    name = next(iter(load_file(first)))
    save_file({**load_file(second), name: load_file(first)[name]}, second)
    with pytest.raises(UserError, match=f"in two shards.*{name} in {first.name} and {second.name}"):
        ModelFiles(folder)


def test_unknown_key_in_files_and_index(folder: Path) -> None:
    shard = _shard(folder)
    tensors = load_file(shard)
    expected = {name: ModelFiles(folder).shape(name) for name in ModelFiles(folder).names}
    save_file({**tensors, "model.unknown.weight": next(iter(tensors.values())).clone()}, shard)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.unknown.weight"] = shard.name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"1 unexpected.*model\.unknown\.weight"):
        ModelFiles(folder).check(expected)
