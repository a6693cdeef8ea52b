"""Test three DataNodes: the death of one during a write costs a push only time."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from asymcheck import Store, events
from tests.remote.conftest import check_location, config, save_steps
from tools.local_hdfs import LocalHdfs


@pytest.fixture
def three(tmp_path: Path) -> Iterator[LocalHdfs]:
    """Return a NameNode and three DataNodes that no other test uses."""
    (tmp_path / "three").mkdir()
    with LocalHdfs(tmp_path / "three", 3) as cluster:
        yield cluster


# The NameNode replaces the dead replica only after it has declared the DataNode dead, after 16 seconds.
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_datanode_dies_while_a_pack_is_written(three: LocalHdfs, store_path: Path, replicas: int) -> None:
    """Test that committed checkpoints are complete and readable, and that the next push succeeds."""
    settings = config(options={"dfs.replication": str(replicas)}, attempts=8, retry_s=0.5, pack_bytes=1 << 20)
    any_location = f"{three.url}/replicated"
    save_steps(store_path, 1, 2, 3)
    killed: list[str] = []

    def kill(found: events.Event) -> None:
        if found.name == "remote.piece_sent" and not killed:
            killed.append("dn2")
            three.send("dn2", signal.SIGKILL)

    with Store.open(store_path, config=settings, create=True) as opened:
        opened.push(any_location, 1)
        with events.observe(kill):
            done = opened.push(any_location, 2)
        assert killed
        assert len(done.committed) == 1
        check_location(any_location, 1, 2)
        opened.push(any_location, 3)
    check_location(any_location, 1, 2, 3)
