"""Test repairs of real stores: no intact data is lost, and a second repair does nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from asymcheck import StoreConfig
from asymcheck.errors import HeadRecordError, OutOfSpaceError, ReadOnlyStoreError
from asymcheck.format import layout
from asymcheck.format.pack import decode_pack_header
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.fsck.verify import Severity
from asymcheck.storage import damaged_frames
from asymcheck.storage.local_files import translated
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.nvme import Files
from asymcheck.store import Store
from tests.crash.actions import open_store
from tests.crash.faults import CHANGES, Counter, WatchedFiles, refuse
from tests.crash.states import fingerprint, make_state
from tests.crash.survival import check_steps
from tests.damage.flips import flip
from tests.fsck.damages import (
    check_idle,
    flip_frame_header,
    flip_header,
    flip_index,
    flip_payload,
    frames,
    locked,
    packs,
    readable,
)


@pytest.fixture
def path(store_path: Path) -> Path:
    """Return a store with three checkpoints, of which the last continues the second."""
    with open_store(store_path) as store:
        store.save(make_state(0), step=0)
        second = store.save(make_state(1), step=1)
        generation = store.training.begin_generation(second)
        store.save(make_state(2), step=2, generation=generation)
    return store_path


def _kinds(done: object) -> list[str]:
    return [one.kind for one in done]  # type: ignore[attr-defined]  # a tuple of results


def test_a_sound_store_is_left_alone(path: Path) -> None:
    """Test that a repair of an intact store finds and changes nothing."""
    with open_store(path) as store:
        check_idle(store)
        assert store.repair().left == ()


@pytest.mark.parametrize("copy", [0, 4096])
@pytest.mark.parametrize("name", ["asymcheck.store", "heads/default/00000002.head"])
def test_a_record_with_one_damaged_copy(path: Path, name: str, copy: int) -> None:
    """Test that the file is restored byte for byte."""
    before = (path / name).read_bytes()
    flip(path / name, (copy + 10) * 8)
    with open_store(path) as store:
        assert [one.where for one in store.repair().done] == [name]
        assert (path / name).read_bytes() == before
        assert store.verify() == []
        check_idle(store)


def test_a_head_record_that_is_cut_off(path: Path) -> None:
    """Test a file that ends with its only copy."""
    head = path / "heads/default/00000002.head"
    before = head.read_bytes()
    os.truncate(head, 5000)
    with open_store(path) as store:
        with pytest.raises(HeadRecordError):
            store.load()
        assert _kinds(store.repair().done) == ["record"]
        assert head.read_bytes() == before
        assert fingerprint(store.load()) == fingerprint(make_state(2))


def test_records_beyond_repair(path: Path) -> None:
    """Test a head record without an intact copy and a damaged manifest: both are listed, with advice, and unchanged."""
    head = path / "heads/default/00000002.head"
    manifest = next((path / "manifests/default").glob("00000001-000000000000-*/*"))
    for at in (10, 4106):
        flip(head, at * 8)
    flip(manifest, 1000 * 8)
    before = head.read_bytes(), manifest.read_bytes()
    with open_store(path) as store:
        repaired = store.repair()
        assert repaired.done == ()
        left = {one.kind: one for one in repaired.left}
        assert set(left) == {"damaged-head", "damaged-manifest"}
        assert "step=" in left["damaged-head"].remedy
        command = "asymcheck delete STORE 0 --run default --generation 1"
        assert f"delete that checkpoint ({command})" in left["damaged-manifest"].remedy
        assert left["damaged-manifest"].checkpoints[0].startswith("run default, step 0 ")
    assert (head.read_bytes(), manifest.read_bytes()) == before
    assert readable(path) == {1, 2}


def test_a_lost_head_record(path: Path) -> None:
    """Test that the missing record is listed."""
    (path / "heads/default/00000002.head").unlink()
    with open_store(path) as store:
        assert _kinds(store.repair().left) == ["missing-head"]


@pytest.mark.slow(quick=["flip_index"])
@pytest.mark.parametrize("damage", [flip_header, flip_index])
def test_a_pack_without_header_or_index(path: Path, damage: Callable[[Path], None]) -> None:
    """Test that all partitions are copied to a new pack, and that the damaged file is deleted, not pooled."""
    for pack in packs(path):
        damage(pack)
    damaged = packs(path)
    pooled = sorted((path / "pool").iterdir())
    with open_store(path) as store:
        repaired = store.repair()
        assert _kinds(repaired.done) == ["catalog"] + ["pack"] * len(damaged)
        assert repaired.left == ()
        assert repaired.copied_partitions > 0
        assert not set(packs(path)) & set(damaged)
        assert sorted((path / "pool").iterdir()) == pooled
        assert store.verify() == []
        check_idle(store)
        assert store.save(make_state(2), step=3).written_bytes == 0
        check_steps(store, {0: 0, 1: 1, 2: 2, 3: 2})


def test_damaged_frame_costs_only_itself(path: Path) -> None:
    """Test that other frames are copied, its checkpoints are listed, and the catalog forgets it."""
    pack = packs(path)[0]
    lost = flip_payload(pack, 0)
    others = {name for name, _, _ in frames(pack)} - {lost}
    before = readable(path)
    with open_store(path) as store:
        repaired = store.repair()
        assert repaired.copied_partitions == len(others)
        assert not pack.exists()
        missing = {one.checkpoints[0].split()[3] for one in repaired.left}
        assert missing == {str(step) for step in {0, 1, 2} - before}
        assert all(one.kind == "lost-partitions" and lost.hex() in one.message for one in repaired.left)
        with store.resources.catalog().read() as transaction:
            assert transaction.location(lost) is None
            assert all(transaction.location(name) is not None for name in others)
        check_idle(store)
        assert {finding.kind for finding in store.verify()} == {"missing-partition"}
    assert readable(path) == before


def test_checkpoints_of_many_ranks_are_identified_by_number(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that listings, which are slow to hash with many ranks, are identified by number."""
    for pack in packs(path):
        for frame in range(len(frames(pack))):
            flip_payload(pack, frame)

    def refuse_hash(_listing: CheckpointFiles) -> int:
        raise AssertionError

    monkeypatch.setattr(CheckpointFiles, "__hash__", refuse_hash)
    with open_store(path) as store:
        left = [one for one in store.repair().left if one.kind == "lost-partitions"]
    assert [one.checkpoints[0].split()[3] for one in left] == ["0", "1", "2"]
    assert all(re.search(r"[0-9]+ partitions are lost; the first is [0-9a-f]{32}", one.message) for one in left)


def test_a_later_save_heals_older_checkpoints(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a process that has not met the damage: it writes lost partitions again only after the repair."""
    for pack in packs(path):
        for frame in range(len(frames(pack))):
            flip_payload(pack, frame)
    assert readable(path) == set()
    monkeypatch.setattr(damaged_frames, "_damaged", set())  # Open the store again, like another process.
    with open_store(path) as store:
        assert store.save(make_state(1), step=11).written_bytes == 0
        assert store.repair().copied_partitions == 0
        assert packs(path) == []
        assert store.save(make_state(1), step=12).written_bytes > 0
        for step in (1, 11, 12):
            assert fingerprint(store.load(step)) == fingerprint(make_state(1))
        check_idle(store)


def test_a_partition_of_which_another_copy_is_sound_is_not_copied(path: Path) -> None:
    """Test that the catalog names the other copy, and that the damaged pack is removed."""
    away = path.with_name("away")
    (path / "packs").rename(away)
    (path / "packs").mkdir()
    with open_store(path) as store:
        for step in range(3):
            store.save(make_state(step), step=step + 10)
    for pack in away.iterdir():
        pack.rename(path / "packs" / pack.name)
        flip_payload(path / "packs" / pack.name, 0)
    with open_store(path) as store:
        repaired = store.repair()
        assert repaired.copied_partitions == 0
        assert repaired.left == ()
        assert store.verify() == []
        check_steps(store, {0: 0, 1: 1, 2: 2, 10: 0, 11: 1, 12: 2})


def test_payloads_behind_damaged_frame_headers_are_intact(path: Path) -> None:
    """Test that the payload of a frame with a damaged header is recovered with the index."""
    for pack in packs(path):
        for frame in range(len(frames(pack))):
            flip_frame_header(pack, frame)
    assert readable(path) == set()
    with open_store(path) as store:
        assert store.repair().left == ()
        assert store.verify() == []
    assert readable(path) == {0, 1, 2}


def test_frames_behind_a_damaged_one_are_found_without_an_index(path: Path) -> None:
    """Test frames after a damaged header, at which a plain scan would end."""
    pack = max(packs(path), key=lambda one: len(frames(one)))
    names = [name for name, _, _ in frames(pack)]
    assert len(names) > 2
    flip_frame_header(pack, 0)
    flip_index(pack)
    with open_store(path) as store:
        assert store.repair().copied_partitions == len(names) - 1
        with store.resources.catalog().read() as transaction:
            assert [transaction.location(name) is not None for name in names] == [False] + [True] * (len(names) - 1)


def _save_derived(path: Path) -> tuple[dict[str, torch.Tensor], Path]:
    """Save a state whose last partition is derived from the second; return the state and its pack."""
    master = torch.randn(300_000)
    state = {"first": torch.randn(300_000), "master": master, "model": master.bfloat16()}
    config = StoreConfig(compression="smallest", slots=1)
    with Store.open(path, create=True, config=config) as store:
        store.save(state, step=0)
    (pack,) = packs(path)
    assert len(frames(pack)) == 3
    return state, pack


def test_a_base_with_a_damaged_frame_header_is_intact(store_path: Path) -> None:
    """Test that one repair recovers a partition and those that are derived from it, and reports nothing as lost."""
    state, pack = _save_derived(store_path)
    flip_frame_header(pack, 1)
    with Store.open(store_path, create=True) as store:
        assert store.repair().left == ()
        check_idle(store)
        assert store.verify() == []
        loaded = store.load(0)
        assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_a_base_behind_a_damaged_frame_is_found_without_an_index(store_path: Path) -> None:
    """Test that a repair decodes a derived partition whose base no reader finds, instead of removing it."""
    state, pack = _save_derived(store_path)
    with pack.open("r+b") as file:
        # The header of the pack, and that of the first frame.
        file.write(bytes(2 * BLOCK_BYTES))
    with Store.open(store_path, create=True) as store:
        assert store.repair().copied_partitions == 2
        check_idle(store)
        # Only the first partition was lost.
        store.save({"first": state["first"]}, step=1)
        loaded = store.load(0)
        assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_a_pack_under_a_wrong_name_is_left_alone(path: Path) -> None:
    """Test intact frames that belong to another pack id."""
    pack = packs(path)[0]
    wrong = pack.with_name(layout.pack_name(bytes(16)))  # type: ignore[arg-type]  # an id of zeros
    pack.rename(wrong)
    data = wrong.read_bytes()
    with open_store(path) as store:
        left = {one.kind for one in store.repair().left}
    assert left == {"unreadable-pack", "lost-partitions"}
    assert wrong.read_bytes() == data


class _Unreadable(Files):
    """A device that cannot read one range of one pack."""

    def __init__(self, path: Path, offset: int) -> None:
        self.path, self.offset = path, offset

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> int:
        """Raise an error, like a worn drive."""
        if path == self.path and offset == self.offset:
            with translated("read", path):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pread(descriptor, buffers, offset, path)


def test_unreadable_data_may_return(path: Path) -> None:
    """Test that readable data is copied, the pack stays, and a second repair does nothing."""
    pack = packs(path)[0]
    name, offset, _ = frames(pack)[0]
    with open_store(path, files=_Unreadable(pack, offset)) as store:
        repaired = store.repair()
        assert repaired.copied_partitions == len(frames(pack)) - 1
        assert pack.exists()
        assert "unreadable-pack" in {one.kind for one in repaired.left}
        with store.resources.catalog().read() as transaction:
            assert transaction.location(name) is None
        check_idle(store)
    assert readable(path) == {0, 1, 2}


@pytest.mark.parametrize("part", ["header", "index"])
def test_header_or_index_that_the_drive_cannot_read(path: Path, part: str) -> None:
    """Test one bad sector: loads and a collection find the frames, and a repair copies them."""
    pack = packs(path)[0]
    offset = 0 if part == "header" else decode_pack_header(pack.read_bytes(), pack.name).index_offset
    with open_store(path, files=_Unreadable(pack, offset)) as store:
        for step in range(3):
            assert fingerprint(store.load(step)) == fingerprint(make_state(step))
        store.gc()
        repaired = store.repair()
        assert (pack.exists(), repaired.left) == (False, ())
        check_idle(store)
    assert readable(path) == {0, 1, 2}


def test_stale_temporaries_are_removed(path: Path) -> None:
    """Test files that a garbage collection would also remove."""
    stale = path / "packs" / f"{'0' * 32}.tmp"
    stale.write_bytes(b"x")
    with open_store(path) as store:
        assert _kinds(store.repair().done) == ["temporaries"]
        assert not stale.exists()
        check_idle(store)


def test_a_pack_in_use_is_busy(path: Path) -> None:
    """Test that the pack is repaired once it is unlocked."""
    pack = packs(path)[0]
    flip_header(pack)
    before = set(packs(path))
    with open_store(path) as store:
        with locked(pack):
            repaired = store.repair()
            assert _kinds(repaired.left) == ["busy-pack"]
            assert repaired.copied_partitions == 0
            assert set(packs(path)) == before
        assert store.repair().left == ()
        assert store.verify() == []


def test_a_read_only_store_is_refused(path: Path) -> None:
    """Test a clear error, and that nothing is changed."""
    flip_header(packs(path)[0])
    with open_store(path, read_only=True) as store:
        for refused in (store.repair, store.resources.rebuild_catalog):
            with pytest.raises(ReadOnlyStoreError, match="read_only=True"):
                refused()


def _damage(path: Path) -> None:
    first, second, *_ = packs(path)
    flip_payload(first, 0)
    flip_header(second)
    flip(path / "asymcheck.store", 80)


def _repair_refused(path: Path, at: int) -> Counter:
    """Repair on a disk that is full at one operation."""
    counter = Counter(CHANGES, at, refuse(errno.ENOSPC))
    with contextlib.suppress(OutOfSpaceError), open_store(path, files=WatchedFiles(counter)) as store:
        store.repair()
    return counter


@pytest.mark.slow
def test_a_full_disk_loses_nothing(path: Path, tmp_path: Path) -> None:
    """Test every failing write: readable data stays readable, and the next repair completes."""
    _damage(path)
    before = readable(path)
    shutil.copytree(path, tmp_path / "counted")
    count = len(_repair_refused(tmp_path / "counted", 0).seen)
    assert count > 10
    for at in range(1, count + 1):
        copy = tmp_path / f"copy-{at}"
        shutil.copytree(path, copy)
        _repair_refused(copy, at)
        _check_repaired(copy, before)
        shutil.rmtree(copy)


def _check_repaired(path: Path, before: set[int]) -> None:
    assert readable(path) == before
    with open_store(path) as store:
        store.repair()
        assert {finding.kind for finding in store.verify()} <= {"missing-partition"}
        check_idle(store)
    assert readable(path) == before


def test_warnings_only(path: Path) -> None:
    """Test the kinds of findings that verify reports."""
    _damage(path)
    with open_store(path, read_only=True) as store:
        assert Severity.ERROR in {finding.severity for finding in store.verify()}


def test_repaired_store_opens_normally(path: Path) -> None:
    """Test any later process."""
    flip_index(packs(path)[0])
    with open_store(path) as store:
        store.repair()
    with Store.open(path, read_only=True) as store:
        assert store.verify() == []
