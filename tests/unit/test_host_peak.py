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
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"hidden_size": 768, "num_hidden_layers": 8}, ["train.batch_size=1", "train.max_steps=2"]),
        ({"hidden_size": 1024, "num_hidden_layers": 8}, ["train.batch_size=1", "train.max_steps=2"]),
        (
            {"hidden_size": 576, "num_hidden_layers": 20, "vocab_size": 49152},
            ["train.batch_size=4", "train.max_steps=4", "placement.device_memory=400MiB"],
        ),
    ],
    ids=["57M", "101M", "98M, large vocabulary, limited device"],
)
def test_predicted_is_never_below_and_within_a_tenth(tmp_path: Path, shape: dict[str, int], options: list[str]) -> None:
    """For smaller models what is allowed for the process is too much."""
    width = shape["hidden_size"]
    make_model(
        tmp_path / "model",
        intermediate_size=11 * width // 4,
        num_attention_heads=8,
        num_key_value_heads=8,
        **shape,
    )
    write_rows(tmp_path / "chats.jsonl", chats(40))
    words = arguments(tmp_path, "train.micro_batch_size=auto", *options)
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
    monkeypatch.setattr(machine, "_cgroup_limits", lambda: [*fits, (580 * MIB, 80 * MIB)])
    refused = megatrain(command, *words)
    assert refused.exit_code == 2
    missing = {"train": r"placement\.host_memory: .*\n +found: 500 MiB", "plan": r"missing: \S+ MiB of host memory"}
    assert re.search(missing[command], refused.stderr), refused.stderr
    assert not (tmp_path / "run").exists()
