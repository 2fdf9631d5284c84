"""Generation settings that transformers refuses to write do not stop an export, and no side file loses
weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from _exports import export, logits, reload
from _fixtures import tiny_checkpoint

from megatrain import UserError


def test_contradictory_generation_settings_are_exported_as_they_are(tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = tiny_checkpoint(source, "tiny")
    text = json.dumps({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 2})
    (source / "generation_config.json").write_text(text)
    export(model, tmp_path / "out", source)
    assert (tmp_path / "out" / "generation_config.json").read_text() == text
    assert torch.equal(logits(reload(tmp_path / "out")), logits(model))


def test_even_an_unforeseen_failure_of_side_files_keeps_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    model = tiny_checkpoint(source, "tiny")

    def fail(*arguments: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr("megatrain.export.write_side_files", fail)
    with pytest.raises(UserError, match=r"weights are saved in .*KeyError\('surprise'\)"):
        export(model, tmp_path / "out", source)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_side_file_that_fails_is_reported_after_the_weights_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    model = tiny_checkpoint(source, "tiny")
    copy = shutil.copyfile

    def fail(origin: Path, target: Path) -> None:
        if origin.name == "generation_config.json":
            raise PermissionError(13, "Permission denied")
        copy(origin, target)

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(UserError, match=r"weights are saved in .*generation_config\.json could not be copied"):
        export(model, tmp_path / "out", source)
    assert torch.equal(logits(reload(tmp_path / "out")), logits(model))


def test_a_run_tries_its_export_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = pytest.importorskip("_runs")
    runs.make_model(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text("{}")
    runs.write_rows(tmp_path / "chats.jsonl", runs.chats(8))
    copy = shutil.copyfile

    def fail(origin: Path, target: Path) -> None:
        if Path(origin).name == "generation_config.json":
            raise PermissionError(13, "Permission denied")
        copy(origin, target)

    monkeypatch.setattr(shutil, "copyfile", fail)
    result = runs.CliRunner().invoke(runs.app, ["train", *runs.arguments(tmp_path)])
    assert isinstance(result.exception, UserError) or result.exit_code == 2
    assert "trial save" in str(result.exception) + result.output
    assert not (tmp_path / "run" / "final").exists()
    assert not (tmp_path / "run" / "resolved.yaml").exists()
