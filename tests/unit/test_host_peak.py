"""The host memory that a run is predicted to take, beside the kernel's high water mark of its process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _runs import arguments, chats, make_model, megatrain, write_rows

from megatrain import machine

MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize(("width", "layers"), [(768, 8), (1024, 8)])
def test_predicted_is_never_below_and_within_a_tenth(tmp_path: Path, width: int, layers: int) -> None:
    """Of models of 57 and 101 million parameters: for smaller ones the 600 MiB allowed for the process are too much."""
    make_model(
        tmp_path / "model",
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    write_rows(tmp_path / "chats.jsonl", chats(4))
    words = arguments(tmp_path, "train.batch_size=1", "train.max_steps=2", "train.micro_batch_size=auto")
    program = f"import sys; from megatrain.cli import main; sys.argv = ['megatrain', 'train', *{words!r}]; main()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    host = json.loads(lines[-1])["summary"]["host_peak"]
    assert host["measured"] <= host["predicted"] <= 1.1 * host["measured"], host


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_container_that_is_too_small_is_refused_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A limit of the cgroup counts, less what others in it use, whatever the machine has."""
    make_model(tmp_path / "model", hidden_size=512, num_attention_heads=8, num_key_value_heads=8)
    write_rows(tmp_path / "chats.jsonl", chats(4))
    words = arguments(tmp_path, "data.max_seq_len=200")
    fits = [(2048 * MIB, 1024 * MIB)]
    monkeypatch.setattr(machine, "_cgroup_limits", lambda: fits)
    assert megatrain(command, *words, *(["--dry-run"] if command == "train" else [])).exit_code == 0
    monkeypatch.setattr(machine, "_cgroup_limits", lambda: [*fits, (700 * MIB, 80 * MIB)])
    refused = megatrain(command, *words)
    assert refused.exit_code == 2
    missing = {"train": r"placement\.host_memory: .*\n +found: 620 MiB", "plan": r"missing: \S+ MiB of host memory"}
    assert re.search(missing[command], refused.stderr), refused.stderr
    assert not (tmp_path / "run").exists()
