"""Test several uploaders and a collection at the same time: committed checkpoints are complete."""

from __future__ import annotations

import threading
from pathlib import Path, PurePath

import pytest
import torch

from asymcheck import Store, events
from asymcheck.replication.checkpoint_cache import RemotePresence
from asymcheck.storage.remote import RemoteTier
from asymcheck.storage.remote.client_interface import Entry
from asymcheck.storage.remote.location import parse_location
from asymcheck.storage.remote.remote_files import RemoteFiles
from asymcheck.types import PackId
from tests.remote.child import push
from tests.remote.conftest import CONFIG, announce, check_location, config, save_steps, state_of
from tests.zygote import Zygote


@pytest.mark.slow
def test_processes_that_push_at_once(zygote: Zygote, store: Path, tmp_path: Path, any_location: str) -> None:
    """Test four processes: two stores with one run each, into a location that does not exist yet."""
    children = [zygote.start(push, store=str(store), location=any_location, step=step) for step in (1, 2, 1, 2)]
    for child in children:
        child.finish()
    check_location(any_location, 1, 2)


def orphaned(store: Path, folder: str) -> None:
    """Push a step and delete it at the location, so that its packs are garbage."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, 1)
        opened.push(folder, 2)
    with Store.open(folder, config=CONFIG, create=True) as remote:
        remote.delete(2)


@pytest.mark.slow(quick=["removed"])
@pytest.mark.parametrize("event", ["remote.pack_doomed", "remote.pack_removed"], ids=["doomed", "removed"])
def test_push_relies_on_a_pack_under_collection(store: Path, folder: str, event: str) -> None:
    """Test a push between announcement and removal, and a push right after the first removal."""
    orphaned(store, folder)
    pushed = []

    def observe(found: events.Event) -> None:
        if found.name == event and not pushed:
            pushed.append(found)
            with Store.open(store, config=CONFIG, create=True) as opened:
                opened.push(folder, 2)

    with Store.open(folder, config=config(grace_s=0.0), create=True) as remote, events.observe(observe):
        remote.gc()
    assert pushed
    check_location(folder, 1, 2)


@pytest.mark.slow(quick=["remote.manifest_renamed"])
@pytest.mark.parametrize(
    "event", ["remote.pack_begun", "remote.pack_renamed", "remote.small_closed", "remote.manifest_renamed"]
)
def test_a_collection_in_the_middle_of_a_push(store: Path, folder: str, event: str) -> None:
    """Test that the push sends data again that it relied on and that the collection has removed."""
    orphaned(store, folder)
    freed: list[int] = []

    def observe(found: events.Event) -> None:
        if found.name == event and not freed:
            freed.append(0)
            with Store.open(folder, config=config(grace_s=0.0), create=True) as remote:
                freed[0] = remote.gc().freed_packs
        if found.name == "remote.manifest_renamed" and event in ("remote.pack_begun", "remote.pack_renamed"):
            # Removed data is restored before the commit, so a crash right after the commit loses nothing.
            with Store.open(folder, config=CONFIG, create=True) as remote:
                remote.load(3, run="other")

    expected = {"old": state_of(2)["model"], "new": torch.randn(5000)}
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.save(expected, step=3, run="other")
        with events.observe(observe):
            opened.push(folder, 3, run="other")
    assert (freed[0] > 0) == (event != "remote.manifest_renamed")
    with Store.open(folder, config=CONFIG, create=True) as remote:
        found = remote.load(3, run="other")
        assert torch.equal(found["old"]["w"], expected["old"]["w"])  # type: ignore[index]  # mappings
        assert remote.verify() == []


def test_two_collections_and_a_push_at_once(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a collection that announces garbage that another has announced and a push has claimed again."""
    orphaned(store, folder)
    doom, delete = RemoteTier.doom, RemoteFiles.delete
    pushed, announced = threading.Event(), threading.Event()

    def collect() -> None:
        with Store.open(folder, config=config(grace_s=0.0), create=True) as remote:
            remote.gc()

    other = threading.Thread(target=collect)

    def doom_late(self: RemoteTier, entry: Entry, pack_id: PackId, collection: bytes) -> bool:
        if threading.current_thread() is not other and not pushed.is_set():
            other.start()
            assert pushed.wait(60)
        return doom(self, entry, pack_id, collection)

    def delete_late(self: RemoteFiles, path: PurePath) -> None:
        if path.suffix == ".doomed" and not pushed.is_set():
            with Store.open(store, config=CONFIG, create=True) as opened:
                opened.push(folder, 2)
            pushed.set()
            assert announced.wait(60)
        delete(self, path)

    def observe(found: events.Event) -> None:
        if found.name == "remote.pack_doomed" and threading.current_thread() is not other:
            announced.set()
            other.join()

    monkeypatch.setattr(RemoteTier, "doom", doom_late)
    monkeypatch.setattr(RemoteFiles, "delete", delete_late)
    with events.observe(observe):
        collect()
    assert announced.is_set()
    check_location(folder, 1, 2)


def test_a_collection_that_was_killed_loses_nothing(store: Path, folder: str) -> None:
    """Test that announced packs are read, relied on, and put back."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, 2)
    packs = Path(folder.removeprefix("file://")) / "packs"
    for pack in packs.iterdir():
        announce(pack)
    check_location(folder, 2)
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, 1)
    with Store.open(folder, config=config(grace_s=0.0), create=True) as remote:
        remote.gc()
    assert {pack.suffix for pack in packs.iterdir()} == {".pack"}
    check_location(folder, 1, 2)


def test_run_continues_during_pushes(store: Path, folder: str) -> None:
    """Test that steps are saved and deleted between pushes."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, everything=True)
        opened.delete(1)
        opened.gc()
    save_steps(store, 3)
    with Store.open(store, config=CONFIG, create=True) as opened:
        assert opened.push(folder, everything=True).present == 1
    check_location(folder, 1, 2, 3)


def test_pack_removed_between_two_comparisons(store: Path, folder: str) -> None:
    """Test that a push lists the packs again for each checkpoint that it finds at the location.

    Otherwise, it would report a checkpoint that another push has committed without its last check.
    """
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, 1)
        opened.push(folder, 2)
    remote = RemoteTier(parse_location(folder), CONFIG)
    first, second = remote.manifests.checkpoints("default")[:2]
    present = RemotePresence(remote)
    assert present.has(first)
    for pack in (Path(folder.removeprefix("file://")) / "packs").iterdir():
        announce(pack)
    assert not present.has(second)
