"""Typical mistakes: exit code 2, one message with field or file, value and fix, no traceback, nothing half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _runs import arguments, chats, make_model, megatrain, write_rows
from safetensors.torch import load_file, save_file

from megatrain import machine

Breaks = Callable[[Path], None]


def rows(*values: Any) -> Breaks:
    return lambda folder: void(write_rows(folder / "chats.jsonl", values))


def data_bytes(content: bytes) -> Breaks:
    return lambda folder: void((folder / "chats.jsonl").write_bytes(content))


def void(_: object) -> None:
    return None


def edit_config(**changes: Any) -> Breaks:
    def change(folder: Path) -> None:
        file = folder / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def edit_weights(change: Callable[[dict[str, Any]], None]) -> Breaks:
    def rewrite(folder: Path) -> None:
        file = folder / "model" / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})

    return rewrite


def truncate_weights(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)


def lose_a_shard(folder: Path) -> None:
    make_model(folder / "model2", max_shard_size="100KB")
    (folder / "model").rename(folder / "old")
    (folder / "model2").rename(folder / "model")
    sorted((folder / "model").glob("*.safetensors"))[0].unlink()


def pickles_only(folder: Path) -> None:
    (folder / "model" / "model.safetensors").rename(folder / "model" / "pytorch_model.bin")


def no_tokenizer(folder: Path) -> None:
    for file in (folder / "model").glob("tokenizer*"):
        file.unlink()


def base_model(folder: Path) -> None:
    (folder / "model" / "chat_template.jinja").unlink()


def tokenizer_file(name: str, content: str) -> Breaks:
    return lambda folder: void((folder / "model" / name).write_text(content))


def adapter(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()
    (folder / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "own/base"}')


def used_folder(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "notes.txt").write_text("mine")


GOOD = chats(1)[0]
USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "yes"}

# name -> what is done to the folder, words on the command line, what the message must say
MISTAKES: dict[str, tuple[Breaks | None, list[str], list[str]]] = {
    "data path": (
        None,
        ["data.train={folder}/chat.jsonl"],
        ["data.train", "chat.jsonl", "did you mean", "chats.jsonl"],
    ),
    "data is a folder": (None, ["data.train={folder}"], ["data.train", "is a folder", "chats.jsonl"]),
    "model path": (None, ["model.name_or_path={folder}/modle"], ["model.name_or_path", "modle: no such folder"]),
    "no columns known": (rows({"question": "a", "answer": "b"}), [], ["question, answer", "data.columns"]),
    "format named wrongly": (None, ["data.format=sharegpt"], ["data.format", "'sharegpt'", "messages"]),
    "format does not fit": (None, ["data.format=text"], ["line 1: text is missing", "columns messages"]),
    "no assistant": (rows(GOOD, {"messages": [USER]}), [], ["line 2: no assistant message", "data.bad_rows=skip"]),
    "role": (rows({"messages": [{"role": "narrator", "content": "a"}, ANSWER]}), [], ["line 1", "'narrator'", "user"]),
    "null content": (rows({"messages": [USER, {"role": "assistant", "content": None}]}), [], ["content is null"]),
    "two users": (rows({"messages": [USER, USER, ANSWER]}), [], ["two user messages in a row"]),
    "assistant first": (rows({"messages": [ANSWER]}), [], ["starts with the assistant"]),
    "tool calls": (rows({"messages": [USER, ANSWER | {"tool_calls": [1]}]}), [], ["tool_calls", "not supported yet"]),
    "not JSON": (rows(GOOD, "{oops"), [], ["line 2: not JSON", "{oops"]),
    "JSON document": (data_bytes(b"[\n" + json.dumps(GOOD).encode() + b"]"), [], ["one JSON document", "jq -c"]),
    "empty file": (data_bytes(b""), [], ["data.train", "is empty"]),
    "only empty lines": (data_bytes(b"\xef\xbb\xbf\r\n\r\n"), [], ["data.train", "is empty"]),
    "cut off": (data_bytes(json.dumps(GOOD).encode() + b'\n{"mess'), [], ["line 2: the file ends in the middle"]),
    "half a character": (rows(GOOD, '{"text": "a\\ud800"}'), [], ["line 2: half a character", "\\ud800"]),
    "mapped to nothing": (
        None,
        ["data.columns={{messages: mesages}}"],
        ["data.columns: messages: mesages", "did you mean messages?"],
    ),
    "UTF-16": (data_bytes("{}".encode("utf-16")), [], ["UTF-16", "UTF-8"]),
    "Latin-1": (data_bytes(b'{"text": "caf\xe9"}'), [], ["line 1: not UTF-8", "0xe9"]),
    "all rows too long": (None, ["data.max_seq_len=8"], ["no row is left", "longer than 8", "data.max_seq_len"]),
    "longer than the model": (None, ["data.max_seq_len=9999"], ["data.max_seq_len: 9999", "256 positions"]),
    "split of dialogues": (None, ["data.too_long=split"], ["data.too_long: split is for text rows"]),
    "base model": (base_model, [], ["no chat template", "data.chat_template=FILE.jinja"]),
    "template switched off": (None, ["data.chat_template=none"], ["line 1", "data.chat_template=none", "remove"]),
    "template path": (None, ["data.chat_template=mine.jinja"], ["data.chat_template: mine.jinja: no such file"]),
    "rate as text": (None, ["optim.lr=small"], ["optim.lr: 'small' is not a number above 0"]),
    "rate below zero": (None, ["optim.lr=-1e-5"], ["optim.lr: -1e-05 is not a number above 0 and at most 1"]),
    "another trainer's key": (None, ["learning_rate=1e-5"], ["learning_rate", "optim.lr"]),
    "key mistyped": (None, ["optim.weight_decy=0"], ["optim.weight_decy", "did you mean optim.weight_decay?"]),
    "flag": (None, ["--learning-rate=1e-5"], ["--learning-rate", "optim.lr"]),
    "config path": (None, ["runn.yaml"], ["runn.yaml: no such file"]),
    "warm-up": (None, ["schedule.warmup=50"], ["schedule.warmup: 50 steps are more than the run's 3"]),
    "used folder": (used_folder, [], ["output_dir", "not empty", "notes.txt", "checkpoint.resume=auto"]),
    "budget": (None, ["placement.device_memory=20KiB"], ["placement.device_memory", "too small"]),
    "budget as text": (None, ["placement.device_memory=much"], ["placement.device_memory: 'much' is not a size"]),
    "host budget": (None, ["placement.host_memory=1MiB"], ["placement.host_memory", "too little"]),
    "host budget below what is there": (
        None,
        ["placement.host_memory=1KiB"],
        ["placement.host_memory", "raise placement.host_memory to"],
    ),
    "no folder": (None, ["output_dir="], ["output_dir: empty", "output_dir=VALUE"]),
    "no disk": (None, ["output_dir=/proc/run"], ["output_dir: /proc/run", "not on a disk"]),
    "no GPU": (None, ["placement.device=cuda"], ["placement.device", "no CUDA device"]),
    "missing shard": (lose_a_shard, [], ["safetensors", "missing"]),
    "truncated shard": (truncate_weights, [], ["model.safetensors"]),
    "missing tensor": (edit_weights(lambda t: void(t.pop("model.norm.weight"))), [], ["model.norm.weight", "missing"]),
    "shape": (edit_config(intermediate_size=128), [], ["gate_proj", "another shape"]),
    "vocabulary": (edit_config(vocab_size=300), [], ["300"]),
    "heads": (edit_config(num_attention_heads=5), [], ["config.json", "attention heads (5)"]),
    "size as text": (edit_config(hidden_size="32"), [], ["config.json", "'hidden_size' expected int"]),
    "null": (edit_config(vocab_size=None), [], ["config.json", "'vocab_size' expected int"]),
    "number format": (edit_config(dtype="float99"), [], ["config.json", "float99"]),
    "architecture": (edit_config(model_type="llamma9"), [], ["llamma9"]),
    "config not JSON": (lambda f: void((f / "model" / "config.json").write_text("{")), [], ["config.json"]),
    "no config": (lambda f: (f / "model" / "config.json").unlink(), [], ["config.json"]),
    "pickle": (pickles_only, [], ["pytorch_model.bin", "safetensors", "save_pretrained"]),
    "tokenizer": (no_tokenizer, [], ["tokenizer"]),
    "special tokens": (tokenizer_file("special_tokens_map.json", "{"), [], ["tokenizer", "special_tokens_map.json"]),
    "tokenizer empty": (tokenizer_file("tokenizer.json", "{}"), [], ["tokenizer.json"]),
    "adapter": (adapter, [], ["is an adapter", "own/base", "merge_and_unload"]),
    "its own code": (edit_config(model_type="newthing", auto_map={"AutoConfig": "x.X"}), [], ["trust_remote_code"]),
    "resume path": (None, ["checkpoint.resume={folder}/none"], ["none"]),
    "revision of a folder": (None, ["model.revision=main"], ["model.revision"]),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    make_model(folder / "model")
    return folder


@pytest.fixture
def folder(tmp_path: Path, whole: Path) -> Path:
    (tmp_path / "model").mkdir()
    for file in (whole / "model").iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    write_rows(tmp_path / "chats.jsonl", chats(12))
    return tmp_path


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_the_way_out(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, words, expected = MISTAKES[name]
    if breaks:
        breaks(folder)
    before = sorted(folder.rglob("*"))
    monkeypatch.chdir(folder)
    result = megatrain("train", *arguments(folder, *(w.format(folder=folder) for w in words)))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.endswith("(exit 2, nothing was written)\n")
    assert "Traceback" not in result.output
    missing = [text for text in expected if text not in result.stderr]
    assert not missing, f"{missing} not in: {result.stderr}"
    assert sorted(folder.rglob("*")) == before


def test_all_bad_rows_are_named(folder: Path) -> None:
    write_rows(folder / "chats.jsonl", [GOOD, "{oops", {"messages": [USER]}, GOOD, {"messages": 3}])
    error = megatrain("train", *arguments(folder)).stderr
    assert "line 2: not JSON" in error
    assert "also:  line 3: no assistant message" in error
    assert "also:  line 5: messages is not a list" in error


@pytest.mark.parametrize("word", ["mdel", "other/none"])
def test_a_name_that_may_be_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = megatrain("train", *arguments(folder, f"model.name_or_path={word}")).stderr
    assert f"hf download {word}" in error
    assert f"as a folder: there is no {folder / word}" in error
    assert ("did you mean the folder model?" in error) == (word == "mdel")


def test_home_is_one_folder_everywhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder)
    words = ["output_dir=~/run", "data.train=~/chats.jsonl", "model.name_or_path=~/model"]
    result = megatrain("train", *arguments(folder, *words))
    assert result.exit_code == 0, result.output
    assert "~" not in (folder / "run" / "resolved.yaml").read_text(encoding="utf-8")
    assert (folder / "run" / "final" / "model.safetensors").is_file()
    assert not (folder / "~").exists()


def test_a_leading_zero_is_no_octal(folder: Path) -> None:
    (folder / "run.yaml").write_text("train: {seed: 010}\n")
    result = megatrain("train", *arguments(folder, str(folder / "run.yaml"), "train.max_steps=010", "--dry-run"))
    assert "seed: 10" in result.stdout
    assert "max_steps: 10" in result.stdout


@pytest.mark.parametrize("kind", ["ascii", "closed pipe", "deleted folder"])
def test_where_the_output_goes(folder: Path, kind: str) -> None:
    gone = folder / "gone"
    gone.mkdir()
    program = [sys.executable, "-c", "from megatrain.cli import main; main()"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"} if kind == "ascii" else dict(os.environ)
    if "PYTHONPATH" in environment:
        environment["PYTHONPATH"] = str(Path(environment["PYTHONPATH"]).resolve())
    command = [*program, "doctor"] if kind == "deleted folder" else [*program, "train", *arguments(folder)]
    if kind == "deleted folder":
        command = ["sh", "-c", f'cd {gone} && rmdir {gone} && exec "$0" "$@"', *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if kind == "closed pipe":
            process.stdout.readline()
            process.stdout.close()
            error = process.stderr.read()
        else:
            error = process.communicate(timeout=120)[1]
        code = process.wait(timeout=120)
    if kind == "deleted folder":
        assert code == 2
        assert error.startswith(b"error: the folder that you are in no longer exists")
    else:
        assert error == b""
        assert code == (0 if kind == "ascii" else 1)


def test_sharegpt_rows(folder: Path) -> None:
    turns = [("system", "Be brief."), ("human", "hello?"), ("gpt", "yes")]
    write_rows(folder / "chats.jsonl", [{"conversations": [{"from": r, "value": t} for r, t in turns]}] * 4)
    mapping = "data.columns={messages: conversations, role: from, content: value}"
    result = megatrain("train", *arguments(folder, mapping))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", ["heads", "special tokens", "adapter"])
def test_a_broken_model_is_named_when_it_is_asked(folder: Path, name: str) -> None:
    breaks, _, expected = MISTAKES[name]
    assert breaks is not None
    breaks(folder)
    result = megatrain("generate", str(folder / "model"))
    assert result.exit_code == 2
    assert all(text in result.stderr for text in expected), result.stderr


def test_paths_to_copy_are_quoted(folder: Path) -> None:
    run = folder / "my run"
    result = megatrain("train", *arguments(folder, f"output_dir={run}"))
    assert f"megatrain generate '{run}/final'" in result.stdout


def test_the_disk_check_counts_what_a_save_asks_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the start lets pass, save and export must let pass."""
    monkeypatch.setattr(machine, "disk_free", lambda _: 100 << 20)  # tensors are far below, the margins above
    result = megatrain("train", *arguments(folder))
    assert "the disk is too full" in result.stderr


def test_too_little_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "disk_free", lambda _: 1000)
    result = megatrain("train", *arguments(folder))
    assert result.exit_code == 2
    assert "the disk is too full" in result.stderr
    assert "free space" in result.stderr


def test_read_only_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)  # the tests may run as root, whom no mode stops
    result = megatrain("train", *arguments(folder))
    assert result.exit_code == 2
    assert "cannot be written: Permission denied" in result.stderr


def test_a_key_that_stands_twice(folder: Path) -> None:
    (folder / "run.yaml").write_text("optim: {lr: 1e-5, lr: 1e-4}\n")
    result = megatrain("train", str(folder / "run.yaml"))
    assert result.exit_code == 2
    assert "the key 'lr' stands twice" in result.stderr


@pytest.mark.parametrize("command", [["generate", "{folder}/nothing"], ["export", "{folder}", "{folder}/out"]])
def test_other_commands_name_what_is_missing(folder: Path, command: list[str]) -> None:
    result = megatrain(*(word.format(folder=folder) for word in command))
    assert result.exit_code == 2
    assert "fix:" in result.stderr
