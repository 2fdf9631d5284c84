"""A training state or an export with NaN or infinity is never written, and the last good save stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from _exports import export
from _fixtures import tiny_checkpoint
from _stores import UNITS, PlainStore

from megatrain import UserError
from megatrain.checkpoint import latest_complete, save_state, step_folder

NAME = "model.layers.1.mlp.weight"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ["master", "exp_avg", "exp_avg_sq"])
def test_no_state_with_a_bad_value(tmp_path: Path, kind: str, value: float) -> None:
    save_state(step_folder(tmp_path, 1), PlainStore(UNITS, 1), {})
    store = PlainStore(UNITS, 2)
    tensor = store.masters[NAME] if kind == "master" else store.moments[NAME, kind]
    tensor[3, 5] = value
    with pytest.raises(UserError, match=f"'{kind}.{NAME}' holds NaN or infinity"):
        save_state(step_folder(tmp_path, 2), store, {})
    assert latest_complete(tmp_path) == (step_folder(tmp_path, 1), [])


def test_no_export_with_a_bad_value(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "source", "tiny")
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[1, 2] = torch.nan
    with pytest.raises(UserError, match=r"'model\.layers\.2\.mlp\.up_proj\.weight' holds NaN"):
        export(model, tmp_path / "out", tmp_path / "source")
    assert not (tmp_path / "out").exists()
