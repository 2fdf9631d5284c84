"""A model that resumes has the masters it had, bit for bit, and goes on as if it had never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from _engine import engine, rows
from _fixtures import tiny_checkpoint, tiny_config

from megatrain import UserError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_resume_save_is_bit_identical(tmp_path: Path, dtype: str, device: str) -> None:
    config = tiny_config("tiny-tied", attention_dropout=0.1)
    with engine(config, device, compute_dtype=dtype) as model:
        for seed in range(3):
            model.step(rows(2, seed=seed))
        model.save_state(tmp_path / "a", extra={"position": 7})
        model.save_pretrained(tmp_path / "export", dtype="bfloat16")
        losses = [model.step(rows(2, seed=seed)).loss for seed in (3, 4)]
        final = model.state_dict()
    with engine(config, device, compute_dtype=dtype, seed=99) as model:
        with pytest.raises(UserError, match="exported model, not a training state"):
            model.load_state(tmp_path / "export")
        assert model.load_state(tmp_path / "a") == {"position": 7}
        model.save_state(tmp_path / "b", extra={"position": 7})
        for path in (tmp_path / "a").iterdir():
            assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
        assert [model.step(rows(2, seed=seed)).loss for seed in (3, 4)] == losses
        assert all(torch.equal(master, final[name]) for name, master in model.state_dict().items())


def test_masters_keep_what_bfloat16_would_lose(tmp_path: Path, device: str) -> None:
    plain = tiny_checkpoint(tmp_path / "model")
    with engine(tmp_path / "model", device, compute_dtype="bfloat16") as model:
        masters = model.state_dict()
    for name, parameter in plain.named_parameters():
        assert torch.equal(masters[name], parameter.detach())
        assert masters[name].dim() == 1 or not torch.equal(masters[name], masters[name].bfloat16().float())
