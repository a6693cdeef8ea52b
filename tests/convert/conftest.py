"""Common fixtures for foreign formats."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from asymcheck import Store


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    """Return a new store."""
    with Store.open(store_path, create=True) as opened:
        yield opened


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one folder for all examples of a hypothesis test; each example overwrites its file."""
    return tmp_path_factory.mktemp("scratch")
