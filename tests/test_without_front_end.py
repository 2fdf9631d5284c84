"""The Python API needs torch, transformers, safetensors and numpy: without the command line's libraries it trains."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys

BLOCKED = ("pydantic", "pydantic_core", "typer", "rich")
sys.modules.update(dict.fromkeys(BLOCKED))  # importing them fails, and looking for them finds nothing

import torch
from transformers import LlamaConfig
from megatrain import AdamW, Model, UserError

config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                     num_attention_heads=2, num_key_value_heads=1)
ids = torch.arange(3, 15).view(2, 6)
with Model.from_config(config, device="cpu", optimizer=AdamW(lr=1e-2)) as model:
    losses = [model.step([{"input_ids": ids, "labels": ids}]).loss for _ in range(3)]
assert losses[-1] < losses[0], losses
assert not [name for name, module in sys.modules.items() if name.partition(".")[0] in BLOCKED and module]
print("trained")
"""


def test_a_step_without_pydantic_typer_and_rich() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"


@pytest.mark.parametrize("library", ["pydantic", "typer", "rich"])
def test_the_blocker_blocks(library: str) -> None:
    script = SCRIPT.partition("import torch")[0] + f"import {library}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"import of {library} halted" in done.stderr
