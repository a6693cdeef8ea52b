"""Common fixtures for foreign formats."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one folder for all examples of a hypothesis test; each example overwrites its file."""
    return tmp_path_factory.mktemp("scratch")
