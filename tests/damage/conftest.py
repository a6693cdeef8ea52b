"""Fixtures of the damage tests."""

from collections.abc import Iterator

import pytest

from tests.damage.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Return a process that forks a child for each job, so that the child may die."""
    with Zygote() as process:
        yield process
