"""The examples of the documentation run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from _runs import make_model, megatrain

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def test_quick_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "Qwen" / "Qwen3-4B")  # a folder of that name, in place of a download
    (tmp_path / "chats.jsonl").write_text(blocks("quickstart.md", "json")[0], encoding="utf-8")
    (config,) = blocks("quickstart.md", "yaml")
    assert set(yaml.safe_load(config)) == {"model", "data", "output_dir"}
    (tmp_path / "run.yaml").write_text(config, encoding="utf-8")
    commands = [line for block in blocks("quickstart.md", "bash") for line in block.splitlines()]
    assert [c.split()[1] for c in commands] == [
        "doctor", "train", "train", "train", "train", "generate", "export",
    ]  # fmt: skip
    for command in commands:
        if command.startswith("megatrain export"):
            # The page assumes a run that has saved; this one is too short to have.
            words = ["run.yaml", "output_dir=runs/third", "train.epochs=3", "checkpoint.every=1"]
            assert megatrain("train", *words).exit_code == 0
            command = command.replace("runs/first", "runs/third")
        result = megatrain(*shlex.split(command)[1:])
        assert result.exit_code == 0, f"{command}\n{result.output}"


def test_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model")
    (example,) = blocks("api.md", "python")
    exec(compile(example, "docs/api.md", "exec"), {})
    assert (tmp_path / "trained" / "model.safetensors").is_file()
