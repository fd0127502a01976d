"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.weights import hub


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, pulled into the user's cache if it is not there yet."""
    return hub.pull(hub.DEFAULT_MODEL)
