"""How long planning and measuring take: `make check-times`, on an otherwise idle machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatrain.model_spec import FOLDER as KNOWN_MODELS

pytestmark = [
    pytest.mark.times,
    pytest.mark.skipif(find_spec("megatrain.cli") is None, reason="no command line in this tree"),
]

SHAPES = {
    "7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "14B": ("qwen2", 5120, 13824, 48, 40, 8, 152064),
    "32B": ("qwen3", 5120, 25600, 64, 64, 8, 151936),
    "72B": ("qwen2", 8192, 29568, 80, 64, 8, 152064),
    "120B": ("llama", 10240, 35840, 88, 80, 8, 128256),
}
EXPERTS = "117B of experts"


def config_file(folder: Path, shape: str) -> str:
    """A config of no known model."""
    file = folder / "config.json"
    if shape == EXPERTS:
        known = json.loads((KNOWN_MODELS / "gpt-oss-120b.json").read_text(encoding="utf-8"))["config"]
        file.write_text(json.dumps(known | {"vocab_size": 201000}))
        return str(file)
    names = (
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    file.write_text(json.dumps(dict(zip(names, SHAPES[shape], strict=True)) | {"tie_word_embeddings": False}))
    return str(file)


def timed(folder: Path, *words: str, without_torch: bool = False) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Seconds of a command whose cache is below ``folder``."""
    block = "sys.modules['torch'] = None; " if without_torch else ""
    program = f"import sys; {block}sys.argv = ['megatrain', *{list(words)!r}]; from megatrain.cli import main; main()"
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    begin = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment, cwd=folder
    )
    return time.perf_counter() - begin, result


@pytest.mark.parametrize("shape", [*SHAPES, EXPERTS])
def test_a_config_is_known_within_15_seconds_and_from_then_on_within_one(tmp_path: Path, shape: str) -> None:
    """The second answer needs no torch."""
    file = config_file(tmp_path, shape)
    program = (
        "import sys, time; from megatrain.model_spec import load_model_spec as load\n"
        f"begin = time.perf_counter(); spec = load({file!r}, print); seconds = time.perf_counter() - begin\n"
        "print(spec.parameters, seconds, 'torch' in sys.modules)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def load() -> list[str]:
        return subprocess.check_output([sys.executable, "-c", program], text=True, env=environment).splitlines()

    first, again = load(), load()
    assert len(first) == 2, "one line says what takes so long"
    assert float(first[-1].split()[1]) < 15
    assert len(again) == 1
    assert float(again[0].split()[1]) < 1
    assert again[0].split()[2] == "False"
    assert again[0].split()[0] == first[-1].split()[0]


@pytest.mark.parametrize(
    ("model", "where", "tokens", "length"),
    [  # where updates on the host are longer than the arithmetic, many placements of a way out are almost as fast
        ("qwen2.5-72b", "h200-128gb", 16384, 1024),
        ("llama-3.1-70b", "h100-80gb-512gb", 8192, 4096),
        ("llama-3.1-70b", "rtx5090-256gb", 16384, 1024),
        ("mixtral-8x7b", "gh200-480gb", 16896, 512),
        ("gpt-oss-120b", "h200-1.5tb", 131072, 1024),
    ],
)
def test_ways_out_are_planned_within_5_seconds(
    tmp_path: Path, model: str, where: str, tokens: int, length: int
) -> None:
    words = ["--machine", where, "--tokens-per-step", str(tokens), "--seq-len", str(length)]
    seconds, result = timed(tmp_path, "plan", "--model", model, *words, without_torch=True)
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stderr.count("fix:") >= 2
    assert seconds < 5


@pytest.mark.parametrize("shape", [*SHAPES, EXPERTS])
def test_what_does_not_fit_is_refused_within_5_seconds(tmp_path: Path, shape: str) -> None:
    file = config_file(tmp_path, shape)
    words = ["--machine", "rtx4090-128gb", "--tokens-per-step", "1048576", "--seq-len", "131072"]
    timed(tmp_path, "plan", "--model", file, *words)  # the spec is known from then on
    seconds, result = timed(tmp_path, "plan", "--model", file, *words, without_torch=True)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "missing:" in result.stderr
    assert seconds < 5


def test_a_machine_is_measured_within_20_seconds_and_not_again(tmp_path: Path) -> None:
    first, result = timed(tmp_path, "doctor")
    assert result.returncode == 0, result.stderr
    assert "AdamW" in result.stdout
    assert first < 20
    again, second = timed(tmp_path, "doctor")
    assert again < 5
    rates = [[line for line in out.stdout.splitlines() if line.startswith("rates")] for out in (result, second)]
    assert rates[0] == rates[1] != []
