"""A model with a tokenizer, data, and the command line inside this process."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from _fixtures import tiny_checkpoint
from _tokenizers import SMOLLM2, save_tokenizer

pytest.importorskip("pydantic", reason="the front end's packages are not installed")
from typer.testing import CliRunner, Result

from megatrain.cli import app


def make_model(folder: Path, template: str | None = SMOLLM2, family: str = "tiny-tied", **changes: Any) -> Path:
    """A random 4-layer model of 320 entries with the tokenizer that has as many."""
    tiny_checkpoint(folder, family, **changes)
    save_tokenizer(folder, template)
    return folder


def chats(number: int) -> list[dict[str, Any]]:
    """Dialogues of different lengths, one or two turns."""
    rows = []
    for i in range(number):
        turns = [("user", f"hello {i}?"), ("assistant", "yes " * (1 + i % 5) + str(i))]
        turns += [("user", "And you?"), ("assistant", f"well {i * i}")] if i % 3 == 0 else []
        rows.append({"messages": [{"role": r, "content": c} for r, c in turns]})
    return rows


def write_rows(file: Path, rows: Iterable[Any]) -> Path:
    """JSON lines; a row that is a text is written as it is."""
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return file


def arguments(folder: Path, *words: str) -> list[str]:
    """Options of a short run on the CPU below ``folder``, with ``words`` laid over them."""
    defaults = {
        "model.name_or_path": str(folder / "model"),
        "data.train": str(folder / "chats.jsonl"),
        "output_dir": str(folder / "run"),
        "train.batch_size": "4",
        "train.micro_batch_size": "2",
        "placement.device": "cpu",
        "compute.dtype": "float32",
        "optim.lr": "1e-3",
    }
    given = dict(w.split("=", 1) for w in words if "=" in w)
    return [f"{k}={v}" for k, v in (defaults | given).items()] + [w for w in words if "=" not in w]


@contextmanager
def _root_logger() -> Iterator[None]:
    """A command sets up logging for its process; put it back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.captureWarnings(False)


def megatrain(*words: str) -> Result:
    """Run the command line; the result has ``exit_code``, ``stdout``, ``stderr`` and ``output``."""
    with _root_logger():
        return CliRunner().invoke(app, list(words), catch_exceptions=False)


def metrics(run: Path) -> list[dict[str, Any]]:
    """The step records of a run."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [r for r in records if "step" in r]
