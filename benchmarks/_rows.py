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


def speed(parameters: int, tokens: int, seconds: Sequence[float]) -> dict[str, Any]:
    """Median of the timed steps and what follows from it; FLOPs are 6 x parameters x tokens."""
    median = statistics.median(seconds)
    return {
        "parameters": parameters,
        "tokens": tokens,
        "seconds": median,
        "all_seconds": list(seconds),
        "tokens_per_second": tokens / median,
        "tflops_6n": 6 * parameters * tokens / median / 1e12,
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
        "command": " ".join(sys.argv[: sys.argv.index("--out")] if "--out" in sys.argv else sys.argv),
    }
