"""``trace.path``: a picture of measured steps beside the predicted one, and what is refused before the first step."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from _runs import arguments, chats, make_model, megatrain, metrics, write_rows

from megatrain.config import TraceConfig
from megatrain.costs import Costs
from megatrain.tracing import RecordedSteps


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    write_rows(tmp_path / "chats.jsonl", chats(24))
    return tmp_path


def summary(run: Path) -> dict[str, Any]:
    last = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    found: dict[str, Any] = last["summary"]
    return found


def test_a_run_draws_its_steps(folder: Path) -> None:
    result = megatrain("train", *arguments(folder, f"trace.path={folder}/run/step.html", "placement.slots=1"))
    assert result.exit_code == 0, result.output
    assert f"trace   {folder}/run/step.html, and {folder}/run/step.json for ui.perfetto.dev" in result.stdout
    text = (folder / "run" / "step.html").read_text(encoding="utf-8")
    headings = [h.text or "" for h in ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>")).iter("h2")]
    assert [h.partition(":")[0] for h in headings] == ["step 5, predicted", "step 4, measured", "step 5, measured"]
    assert "all trained" in text

    events = json.loads((folder / "run" / "step.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "step 5, predicted", 2: "steps 3 to 5, measured"}
    slices = [e for e in events if e["ph"] == "X" and e["pid"] == 2]
    ops = [e["args"] for e in slices]
    steps = [
        Counter((op["kind"], op["unit"], op.get("micro_batch")) for op in ops if op["step"] == step)
        for step in (2, 3, 4)
    ]
    assert steps[0] == steps[1] == steps[2]
    fetches = {key: n for key, n in steps[0].items() if key[0] == "FETCH"}
    assert sum(fetches.values()) == 6 + 3, "with one slot all layers but the last are fetched twice"
    assert {n for key, n in steps[0].items() if key[0] != "FETCH"} == {1}
    assert {op["step"] for op in ops} == {2, 3, 4}

    before = [e["ts"] + e["dur"] for e in slices if e["args"]["kind"] == "PUBLISH"][-2]
    assert min(e["ts"] for e in events if e["ph"] == "X" and e["pid"] == 1) == pytest.approx(before, abs=0.01)


def test_each_run_ends_with_what_was_predicted(folder: Path) -> None:
    result = megatrain("train", *arguments(folder))
    assert result.exit_code == 0, result.output
    assert re.search(r"^checked step .*, predicted .* \([+-]\d+ %\) · host .*, predicted ", result.stdout, re.MULTILINE)
    assert "warning" not in result.stdout
    figures = summary(folder / "run")
    assert figures["one_step"]["predicted"] > 0
    assert figures["one_step"]["measured"] > 0
    assert figures["device_peak"] is None
    assert figures["host_peak"]["predicted"] > 500 << 20
    assert figures["host_peak"]["measured"] > 100 << 20
    assert not list(folder.rglob("*.html"))


def test_a_run_of_one_step_has_no_steady_one(folder: Path) -> None:
    result = megatrain("train", *arguments(folder, "train.max_steps=1"))
    assert result.exit_code == 0, result.output
    assert re.search(r"^checked host ", result.stdout, re.MULTILINE)
    assert summary(folder / "run")["one_step"] is None


def test_tracing_does_not_change_the_run(folder: Path) -> None:
    losses = []
    for name, words in (("plain", ["train.max_steps=1"]), ("traced", [f"trace.path={folder}/step.html"])):
        words = [*words, "train.epochs=2", f"output_dir={folder}/{name}"]
        assert megatrain("train", *arguments(folder, *words)).exit_code == 0
        losses.append([step["loss"] for step in metrics(folder / name)])
    assert losses[1][0] == losses[0][0]
    words = ["train.epochs=2", f"output_dir={folder}/again", f"trace.path={folder}/step.html", "trace.steps=5"]
    assert megatrain("train", *arguments(folder, *words)).exit_code == 0
    assert [step["loss"] for step in metrics(folder / "again")] == losses[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trace.path={}/none/step.html"], "trace.path: {}/none/step.html: there is no folder {}/none"),
        (["trace.path={}/step.txt"], "fix:   trace.path={}/step.html"),
        (["trace.path={}/there.html"], "trace.path: {}/there.html cannot be written"),
        (["trace.path={}/other.html"], "trace.path: {}/other.json cannot be written"),
        (["trace.path={}/step.html", "train.max_steps=2"], "trace.steps: 2, but a run of 2 steps has 1 steady ones"),
        (["trace.path={}/step.html", "trace.steps=0"], "trace.steps: 0 is not a whole number at least 1"),
    ],
)
@pytest.mark.parametrize("dry", [False, True])
def test_mistakes_are_found_before_the_first_step(folder: Path, words: list[str], message: str, dry: bool) -> None:
    for name in ("there.html", "other.json"):
        (folder / name).mkdir()
    before = sorted(folder.rglob("*"))
    result = megatrain("train", *arguments(folder, *[w.format(folder) for w in words], *(["--dry-run"] if dry else [])))
    assert result.exit_code == 2
    assert message.format(folder, folder) in result.stderr
    assert sorted(folder.rglob("*")) == before


def test_a_disk_that_takes_no_more_does_not_end_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordedSteps, "write", full)
    result = megatrain("train", *arguments(folder, f"trace.path={folder}/step.html"))
    assert result.exit_code == 0, result.output
    assert "trace   not written: [Errno 28] No space left on device" in result.stdout


def test_a_resumed_run_draws_what_is_left(folder: Path) -> None:
    words = [f"trace.path={folder}/step.html", "train.max_steps=6", "checkpoint.every=3", "checkpoint.keep=9"]
    assert megatrain("train", *arguments(folder, *words)).exit_code == 0
    (folder / "step.html").unlink()
    resume = f"checkpoint.resume={folder}/run/checkpoints/"
    saves = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    assert len(saves) == 1
    result = megatrain("train", *arguments(folder, *words, resume + saves[0]))
    assert result.exit_code == 0, result.output
    assert "step 6, measured" in (folder / "step.html").read_text(encoding="utf-8")
    result = megatrain("train", *arguments(folder, *words, "trace.steps=3", resume + saves[0]))
    assert result.exit_code == 0, result.output
    assert "trace   none: too few steps are left for a steady one" in result.stdout


@pytest.mark.parametrize(
    ("path", "drawn", "steps", "recorded"),
    [
        ("x.html", 2, range(10), [2, 3, 4]),
        ("x.html", 5, range(7), [1, 2, 3, 4, 5, 6]),
        ("x.html", 2, range(3), [0, 1, 2]),
        ("x.html", 2, range(2), []),
        ("x.html", 1, range(40, 50), [42, 43]),
        (None, 2, range(10), [2, 3]),
        (None, 20, range(2), [0, 1]),
        (None, 1, range(1), []),
        (None, 1, range(0), []),
    ],
)
def test_which_steps_are_recorded(path: str | None, drawn: int, steps: range, recorded: list[int]) -> None:
    assert list(RecordedSteps(TraceConfig(path=path, steps=drawn), steps).steps) == recorded


def test_memory_that_is_not_as_planned_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Costs.fixed_device_bytes

    def wrong(self: Costs, *args: Any) -> Counter[str]:
        labels = planned(self, *args)
        labels["slots"] += 1000
        return labels

    monkeypatch.setattr(Costs, "fixed_device_bytes", wrong)
    result = megatrain("train", *arguments(folder, "train.max_steps=1"))
    assert result.exit_code == 0, result.output
    (line,) = re.findall(r"^warning memory is not as planned: (.*)$", result.stdout, re.MULTILINE)
    label, more, less = re.fullmatch(r"device (\w+): planned ([\d,]+) bytes, allocated ([\d,]+)", line).groups()  # type: ignore[union-attr]
    assert label == "slots"
    assert int(more.replace(",", "")) == int(less.replace(",", "")) + 1000
    assert line in (folder / "run" / "run.log").read_text(encoding="utf-8")
