"""Fixture for the rendezvous of ranks."""

from __future__ import annotations

import pytest

from tests.distributed.job import Meeting
from tests.zygote import Zygote


@pytest.fixture(scope="session")
def meeting(zygote: Zygote) -> Meeting:
    """Return one rendezvous for all tests, like torchrun's agent, which keeps keys of earlier attempts."""
    return Meeting(zygote)
