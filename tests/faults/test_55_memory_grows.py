"""Memory does not grow with steps: 300 of them with other lengths each, scored and saved in between."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from _engine import engine
from _fixtures import tiny_config

from megatrain import Model

STEPS, SETTLED = 300, 50


def resident() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    assert found is not None
    return int(found[1]) * 1024


def live_tensors() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter))


def lengths(model: Model, step: int, folder: Path, *, beside: bool) -> None:
    tokens = 4 + 7 * step % 29
    ids = torch.randint(3, 320, (2, tokens), generator=torch.Generator().manual_seed(step))
    batch = {"input_ids": ids, "labels": ids.clone()}
    model.step([batch, batch] if step % 3 else [batch])
    if beside and step % 20 == 0:
        model.evaluate([batch])
        model.save_state(folder / f"state{step}")
        model.save_pretrained(folder / f"export{step}")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("options", "beside"),
    [
        pytest.param({}, True, marks=pytest.mark.slow),
        pytest.param(
            {"activations": "keep 50%, selective 50%", "clipping": "speculative", "slots": 1},
            False,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"boundaries": "host", "boundary_every": 2, "states_on_device": ["layers.1"]}, False, marks=pytest.mark.slow
        ),
    ],
)
def test_300_steps_take_no_more_than_50(options: dict[str, Any], beside: bool, device: str, tmp_path: Path) -> None:
    with engine(tiny_config(), device, **options) as model:
        for step in range(1, STEPS + 1):
            lengths(model, step, tmp_path, beside=beside)
            if step == SETTLED:
                memory, tensors, peak = resident(), live_tensors(), model.memory.device_peak
        assert live_tensors() <= tensors + 12, "of the newest step: those of its last operation in each lane"
        assert resident() - memory < 20e6
        assert model.memory.device_peak == peak, "shapes of the first 50 steps are those of all"
