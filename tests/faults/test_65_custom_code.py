"""A model that ships its own Python files: they are in the export, and it loads offline from a moved
folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from _exports import export, logits
from _fixtures import tiny_checkpoint

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
from .helper import SCALE


class OwnConfig(LlamaConfig):
    model_type = "own-llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        result = super().forward(*args, **kwargs)
        result.logits = result.logits * SCALE
        return result
"""


def test_custom_code_travels_with_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    model = tiny_checkpoint(source, "tiny")
    config = json.loads((source / "config.json").read_text())
    config |= {
        "model_type": "own-llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    (source / "config.json").write_text(json.dumps(config))
    (source / "modeling_own.py").write_text(CODE)
    (source / "helper.py").write_text("SCALE = 3.0\n")
    export(model, tmp_path / "out", source)
    source.rename(tmp_path / "gone")
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(moved, trust_remote_code=True)
    assert type(loaded).__name__ == "OwnForCausalLM"
    assert torch.equal(logits(loaded.eval()), logits(model) * 3)
