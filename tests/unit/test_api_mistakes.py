"""Every mistake in a call of the API is a `UserError` that names the argument, and the model goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _fixtures import tiny_checkpoint, tiny_config

from megatrain import AdamW, Model, UserError


def test_constructor(tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "placement.slots": {"slots": 1.5},
        "placement.slots: '2'": {"slots": "2"},
        "placement.slots: None": {"slots": None},
        "placement.slots: True": {"slots": True},
        "optim.max_grad_norm": {"max_grad_norm": "1"},
        "placement.device": {"device": None},
        "optimizer": {"optimizer": "adam"},
        "optimizer: <class": {"optimizer": torch.optim.AdamW},
        "loss_chunk_tokens": {"loss_chunk_tokens": -1},
        "seed": {"seed": "a"},
        "compute.activations": {"activations": 5},
        "compute.dtype": {"compute_dtype": "int8"},
        "placement.states": {"states_on_device": ["layers.9"]},
    }
    for message, options in cases.items():
        with pytest.raises(UserError, match=message):
            Model.from_config(tiny_config(), **({"device": "sim"} | options))
    with pytest.raises(UserError, match="config"):
        Model.from_config({}, device="sim")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"model\.name_or_path"):
        Model.from_pretrained(None, device="sim")  # type: ignore[arg-type]
    tiny_checkpoint(tmp_path)
    with pytest.raises(UserError, match="progress"):
        Model.from_pretrained(tmp_path, device="sim", progress=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [{"lr": "x"}, {"lr": -1}, {"betas": 0.9}, {"betas": (0.9, 1.0)}, {"eps": 0}, {"weight_decay": float("nan")}],
)
def test_optimizer(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"optim.{next(iter(options))}"):
        AdamW(**options)


def test_calls_that_are_refused_leave_the_model_usable(tmp_path: Path) -> None:
    ids = torch.randint(3, 300, (2, 8))
    good = {"input_ids": ids, "labels": ids}
    calls: dict[str, Callable[[Model], object]] = {
        "rows": lambda m: m.reserve("2", 16, 1),  # type: ignore[arg-type]
        "tokens": lambda m: m.reserve(2, -1, 1),
        "device_memory": lambda m: m.reserve(10**6, 10**6, 1),
        "lr": lambda m: m.step([good], lr="fast"),  # type: ignore[arg-type]
        "labels": lambda m: m.step([good | {"labels": ids > 5}]),
        "attention_mask": lambda m: m.step([good | {"attention_mask": torch.full_like(ids, 2)}]),
        "position_ids": lambda m: m.step([good | {"position_ids": -torch.ones_like(ids)}]),
        "path": lambda m: m.save_state(None),  # type: ignore[arg-type]
        "extra": lambda m: m.save_state(tmp_path / "s", extra={"a": object()}),
    }
    with Model.from_config(tiny_config(), device="cpu") as model:
        for message, call in calls.items():
            with pytest.raises(UserError, match=message):
                call(model)
        assert not model.step([good]).skipped
    with pytest.raises(UserError, match="closed"), model:
        pass


def test_hopeless_batches_are_refused_without_trying(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system promises memory that it does not have, an attempt would end the process."""
    with Model.from_config(tiny_config(), device=device) as model:
        monkeypatch.setattr("megatrain.engine.workspace.Workspaces.measure", lambda *_, **__: pytest.fail("it tried"))
        with pytest.raises(UserError, match=r"device_memory.*1000000 x 1000000 tokens"):
            model.reserve(10**6, 10**6, 1)


def test_weights_that_cannot_be_trained_from(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "nan")
    with torch.no_grad():
        source.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    source.save_pretrained(tmp_path / "nan")
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN"):
        Model.from_pretrained(tmp_path / "nan", device="sim")
    config = tiny_config()
    config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(UserError, match=r"quantization_config \(awq\)"):
        Model.from_config(config, device="sim")


def test_a_script_that_does_not_close_its_model_ends_well() -> None:
    """While updates run: an interpreter that ends under a thread in native code ends in an abort."""
    program = """
import torch
from transformers import LlamaConfig
from megatrain import Model
model = Model.from_config(LlamaConfig(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_hidden_layers=2, vocab_size=4096))
ids = torch.arange(16)[None]
model.step([{"input_ids": ids, "labels": ids}])
print("done")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


FORKED = """
import os, sys, threading
from megatrain.devices._threads import ThreadLanes

lanes = ThreadLanes(["compute"], perform=lambda ticket, run: run(), await_other=lambda *_: None)
held, over = threading.Event(), threading.Event()

def hold():
    with lanes._condition:
        held.set()
        over.wait()

threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    late = threading.Timer(20, os._exit, [3])
    late.daemon = True
    late.start()
    sys.exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
over.set()
sys.exit(status)
"""


def test_a_fork_ends_though_a_lane_of_its_parent_held_a_lock() -> None:
    result = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
