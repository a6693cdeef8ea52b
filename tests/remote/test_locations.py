"""Test that a URI identifies one location, or is refused with an alternative."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from pyarrow import fs

from asymcheck import Store
from asymcheck.errors import InvalidInputError, RemoteUnreachableError, StoreNotFoundError, StructureError
from asymcheck.format.layout import DESCRIPTOR_NAME
from asymcheck.replication.push import open_location
from asymcheck.storage.remote import clients, parse_location
from tests.remote.conftest import CONFIG, check_location, check_state, config


def test_a_store_is_no_location(store: Path) -> None:
    """Test that a store is not opened as a location, whose users would ignore its catalog."""
    message = rf"a local store .* give its path {store};"
    for location in (f"file://{store}", f"file://localhost{store}/"):
        with pytest.raises(InvalidInputError, match=message):
            Store.open(location, config=CONFIG, create=True)
        with Store.open(store, config=CONFIG, create=True) as opened, pytest.raises(InvalidInputError, match=message):
            opened.push(location)
    with Store.open(store, config=CONFIG, create=True) as opened:
        check_state(opened.load(), 2)


def test_a_location_of_earlier_pushes_is_not_created_again(store: Path, any_location: str) -> None:
    """Test that an emptied location, such as a missing mount, needs an explicit step on every file system."""
    where = parse_location(any_location)
    with Store.open(store, config=CONFIG, create=True) as opened:
        # Begin a push that is killed before its first pack. On some file systems, the test cannot remove more.
        with contextlib.closing(open_location(opened.resources.tier, where, CONFIG)) as tier:
            tier.files.delete(tier.files.top / DESCRIPTOR_NAME)
        with pytest.raises(RemoteUnreachableError, match=r"--create of asymcheck push"):
            opened.push(any_location)
        with pytest.raises(StoreNotFoundError):
            Store.open(any_location, config=CONFIG)
        opened.push(any_location, create=True)
    check_location(any_location, 2)


def test_a_copied_store_without_empty_folders_is_no_location(store: Path) -> None:
    """Test that the descriptor tells the layout of a copy that lacks the folders of a local store."""
    for name in ("pool", "catalog"):
        shutil.rmtree(store / name)
    with pytest.raises(InvalidInputError, match=rf"a local store \(so its asymcheck.store says\).* path {store};"):
        Store.open(f"file://{store}", config=CONFIG)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_location_is_no_store(pushed: Path, folder: str, *, read_only: bool) -> None:
    """Test that a location is not opened as a store, which would ignore doomed packs and collect with locks."""
    del pushed
    with pytest.raises(InvalidInputError, match=f"a remote location, not a local store. Open it as {folder}"):
        Store.open(folder.removeprefix("file://"), config=CONFIG, read_only=read_only)


def test_a_store_that_lost_its_descriptor_is_no_place_for_a_location(store: Path) -> None:
    """Test that such a store gets no new descriptor."""
    (store / "asymcheck.store").rename(store.parent / "aside")
    with Store.open(store.parent / "other", config=CONFIG, create=True) as other:
        other.save({"x": 1}, step=1)
        with pytest.raises(StructureError, match=r"has no asymcheck\.store, but it has manifests and packs"):
            other.push(f"file://{store}")
    assert not (store / "asymcheck.store").exists()


@pytest.mark.slow(quick=["a b+c"])
@pytest.mark.parametrize("name", ["a%41b", "what?", "a#b", "a b+c", "ü", "%2F", "a\tb", "*[x]", "\udcff"])
def test_location_is_printed_as_a_valid_uri(store: Path, tmp_path: Path, name: str) -> None:
    """Test that special characters are escaped in the URI and in messages."""
    location = (tmp_path / name / "remote").as_uri()
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(location, 1)
    assert (tmp_path / name / "remote" / "asymcheck.store").exists()
    with Store.open(location, config=CONFIG, create=True) as remote:
        assert parse_location(str(remote.location)) == parse_location(location)
    check_location(str(parse_location(location)), 1)
    with pytest.raises(StoreNotFoundError) as caught:
        Store.open(f"{location}/nothing", config=CONFIG, create=True)
    assert f"{parse_location(location)}/nothing does not exist" in str(caught.value)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("file:///exp#1", "write %23 for the #"),
        ("hdfs://host:8020/exp#1", "write %23 for the #"),
        ("hdfs://host:8020/exp#", "write %23 for the #"),
        ("file:///q?1", "no options; write %3F"),
        ("file:///q?", "no options; write %3F"),
        ("file:///a\nb", "a control character"),
        ("file:///a%00b", "a zero byte"),
        ("hdfs://[host:8020/q", "correct its host"),
        ("hdfs://host:8020/q?bogus", "give options as "),
        ("hdfs://host:8020/q?dfs.replication=1&dfs.replication=2", "an option is given twice"),
        ("hdfs://host:8020/q?dfs.replication=", "dfs.replication '': give an integer from 1"),
        ("hdfs://host:8020/q?dfs.replication=abc", "dfs.replication 'abc': give an integer from 1"),
        ("hdfs://host:8020/q?dfs.blocksize=-1", "dfs.blocksize '-1': give an integer from 1"),
    ],
)
def test_nothing_of_a_location_is_dropped(location: str, message: str) -> None:
    """Test that no part of a URI is ignored, so that different URIs are different locations."""
    with pytest.raises(InvalidInputError) as caught:
        Store.open(location, config=CONFIG, create=True)
    assert message in str(caught.value)


def test_one_step_of_everything_is_refused(store: Path, folder: str) -> None:
    """Test a request that is ambiguous."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        for move in (opened.push, opened.pull):
            with pytest.raises(InvalidInputError, match="step 3 with everything=True"):
                move(folder, 3, everything=True)


def test_nothing_stands_behind_a_location(folder: str) -> None:
    """Test that a location with a further remote location is refused."""
    with pytest.raises(
        InvalidInputError, match=r"remote 'file:///elsewhere' of file://.*: only a store on a local drive has one"
    ):
        Store.open(folder, remote="file:///elsewhere")


def test_configured_setting_is_checked_like_a_query() -> None:
    """Test that the error is raised before any connection."""
    with pytest.raises(InvalidInputError, match=r"dfs\.replication 'many'"):
        Store.open("hdfs://host:8020/q", config=config(options={"dfs.replication": "many"}))


@pytest.mark.slow
def test_a_bucket_is_the_first_part_of_a_path(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test file systems of pyarrow with buckets, whose paths have no leading slash."""
    (tmp_path / "bucket").mkdir()
    buckets = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    monkeypatch.setattr(clients, "_by_pyarrow", lambda *_: (buckets, "bucket/runs/a b"))
    location = "abfs://bucket/runs/a%20b"
    with pytest.raises(StoreNotFoundError, match=f"{location} does not exist"):
        Store.open(location, config=CONFIG, create=True)
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(location, everything=True)
    check_location(location, 1, 2)
    assert (tmp_path / "bucket" / "runs" / "a b" / "asymcheck.store").exists()
    with Store.open(location, config=config(grace_s=0.0), create=True) as remote:
        remote.delete(2)
        assert remote.gc().freed_packs > 0
    check_location(location, 1)
    (tmp_path / "bucket").rename(tmp_path / "away")
    with pytest.raises(RemoteUnreachableError, match="even the root was not found"):
        Store.open(location, config=CONFIG, create=True)
