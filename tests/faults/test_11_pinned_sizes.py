"""Pinned memory is what was asked for: exact sizes, never rounded up to a power of two."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from _devices import need_cuda
from _fixtures import tiny_config

from megatrain import Model
from megatrain.kernels import load
from megatrain.layout import build_layout, mapping_bytes
from megatrain.store import Store

MAP_NORESERVE = 0x4000
GIB = 1 << 30


@pytest.mark.parametrize("gib", [1.05, 1.2, 2.08])
def test_planned_figure_is_what_is_mapped_and_registered(gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MAP_PRIVATE", mmap.MAP_PRIVATE | MAP_NORESERVE)
    monkeypatch.setattr("megatrain.store.ask_huge_pages", lambda memory: None)
    asked = int(gib * GIB)
    layout = build_layout({"weight": (asked // 2,)})  # its head has this size
    registered: list[int] = []
    store = Store(
        {"layer": layout},
        torch.bfloat16,
        load("reference"),
        lambda memory: registered.append(memory.numel()),
        lambda memory: None,
        gradient_dtype=torch.bfloat16,
    )
    needed = Store.bytes_needed([layout], torch.bfloat16, torch.bfloat16)
    assert sum(registered) == store.nbytes == needed
    assert 7 * asked <= needed <= 7 * asked * 1.005, "12 bytes a parameter and 2 of the gradient"
    store.close()
    assert asked <= mapping_bytes(asked) <= asked + (2 << 20)


@pytest.mark.gpu
def test_shared_memory_grows_by_what_was_asked_for(device: str) -> None:
    need_cuda(device)

    def pinned() -> int:
        from megatrain.devices.cuda import CudaDevice

        return sum(d.pinned_bytes for d in opened if isinstance(d, CudaDevice))

    def locked() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * sum(int(x.split()[1]) for x in lines if x.startswith(("RssAnon", "RssShmem")))

    config = tiny_config(vocab_size=4096, hidden_size=1024, intermediate_size=5000, num_hidden_layers=6)
    opened = []
    with Model.from_config(tiny_config(), device=device) as warm:
        warm.state_dict()
    before = locked()
    with Model.from_config(config, device=device, compute_dtype="bfloat16") as model:
        opened.append(model._device)
        assert pinned() == model.memory.host_bytes
        asked = 14 * model.num_parameters
        assert model.memory.host_bytes <= 1.03 * asked
        assert locked() - before <= 1.03 * asked + (64 << 20)
    assert pinned() == 0
