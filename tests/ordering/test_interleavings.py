"""No legal order of the lanes changes a bit, and every derived wait is needed."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from _world import outcome, same, small_config

from megatrain import AdamW
from megatrain.devices.sim import SimDevice
from megatrain.engine import executor
from megatrain.engine.program import Op
from megatrain.engine.schedule import Ticket, WaitTracker

CASES: dict[str, dict[str, Any]] = {
    "untied, one slot": {"slots": 1},
    "tied, two slots": {"slots": 2, "config": {"tie_word_embeddings": True}},
    "one weight and two states resident, bf16": {
        "compute_dtype": "bfloat16",
        "weights_on_device": ["layers.1"],
        "states_on_device": ["embedding", "layers.0"],
    },
    "speculative": {"clipping": "speculative", "variance": 1.0},
    "speculative, tied, resident, bf16": {
        "clipping": "speculative",
        "variance": 1.0,
        "compute_dtype": "bfloat16",
        "config": {"tie_word_embeddings": True},
        "states_on_device": ["layers.0"],
    },
    "half speculative": {"clipping": "speculative", "speculated": "67%", "variance": 1.0},
    "passing gradients": {"host_gradients": "passing", "max_grad_norm": None},
    "passing gradients, tied, resident, bf16": {
        "host_gradients": "passing",
        "max_grad_norm": None,
        "compute_dtype": "bfloat16",
        "config": {"tie_word_embeddings": True, "num_hidden_layers": 5},
        "states_on_device": ["layers.1"],
    },
    "kept, bf16": {"slots": 2, "activations": "keep", "compute_dtype": "bfloat16"},
    "boundaries on the host": {"slots": 2, "boundaries": "host", "config": {"num_hidden_layers": 5}},
    "boundaries on the host, one kept, bf16": {
        "slots": 2,
        "boundaries": "host",
        "activations": ["layers.2"],
        "compute_dtype": "bfloat16",
        "config": {"num_hidden_layers": 5, "tie_word_embeddings": True},
    },
    "blocks of two": {"slots": 2, "boundary_every": 2, "config": {"num_hidden_layers": 5}},
    "blocks of two, one slot, boundaries on the host": {
        "slots": 1,
        "boundary_every": 2,
        "boundaries": "host",
        "config": {"num_hidden_layers": 7},
    },
    "micro-batch-major": {"order": "micro_batch", "weights_on_device": "100%"},
    "micro-batch-major, bf16, boundaries on the host": {
        "order": "micro_batch",
        "weights_on_device": "100%",
        "states_on_device": ["layers.0", "head"],
        "boundaries": "host",
        "compute_dtype": "bfloat16",
        "config": {"num_hidden_layers": 5, "tie_word_embeddings": True},
    },
}


def options_of(case: str) -> dict[str, Any]:
    options = dict(CASES[case])
    return options | {"config": small_config(**options.get("config", {}))}


@pytest.mark.parametrize("case", [case for case in CASES if "speculative" in case])
def test_the_speculative_cases_update_before_the_norm_is_known(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or their waits would be needed by nothing."""
    waiting = []
    speculate = AdamW.speculate

    def noting(self: AdamW, *args: Any, **options: Any) -> None:
        speculate(self, *args, **options)
        waiting.append(args[3].sum().item())

    monkeypatch.setattr(AdamW, "speculate", noting)
    outcome(SimDevice(), **options_of(case))
    assert len(waiting) >= 2 * 2  # two steps, two units or more
    assert not any(waiting)


@pytest.mark.parametrize("seed", [*range(1, 9), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(9, 31))])
def test_speculative_seeds_are_bitwise_equal(seed: int) -> None:
    options = options_of("speculative, tied, resident, bf16")
    assert same(outcome(SimDevice(seed=seed), **options), outcome(SimDevice(seed=0), **options))


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in (1, 2, 3))])
def test_200_seeds_are_bitwise_equal(block: int) -> None:
    options = options_of("tied, two slots")
    expected = outcome(SimDevice(seed=0), **options)
    for seed in range(50 * block, 50 * block + 50):
        assert same(outcome(SimDevice(seed=seed), **options), expected), f"seed {seed}"


@pytest.mark.parametrize("case", CASES)
def test_threads_equal_the_simulator(case: str) -> None:
    options = options_of(case)
    assert same(outcome("cpu", **options), outcome(SimDevice(), **options))


class Recorder(WaitTracker):
    """Derives waits as ever, notes them all, and leaves out the chosen one."""

    omitted: tuple[Ticket, Ticket] | None = None
    seen: ClassVar[list[tuple[str, Ticket, Ticket]]] = []

    def add(self, op: Op) -> tuple[Ticket, list[Ticket]]:
        ticket, waits = super().add(op)
        type(self).seen += [(str(op), ticket, wait) for wait in waits]
        return ticket, [wait for wait in waits if (ticket, wait) != self.omitted]


QUICK = {
    "tied, two slots",
    "one weight and two states resident, bf16",
    "passing gradients",
    "micro-batch-major",
}


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_every_wait_is_needed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(case)
    monkeypatch.setattr(executor, "WaitTracker", Recorder)
    monkeypatch.setattr(Recorder, "omitted", None)
    monkeypatch.setattr(Recorder, "seen", [])
    expected = outcome(SimDevice(), **options)
    derived = list(Recorder.seen)
    assert len(derived) > 15
    unnoticed = []
    for op, ticket, wait in derived:
        monkeypatch.setattr(Recorder, "omitted", (ticket, wait))
        try:
            if same(outcome(SimDevice(starve=wait), **options), expected):
                unnoticed.append((op, ticket, wait))
        except Exception:
            pass
    assert not unnoticed
