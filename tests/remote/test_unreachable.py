"""Test that an unreachable location is reported immediately, with a remedy."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from asymcheck import Store
from asymcheck.config import RemoteConfig
from asymcheck.errors import InvalidInputError, RemoteUnreachableError, StorageError
from asymcheck.storage.remote import deadline, parse_location
from asymcheck.storage.remote.clients import connect

AT_ONCE_S = 10.0
"""Limit in seconds, far below the time-outs of the clients, which are 60 s and more."""


@pytest.fixture
def closed_port() -> int:
    """Return a port of this machine without a listener."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
    return port


def test_a_refused_connection(closed_port: int) -> None:
    """Test that the error names host, port and remedy, without the retries of the client, which take a minute."""
    began = time.monotonic()
    message = rf"host 127\.0\.0\.1, port {closed_port} .*refused.*fs\.defaultFS"
    with pytest.raises(RemoteUnreachableError, match=message):
        Store.open(f"hdfs://127.0.0.1:{closed_port}/runs")
    assert time.monotonic() - began < AT_ONCE_S


def test_an_unknown_host() -> None:
    """Test ``.invalid``, a reserved domain that no name server knows."""
    began = time.monotonic()
    with pytest.raises(RemoteUnreachableError, match=r"host namenode\.invalid is not known .*correct the location"):
        Store.open("hdfs://namenode.invalid:8020/runs")
    assert time.monotonic() - began < AT_ONCE_S


def test_a_port_that_is_none() -> None:
    """Test a port number that is out of range."""
    with pytest.raises(InvalidInputError, match=r"location hdfs://localhost:99999/runs: Port out of range"):
        Store.open("hdfs://localhost:99999/runs")


def test_a_port_that_is_left_out() -> None:
    """Test that the error says what to pass, because the client expects a name service."""
    with pytest.raises(InvalidInputError, match="without a port it is a name service: give the port, or"):
        Store.open("hdfs://localhost/runs")


def test_a_name_service_is_not_connected_to(closed_port: int) -> None:
    """Test that the client tries its NameNodes in turn, because the name is not a host and has no port."""
    options = {
        "dfs.ha.namenodes.cluster": "a,b",
        "dfs.namenode.rpc-address.cluster.a": f"127.0.0.1:{closed_port}",
        "dfs.namenode.rpc-address.cluster.b": f"127.0.0.1:{closed_port}",
    }
    assert connect(parse_location("hdfs://cluster/runs"), RemoteConfig(options=options)).kind == "hdfs-native"


@pytest.mark.slow
def test_a_busy_namenode_is_left_to_the_client() -> None:
    """Test a listener that accepts no connection in time, which is left to the client."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen(0)
        # These connections fill the queue of the listener.
        waiting = [socket.socket() for _ in range(2)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(busy.getsockname())
        location = f"hdfs://127.0.0.1:{busy.getsockname()[1]}/runs"
        assert connect(parse_location(location), RemoteConfig()).kind == "hdfs-native"
        for one in waiting:
            one.close()


@pytest.mark.parametrize("location", ["foo://x", "foo://x/runs"])
def test_an_unknown_scheme(location: str) -> None:
    """Test that the error lists the supported schemes."""
    with pytest.raises(
        InvalidInputError, match=rf"'{location}': no file system is known for foo://; use hdfs, file, s3"
    ):
        Store.open(location, create=True)


def test_a_place_where_nothing_can_be_created(store: Path, tmp_path: Path) -> None:
    """Test the kernel's own folder, and a file in place of a folder: the error of this package names the path."""
    (tmp_path / "file").write_text("x")
    with Store.open(store, create=True) as opened:
        with pytest.raises(StorageError, match=r"file:///proc/nope/heads: cannot create this directory"):
            opened.push("file:///proc/nope")
        with pytest.raises(StorageError, match=r"file/below/.* a file has the name of a directory: choose another"):
            opened.push(f"file://{tmp_path}/file/below")


def test_a_location_without_an_answer_is_reported_while_waiting(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a client that hangs: the wait and each new attempt are logged."""
    monkeypatch.setattr(deadline, "_QUIET_S", 0.01)
    never = threading.Event()
    config = RemoteConfig(deadline_s=0.5, attempts=2, retry_s=0.01)

    def hang(seconds: float) -> object:
        return deadline.within(seconds, "read hdfs://a/b", lambda: never.wait(2))

    with pytest.raises(RemoteUnreachableError, match="gave up after 2 attempts"):
        deadline.tried(config, hang)
    never.set()
    messages = [record.getMessage() for record in caplog.records if record.name == deadline.__name__]
    assert [message.split(";")[-1].split(" up to")[0] for message in messages] == [
        " waiting",
        " trying again",
        " waiting",
    ]
    assert all(message.startswith("read hdfs://a/b: no answer") for message in messages)
