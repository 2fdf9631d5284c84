"""`placement.gradients=passing` from the command line: it reaches the run, and what does not go with it is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from _fixtures import tiny_model
from _runs import arguments, chats, make_model, megatrain, write_rows

from megatrain import Model
from megatrain.config_file import load_config
from megatrain.engine.operations import Operations
from megatrain.preflight import prepare

PASSING = ("optim.max_grad_norm=null", "placement.gradients=passing")


@pytest.mark.parametrize("family", ["tiny", "tiny-tied"])
def test_a_run_goes_on_with_passing_gradients_where_one_with_kept_ones_stopped(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "model", family=family)
    write_rows(tmp_path / "chats.jsonl", chats(11))
    common = ("train.max_steps=4", "checkpoint.every=1", "checkpoint.keep=20", "checkpoint.resume=auto")
    whole, run = tmp_path / "whole", tmp_path / "run"
    result = megatrain("train", *arguments(tmp_path, *common, f"output_dir={whole}", "optim.max_grad_norm=null"))
    assert result.exit_code == 0, result.output
    shutil.copytree(whole, run)
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoints" / "step-00000003")

    applied: list[str] = []
    apply = Operations.apply
    monkeypatch.setattr(Operations, "apply", lambda *args: (applied.append(args[1].unit), apply(*args))[1])
    result = megatrain("train", *arguments(tmp_path, *common, f"output_dir={run}", *PASSING))
    assert result.exit_code == 0, result.output
    assert "planned" not in result.output, "bytes by label that are not those allocated"
    assert len(applied) == 2 * 6, "two steps of six units"
    assert "gradients: passing" in (run / "resolved.yaml").read_text()
    weights = [(folder / "final" / "model.safetensors").read_bytes() for folder in (whole, run)]
    assert weights[0] == weights[1]

    config = load_config(None, arguments(tmp_path, f"output_dir={tmp_path}/other", *PASSING))
    foreseen = prepare(config, lambda *_: None).host_bytes
    with Model.from_pretrained(
        tmp_path / "model", device="cpu", compute_dtype="float32", max_grad_norm=None, host_gradients="passing"
    ) as model:
        assert model.memory.host_bytes == foreseen


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_clipping_is_refused_before_data_are_read(tmp_path: Path, words: tuple[str, ...]) -> None:
    make_model(tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text("no JSON\n")
    result = megatrain("train", *arguments(tmp_path, "placement.gradients=passing", *words))
    assert result.exit_code == 2
    assert "optim.max_grad_norm: 1.0 needs" in result.output
    assert not (tmp_path / "run").exists()


def as_gpt_oss(model: Path) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "gpt_oss"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: tiny_model("qwen3_moe").save_pretrained(model), "hold each expert apart"),
        (as_gpt_oss, "model.attn_implementation: sdpa"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_by_a_dry_run(
    change: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    change(make_model(tmp_path / "model"))
    write_rows(tmp_path / "chats.jsonl", chats(4))
    result = megatrain("train", *arguments(tmp_path, "--dry-run"))
    assert result.exit_code == 2
    assert message in result.output


def test_plan_goes_by_the_run_file(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    write_rows(tmp_path / "chats.jsonl", chats(4))
    words = arguments(tmp_path, *PASSING, "placement.device=auto", "compute.dtype=bfloat16")
    result = megatrain("plan", *words, "--machine", "rtx4090-128gb")
    assert result.exit_code == 0, result.output
    assert "12 bytes a parameter" in result.output
    assert "placement.gradients=passing" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "qwen2.5-7b", "--gradients", "some"), "--gradients: 'some' is unknown; choose kept or passing"),
        (("model.name_or_path=m", "data.train=d", "output_dir=o", "--gradients", "passing"), "is for --model alone"),
    ],
)
def test_what_is_no_way_to_ask_for_them(words: tuple[str, ...], message: str) -> None:
    result = megatrain("plan", *words, "--machine", "h200-128gb", "--tokens-per-step", "4096")
    assert result.exit_code == 2
    assert message in result.output
