"""Fault 16: nobody can tell beforehand whether the model fits in RAM."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from _fixtures import random_checkpoint
from _runs import arguments, chats, make_model, megatrain, write_rows
from _tokenizers import save_tokenizer

from megatrain import Model, preflight
from megatrain.config import CheckpointConfig, ComputeConfig, DataConfig, ModelConfig, RunConfig, TrainConfig
from megatrain.config_file import load_config
from megatrain.costs import process_bytes
from megatrain.errors import UserError
from megatrain.model_spec import ModelSpec
from megatrain.preflight import prepare


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [0, 100_000_000])
def test_the_prediction_is_close_and_never_below(tmp_path: Path, dtype: str, size: int) -> None:
    if size:
        random_checkpoint(tmp_path / "model", size, shards=2)
        save_tokenizer(tmp_path / "model")
    else:
        make_model(tmp_path / "model")
    config = RunConfig(
        model=ModelConfig(name_or_path=str(tmp_path / "model")),
        data=DataConfig(train=str(write_rows(tmp_path / "chats.jsonl", chats(4)))),
        compute=ComputeConfig(dtype=dtype),  # type: ignore[arg-type]
        checkpoint=CheckpointConfig(every=0),
        output_dir=str(tmp_path / "run"),
    )
    prepared = prepare(config, lambda *_: None)
    with Model.from_pretrained(tmp_path / "model", device="cpu", compute_dtype=dtype) as model:
        assert prepared.parameters == model.num_parameters
        assert model.memory.host_bytes <= prepared.host_bytes <= 1.1 * model.memory.host_bytes


@pytest.mark.parametrize(
    ("every", "activations"), [(1, "recompute"), (3, "recompute"), (1, "75%"), (2, "50%"), (1, "keep")]
)
def test_boundaries_on_the_host_are_predicted(tmp_path: Path, every: int, activations: str) -> None:
    """Host memory comes in huge pages, which hide small needs: so there are many micro-batches."""
    make_model(tmp_path / "model")
    text = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes " * 40}]}] * 48
    config = RunConfig(
        model=ModelConfig(name_or_path=str(tmp_path / "model")),
        data=DataConfig(train=str(write_rows(tmp_path / "chats.jsonl", text))),
        train=TrainConfig(batch_size=48, micro_batch_size=1),
        compute=ComputeConfig(dtype="float32", boundaries="host", boundary_every=every, activations=activations),
        output_dir=str(tmp_path / "run"),
    )
    prepared = prepare(config, lambda *_: None)
    rows, tokens, micros = prepared.batches.largest
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    options: dict[str, Any] = {"boundaries": "host", "boundary_every": every, "activations": activations}
    with Model.from_pretrained(tmp_path / "model", device="cpu", compute_dtype="float32", **options) as model:
        without = model.memory.host_bytes
        model.step([{"input_ids": ids, "labels": ids}] * micros)
        assert (without < model.memory.host_bytes) == (activations != "keep")
        assert model.memory.host_bytes <= prepared.host_bytes <= 1.1 * model.memory.host_bytes + (4 << 20)


def sparse_7b(folder: Path) -> None:
    """A 7B model whose weight file takes no disk: a header, and a hole of the right length."""
    config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(folder)
    header, at = {}, 0
    for name, parameter in model.named_parameters():
        end = at + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        os.truncate(file.fileno(), 8 + len(text) + at)
    save_tokenizer(folder)


def test_too_little_memory_stops_at_once_naming_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    sparse_7b(tmp_path / "model")
    write_rows(tmp_path / "chats.jsonl", chats(4))
    begun = time.monotonic()
    result = megatrain("train", *arguments(tmp_path, "placement.host_memory=64GiB", "compute.dtype=bfloat16"))
    assert time.monotonic() - begun < 5
    assert result.exit_code == 2
    need, missing = re.search(r"needs ([\d.]+) GiB.*?([\d.]+) GiB too little", result.stderr, re.DOTALL).groups()  # type: ignore[union-attr]
    assert float(need) == pytest.approx(6.738e9 * 14 / 2**30, rel=0.01)
    assert float(missing) == pytest.approx(float(need) + 0.6 - 64, abs=0.2)


def test_dry_run_prints_each_part(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    write_rows(tmp_path / "chats.jsonl", chats(4))
    lines = megatrain("train", *arguments(tmp_path, "--dry-run")).stdout.splitlines()
    memory = next(line for line in lines if line.startswith("memory"))
    disk = next(line for line in lines if line.startswith("disk"))
    assert re.search(r"cpu all that is free · host \d+ MiB of [\d.]+ GiB free", memory)
    assert re.search(r"each save \d+ MiB, free [\d.,]+ [GM]iB", disk)
    assert shutil.disk_usage(tmp_path).free > 0


def test_what_a_gpu_tunes_with_counts_before_a_run_that_is_set_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler stays with the layers that it makes, and pins copies of activations for smaller steps than the
    largest, or where the device has no room; where the planner does not know the model, nobody can say how much."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_model(tmp_path / "model")
    config = load_config(None, arguments(tmp_path))
    alike, varied = (SimpleNamespace(largest=(64, 65536, 1), ragged=ragged) for ragged in (False, True))
    elements = json.loads((folder / "config.json").read_text())["intermediate_size"]
    layer, copies = 40 << 20, 1 << (64 * 65536 * elements * 2 - 1).bit_length()

    def beside(batches: SimpleNamespace, given: RunConfig, device: str = "cuda", free: int = 80 << 30) -> int:
        total = preflight._process_bytes(given, folder, batches, device, "bfloat16", free)
        return total - process_bytes(on_gpu=device == "cuda")

    small = replace(config, placement=replace(config.placement, device_memory="1GiB"))
    assert beside(alike, config) == layer
    assert beside(varied, config) == beside(alike, small) == beside(alike, config, free=2 << 30) == layer + copies
    assert beside(alike, config, "cpu") == 0
    compiled = replace(config, compute=replace(config.compute, compile=True))
    assert beside(alike, compiled, "cpu") == (100 << 20) + layer
    monkeypatch.setattr(preflight, "load_model_spec", unknown)
    assert beside(varied, config) == layer
    assert beside(varied, compiled, "cpu") == (100 << 20) + layer


def unknown(name: str) -> ModelSpec:
    raise UserError(f"{name}: not of a kind that can be planned")
