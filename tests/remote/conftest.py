"""Fixtures: remote locations in a folder and on a real HDFS."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch

from asymcheck import Push, RemoteConfig, Store, StoreConfig
from asymcheck.executor import begin
from asymcheck.replication import background_push, push_loop
from asymcheck.replication.background_push import BackgroundPush
from asymcheck.replication.push_status import Mailbox, PushJob
from asymcheck.storage.remote.remote_files import RemoteFiles
from tools.local_hdfs import LocalHdfs
from tools.local_objects import BUCKET, LocalObjects, variables
from tools.local_sftp import LocalSftp

CLUSTER = "ASYMCHECK_TEST_HDFS"
CLIENT = "ASYMCHECK_TEST_CLIENT"
"""Names of environment variables: a location and a client to test with."""

REMOTE = RemoteConfig(
    client=cast("Literal['hdfs-native', 'libhdfs'] | None", os.environ.get(CLIENT)),
    pack_bytes=64 << 10,
    uploads=8,
    piece_bytes=32 << 10,
    gap_bytes=4096,
    deadline_s=30.0,
    grace_s=3600.0,
    retry_s=0.05,
)
CONFIG = StoreConfig(
    partition_bytes=8192, bundle_below_bytes=4096, inline_bytes=64, inline_total_bytes=128, remote=REMOTE
)
"""Small partitions, packs and pieces, so that little data has many of each."""


def config(**changes: object) -> StoreConfig:
    """Return the configuration with changed settings of the remote location."""
    return dataclasses.replace(CONFIG, remote=dataclasses.replace(REMOTE, **changes))  # type: ignore[arg-type]  # as named


def state_of(step: int) -> dict[str, object]:
    """Return a state of some 40 partitions, most of which change from step to step."""
    noise = torch.randn(40_000, generator=torch.Generator().manual_seed(step))
    return {"model": {"w": noise, "fixed": torch.arange(20_000, dtype=torch.float32)}, "step": step}


def save_steps(path: Path, *steps: int) -> None:
    """Save the states of steps."""
    with Store.open(path, config=CONFIG, create=True) as store:
        for step in steps:
            store.save(state_of(step), step=step)


def check_state(state: object, step: int) -> None:
    """Compare the state of a step bit for bit."""
    assert isinstance(state, dict)
    expected = state_of(step)
    assert state["step"] == step
    for name in ("w", "fixed"):
        assert torch.equal(state["model"][name], expected["model"][name])  # type: ignore[index]  # a mapping


def check_location(location: str, *steps: int) -> None:
    """Check that exactly these steps are at the location, and complete."""
    with Store.open(location, config=CONFIG, create=True) as remote:
        assert [one.step for one in remote.checkpoints() if one.complete] == list(steps)
        for step in steps:
            check_state(remote.load(step), step)
        assert [one for one in remote.verify() if one.checkpoints] == []


def by_process(store: Store, location: str, **rules: object) -> BackgroundPush:
    """Return a push by a child process, which has begun."""
    return store.training.push_in_background(Push(location, **{"close_s": None, **rules})).start()  # type: ignore[arg-type]  # as named


class ChildOnThread:
    """The loop of a child process on a thread of the test, so that a test can break its functions."""

    pid = 0

    def __init__(self, requests: Mailbox, statuses: Mailbox, job: PushJob) -> None:
        """Begin the loop."""
        self._done = begin(partial(push_loop.run_child, requests, statuses, job, os.getppid()), "child")

    def wait(self) -> int:
        """Return the exit status."""
        return self._done.result()

    def kill(self) -> None:
        """Leave the thread to itself."""


@pytest.fixture
def on_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run push loops on threads of the test, with the memory of a child process."""
    monkeypatch.setattr(background_push, "_start", ChildOnThread)


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process."""
    return [
        int(child)
        for tasks in Path(f"/proc/{pid}/task").iterdir()
        for child in (tasks / "children").read_text().split()
    ]


def announce(pack: Path) -> None:
    """Announce the removal of a pack, like a collection that is killed before the removal."""
    pack.rename(pack.with_name(f"{pack.name.partition('.')[0]}.{'0' * 32}.doomed"))


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHdfs]:
    """Return a NameNode and one DataNode."""
    with LocalHdfs(tmp_path_factory.mktemp("hdfs")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalObjects]:
    """Return an S3 server."""
    with LocalObjects(tmp_path_factory.mktemp("objects") / "server") as server:
        yield server


@pytest.fixture(scope="session")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSftp]:
    """Return an SFTP server."""
    with LocalSftp(tmp_path_factory.mktemp("sftp")) as server:
        yield server


@pytest.fixture(scope="session")
def hdfs_url(request: pytest.FixtureRequest) -> str:
    """Return the HDFS to test with: one from an environment variable, or a new one."""
    named = os.environ.get(CLUSTER)
    if named:
        return named
    cluster = request.getfixturevalue("hdfs")
    assert isinstance(cluster, LocalHdfs)
    return cluster.url


# A cluster takes seconds to start. `make test` starts it for one round trip.
FILE_SYSTEMS = ["file", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hdfs", "sftp"))]


@pytest.fixture(params=FILE_SYSTEMS)
def any_file_system(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return an empty location that can rename files: in a folder, on HDFS, and on an SFTP server."""
    return _location(request, tmp_path)


def _location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/remote"
    if request.param == "sftp":
        return f"{request.getfixturevalue('sftp').url}/tests/{uuid.uuid4().hex}"
    return f"{request.getfixturevalue('hdfs_url')}/tests/{uuid.uuid4().hex}"


@pytest.fixture(params=[*FILE_SYSTEMS, pytest.param("objects", marks=pytest.mark.slow)])
def any_location(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an empty location: in a folder, on HDFS, on an SFTP server, and in an object store."""
    if request.param == "objects":
        for name, value in variables(request.getfixturevalue("objects").endpoint).items():
            monkeypatch.setenv(name, value)
        return f"s3://{BUCKET}/tests/{uuid.uuid4().hex}"
    return _location(request, tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return a location in a folder, for tests that do not depend on the file system."""
    return f"file://{tmp_path}/remote"


@pytest.fixture
def store(store_path: Path) -> Path:
    """Return a store with steps 1 and 2."""
    save_steps(store_path, 1, 2)
    return store_path


@pytest.fixture
def pushed(store: Path, folder: str) -> Path:
    """Return a store whose two checkpoints were pushed to ``folder``."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, everything=True)
    return store


def packs_of(folder: str) -> set[Path]:
    """Return the files of all packs of a location."""
    return set(Path(folder.removeprefix("file://"), "packs").iterdir())


def lose_packs(store: Path) -> None:
    """Remove all packs."""
    for pack in (store / "packs").iterdir():
        pack.unlink()


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the operations at locations."""
    done: list[str] = []
    original: Callable[..., Any] = RemoteFiles._do

    def do(files: RemoteFiles, action: str, *arguments: object) -> object:
        done.append(action)
        return original(files, action, *arguments)

    monkeypatch.setattr(RemoteFiles, "_do", do)
    return done
