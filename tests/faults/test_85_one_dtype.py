"""What is announced, what is loaded and what is stored have one dtype, on every device and from every checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from _fixtures import tiny_checkpoint

from megatrain import Model, UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("compute", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_announced_loaded_and_stored(
    source: torch.dtype,
    compute: str | None,
    device: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = tiny_checkpoint(tmp_path / "model", dtype=source)
    expected = compute or ("bfloat16" if device == "cuda" else "float32")
    caplog.set_level(logging.INFO, "megatrain")
    with Model.from_pretrained(tmp_path / "model", device=device, compute_dtype=compute, compile=False) as model:
        assert f"device: {device}, compute dtype {expected}" in caplog.text
        needed = model.memory.host_bytes
        for unit in model._store.units:
            slab = model._store.slab(unit)
            assert slab.head.dtype is DTYPES[expected]
            assert (slab.tail is None) == (expected == "float32")
            assert slab.exp_avg.dtype is slab.exp_avg_sq.dtype is torch.float32
            assert model._store.gradient(unit).dtype is DTYPES[expected]
        masters = model.state_dict()
        model.save_pretrained(tmp_path / "export")
    for name, parameter in plain.named_parameters():
        assert torch.equal(masters[name], parameter.detach().float())
    from safetensors import safe_open

    with safe_open(tmp_path / "export" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {source}  # noqa: SIM118
    # The estimate that a budget is compared with is the size of the store, to the byte.
    options = {"device": device, "compute_dtype": compute, "compile": False}
    Model.from_pretrained(tmp_path / "model", host_memory=needed, **options).close()
    with pytest.raises(UserError, match=rf"\({needed} bytes\)"):
        Model.from_pretrained(tmp_path / "model", host_memory=needed - 1, **options)
