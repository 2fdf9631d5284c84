"""Masters survive a resume bit for bit, and an export is not mistaken for a training state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from _fixtures import tiny_checkpoint
from _stores import UNITS, PlainStore

from megatrain import UserError
from megatrain.checkpoint import load_state, save_state


def test_save_resume_save_is_bit_identical(tmp_path: Path) -> None:
    save_state(tmp_path / "a", PlainStore(UNITS, 1), {"step": 1})
    resumed = PlainStore(UNITS, 2)
    meta = load_state(tmp_path / "a", resumed)
    resumed.steps["head"] = 1
    save_state(tmp_path / "b", resumed, meta)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("shard", ["5GB", "100KB"])
def test_resuming_from_an_export_says_what_would_be_lost(tmp_path: Path, shard: str) -> None:
    tiny_checkpoint(tmp_path / "final", "tiny", dtype=torch.bfloat16, max_shard_size=shard)
    store = PlainStore(UNITS)
    with pytest.raises(UserError, match=r"exported model, not a training state.*lose precision.*new run"):
        load_state(tmp_path / "final", store)
    with pytest.raises(UserError, match=r"it has no state\.json"):
        load_state(tmp_path, store)
    assert not store.touched
