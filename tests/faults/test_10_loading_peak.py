"""Loading takes what training needs anyway, and never a second copy: one shard and 300 MB more at most."""

from __future__ import annotations

from pathlib import Path

import pytest
from _fixtures import peak_rss, random_checkpoint

MB = 10**6


def load(folder: Path, dtype: str) -> object:
    from megatrain import Model

    return Model.from_pretrained(folder, device="cpu", compute_dtype=dtype, slots=1)


@pytest.mark.parametrize(
    ("nbytes", "dtype"),
    [
        (100 * MB, "bfloat16"),
        pytest.param(300 * MB, "bfloat16", marks=pytest.mark.slow),
        pytest.param(300 * MB, "float32", marks=pytest.mark.slow),
        pytest.param(2000 * MB, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_peak_of_loading(tmp_path: Path, nbytes: int, dtype: str) -> None:
    random_checkpoint(tmp_path / "model", nbytes, shards=8)
    shard = max(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    assert shard < nbytes // 6
    memory = peak_rss(load, tmp_path / "model", dtype)
    # Moments and gradients are zero pages until the first step, so this bound is below the 14 bytes a parameter.
    assert memory.after - memory.before >= 2 * nbytes, "head and tail, or the FP32 master"
    assert memory.after - memory.before <= 7 * nbytes + 300 * MB
    slack = 300 * MB if nbytes > 1000 * MB else 100 * MB
    assert memory.peak <= memory.after + shard + slack
