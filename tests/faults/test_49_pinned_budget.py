"""Fault 49: WSL and Windows cap pinned memory far below RAM; the error text blames the GPU.

What cannot be pinned passes through a small pinned ring, results are the same, and the message names pinned memory.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from _devices import FakeDriver, PinningCpu, need_cuda
from _engine import engine, joined, rows
from _fixtures import tiny_config

from megatrain import Model
from megatrain.errors import UserError

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("one_thread")


def trained(device: Any, config: Any, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    with engine(config, device, **options) as model:
        losses = [model.step([joined(rows(4, 32, seed=step))]).loss for step in range(3)]
        return losses, model.state_dict()


def small(**changes: Any) -> Any:
    """TINY grown to 64 MiB of training state."""
    return tiny_config(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, **changes)


@pytest.mark.parametrize("boundaries", ["device", "host"])
@pytest.mark.parametrize("by", ["the option", "the driver"])
def test_training_passes_through_a_small_ring(by: str, boundaries: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    driver = FakeDriver() if by == "the option" else FakeDriver(most=66 * MIB)
    options = {"pinned_memory": "16MiB"} if by == "the option" else {}
    want = trained("cpu", small(), boundaries=boundaries)
    device = PinningCpu(driver)
    got = trained(device, small(), boundaries=boundaries, **options)
    assert got[0] == want[0]
    assert all(torch.equal(got[1][name], master) for name, master in want[1].items())
    assert driver.pinned == {}, "closing has unpinned all"
    ring = sum(buffer.nbytes for buffer in driver.buffers)
    assert len(driver.buffers) == 4
    assert ring == (4 * MIB if by == "the option" else 64 * MIB)
    (message,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert message.startswith("pinned memory: ")
    assert "GPU" not in message
    assert ("placement.pinned_memory" if by == "the option" else "error 2") in message


def test_a_budget_holds_and_is_used(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver()
    with engine(small(), PinningCpu(driver), pinned_memory="16MiB") as model:
        pinned = sum(driver.pinned.values())
        assert 11 * MIB <= pinned <= 12 * MIB, "what the ring leaves of 16 MiB"
        assert model.memory.host_bytes > 4 * pinned


def test_without_a_limit_everything_is_pinned_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver()
    with engine(small(), PinningCpu(driver)) as model:
        assert sum(driver.pinned.values()) == model.memory.host_bytes
    assert driver.buffers == []
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_driver_that_pins_nothing_at_all() -> None:
    class Refuses(FakeDriver):
        def buffer(self, nbytes: int) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8)  # memory that is not pinned: slower still

    want = trained("cpu", tiny_config())
    assert trained(PinningCpu(Refuses(most=0)), tiny_config())[0] == want[0]


@pytest.mark.parametrize("size", ["much", 0])
def test_a_wrong_size_is_named(size: Any) -> None:
    with pytest.raises(UserError, match=r"placement\.pinned_memory: .* is not a size"):
        Model.from_config(tiny_config(), device="cpu", pinned_memory=size)


@pytest.mark.slow
def test_one_gib_of_state_through_256_mib(caplog: pytest.LogCaptureFixture) -> None:
    """The size of the report."""
    config = tiny_config(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, vocab_size=2048)
    want = trained("cpu", config)
    driver = FakeDriver()
    with engine(config, PinningCpu(driver), pinned_memory="256MiB") as model:
        assert model.memory.host_bytes >= 1 << 30
        assert sum(driver.pinned.values()) == 192 * MIB
        losses = [model.step([joined(rows(4, 32, seed=step))]).loss for step in range(3)]
    assert losses == want[0]


@pytest.mark.gpu
@pytest.mark.parametrize("boundaries", ["device", "host"])
def test_on_a_gpu(device: str, boundaries: str, caplog: pytest.LogCaptureFixture) -> None:
    need_cuda(device)
    want = trained(device, small(), boundaries=boundaries)
    got = trained(device, small(), boundaries=boundaries, pinned_memory="16MiB")
    assert got[0] == want[0]
    assert all(torch.equal(got[1][name], master) for name, master in want[1].items())
    assert [r for r in caplog.records if r.getMessage().startswith("pinned memory: ")]


@pytest.mark.gpu
def test_a_refusal_is_not_blamed_on_the_next_kernel(device: str) -> None:
    need_cuda(device)
    from megatrain.devices.cuda import CudaDriver

    driver = CudaDriver(torch.device("cuda"))
    assert driver.pin(0x1000, 4096) != 0, "nothing is mapped there"
    assert torch.ones(4, device="cuda").sum().item() == 4
