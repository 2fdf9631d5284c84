"""This folder is on the import path because it holds a conftest: every test imports ``_fixtures``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

# A GPU machine may hold the engine's packages alone; `_runs` passes over its tests by itself.
collect_ignore = [] if find_spec("pydantic") else ["unit/test_config.py", "faults/test_19_rate_as_text.py"]


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a user's machine has cached, as measured rates, decides no test; and no test leaves anything there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device of the engine tests: cpu, sim or cuda")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """The engine's device; ``--device cuda`` runs the same tests on a GPU."""
    name: str = request.config.getoption("--device")
    return name


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny arithmetic is fastest on one thread, and idle OpenMP threads would spin."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _layers_are_not_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """On CUDA layers are compiled by default; for tiny ones that takes longer than all else. See ``compiling``."""
    if request.config.getoption("--device") != "cuda" or "compiling" in request.fixturenames:
        yield
        return
    from torch._dynamo import config

    with config.patch(disable=True):
        yield


@pytest.fixture
def compiling() -> None:
    """For tests in which torch.compile does compile."""


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> str:
    """``cuda``, for tests that only a GPU can run."""
    if request.config.getoption("--device") != "cuda":
        pytest.skip("needs --device cuda")
    return "cuda"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Counts the storages that operations of the compute lane really make and keep."""
    from megatrain.devices import _measure
    from megatrain.engine.operations import Operations

    counter = _measure._LiveBytes()
    perform = Operations.perform

    def counting(self: Operations, op: Any, handles: Any, run: Any) -> None:
        if op.lane != "compute":
            perform(self, op, handles, run)
            return
        with counter:
            perform(self, op, handles, run)

    monkeypatch.setattr(Operations, "perform", counting)
    return counter
