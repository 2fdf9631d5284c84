"""This folder is on the import path because it holds a conftest: every test imports ``_fixtures``."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device of the engine tests: cpu, sim or cuda")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """The engine's device; ``--device cuda`` runs the same tests on a GPU."""
    name: str = request.config.getoption("--device")
    return name
