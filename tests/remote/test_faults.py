"""Test a real HDFS that freezes, dies, is full, or refuses: every operation ends with a named error."""

from __future__ import annotations

import contextlib
import signal
import uuid
from concurrent import futures
from pathlib import Path

import pytest

from asymcheck import Store
from asymcheck.errors import OutOfSpaceError, ReadOnlyStoreError, RemoteUnreachableError, StoreNotFoundError
from tests.remote.conftest import CONFIG, check_location, check_state, config
from tests.zygote import wait_until
from tools.local_hdfs import LocalHdfs

# The deadline is short, but long enough for a busy machine. Operations that should succeed get a second attempt,
# because the client sometimes reports a failure of a healthy DataNode.
IMPATIENT = config(deadline_s=6.0, attempts=2, options={"dfs.client.failover.max.attempts": "1"})
NO_ANSWER = r"no answer in \d"


@pytest.fixture
def hdfs_location(hdfs: LocalHdfs, store: Path) -> str:
    """Return a location in a separate HDFS with step 1."""
    location = f"{hdfs.url}/faults/{uuid.uuid4().hex}"
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(location, 1)
    return location


def is_readable(location: str) -> bool:
    """Return whether the bytes of the descriptor can be read."""
    with contextlib.suppress(RemoteUnreachableError):
        Store.open(location, config=IMPATIENT, create=True).close()
        return True
    return False


@pytest.mark.slow
def test_a_frozen_namenode(hdfs: LocalHdfs, store: Path, hdfs_location: str) -> None:
    """Test that reads and pushes end by their deadline, with the name of the NameNode, and work again later."""
    with Store.open(hdfs_location, config=IMPATIENT, create=True) as opened_before, hdfs.frozen("nn"):
        with pytest.raises(RemoteUnreachableError, match=r"asymcheck\.store: " + NO_ANSWER):
            Store.open(hdfs_location, config=IMPATIENT, create=True)
        with pytest.raises(RemoteUnreachableError, match=NO_ANSWER):
            opened_before.load()
        with (
            Store.open(store, config=IMPATIENT, create=True) as opened,
            pytest.raises(RemoteUnreachableError, match=NO_ANSWER),
        ):
            opened.push(hdfs_location, 2)
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(hdfs_location, 2)
    check_location(hdfs_location, 1, 2)


@pytest.mark.long
def test_a_frozen_datanode(hdfs: LocalHdfs, store: Path, hdfs_location: str) -> None:
    """Test readable names without readable bytes: no step is skipped, and nothing is committed."""
    with Store.open(hdfs_location, config=IMPATIENT, create=True) as opened_before, hdfs.frozen("dn1"):
        with pytest.raises(RemoteUnreachableError):
            opened_before.load()
        with Store.open(store, config=IMPATIENT, create=True) as opened, pytest.raises(RemoteUnreachableError):
            opened.push(hdfs_location, 2)
    hdfs.wait()
    check_location(hdfs_location, 1)


@pytest.mark.slow
def test_a_namenode_that_dies_and_comes_back(hdfs: LocalHdfs, store: Path, hdfs_location: str) -> None:
    """Test that no file counts as missing during the outage, and that all files are readable later."""
    hdfs.send("nn", signal.SIGKILL)
    try:
        with pytest.raises(RemoteUnreachableError):
            Store.open(hdfs_location, config=IMPATIENT, create=True)
        with Store.open(store, config=IMPATIENT, create=True) as opened, pytest.raises(RemoteUnreachableError):
            opened.push(hdfs_location, 2)
    finally:
        hdfs.start("nn")
        hdfs.wait()
    check_location(hdfs_location, 1)


@pytest.mark.slow
def test_datanodes_that_die_and_come_back(hdfs: LocalHdfs, store: Path, hdfs_location: str) -> None:
    """Test that a temporarily unreadable checkpoint does not count as damaged."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(hdfs_location, 2)
    hdfs.send("dn1", signal.SIGKILL)
    try:
        with pytest.raises(RemoteUnreachableError), Store.open(hdfs_location, config=IMPATIENT, create=True) as opened:
            opened.load()
    finally:
        hdfs.start("dn1")
        hdfs.wait()
        wait_until(lambda: is_readable(hdfs_location), "the DataNode to tell what it has")
    check_location(hdfs_location, 1, 2)


@pytest.mark.slow
def test_a_read_is_tried_again_when_a_datanode_comes_back(hdfs: LocalHdfs, hdfs_location: str) -> None:
    """Test a restart of a DataNode in the middle of a restore."""
    with Store.open(hdfs_location, config=config(attempts=8, retry_s=0.2), create=True) as opened:
        hdfs.send("dn1", signal.SIGKILL)
        with futures.ThreadPoolExecutor(1) as pool:
            loading = pool.submit(opened.load)
            with pytest.raises(futures.TimeoutError):
                loading.result(timeout=0.5)
            hdfs.start("dn1")
            check_state(loading.result(), 1)
    hdfs.wait()


@pytest.mark.slow
def test_a_quota(hdfs: LocalHdfs, store: Path, hdfs_location: str) -> None:
    """Test the error of a full quota, and that the push continues when there is space again."""
    path = hdfs_location.removeprefix(hdfs.url)
    hdfs.admin("-setSpaceQuota", "1m", path)
    with Store.open(store, config=IMPATIENT, create=True) as opened, pytest.raises(OutOfSpaceError, match="quota"):
        opened.push(hdfs_location, 2)
    hdfs.admin("-clrSpaceQuota", path)
    check_location(hdfs_location, 1)
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(hdfs_location, 2)
    check_location(hdfs_location, 1, 2)


@pytest.mark.slow
def test_safe_mode(hdfs: LocalHdfs, store: Path, hdfs_location: str) -> None:
    """Test that checkpoints can be read, and that a push is refused with the reason."""
    hdfs.admin("-safemode", "enter")
    try:
        with Store.open(hdfs_location, config=CONFIG, create=True) as opened:
            check_state(opened.load(), 1)
        with (
            Store.open(store, config=IMPATIENT, create=True) as opened,
            pytest.raises(RemoteUnreachableError, match="HDFS is in safe mode: try again"),
        ):
            opened.push(hdfs_location, 2)
    finally:
        hdfs.admin("-safemode", "leave")
    check_location(hdfs_location, 1)


@pytest.mark.slow
def test_another_user(hdfs: LocalHdfs, store: Path, hdfs_location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a user who may read and not write, and the error of a write."""
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
    with Store.open(hdfs_location, config=CONFIG, create=True) as opened:
        check_state(opened.load(), 1)
    with Store.open(store, config=IMPATIENT, create=True) as opened:
        with pytest.raises(ReadOnlyStoreError, match="no permission"):
            opened.push(hdfs_location, 2)
        with pytest.raises(ReadOnlyStoreError, match="no permission"):
            opened.push(f"{hdfs.url}/new", 2)
    with pytest.raises(StoreNotFoundError):
        Store.open(f"{hdfs.url}/new", config=CONFIG, create=True)
