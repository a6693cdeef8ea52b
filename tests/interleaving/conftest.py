"""Fixture: the process from which the schedulers are forked."""

from collections.abc import Iterator

import pytest

from tests.zygote import Zygote


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Return a process in which sets have the same order in each run, so that seeds give the same schedules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        zygote = Zygote(tmp_path_factory.mktemp("zygote"), "tests.interleaving.jobs")
    yield zygote
    zygote.close()
