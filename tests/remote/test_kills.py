"""Test an uploader killed at any step: it commits nothing by accident, and the next push continues."""

from __future__ import annotations

import uuid
from pathlib import Path, PurePosixPath

import pytest

from asymcheck import Store, events
from asymcheck.errors import InconsistentCheckpointError, StoreNotFoundError
from asymcheck.storage.remote.location import parse_location
from asymcheck.storage.remote.remote_files import RemoteFiles
from tests.remote.child import push, push_and_die, push_and_lose
from tests.remote.conftest import CONFIG, REMOTE, check_location, check_state, config
from tests.zygote import Zygote

STEPS = [(event, count) for event in events.REMOTE_ORDER for count in ((1, 2) if "manifest" not in event else (1,))]
QUICK = [
    ("remote.piece_sent", 2),
    ("remote.manifest_renamed", 1),
]
"""Kills that also run on HDFS, where each takes seconds."""


@pytest.fixture(
    params=[
        pytest.param(
            (kind, *step),
            id=f"{kind}-{step[0]}-{step[1]}",
            marks=[pytest.mark.long] if kind == "hdfs" and step not in QUICK else [],
        )
        for kind in ("file", "hdfs")
        for step in STEPS
    ]
)
def death(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str, int]:
    """Return a location, and the step of the upload at which the process dies."""
    kind, event, count = request.param
    if kind == "file":
        return f"file://{tmp_path}/remote", event, count
    return f"{request.getfixturevalue('hdfs_url')}/tests/{uuid.uuid4().hex}", event, count


@pytest.fixture
def store_with_heads(store: Path) -> Path:
    """Return a store with steps 1 and 2, and the head record of a second generation that continues from step 2."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.training.begin_generation(opened.checkpoints()[-1])
        opened.training.begin_generation(opened.checkpoints()[-1])
    return store


@pytest.mark.slow(quick=["file-remote.manifest_renamed-1", "file-remote.pack_closed-1"], long=["file-*-2"])
def test_killed_at_a_step(zygote: Zygote, store_with_heads: Path, death: tuple[str, str, int]) -> None:
    """Test that step 1 is at the location, step 2 is missing or complete, and a second push completes it."""
    location, event, count = death
    zygote.start(push, store=str(store_with_heads), location=location, step=1).finish()
    arguments = {"store": str(store_with_heads), "location": location, "step": 2, "event": event, "count": count}
    if event in ("remote.head_renamed", "remote.small_closed"):
        # The push of step 1 has sent the descriptor and the head records.
        location += "-new"
        arguments["location"] = location
    zygote.start(push_and_die, **arguments).wait_killed()
    try:
        with Store.open(location, config=CONFIG, create=True) as remote:
            steps = [one.step for one in remote.checkpoints() if one.complete]
            assert (2 in steps) == (event == "remote.manifest_renamed")
            for step in steps:
                check_state(remote.load(step), step)
            assert [one for one in remote.verify() if one.checkpoints] == []
    except StoreNotFoundError:
        steps = []
    with Store.open(store_with_heads, config=CONFIG, read_only=True) as opened:
        done = opened.push(location)
        full_push = opened.push(f"file://{store_with_heads}-whole", 2).moved_partitions
    if event in ("remote.pack_renamed", "remote.head_renamed", "remote.manifest_renamed"):
        assert done.moved_partitions < full_push
    check_location(location, *sorted({*steps, 2}))


@pytest.mark.slow
def test_killed_before_noticing_missing_packs(zygote: Zygote, store: Path, folder: str) -> None:
    """Test that the next push does not trust a committed manifest alone."""
    zygote.start(push_and_lose, store=str(store), location=folder, step=2).wait_killed()
    with Store.open(folder, config=CONFIG, create=True) as remote, pytest.raises(InconsistentCheckpointError):
        remote.load(2)
    with Store.open(store, config=CONFIG, read_only=True) as opened:
        assert len(opened.push(folder).committed) == 1
        assert opened.push(folder).present == 1
    check_location(folder, 2)


@pytest.mark.slow
def test_collection_removes_a_killed_push(zygote: Zygote, store: Path, any_location: str) -> None:
    """Test that a push in progress is not collected, and later only temporary files and unreferenced packs."""
    zygote.start(push, store=str(store), location=any_location, step=1).finish()
    zygote.start(
        push_and_die, store=str(store), location=any_location, step=2, event="remote.pack_renamed", count=1
    ).wait_killed()
    files = RemoteFiles(parse_location(any_location), REMOTE)
    packs = PurePosixPath(files.location.path) / "packs"
    before = files.list(packs)
    with Store.open(any_location, config=CONFIG, create=True) as remote:
        young = remote.gc()
    assert (young.freed_packs, young.removed_temporaries) == (0, 0)
    assert files.list(packs) == before
    with Store.open(any_location, config=config(grace_s=0.0), create=True) as remote:
        useless = remote.gc(dry_run=True).freed_packs
        assert useless >= 1
        assert files.list(packs) == before
        if not files.renames:
            # The first collection in an object store announces the removal.
            assert remote.gc().freed_packs == 0
        done = remote.gc()
        assert remote.gc().freed_packs == 0
    assert (done.freed_packs, done.kept_packs) == (useless, young.kept_packs - useless)
    assert len(files.list(packs)) == done.kept_packs
    check_location(any_location, 1)
