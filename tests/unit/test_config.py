"""The configuration tree, its YAML reader and its page of documentation."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.config import DataConfig, ModelConfig, RunConfig, options, parse_bytes
from megatrain.config_file import OTHER_TRAINERS, dump_config, expected, load_config
from megatrain.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
BASE = ["model.name_or_path=m", "data.train=d.jsonl", "output_dir=o"]


def load(*words: str) -> RunConfig:
    return load_config(None, [*BASE, *words])


def test_three_lines_are_complete(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {name_or_path: Qwen/Qwen3-4B}\ndata: {train: chats.jsonl}\noutput_dir: runs/first\n")
    config = load_config(str(file), [])
    assert config == RunConfig(
        model=ModelConfig(name_or_path="Qwen/Qwen3-4B"), data=DataConfig(train="chats.jsonl"), output_dir="runs/first"
    )
    with pytest.raises(FrozenInstanceError):
        config.output_dir = "x"  # type: ignore[misc]


def test_words_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("optim: {lr: 1e-4, eps: 1e-6}\ntrain:\n")
    config = load_config(str(file), [*BASE, "optim.lr=2e-5"])
    assert (config.optim.lr, config.optim.eps) == (2e-5, 1e-6)


def test_the_resolved_file_gives_the_same_configuration(tmp_path: Path) -> None:
    config = load("optim.lr=3e-5", "data.columns={messages: conversations}", "placement.device_memory=400MiB")
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_config(config))
    assert load_config(str(file), []) == config


@settings(deadline=None)
@given(st.floats(min_value=1e-30, max_value=1.0))
def test_every_spelling_of_a_rate_is_read_exactly(rate: float) -> None:
    for text in (repr(rate), f"{rate:.17e}", f"'{rate!r}'", f"{rate:.17E}"):
        assert load(f"optim.lr={text}").optim.lr == rate


NAMES = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=8)


@settings(deadline=None)
@given(st.dictionaries(NAMES, NAMES, max_size=3))
def test_columns_survive_the_resolved_file(columns: dict[str, str]) -> None:
    config = replace(load(), data=DataConfig(train="d", columns=columns))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "resolved.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        assert load_config(str(file), []) == config


@pytest.mark.parametrize("text", ["yes", "no", "on", "off", "12:30:45", "2001-01-01"])
def test_texts_stay_texts(text: str) -> None:
    assert load(f"data.train={text}").data.train == text


@pytest.mark.parametrize("theirs", OTHER_TRAINERS)
def test_the_names_of_other_trainers_are_refused_with_ours(theirs: str) -> None:
    ours = OTHER_TRAINERS[theirs]
    assert ours in options()
    for word in (f"{theirs}=1", f"training.{theirs}=1"):
        with pytest.raises(UserError, match=rf"(?s){theirs}.*{ours}|training: unknown"):
            load(word)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(UserError) as e:
        load("optim.lr=-1", "train.epochs=half", "schedule.type=cosin")
    text = str(e.value)
    assert "optim.lr: -1.0 is not a number above 0 and at most 1" in text
    assert "train.epochs: 'half' is not a whole number at least 1" in text
    assert "schedule.type: 'cosin' is not one of constant, linear, cosine\n  fix:   did you mean cosine?" in text


def test_missing_options_are_named() -> None:
    with pytest.raises(UserError, match=r"(?s)model.name_or_path: missing.*data.train: missing.*output_dir: missing"):
        load_config(None, [])


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words"])
def test_a_file_that_holds_no_options(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError, match="not options"):
        load_config(str(tmp_path / "run.yaml"), [])


def test_a_file_that_is_not_yaml(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("a: [1, 2")
    with pytest.raises(UserError, match=r"run.yaml: not YAML: .*line 1"):
        load_config(str(tmp_path / "run.yaml"), [])


@given(st.integers(1, 10**6), st.sampled_from([("MiB", 2**20), ("GiB", 2**30), ("kb", 1000), ("GB", 10**9), ("", 1)]))
def test_sizes(number: int, unit: tuple[str, int]) -> None:
    assert parse_bytes("x", f"{number}{unit[0]}") == number * unit[1]
    assert parse_bytes("x", f" {number} {unit[0]} ") == number * unit[1]


@pytest.mark.parametrize("value", ["much", "", "-1GiB", "1 XB", 0, "0", -5])
def test_what_is_no_size_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"placement.device_memory: .* is not a size"):
        parse_bytes("placement.device_memory", value)


def test_every_option_is_documented_and_described() -> None:
    for name, (f, _) in options().items():
        assert f.metadata["doc"], name
        assert expected(name), name


def test_the_page_is_current() -> None:
    program = [sys.executable, str(ROOT / "tools" / "config_docs.py")]
    page = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == page
