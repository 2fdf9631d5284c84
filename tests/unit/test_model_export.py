"""What a trained model writes: the source's config key by key, and the logits that training left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from _engine import engine, rows, tolerance
from _exports import reload
from _fixtures import tiny_checkpoint
from _oracle import relative
from transformers import AutoModelForCausalLM

from megatrain import AdamW

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = [("tiny", {}), ("tiny-tied", {}), ("qwen2", {}), ("qwen2", {"tie_word_embeddings": False}), ("gemma2", {})]
CASES += [("phi3", {}), ("phi3", {"tie_word_embeddings": True})]


@pytest.mark.parametrize(("family", "changes"), CASES)
@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16])
def test_train_export_reload(
    family: str, changes: dict[str, Any], source_dtype: torch.dtype, tmp_path: Path, device: str
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    tiny_checkpoint(source, family, dtype=source_dtype, max_shard_size="100KB", **changes)
    old_style(source / "config.json")
    with engine(source, device, optimizer=AdamW(lr=1e-2)) as model:
        for seed in range(2):
            model.step(rows(2, seed=seed))
        masters = model.state_dict()
        model.save_pretrained(out, dtype="float32")
        model.save_pretrained(tmp_path / "as-source")
        batch = rows(1, seed=5)[0]
        expected = model.logprobs(batch)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    assert {key: after.get(key) for key in before if key not in ("dtype", "torch_dtype")} == {
        key: value for key, value in before.items() if key not in ("dtype", "torch_dtype")
    }
    assert set(after) <= {*before, "dtype"}
    same = json.loads((tmp_path / "as-source" / "config.json").read_text())
    assert same == before, "not a key differs where the dtype is the source's"
    assert not any("TokenizersBackend" in path.read_text() for path in out.glob("*.json"))
    reloaded = reload(out)
    for name, parameter in reloaded.named_parameters():
        assert torch.equal(parameter, masters[name]), name
    assert logprobs_of(reloaded, batch) == pytest.approx(expected, abs=2e-5)
    assert relative(logprobs_of(reloaded, batch), expected) <= tolerance(device)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "as-source")
    for name, parameter in rounded.named_parameters():
        assert torch.equal(parameter.float(), masters[name].to(source_dtype).float()), name


def old_style(path: Path) -> None:
    """A config as other versions of transformers have written it, with a key that nobody knows."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters", None) or {}
    config["rope_theta"] = rope.get("rope_theta", 10000.0)
    config["my_own_note"] = {"kept": [1, 2.50, None]}
    config["transformers_version"] = "4.40.0"
    path.write_text(json.dumps(config, indent=2))


def logprobs_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(batch["input_ids"]).logits.float()
    found = logits.log_softmax(-1)[:, :-1].gather(2, batch["labels"][:, 1:, None])[..., 0]
    return torch.cat([torch.zeros(found.shape[0], 1), found], 1)


@pytest.mark.parametrize("family", ["tiny", "tiny-tied"])
def test_export_without_a_source(family: str, tmp_path: Path, device: str) -> None:
    from _fixtures import tiny_config

    with engine(tiny_config(family), device) as model:
        model.step(rows(2))
        masters = model.state_dict()
        model.save_pretrained(tmp_path / "out", dtype="float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    for name, parameter in reload(tmp_path / "out").named_parameters():
        assert torch.equal(parameter, masters[name]), name
