"""Rows of the benchmarks: the table and the picture made of them, and a rival that fails in some."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SPEC = importlib.util.spec_from_file_location("plot", BENCHMARKS / "plot.py")
assert SPEC is not None
assert SPEC.loader is not None
plot = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(plot)


def row(tokens: int, tflops: float, system: str | None = None, layers: int = 28, **options: Any) -> dict[str, Any]:
    result = {
        "shape": "7b",
        "layers": layers,
        "tokens": tokens,
        "seconds": 2.0,
        "tokens_per_second": tokens / 2,
        "tflops_6n": tflops,
        "options": options,
        "max_grad_norm": 1.0,
        "cores": 16,
        "gpu": "NVIDIA H200",
    }
    return result | ({"system": system} if system else {})


def shown(*rows: dict[str, Any]) -> dict[str, list[float]]:
    return {name: [r.get("tflops_6n", 0) for r in line] for name, line in plot.lines_of(rows).items()}


def test_lines_are_sorted_by_speed_and_their_rows_by_tokens() -> None:
    rows = [row(65536, 200, "rival"), row(16384, 100, "rival"), row(16384, 300)]
    assert shown(*rows) == {"MegaTrain, all on the host": [300], "rival": [100, 200]}


def test_of_one_configuration_the_later_row_counts() -> None:
    assert shown(row(16384, 300), row(16384, 250)) == {"MegaTrain, all on the host": [250]}


def test_of_several_settings_of_a_line_the_fastest_counts() -> None:
    rows = [row(16384, 300, states_on_device=1.0), row(16384, 250, states_on_device="20GiB")]
    assert shown(*rows) == {"MegaTrain, best placement": [300]}
    assert shown(row(16384, 120, "rival", compiled=True), row(16384, 100, "rival")) == {"rival": [120]}


def test_rows_that_no_line_compares_are_left_out() -> None:
    assert shown(row(16384, 100), row(16384, 300, slots=1), row(16384, 200, layers=4)) == {
        "MegaTrain, all on the host": [100]
    }


def test_machines_with_other_cores_are_other_lines() -> None:
    assert shown(row(16384, 300), row(16384, 200, "rival") | {"cores": 32}) == {
        "MegaTrain, all on the host, 16 cores": [300],
        "rival, 32 cores": [200],
    }


def test_a_failed_row_is_in_the_table_and_not_in_the_picture() -> None:
    failed = {k: v for k, v in row(65536, 0, "rival").items() if k in ("shape", "layers", "tokens", "options")}
    failed |= {"system": "rival", "max_grad_norm": 1.0, "cores": 16, "error": "out of memory"}
    lines = plot.lines_of([row(16384, 100, "rival"), failed])
    assert "| rival | 16384 | 2.00 | 8192 | 100 |  |  |  |" in plot.table(lines)
    assert "| rival | 65536 | out of memory |" in plot.table(lines)
    assert len(circles(plot.picture(lines, "a <title>"))) == 1 + 2  # the row; the ends of its sample in the legend


def test_points_lie_higher_the_faster_and_further_right_the_more_tokens() -> None:
    points = circles(plot.picture(plot.lines_of([row(16384, 300), row(65536, 450)]), ""))
    (x, y), (more, higher) = points[:2]
    assert more > x
    assert higher < y


def circles(svg: str) -> list[tuple[float, float]]:
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}circle")
    return [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in found]


RIVAL = """
import os, signal, sys
sys.path.insert(0, {rivals!r})
import torch
from _rival import Rival, run

def build(config, options):
    print("set-up", flush=True)
    if options:
        raise ValueError("no such setting")
    return Rival(10, step, lambda: None)

def step(batches):
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    if tokens == 256:
        raise torch.OutOfMemoryError("CUDA out of memory\\nand more")
    if tokens == 384:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.ones(()), torch.ones(())

if __name__ == "__main__":
    run("rival", {{"version": "1"}}, build, "")
"""


@pytest.mark.slow
def test_a_rival_that_fails_in_a_row_goes_on_with_the_next(tmp_path: Path) -> None:
    rows, setups = measured(tmp_path, "--modes", "eager")
    assert setups == 3
    assert rows == {
        ("eager", 128): None,
        ("eager", 256): "OutOfMemoryError: CUDA out of memory",
        ("eager", 384): "the process ended with exit code -9: killed, as a system out of memory does",
        ("eager", 512): None,
    }


def test_of_one_configuration_of_a_rival_the_fastest_row_counts() -> None:
    rows = [row(16384, 120, "rival"), row(16384, 150, "rival") | {"seconds": 1.6}, row(16384, 140, "rival")]
    assert shown(*rows) == {"rival": [150]}


def test_activations_that_are_kept_make_a_line_of_their_own() -> None:
    on_host = {"states_on_device": None, "clipping": "deferred"}
    kept = row(16384, 320, activations="50%", **on_host) | {"auto": True}
    assert shown(row(16384, 300, activations="recompute", **on_host), kept) == {
        "MegaTrain, all on the host, deferred, activations kept": [320],
        "MegaTrain, all on the host, deferred": [300],
    }
    assert shown(row(16384, 320, activations="50%") | {"auto": True}) == {"MegaTrain, best placement": [320]}
    assert shown(kept, row(16384, 400, **on_host) | {"serial_optimizer": True}) == shown(kept)
    assert shown(kept, row(16384, 400, **on_host, device_memory="24GiB") | {"auto": True}) == shown(kept)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["256/3", "256/0", "100"])
def test_a_rival_takes_micro_batches_of_whole_rows(tmp_path: Path, tokens: str) -> None:
    script = tmp_path / "rival.py"
    script.write_text(RIVAL.format(rivals=str(BENCHMARKS / "rivals")))
    command = [sys.executable, str(script), "--shape", "tiny", "--seq-len", "128", "--tokens", tokens]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert f"--tokens {tokens.partition('/')[0]}/" in result.stderr


@pytest.mark.slow
def test_a_rival_that_cannot_be_set_up_fails_in_every_row(tmp_path: Path) -> None:
    rows, setups = measured(tmp_path, "--option", "a=1")
    assert len(rows) == 8
    assert set(rows.values()) == {"ValueError: no such setting"}
    assert setups == 1


@pytest.mark.slow
def test_steps_chooses_predicts_and_measures(tmp_path: Path) -> None:
    planned = ["--auto", "--machine", "h200-128gb", "--max-grad-norm", "none"]
    rows = stepped(tmp_path, "steps.py", "--tokens", "256", "512", *planned)
    assert [row["tokens"] for row in rows] == [256, 512]
    for row in rows:
        assert row["auto"]
        assert row["max_grad_norm"] is None
        assert row["predicted_seconds"] > 0
        assert row["predicted_process_gib"] > row["host_gib"]
        assert row["bound_seconds"] > 0


@pytest.mark.slow
def test_heads_takes_two_bytes_a_parameter(tmp_path: Path) -> None:
    kept = ["--option", "weights_on_device=1MiB", "--machine", "h200-128gb", "--no-bound"]
    (row,) = stepped(tmp_path, "heads.py", "--tokens", "256", *kept)
    assert row["options"]["host_gradients"] == "passing"
    (whole,) = stepped(tmp_path, "steps.py", "--tokens", "256", *kept, "--option", "host_gradients=passing")
    saved = whole["predicted_process_gib"] - row["predicted_process_gib"]
    assert saved > 0.5 * 10 * row["all_parameters"] / 2**30


def stepped(folder: Path, script: str, *words: str) -> list[dict[str, Any]]:
    """Rows of the tiny shape."""
    out = folder / f"{script}.jsonl"
    command = [sys.executable, str(BENCHMARKS / script), "--shape", "tiny", "--seq-len", "128", "--warm", "1"]
    command += ["--steps", "1", "--max-grad-norm", "none", "--option", "clipping=deferred", *words, "--out", str(out)]
    subprocess.run(command, cwd=folder, check=True, timeout=250)
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_the_rivals_find_what_they_share_with_megatrain() -> None:
    """Layers and loss are MegaTrain's own; DeepSpeed itself is not installed here."""
    program = f"import sys; sys.path.insert(0, {str(BENCHMARKS / 'rivals')!r}); import fsdp2_offload, _shared_model"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def measured(folder: Path, *arguments: str) -> tuple[dict[tuple[str, int], str | None], int]:
    """The error of each row, and how often the rival was set up."""
    (folder / "rival.py").write_text(RIVAL.format(rivals=str(BENCHMARKS / "rivals")))
    command = [sys.executable, "rival.py", "--shape", "tiny", "--seq-len", "128", "--steps", "1"]
    command += ["--tokens", "128", "256", "384", "512", *arguments, "--out", "rows.jsonl"]
    output = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=250).stdout
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert all(r["version"] == "1" and ("error" in r) != ("tflops_6n" in r) for r in rows)
    errors = {("compiled" if r["options"].get("compiled") else "eager", r["tokens"]): r.get("error") for r in rows}
    return errors, output.count("set-up")
