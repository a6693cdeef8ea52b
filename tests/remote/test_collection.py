"""Test garbage collection at a location: data of live checkpoints stays, with any damage or concurrency."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asymcheck import Retention, Store, events
from asymcheck.errors import InconsistentCheckpointError, ReadOnlyStoreError, RemoteUnreachableError
from asymcheck.format import layout
from asymcheck.gc.collect import Collected
from asymcheck.replication.collect_remote import RemotePruner
from asymcheck.storage.remote import RemoteTier, parse_location
from asymcheck.storage.remote.client_interface import Entry
from asymcheck.storage.remote.manifests import RemoteManifests
from asymcheck.storage.remote.remote_files import RemoteFiles
from asymcheck.types import CheckpointRef, PackId, SaveId
from tests.damage.flips import flip
from tests.remote.conftest import CONFIG, announce, check_location, config, packs_of, save_steps

DELTAS = dataclasses.replace(config(compression="smallest", pack_bytes=8 << 20), partition_bytes=256 << 10)
_FRAMES = 4096
"""Offset of the first frame."""


def weights(step: int) -> torch.Tensor:
    """Return weights that are close to those of the previous step, so that a delta pays off."""
    base = torch.randn(300_000, generator=torch.Generator().manual_seed(1))
    return base * (1 + 1e-4 * step)


def age(folder: str) -> None:
    """Make every file at the location ten days old."""
    then = time.time() - 10 * 86400
    for path in Path(folder.removeprefix("file://")).rglob("*"):
        os.utime(path, (then, then))


@pytest.fixture
def steps(store_path: Path) -> Path:
    """Return a store with two similar steps, stored plain."""
    with Store.open(store_path, config=dataclasses.replace(DELTAS, compression="off"), create=True) as store:
        for step in (1, 2):
            store.save({"w": weights(step)}, step=step)
    return store_path


@pytest.fixture
def delta(steps: Path, folder: str) -> Path:
    """Push both steps, and delete the first; return the pack of the second, with deltas on the other pack."""
    with Store.open(steps, config=DELTAS, create=True) as store:
        store.push(folder, 1)
        before = packs_of(folder)
        store.push(folder, 2)
    with Store.open(folder, config=DELTAS, create=True) as remote:
        assert {one.codec for tensor in remote.tensors(2)[1] for one in tensor.partitions} == {"ordered-integer-delta"}
        remote.delete(1)
    age(folder)
    (pack,) = packs_of(folder) - before
    return pack


def spoil(pack: Path, *offsets: int) -> None:
    """Flip a bit at each offset."""
    for offset in offsets:
        flip(pack, 8 * offset)
    os.utime(pack, (1e9, 1e9))


def test_the_bases_of_a_pack_with_a_damaged_index_stay(delta: Path, folder: str) -> None:
    """Test that the pack is scanned, and that the bases of its frames count as needed."""
    spoil(delta, -60)
    with Store.open(folder, config=DELTAS, create=True) as remote:
        assert remote.gc() == Collected(kept_packs=2)
    with Store.open(folder, config=DELTAS, create=True) as remote:
        assert torch.equal(remote.load(2)["w"], weights(2))  # type: ignore[index]  # a mapping


def test_damaged_pack_blocks_collection(delta: Path, folder: str) -> None:
    """Test that the unknown base of an unreadable frame blocks the collection, until its checkpoint is deleted."""
    spoil(delta, -60, _FRAMES)
    original = packs_of(folder)
    with Store.open(folder, config=DELTAS, create=True) as remote:
        for dry_run in (True, False):
            with pytest.raises(InconsistentCheckpointError, match=rf"{delta.name}.* is damaged"):
                remote.gc(dry_run=dry_run)
            assert packs_of(folder) == original
        remote.delete(2)
        assert remote.gc().freed_packs == 1
    assert packs_of(folder) == {delta}


def test_a_delta_that_comes_while_its_base_is_about_to_go(
    steps: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a delta whose pack and manifest arrive after the listing, while its base is about to be removed."""
    begun, go_on = threading.Event(), threading.Event()
    doom: Callable[[RemoteTier, Entry, PackId, bytes], bool] = RemoteTier.doom

    def wait(found: events.Event) -> None:
        if found.name == "remote.pack_begun":
            begun.set()
            go_on.wait(60)

    with Store.open(steps, config=DELTAS, create=True) as store:
        store.push(folder, 1)
        (base,) = packs_of(folder)
        age(folder)
        pushing = threading.Thread(target=store.push, args=(folder, 2))

        def after_the_push(self: RemoteTier, entry: Entry, pack_id: PackId, collection: bytes) -> bool:
            go_on.set()
            pushing.join()
            return doom(self, entry, pack_id, collection)

        monkeypatch.setattr(RemoteTier, "doom", after_the_push)
        with events.observe(wait), Store.open(folder, config=DELTAS, create=True) as remote:
            pushing.start()
            assert begun.wait(60)
            remote.delete(1)
            assert remote.gc() == Collected(kept_packs=1)
    assert base in packs_of(folder)
    with Store.open(folder, config=DELTAS, create=True) as remote:
        assert torch.equal(remote.load(2)["w"], weights(2))  # type: ignore[index]  # a mapping


def test_leftover_of_a_killed_collection_counts_once(store: Path, folder: str) -> None:
    """Test that packs in use are kept, and garbage is freed."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, 1)
    number, nbytes = len(packs_of(folder)), sum(pack.stat().st_size for pack in packs_of(folder))
    for dry_run in (True, False):
        for pack in packs_of(folder):
            announce(pack)
        with Store.open(folder, config=CONFIG, create=True) as remote:
            assert remote.gc(dry_run=dry_run) == Collected(kept_packs=number)
    check_location(folder, 1)
    with Store.open(folder, config=CONFIG, create=True) as remote:
        remote.delete(1)
        for pack in packs_of(folder):
            announce(pack)
        for dry_run in (True, False):
            freed = Collected(freed_packs=number, freed_bytes=nbytes, returned_bytes=nbytes)
            assert remote.gc(dry_run=dry_run) == freed
    assert packs_of(folder) == set()


def test_indexes_of_removed_packs_are_forgotten(pushed: Path, folder: str) -> None:
    """Test a training that pushes for weeks."""
    remote = RemoteTier(parse_location(folder), CONFIG)
    remote.read_indexes(remote.pack_ids())
    held = set(remote._indexes)
    (gone, *left) = sorted(packs_of(folder))
    gone.unlink()
    assert len(remote.pack_ids()) == len(left)
    assert held - set(remote._indexes) == {layout.parse_pack_name(gone.name)}
    remote.close()


@pytest.mark.parametrize("names", [["1" * 32 + ".tmp"], []], ids=["killed push", "killed deletion"])
def test_folders_of_killed_pushes_and_deletions_are_removed(pushed: Path, folder: str, names: list[str]) -> None:
    """Test that a verification has nothing to report afterwards."""
    manifests = Path(folder.removeprefix("file://"), "manifests", "default")
    left = manifests / layout.checkpoint_name(CheckpointRef(1, 3, SaveId(bytes(16))))
    left.mkdir()
    for name in names:
        (left / name).write_bytes(b"half")
    with Store.open(folder, config=CONFIG) as remote:
        remote.gc()
        assert left.exists()
        age(folder)
        assert remote.gc().removed_temporaries == len(names)
        assert remote.verify() == []
    assert not left.exists()
    check_location(folder, 1, 2)


def test_files_of_the_user_stay(pushed: Path, folder: str, tmp_path: Path) -> None:
    """Test temporary files in a folder beside those of the location, and behind a link."""
    top, elsewhere = Path(folder.removeprefix("file://")), tmp_path / "elsewhere"
    for place in (top / "notes", elsewhere):
        place.mkdir()
        (place / "mine.tmp").write_bytes(b"important")
    (top / "link").symlink_to(elsewhere)
    age(folder)
    os.utime(elsewhere / "mine.tmp", (0, 0))
    with Store.open(folder, config=CONFIG) as remote:
        assert {one.kind for one in remote.verify()} == {"foreign-file"}
        assert remote.gc().removed_temporaries == 0
    assert (elsewhere / "mine.tmp").exists()
    assert (top / "notes" / "mine.tmp").exists()


def test_files_without_an_age_stay(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that without modification times, every file may belong to a push in progress."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, 1)
    temporary = Path(folder.removeprefix("file://"), "packs", "0" * 32 + ".tmp")
    temporary.write_bytes(b"under way")
    age(folder)
    walk: Callable[..., list[Entry]] = RemoteFiles.walk

    def ageless(self: RemoteFiles, *args: object, **options: object) -> list[Entry]:
        return [dataclasses.replace(entry, mtime_ns=0) for entry in walk(self, *args, **options)]

    monkeypatch.setattr(RemoteFiles, "walk", ageless)
    with Store.open(folder, config=CONFIG, create=True) as remote:
        remote.delete(1)
        assert remote.gc() == Collected(kept_packs=len(packs_of(folder)) - 1)
        assert [one.kind for one in remote.verify()] == ["no-checkpoint"]
    assert temporary.exists()


def test_packs_stay_while_the_manifests_are_somewhere_else(store: Path, folder: str) -> None:
    """Test that neither a collection nor a push takes the checkpoints of a moved folder for deleted."""
    with Store.open(store, config=CONFIG) as opened:
        opened.push(folder, 1)
        age(folder)
        manifests = Path(folder.removeprefix("file://")) / "manifests"
        manifests.rename(manifests.with_name("aside"))
        with Store.open(folder, config=CONFIG) as remote, pytest.raises(RemoteUnreachableError, match="Move it back"):
            remote.gc()
        # The push would create the folder.
        with pytest.raises(RemoteUnreachableError, match="Move it back"):
            opened.push(folder, 2)
    manifests.with_name("aside").rename(manifests)
    with Store.open(folder, config=CONFIG) as remote:
        assert remote.gc().freed_packs == 0
    check_location(folder, 1)


def test_checkpoint_that_may_not_be_deleted_blocks_no_other(
    store: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test an old checkpoint that another user has pushed: newer ones are deleted, and their packs are freed."""
    save_steps(store, 3, 4)
    with Store.open(store, config=CONFIG) as opened:
        opened.push(folder, everything=True)
    age(folder)
    count, remove = len(packs_of(folder)), RemoteManifests.remove

    def refuse(manifests: RemoteManifests, run: str, ref: CheckpointRef) -> None:
        if ref.step == 1:
            raise ReadOnlyStoreError("remove: permission denied")
        remove(manifests, run, ref)

    monkeypatch.setattr(RemoteManifests, "remove", refuse)
    with contextlib.closing(RemoteTier(parse_location(folder), CONFIG)) as remote:
        with pytest.raises(ReadOnlyStoreError, match="permission denied"):
            RemotePruner(remote, "default", Retention(keep_last=1)).prune(time.time_ns())
        assert [ref.step for ref in remote.manifests.refs("default")] == [1, 4]
    assert len(packs_of(folder)) < count
    check_location(folder, 1, 4)
