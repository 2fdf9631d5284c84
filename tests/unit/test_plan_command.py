"""``megatrain plan``: tables, JSON, refusals with exit code 2, and the time and imports that it takes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from _runs import megatrain

from megatrain.machine import Gpu, probe

SEVEN = ("plan", "--model", "qwen2.5-7b", "--machine", "h200-128gb")
STEP = ("--tokens-per-step", "65536", "--seq-len", "1024")


def data(*words: str) -> dict[str, object]:
    result = megatrain(*words, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_the_tables_state_what_a_claim_of_fit_depends_on() -> None:
    result = megatrain(*SEVEN, *STEP)
    assert result.exit_code == 0
    text = result.stdout
    for part in (
        "64 x 1,024 = 65,536 tokens a step",
        "the input of every layer is stored",
        "clipping",
        "14 bytes a parameter",
        "GPU memory",
        "host memory",
        "disk",
        "limited by GPU arithmetic",
        "1.00B tokens",
        "placement.states=",
    ):
        assert part in text
    assert len(re.findall(r"^next    [\d.]+ s \(\+[\d.]+%\), GPU .*: \S+=", text, re.MULTILINE)) == 2
    assert max(map(len, text.splitlines())) < 280


def test_json_adds_up() -> None:
    found = data(*SEVEN, *STEP)
    device, host = found["device_bytes"], found["host_bytes"]
    assert isinstance(device, dict)
    assert isinstance(host, dict)
    assert sum(device.values()) == found["device_peak"]
    assert sum(host.values()) == found["host_total"]
    assert found["tokens_per_second"] == pytest.approx(65536 / float(str(found["seconds"])))


def run_file(folder: Path, *lines: str) -> str:
    text = "\n".join(["model: {name_or_path: Qwen/Qwen3-4B}", "data: {train: chats.jsonl}", "output_dir: run", *lines])
    (folder / "run.yaml").write_text(text)
    return str(folder / "run.yaml")


def test_a_run_file_gives_the_step_and_its_limits(tmp_path: Path) -> None:
    file = run_file(tmp_path, "train: {batch_size: 8}")
    words = ("plan", file, "--machine", "rtx4090-128gb", "data.max_seq_len=2048", "placement.device_memory=16GiB")
    found = data(*words)
    assert found["model"] == "qwen3-4b"
    request = found["request"]
    assert isinstance(request, dict)
    assert (request["rows"], request["seq_len"], request["device_memory"]) == (8, 2048, 16 << 30)
    assert int(str(found["device_limit"])) <= 0.95 * (16 << 30)
    assert dict(request, rows=16) == data(*words, "--tokens-per-step", "32768")["request"]


def test_the_set_line_is_accepted_by_train_and_plan(tmp_path: Path) -> None:
    file = run_file(tmp_path)
    found = data("plan", file, "--machine", "rtx4090-128gb")
    overrides = found["overrides"]
    assert isinstance(overrides, list)
    again = data("plan", file, *overrides, "--machine", "rtx4090-128gb")
    assert again["overrides"] == overrides


def test_the_set_line_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    shares = "compute.activations=keep 20%, selective 50%"
    words = ("plan", run_file(tmp_path), shares, "data.max_seq_len=512", "--machine", "rtx4090-128gb")
    lines = megatrain(*words).stdout.splitlines()
    pasted = shlex.split(lines[lines.index("set") + 1])
    assert shares in pasted
    assert pasted == data(*words)["overrides"]


def test_without_a_machine_it_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    here = probe()
    gpus = (Gpu("NVIDIA GeForce RTX 4090", 24 << 30, 20 << 30, (8, 9), "1"),)
    monkeypatch.setattr("megatrain.machine.probe", lambda: replace(here, gpus=gpus, memory_free=100 << 30))
    found = data("plan", "--model", "qwen3-4b", *STEP)
    assert found["machine"] == "this machine (rates of rtx4090-128gb)"
    assert found["device_limit"] == int(0.95 * (20 << 30))


LONG = ("--tokens-per-step", "262144", "--seq-len", "65536")
SMALL = ("placement.device_memory=10GiB", "placement.host_memory=90GiB", "train.batch_size=16", "data.max_seq_len=1024")
FP32 = ("compute.dtype=float32", "compute.gradient_dtype=float32")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (False, LONG),
        (True, ("data.max_seq_len=65536", "train.batch_size=4")),
        (True, LONG),
        (True, ("train.batch_size=4", "--seq-len", "65536")),
        (True, ("placement.device_memory=20GiB", "placement.host_memory=10GiB", "train.batch_size=16")),
        (True, (*SMALL, *FP32)),
    ],
)
def test_a_way_out_can_be_pasted(tmp_path: Path, file: bool, words: tuple[str, ...]) -> None:
    words = ("plan", *([run_file(tmp_path)] if file else []), "--model", "qwen2.5-7b", *words)
    refused = megatrain(*words, "--machine", "rtx4090-128gb")
    assert refused.exit_code == 2
    assert re.search(r"missing: [\d.]+ GiB of (GPU|host) memory \(\d+ bytes\)", refused.stderr)
    ways = re.findall(r"fix: +(\S+(?: \S+)*?) +([\d.]+) s a step", refused.stderr)
    assert 1 <= len(ways) <= 3
    for way, seconds in ways:
        found = data(*words, "--machine", "rtx4090-128gb", *way.split())
        assert float(str(found["seconds"])) == pytest.approx(float(seconds), abs=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", "--machine", "h200-128gb", *STEP), "--model: missing"),
        (("plan", "--model", "qwen2.5-7b", "--machine", "x", *STEP), r"--machine: .*\n.*machines are a100.*rtx5090"),
        (SEVEN, "--tokens-per-step: missing"),
        ((*SEVEN, "--tokens-per-step", "65537", "--seq-len", "1024"), "--tokens-per-step 65536"),
        ((*SEVEN, "--tokens-per-step", "100", "--seq-len", "1024"), "--tokens-per-step 1024"),
        (("plan", "--model", "none", "--machine", "h200-128gb", *STEP), "neither a known model"),
        (("plan", "--model", "a" * 256, "--machine", "h200-128gb", *STEP), "a name of 256 characters"),
        ((*SEVEN, "--machine", "b" * 5000, *STEP), "a name of 5000 characters"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str) -> None:
    result = megatrain(*words)
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr


def test_a_cpu_run_cannot_be_planned(tmp_path: Path) -> None:
    result = megatrain("plan", run_file(tmp_path), "placement.device=cpu", "--machine", "h200-128gb")
    assert result.exit_code == 2
    assert "placement.device: cpu" in result.stderr


def test_planning_a_known_model_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from megatrain.cli import main\n"
        f"sys.argv = ['megatrain', *{[*SEVEN, *STEP]!r}]\n"
        "main()"
    )
    begun = time.monotonic()
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "tokens/s" in result.stdout
    assert time.monotonic() - begun < 20


def test_the_timeline_is_one_page_with_a_bar_for_every_operation(tmp_path: Path) -> None:
    words = ("plan", "--model", "qwen2.5-7b", "--machine", "rtx4090-128gb", *STEP, "--timeline")
    result = megatrain(*words, str(tmp_path / "step.html"))
    assert result.exit_code == 0
    text = (tmp_path / "step.html").read_text()
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    svg = "{http://www.w3.org/2000/svg}"
    bars = [(g.findtext(f"{svg}title"), g.find(f"{svg}rect")) for g in root.iter(f"{svg}g")]
    told = "\n".join(str(title) for title, _ in bars)
    for unit in ("embedding", *[f"layers.{i}" for i in range(28)], "head"):
        assert f"\n{unit}: " in f"\n{told}"
    rows: dict[str, list[tuple[float, float]]] = {}
    for _, rect in bars:
        assert rect is not None
        rows.setdefault(rect.attrib["y"], []).append((float(rect.attrib["x"]), float(rect.attrib["width"])))
    assert len(rows) == 4, "a row a lane"
    for row in rows.values():
        for (x, width), (following, _) in pairwise(sorted(row)):
            assert x + width <= following + 0.6, "bars of a lane do not overlap"
    assert re.search(r"predicted +[\d.]+ s a step", text)
    assert not re.search(r"(src|href)=", text), "it needs nothing else"


def test_the_timeline_as_trace_events(tmp_path: Path) -> None:
    assert megatrain(*SEVEN, *STEP, "--timeline", str(tmp_path / "step.json")).exit_code == 0
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    units = {event["args"]["unit"] for event in events if event["ph"] == "X"}
    assert units == {"", "embedding", *[f"layers.{i}" for i in range(28)], "head"}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "predicted: qwen2.5-7b on h200-128gb: one step"
    }


def test_a_timeline_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    result = megatrain(*SEVEN, *STEP, "--timeline", str(tmp_path / "none" / "step.html"))
    assert result.exit_code == 2
    assert "--timeline: " in result.stderr
