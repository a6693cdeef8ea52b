"""Rendezvous of the ranks of a test."""

from __future__ import annotations

import pytest

from tests.distributed.job import Meeting
from tests.zygote import Zygote


@pytest.fixture(scope="session")
def meeting(zygote: Zygote) -> Meeting:
    """One for all tests, as the agent of torchrun is one for all attempts: what was said there before stays."""
    return Meeting(zygote)
