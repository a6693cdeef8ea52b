"""Test that damage at a remote location is detected, named, and never returned."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from asymcheck import Retention, Store
from asymcheck.errors import (
    HeadRecordError,
    InconsistentCheckpointError,
    RemoteUnreachableError,
    SkippedCheckpointWarning,
)
from asymcheck.fsck.verify import Severity
from asymcheck.replication.collect_remote import RemotePruner
from asymcheck.storage.remote import RemoteTier
from asymcheck.storage.remote.client_interface import Readable
from asymcheck.storage.remote.clients import _LocalClient
from asymcheck.storage.remote.location import parse_location
from asymcheck.storage.remote.remote_files import RemoteFiles
from tests.remote.conftest import CONFIG, REMOTE, check_location, check_state, packs_of, state_of


def replace(files: RemoteFiles, path: PurePosixPath, data: bytes) -> None:
    """Replace the bytes of a file at the location."""
    files.delete(path)
    if data:
        assert files.put_small(path, data)


def flipped(data: bytes) -> bytes:
    """Flip one bit of the payload of the first frame."""
    return data[: 4096 + 2000] + bytes([data[4096 + 2000] ^ 1]) + data[4096 + 2001 :]


def without_index(data: bytes) -> bytes:
    """Flip one bit of the index."""
    return data[:-4096] + bytes([data[-4096] ^ 1]) + data[-4095:]


def cut(data: bytes) -> bytes:
    """Return the first half."""
    return data[: len(data) // 2]


def empty(_: bytes) -> bytes:
    """Return no bytes."""
    return b""


@pytest.fixture
def damaged(any_location: str, store: Path) -> Callable[[Callable[[bytes], bytes]], str]:
    """Push steps 1 and 2, and damage a pack that only step 2 needs."""

    def make(change: Callable[[bytes], bytes]) -> str:
        files = RemoteFiles(parse_location(any_location), REMOTE)
        packs = PurePosixPath(files.location.path) / "packs"
        with Store.open(store, config=CONFIG, create=True) as opened:
            opened.push(any_location, 1)
            before = set(files.list(packs))
            opened.push(any_location, 2)
        pack = packs / min(set(files.list(packs)) - before)
        data = files.read_small(pack, 1 << 30)
        assert data
        replace(files, pack, change(data))
        return any_location

    return make


Damaged = Callable[[Callable[[bytes], bytes]], str]


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return a set for the inodes of files that the drive of a location cannot read."""
    inodes: set[int] = set()
    reading = _LocalClient.reading

    def checked(client: _LocalClient, path: str) -> contextlib.AbstractContextManager[Readable]:
        if os.stat(path).st_ino in inodes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return reading(client, path)

    monkeypatch.setattr(_LocalClient, "reading", checked)
    return inodes


def test_packs_that_cannot_be_read_stop_no_push_and_no_collection(
    store: Path, folder: str, unreadable: set[int]
) -> None:
    """Test that what only these packs have is sent again, and that a collection keeps them."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, 1)
        lost = packs_of(folder)
        unreadable.update(pack.stat().st_ino for pack in lost)
        opened.push(folder, 2)
    with Store.open(folder, config=CONFIG) as remote:
        check_state(remote.load(2), 2)
        assert remote.gc().freed_packs == 0
    assert lost < packs_of(folder)
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, 1)
    check_location(folder, 1, 2)


def test_frames_that_a_restore_found_damaged_are_sent_again(store: Path, folder: str) -> None:
    """Test a damaged payload in an intact pack, which no push reads."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, 1)
        before = packs_of(folder)
        opened.push(folder, 2)
        assert opened.push(folder, 2).present == 1
        (pack, *_) = packs_of(folder) - before
        pack.write_bytes(flipped(pack.read_bytes()))
        with Store.open(folder, config=CONFIG) as remote, pytest.warns(SkippedCheckpointWarning):
            check_state(remote.load(), 1)
        assert opened.push(folder, 2).moved_partitions == 1
    check_location(folder, 1, 2)


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "fuse", "ext4"])
def test_read_errors_of_a_mount_are_no_damage(
    store: Path, folder: str, unreadable: set[int], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Test that an outage of a mounted server is not taken for damage, which would restore an older checkpoint."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, 1)
        before = packs_of(folder)
        opened.push(folder, 2)
    unreadable.update(pack.stat().st_ino for pack in packs_of(folder) - before)
    monkeypatch.setattr("asymcheck.storage.remote.remote_files.file_system_type", lambda _: kind)
    with Store.open(folder, config=CONFIG) as remote:
        if kind == "ext4":
            with pytest.warns(SkippedCheckpointWarning, match="Input/output error"):
                check_state(remote.load(), 1)
        else:
            with pytest.raises(RemoteUnreachableError, match="Input/output error; check the mount"):
                remote.load()


def test_best_checkpoint_stays_while_its_metrics_cannot_be_read(
    store_path: Path, folder: str, unreadable: set[int]
) -> None:
    """Test a mounted file system that fails for a moment, while a training deletes old checkpoints there."""
    with Store.open(store_path, config=CONFIG, create=True) as store:
        for step, loss in ((1, 0.0), (2, 2.0), (3, 1.0)):
            store.save(state_of(step), step=step, metrics={"loss": loss})
            store.push(folder, step)
    remote = RemoteTier(parse_location(folder), CONFIG)
    best = remote.manifests.checkpoints("default")[0]
    manifest = remote.manifests.directory("default", best.ref) / str(best.manifests[0])
    unreadable.add(os.stat(manifest).st_ino)
    pruner = RemotePruner(remote, "default", Retention(keep_last=1, keep_best=("loss", 1)))
    assert [checkpoint.step for checkpoint in pruner.prune(time.time_ns())] == [2]
    unreadable.clear()
    assert pruner.prune(time.time_ns()) == []
    remote.close()
    check_location(folder, 1, 3)


@pytest.mark.slow(quick=["file-flipped"], long=["hdfs-[!c]*"])
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        pytest.param(flipped, "damaged-frame", id="flipped"),
        pytest.param(cut, "damaged-pack", id="cut"),
        pytest.param(empty, "missing-partition", id="gone"),
    ],
)
def test_a_damaged_pack_costs_its_checkpoint_and_no_other(
    damaged: Damaged, change: Callable[[bytes], bytes], kind: str
) -> None:
    """Test the restore of the older step with a warning, the refusal by step, and the finding of a verification."""
    location = damaged(change)
    with Store.open(location, config=CONFIG, create=True) as remote:
        with pytest.warns(SkippedCheckpointWarning, match="step 2"):
            check_state(remote.load(), 1)
        with pytest.raises(InconsistentCheckpointError, match="step 2"):
            remote.load(2)
        findings = remote.verify()
    assert kind in {one.kind for one in findings}
    lost = [one for one in findings if one.severity is Severity.ERROR]
    assert lost
    assert all("step 2" in name for one in lost for name in one.checkpoints)


@pytest.mark.slow(quick=["file"], long=["hdfs"])
def test_a_pack_without_its_index_is_scanned(damaged: Damaged) -> None:
    """Test that no checkpoint is lost, and that the damage is reported."""
    location = damaged(without_index)
    with Store.open(location, config=CONFIG, create=True) as remote:
        check_state(remote.load(), 2)
        assert [one.kind for one in remote.verify()] == ["damaged-pack"]


def test_a_lost_head_record_of_the_store_costs_no_checkpoint_at_the_location(store: Path, folder: str) -> None:
    """Test a push from a store that is being removed: a new machine still restores what was pushed before."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, 2)
        opened.save(state_of(3), step=3, generation=opened.training.begin_generation(opened.checkpoints()[-1]))
        shutil.rmtree(store / "heads")
        with pytest.raises(HeadRecordError, match=r"cannot push step 3 .* has lost the head record"):
            opened.push(folder, 3)
    check_location(folder, 2)
    with Store.open(folder, config=CONFIG) as remote:
        check_state(remote.load(), 2)


def test_files_between_the_runs_are_no_runs(store: Path, folder: str) -> None:
    """Test that a foreign note in the folder is ignored."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, 1)
    for name in ("manifests/note", "heads/remark"):
        Path(folder.removeprefix("file://"), name).write_text("mine")
    check_location(folder, 1)
    with Store.open(folder, config=CONFIG, create=True) as remote:
        assert remote.runs() == ["default"]
        assert remote.verify() == []
        assert remote.gc().freed_packs == 0


@pytest.mark.slow(quick=["file-without_index"], long=["hdfs-*"])
@pytest.mark.parametrize("change", [without_index, cut, empty])
def test_another_push_restores_lost_packs(damaged: Damaged, change: Callable[[bytes], bytes], store: Path) -> None:
    """Test a checkpoint with manifests but without packs."""
    location = damaged(change)
    with Store.open(store, config=CONFIG, create=True) as opened:
        done = opened.push(location, everything=True)
        assert (len(done.committed), done.present) == (1, 1)
        assert done.moved_partitions > 0
        pushed_again = opened.push(location, everything=True)
        assert (pushed_again.present, pushed_again.packs) == (2, 0)
    check_location(location, 1, 2)


def test_push_after_the_removal_of_a_damaged_pack_sends_its_data_again(damaged: Damaged, store: Path) -> None:
    """Test a flipped bit: a push of the deleted checkpoint relies on the pack, because its index is intact."""
    location = damaged(flipped)
    with Store.open(location, config=CONFIG) as remote:
        names = {one.where.partition(" ")[0] for one in remote.verify() if one.kind == "damaged-frame"}
        remote.delete(2)
    with Store.open(store, config=CONFIG) as opened:
        assert opened.push(location, everything=True).moved_partitions == 0
        files = RemoteFiles(parse_location(location), REMOTE)
        for name in names:
            files.delete(PurePosixPath(files.location.path) / name)
        assert opened.push(location, everything=True).moved_partitions > 0
    check_location(location, 1, 2)


@pytest.mark.slow(quick=["file-cut"], long=["hdfs-*"])
@pytest.mark.parametrize("change", [cut, empty])
def test_another_push_brings_back_a_manifest(any_location: str, store: Path, change: Callable[[bytes], bytes]) -> None:
    """Test a manifest whose bytes differ from its digest, which keeps its name in use and the checkpoint unreadable."""
    files = RemoteFiles(parse_location(any_location), REMOTE)
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(any_location, everything=True)
    folder = max(entry.path for entry in files.walk(PurePosixPath(files.location.path) / "manifests/default"))
    (name,) = files.list(folder)
    data = files.read_small(folder / name, 1 << 30)
    assert data
    replace(files, folder / name, change(data))
    with Store.open(store, config=CONFIG, create=True) as opened:
        done = opened.push(any_location, everything=True)
    assert (len(done.committed), done.present, done.packs) == (1, 1, 0)
    check_location(any_location, 1, 2)


def test_another_push_replaces_a_manifest_that_cannot_be_read(pushed: Path, folder: str, unreadable: set[int]) -> None:
    """Test a defective block of the drive below the location."""
    manifest = max(Path(folder.removeprefix("file://"), "manifests").rglob("*.manifest"))
    unreadable.add(manifest.stat().st_ino)
    with Store.open(pushed, config=CONFIG, create=True) as opened:
        done = opened.push(folder, everything=True)
    assert (len(done.committed), done.present, done.packs) == (1, 1, 0)
    check_location(folder, 1, 2)
