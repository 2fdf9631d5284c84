"""The table of what fits is arithmetic: it is computed again here from its own first columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatrain.costs import process_bytes

README = Path(__file__).resolve().parents[2] / "README.md"
ROWS = re.findall(
    r"^\| \d+ GB \| (\d+) GB \| ([\d.]+)B \| \S+ \(([\d.]+)B\) \| (\d+) GB \| (\d+) GB \| planned \|$",
    README.read_text(encoding="utf-8"),
    re.MULTILINE,
)


def test_the_table_is_there() -> None:
    assert len(ROWS) == 4


@pytest.mark.parametrize(("memory", "fits", "example", "state", "save"), ROWS)
def test_what_fits(memory: str, fits: str, example: str, state: str, save: str) -> None:
    most = (0.9 * float(memory) * 2**30 - process_bytes(on_gpu=True)) / 14 / 1e9
    assert float(fits) == pytest.approx(most, rel=0.02)
    assert float(example) < most
    assert float(state) == pytest.approx(14 * float(example), rel=0.01)
    assert float(save) == pytest.approx(12 * float(example), rel=0.01)
