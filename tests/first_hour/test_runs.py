"""The first hour: a file of three lines, each form of data, and what comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from _runs import arguments, chats, make_model, megatrain, metrics, write_rows
from _tokenizers import MARKED, small_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain import __version__

FORMS = {
    "messages": chats(12),
    "prompt_completion": [{"prompt": f"hello {i}?", "completion": f"yes {i}"} for i in range(12)],
    "text": [{"text": "What is the capital of France? " * (1 + i % 3)} for i in range(12)],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    write_rows(tmp_path / "chats.jsonl", chats(12))
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
def test_three_lines_run_each_form(tmp_path: Path, form: str) -> None:
    make_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", FORMS[form])
    config = {
        "model": {"name_or_path": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    result = megatrain("train", str(tmp_path / "run.yaml"))
    assert result.exit_code == 0, result.output
    assert f"model   {tmp_path}/run/final" in result.stdout
    resolved = yaml.safe_load((tmp_path / "run" / "resolved.yaml").read_text(encoding="utf-8"))
    assert resolved["train"]["batch_size"] == 16
    assert resolved["data"]["train"] == config["data"]["train"]
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert reloaded.num_parameters() > 0


def test_the_loss_falls_and_the_export_answers(folder: Path) -> None:
    result = megatrain("train", *arguments(folder, "train.epochs=8", "optim.lr=3e-3"))
    assert result.exit_code == 0, result.output
    steps = metrics(folder / "run")
    assert [s["step"] for s in steps] == list(range(1, 25))
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    answer = megatrain("generate", str(folder / "run" / "final"), "hello 3?", "--max-new-tokens", "8")
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.strip()


def test_dry_run_shows_the_rows_and_writes_nothing_but_caches(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    result = megatrain("train", *arguments(folder, "--dry-run"))
    assert result.exit_code == 0, result.output
    assert "[[yes 0<|im_end|>]]" in result.stdout
    lines = result.stdout.splitlines()
    assert lines[-1].startswith("dry run: nothing was trained, and nothing written but caches (")
    assert [line.split()[0] for line in lines[-6:-1]] == ["model", "data", "steps", "memory", "disk"]
    assert "        optim.lr: 0.001" in lines
    assert "optim.beta1" not in result.stdout  # it has its default
    assert sorted(folder.rglob("*")) == before


def test_the_version_is_told() -> None:
    assert megatrain("--version").stdout == f"megatrain {__version__}\n"


def test_the_model_s_template_replaced_by_a_file(folder: Path) -> None:
    (folder / "mine.jinja").write_text(MARKED, encoding="utf-8")
    result = megatrain("train", *arguments(folder, f"data.chat_template={folder}/mine.jinja"))
    assert result.exit_code == 0, result.output
    assert AutoTokenizer.from_pretrained(folder / "run" / "final").chat_template == MARKED


def test_a_base_model_trains_on_prompts_as_plain_text(tmp_path: Path) -> None:
    make_model(tmp_path / "model", template=None)
    write_rows(tmp_path / "chats.jsonl", FORMS["prompt_completion"])
    result = megatrain("train", *arguments(tmp_path, "--dry-run"))
    assert "hello 0?[[yes 0<|im_end|>]]" in result.stdout


def test_columns_of_another_name(folder: Path) -> None:
    rows = [{"conversations": [{"from": m["role"], "value": m["content"]} for m in r["messages"]]} for r in chats(8)]
    write_rows(folder / "chats.jsonl", rows)
    columns = "data.columns={messages: conversations, role: from, content: value}"
    result = megatrain("train", *arguments(folder, columns, "--dry-run"))
    assert result.exit_code == 0, result.output
    assert "[[yes 0<|im_end|>]]" in result.stdout


def test_byte_order_mark_windows_lines_and_empty_lines_are_read(folder: Path) -> None:
    lines = "\r\n\r\n".join(json.dumps(r) for r in chats(6))
    (folder / "chats.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\r\n\r\n")
    result = megatrain("train", *arguments(folder, "--dry-run"))
    assert result.exit_code == 0, result.output
    assert "data    6 rows" in result.stdout


def test_bad_rows_are_skipped_and_counted(folder: Path) -> None:
    write_rows(folder / "chats.jsonl", [*chats(11), "{not json"])
    result = megatrain("train", *arguments(folder, "data.bad_rows=skip"))
    assert result.exit_code == 0, result.output
    assert "1 rows skipped (bad, see run.log)" in result.stdout
    assert "line 12 skipped: not JSON" in (folder / "run" / "run.log").read_text(encoding="utf-8")


def test_the_tokenizer_of_the_export_is_the_source_s(folder: Path) -> None:
    assert megatrain("train", *arguments(folder)).exit_code == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / "run" / "final" / name).read_bytes() == (folder / "model" / name).read_bytes()
    text = "What is the capital?"
    assert (
        AutoTokenizer.from_pretrained(folder / "run" / "final")(text)["input_ids"]
        == small_tokenizer()(text)["input_ids"]
    )


def test_one_step_has_one_loss_however_it_is_split(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    write_rows(tmp_path / "chats.jsonl", chats(8))
    losses, norms = [], []
    for micro in (8, 4, 2, 1):
        words = [f"train.micro_batch_size={micro}", "train.batch_size=8", f"output_dir={tmp_path}/run{micro}"]
        assert megatrain("train", *arguments(tmp_path, *words)).exit_code == 0
        (step,) = metrics(tmp_path / f"run{micro}")
        losses.append(step["loss"])
        norms.append(step["grad_norm"])
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-6)
