"""The loss is computed in FP32 from BF16 logits, for every chunk size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from _engine import engine, joined, rows
from _fixtures import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("chunk", [1, 7, 128, 10_000])
def test_a_high_loss_is_exact(chunk: int, tmp_path: Path, device: str) -> None:
    plain = tiny_model(dtype=torch.bfloat16)
    with torch.no_grad():
        plain.lm_head.weight.mul_(55)
    plain.save_pretrained(tmp_path / "model")
    batch = joined(rows(4, tokens=60))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).to(device)
    with torch.no_grad():
        logits = plain(batch["input_ids"].to(device)).logits[:, :-1].flatten(0, 1)
    targets = batch["labels"][:, 1:].flatten().to(device)
    expected = torch.nn.functional.cross_entropy(logits.float(), targets).item()
    in_bf16 = torch.nn.functional.cross_entropy(logits, targets).item()
    assert 25 < expected < 50
    assert abs(in_bf16 - expected) > 2e-3, "else this could not fail"
    with engine(tmp_path / "model", device, compute_dtype="bfloat16", loss_chunk_tokens=chunk) as model:
        assert model.evaluate([batch]).loss == pytest.approx(expected, abs=1e-3)
        assert model.step([batch]).loss == pytest.approx(expected, abs=1e-3)
