"""Whether a card can compute in bfloat16 is answered in one place, at the start, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from _fixtures import tiny_config

import megatrain
from megatrain import Model, UserError
from megatrain.devices.cpu import CpuDevice
from megatrain.devices.cuda import CudaDevice


class FakeCuda(CpuDevice):
    """Lanes of the CPU; what it can compute is answered by the CUDA device's own code."""

    name = "cuda"
    check_dtype = CudaDevice.check_dtype


@pytest.fixture(params=[(7, 5), (8, 0)])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tested Card")
    found: tuple[int, int] = request.param
    return found


@pytest.mark.parametrize("named", [None, "bfloat16"])
def test_bfloat16_is_refused_at_the_start_or_works(named: str | None, capability: tuple[int, int]) -> None:
    options = {"compute_dtype": named, "compile": False, "kernel": "reference"}
    if capability < (8, 0):
        with pytest.raises(UserError, match=r"bfloat16 needs compute capability 8\.0, and Tested Card has 7\.5; set"):
            Model.from_config(tiny_config(), device=FakeCuda(), **options)
        return
    with Model.from_config(tiny_config(), device=FakeCuda(), **options) as model:
        assert model._store.slab("layers.0").head.dtype is torch.bfloat16


def test_float32_works_on_every_card(capability: tuple[int, int]) -> None:
    ids = torch.arange(3, 11)[None]
    with Model.from_config(
        tiny_config(), device=FakeCuda(), compute_dtype="float32", compile=False, kernel="reference"
    ) as model:
        assert model.step([{"input_ids": ids, "labels": ids}]).loss > 0


def test_one_place_answers() -> None:
    package = Path(megatrain.__file__).parent
    asking = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(word in path.read_text() for word in ("get_device_capability", "is_bf16_supported"))
    ]
    assert asking == ["devices/cuda.py"]
