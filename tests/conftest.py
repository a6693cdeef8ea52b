"""Common fixtures: one compute thread, interrupts, hypothesis profiles, other processes, and a folder."""

import fnmatch
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.zygote import Zygote

# Register these modules before their import, so that their assertions show both sides, as in test modules.
pytest.register_assert_rewrite("tests.crash.survival", "tests.crash.actions")

# Keep rings of tests, also of killed ones, in a separate folder. Set it before the package is imported, so that
# processes of tests inherit it.
RINGS = tempfile.mkdtemp(prefix="asymcheck-tests-", dir="/dev/shm")
os.environ["ASYMCHECK_RING_FOLDER"] = RINGS

# Two test workers share two cores. With a thread for each core, kernels of torch would wait for the other worker.
torch.set_num_threads(1)

# A shell starts background jobs with interrupts ignored, and Python keeps this; some tests interrupt themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `ci` is the default: the same examples in every run, so that a failure is a change of the code.
# `--hypothesis-profile=explore` searches for new examples. There is no deadline, because a slow disk is not a bug.
settings.register_profile("ci", max_examples=50, derandomize=True, deadline=None, print_blob=True)
settings.register_profile(
    "explore", max_examples=2_000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Remove the mark ``slow`` from the parameter sets that it lists as ``quick``, and mark others as ``long``."""
    for item in items:
        mark = item.get_closest_marker("slow")
        if mark is None or not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        name = item.callspec.id
        if name in mark.kwargs.get("quick", ()):
            item.own_markers[:] = [own for own in item.own_markers if own.name != "slow"]
        elif any(fnmatch.fnmatchcase(name, pattern) for pattern in mark.kwargs.get("long", ())):
            item.add_marker(pytest.mark.long)


def pytest_sessionfinish() -> None:
    """Free the memory of the rings."""
    shutil.rmtree(RINGS, ignore_errors=True)


@pytest.fixture(autouse=True)
def _drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every drive as attached to the machine, so that tests behave equally on each machine."""
    monkeypatch.setattr("asymcheck.storage.nvme.drives.is_paravirtual", lambda _device: False)


@pytest.fixture(autouse=True)
def _no_damage_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget damage that earlier tests met, because tests copy stores with their pack ids."""
    monkeypatch.setattr("asymcheck.storage.damaged_frames._damaged", set())


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    """Return a path for a store that does not exist yet, in a temporary directory."""
    return tmp_path / "store"


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Return a process from which children are forked."""
    # The package imports its modules on first use, and most children need all of a Checkpointer.
    imported = ("asymcheck.checkpointer", "pytest", "torch.distributed.fsdp", "torch.distributed.tensor")
    zygote = Zygote(tmp_path_factory.mktemp("zygote"), *imported)
    yield zygote
    zygote.close()
