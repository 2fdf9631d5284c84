"""How long a user waits for the first sign of life: `make check-times`, on an otherwise idle machine."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.times


def seconds_to_first_output(*command: str) -> float:
    """Best of three, until the first byte that the command prints."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.read(1), "printed nothing"
            times.append(time.perf_counter() - begin)
            process.stdout.read()
        assert process.returncode == 0
    return min(times)


def test_import_takes_under_a_second() -> None:
    assert seconds_to_first_output(sys.executable, "-c", "import megatrain; print(1)") < 1


@pytest.mark.skipif(find_spec("megatrain.cli") is None, reason="no command line in this tree")
def test_help_appears_within_two_seconds() -> None:
    program = "import sys; from megatrain.cli import main; sys.argv = ['megatrain', '--help']; main()"
    assert seconds_to_first_output(sys.executable, "-c", program) < 2
