"""What importing the package costs, and what the engine does without the command line's libraries."""

from __future__ import annotations

import subprocess
import sys


def run(program: str) -> None:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def test_import_loads_nothing_heavy_and_starts_no_thread() -> None:
    run("""
import os, sys, threading
import megatrain
assert {"Model", "AdamW", "UserError"} <= set(dir(megatrain))
heavy = {"torch", "transformers", "numpy", "pydantic", "typer", "rich"} & set(sys.modules)
assert not heavy, heavy
assert threading.active_count() == 1
tasks = "/proc/self/task"
assert not os.path.isdir(tasks) or len(os.listdir(tasks)) == 1
""")


def test_unknown_name_is_an_attribute_error() -> None:
    run("""
import megatrain
try:
    megatrain.Modle
except AttributeError as error:
    assert "Modle" in str(error)
else:
    raise AssertionError("no error")
""")


def test_kernels_choose_without_torch_where_the_native_one_is_built() -> None:
    run("""
import sys
from megatrain import kernels
kernel = kernels.load()
assert kernel.name == "reference" or "torch" not in sys.modules
""")
