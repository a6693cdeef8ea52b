"""An open store for each test that asks for one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from asymcheck import Store


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    """A new store with the default settings, closed after the test."""
    with Store.open(store_path) as opened:
        yield opened
