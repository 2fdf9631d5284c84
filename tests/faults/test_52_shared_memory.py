"""Fault 52: containers give 64 MB of shared memory, and stores or data workers that live there die with a bus error.

Nothing of ours does: training state is private memory, and rows are read in the process itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from _runs import arguments, chats, make_model, write_rows

PROGRAM = """
import json, os, sys
from multiprocessing import resource_tracker
from pathlib import Path

def shared():
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssShmem:"))

def mappings():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if line.split()[1][3] == "s" and "w" in line.split()[1]]

import torch, transformers
from megatrain import trainer
from megatrain.cli import main

seen, before = [], (shared(), set(os.listdir("/dev/shm")))
step = trainer._Loop.run_step

def watched(self, number):
    step(self, number)
    state = self._model.memory.host_bytes
    seen.append([shared() - before[0], mappings(), sorted(set(os.listdir("/dev/shm")) - before[1]), state])

trainer._Loop.run_step = watched
try:
    main()
finally:
    print(json.dumps(seen))
"""


def test_one_process_uses_no_shared_memory(tmp_path: Path) -> None:
    make_model(tmp_path / "model", hidden_size=256, intermediate_size=1024)
    write_rows(tmp_path / "chats.jsonl", chats(8))
    words = arguments(tmp_path, "compute.boundaries=host")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, "train", *words], capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    seen = json.loads(result.stdout.splitlines()[-1])
    assert len(seen) == 2
    for kib, mapped, files, state in seen:
        assert state > 64 << 20, "more than such a container has"
        assert kib < 1024
        assert mapped == []
        assert files == []
