"""Fixtures for the rendezvous and the launch of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.job import Job, Meeting
from tests.zygote import Zygote

Launch = Callable[..., Job]


@pytest.fixture(scope="session")
def launch(zygote: Zygote) -> Launch:
    """Return a function that starts the ranks of a scenario; arguments in capitals are environment variables."""
    meeting = Meeting(zygote)

    def launched(scenario: str, folder: Path, *arguments: object, world_size: int = 4, **environment: object) -> Job:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, str(value))
            return meeting.launch(
                scenario, world_size, folder, *map(str, arguments), program="tests.multi_node.scenarios"
            )

    return launched
