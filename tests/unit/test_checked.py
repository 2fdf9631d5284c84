"""The planner's bytes are those that a model takes, label by label, for every option of a run that moves them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from _fixtures import tiny_config
from _oracle import random_batches

from megatrain import Model, auto
from megatrain.checked import PlannedMemory, input_bytes, mismatches, peaks, planned_memory
from megatrain.config import ComputeConfig, DataConfig, ModelConfig, PlacementConfig, RunConfig
from megatrain.datasets import Row
from megatrain.loggers import Checked
from megatrain.model_spec import load_model_spec
from megatrain.results import MemoryReport
from megatrain.trainer import open_model

BATCHES = SimpleNamespace(largest=(2, 32, 2), ragged=False)


def run_config(placement: dict[str, Any], compute: dict[str, Any]) -> RunConfig:
    config = RunConfig(
        model=ModelConfig(name_or_path="m"),
        data=DataConfig(train="t"),
        placement=PlacementConfig(**{"device": "cpu", "slots": 2, **placement}),
        compute=ComputeConfig(**{"activations": "recompute", **compute}),
        output_dir="o",
    )
    return auto.with_options(config, auto.OPTIONS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A model whose head is tied, or not."""
    made = {tied: tmp_path_factory.mktemp("models") / f"tied-{tied}" for tied in (False, True)}
    for tied, folder in made.items():
        with Model.from_config(tiny_config(tie_word_embeddings=tied), device="cpu") as source:
            source.save_pretrained(folder)
    return made


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("placement", "compute"),
    [
        ({}, {}),
        ({"slots": 1}, {"gradient_dtype": "float32"}),
        ({"slots": 3, "states": "50%"}, {"activations": "keep"}),
        ({"weights": "50%", "states": "20%"}, {}),
        ({"weights": "100%"}, {"order": "micro_batch"}),
        ({"states": "100%"}, {"order": "micro_batch"}),
        ({}, {"boundaries": "host", "boundary_every": 2}),
    ],
)
def test_planned_is_allocated(
    folders: dict[bool, Path],
    one_thread: None,
    tied: bool,
    dtype: str,
    placement: dict[str, Any],
    compute: dict[str, Any],
) -> None:
    config = run_config(placement, compute)
    spec = load_model_spec(str(folders[tied]))
    with open_model(config, folders[tied], dtype, lambda *_: None) as model:
        planned = planned_memory(spec, config, "cpu", dtype, BATCHES, None)  # type: ignore[arg-type]
        assert list(mismatches(planned, model.memory)) == []
        for step in random_batches(320, steps=2, micros=2, tokens=32):
            model.step(step)
        assert list(mismatches(planned, model.memory)) == [], "nor after steps"
        assert sum(model.memory.host_by_label.values()) == model.memory.host_bytes


def test_a_difference_names_label_and_both_bytes() -> None:
    memory = MemoryReport(
        device_budget=None,
        device_peak=10,
        device_measured=None,
        host_bytes=1200,
        by_label={"slots": 1000, "libraries": 7, "gradients": 5},
        host_by_label={"masters and moments": 1200, "gradients": 0, "boundary activations": 50},
    )
    device = {"slots": 1200, "libraries": 3, "resident state": 8}
    planned = PlannedMemory(device, {"masters and moments": 1200}, 0)
    assert list(mismatches(planned, memory)) == [
        "device gradients: planned 0 bytes, allocated 5",
        "device resident state: planned 8 bytes, allocated 0",
        "device slots: planned 1,200 bytes, allocated 1,000",
    ]


def test_peaks() -> None:
    memory = MemoryReport(
        device_budget=None, device_peak=100, device_measured=90, host_bytes=1000, by_label={}, host_by_label={}
    )
    device, host = peaks(memory, "cuda", 7)
    assert device == Checked(predicted=100, measured=90)
    assert host.predicted == 1007
    assert host.measured > 50 << 20
    assert peaks(memory, "cpu", 7)[1].predicted == 1132, "and a quarter of the device's"


def test_bytes_of_tokenizer_and_rows() -> None:
    rows = [Row(np.zeros(n, np.int32), np.zeros(n, np.bool_)) for n in (7, 50)]
    assert 5 * (7 + 50) <= input_bytes("cpu", 0, rows) - input_bytes("cpu", 0, []) <= 5 * (7 + 50) + 2 * 500
    assert 40 << 20 <= input_bytes("cpu", 49152, []) <= 70 << 20  # SmolLM2's took 53 MiB
    assert input_bytes("cuda", 49152, rows) == 0, "what a GPU's process takes has room for them"
