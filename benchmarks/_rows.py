"""One line of JSON a measured configuration: what every benchmark of training steps writes."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Options from ``name=value`` pairs, values as JSON where they parse."""
    result: dict[str, Any] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            result[name] = json.loads(text)
        except json.JSONDecodeError:
            result[name] = text
    return result


def speed(parameters: int, tokens: int, seconds: Sequence[float], *, mixed: bool = False) -> dict[str, Any]:
    """Median of the timed steps (mean of steps of ``mixed`` kinds) and what follows; FLOPs: 6 x parameters x tokens."""
    typical = statistics.mean(seconds) if mixed else statistics.median(seconds)
    return {
        "parameters": parameters,
        "tokens": tokens,
        "seconds": typical,
        "all_seconds": list(seconds),
        "tokens_per_second": tokens / typical,
        "tflops_6n": 6 * parameters * tokens / typical / 1e12,
    }


def write(row: dict[str, Any], out: Path | None, commit: str | None) -> None:
    """Print ``row`` and, where there is a file, append it with what it ran on."""
    print(json.dumps(row), flush=True)
    if out:
        with out.open("a") as file:
            file.write(json.dumps(row | _hardware(commit)) + "\n")


def _hardware(commit: str | None) -> dict[str, Any]:
    if commit is None:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        commit = git.stdout.strip() or None
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": platform.processor() or platform.machine(),
        "cores": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "command": " ".join(_without(sys.argv, "--out", "--commit")),
    }


def _without(words: Sequence[str], *options: str) -> list[str]:
    """The command line less these options and their values."""
    return [word for before, word in zip(["", *words[:-1]], words, strict=True) if not {before, word} & set(options)]
