"""Interleavings of tiny arithmetic: one thread a lane is plenty."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For every test of this folder."""
