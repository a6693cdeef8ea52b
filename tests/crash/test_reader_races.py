"""Test readers of checkpoints that are deleted, collected and overwritten at critical moments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from asymcheck.errors import CheckpointNotFoundError, RecoveryError
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Manifest
from asymcheck.fsck import verify as verify_module
from asymcheck.restore import resolve as resolve_module
from asymcheck.restore.resolve import Resolved
from asymcheck.storage.local_files import Files
from asymcheck.storage.manifests import ManifestReader
from asymcheck.storage.nvme import CheckpointFiles, NvmeTier
from asymcheck.store import Store
from asymcheck.types import CheckpointRef, Progress, ProgressMeter
from tests.crash.actions import open_store
from tests.crash.states import fingerprint, make_state
from tests.crash.survival import check_steps


def test_the_newest_is_deleted_between_listing_and_reading(stores: tuple[Store, Store]) -> None:
    """Test that the reader reports the deletion, and restores the previous checkpoint."""
    store, other = stores
    store.save(make_state(0), step=0)
    store.save(make_state(1), step=1)
    original = resolve_module.resolve_one

    def resolve_one(tier: NvmeTier, listing: CheckpointFiles, *, whole: bool = False) -> Resolved:
        if listing.ref.step == 1:
            other.delete(1)
            other.gc()
        return original(tier, listing, whole=whole)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve_module, "resolve_one", resolve_one)
        restored = store.restore()
        assert fingerprint(restored.state) == fingerprint(make_state(0))
        assert len(restored.skipped) == 1
        store.save(make_state(1), step=1)
        with pytest.raises(RecoveryError, match=r"gone|deleted"):
            store.load(1)


def test_all_listed_checkpoints_are_deleted(stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a slow reader lists again, and restores the checkpoint that was saved meanwhile."""
    store, other = stores
    store.save(make_state(0), step=0)
    store.save(make_state(1), step=1)
    original = resolve_module.resolve_one

    def resolve_one(tier: NvmeTier, listing: CheckpointFiles, *, whole: bool = False) -> Resolved:
        if listing.ref.step == 1:
            other.save(make_state(2), step=2)
            other.delete(0)
            other.delete(1)
            other.gc()
        return original(tier, listing, whole=whole)

    monkeypatch.setattr(resolve_module, "resolve_one", resolve_one)
    restored = store.restore()
    assert restored.checkpoint.step == 2
    assert fingerprint(restored.state) == fingerprint(make_state(2))
    check_steps(store, {2: 2})


class _Reading(Files):
    """Runs an action once, before a frame is read."""

    act: Callable[[], object] | None = None

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> int:
        """Act, then read."""
        if self.act is not None and path.suffix == ".pack" and sum(map(len, buffers)) > 16 * 1024:
            act, self.act = self.act, None
            act()
        return super().pread(descriptor, buffers, offset, path)


def _delete_when_read(monkeypatch: pytest.MonkeyPatch, other: Store, *, before: bool) -> None:
    """Delete step 0 in another process just before or just after its manifest is read."""
    original = ManifestReader.read

    def delete(ref: CheckpointRef) -> None:
        if ref.step == 0:
            # A deletion reads the manifest, too.
            monkeypatch.setattr(ManifestReader, "read", original)
            other.delete(0)

    def read(reader: ManifestReader, run: str, ref: CheckpointRef, name: ManifestName) -> Manifest:
        if before:
            delete(ref)
        manifest = original(reader, run, ref, name)
        if not before:
            delete(ref)
        return manifest

    monkeypatch.setattr(ManifestReader, "read", read)


def test_verify_misses_no_manifest_that_was_deleted(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that a manifest that is deleted after the listing is not reported as damage."""
    store, other = stores
    for step in range(2):
        store.save(make_state(step), step=step)
    _delete_when_read(monkeypatch, other, before=True)
    assert store.verify() == []
    assert [one.step for one in store.checkpoints()] == [1]


def test_verify_reports_no_checkpoint_that_a_training_deletes(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a training that saves a checkpoint, and deletes an old one, during each attempt."""
    store, other = stores
    for step in range(2):
        store.save(make_state(step), step=step)
    original, steps = verify_module._Checker._check_packs, itertools.count(2)

    def check_packs(checker: verify_module._Checker) -> None:
        step = next(steps)
        other.save(make_state(step), step=step)
        other.delete(step - 2)
        other.gc()
        original(checker)

    monkeypatch.setattr(verify_module._Checker, "_check_packs", check_packs)
    assert store.verify() == []


def test_verify_misses_nothing_that_a_deleted_checkpoint_needs(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that missing data of a checkpoint that was deleted meanwhile is not reported, even if its packs exist."""
    store, other = stores
    store.save(make_state(0), step=0)
    for pack in (store.path / "packs").glob("*.pack"):
        pack.unlink()
    assert {one.kind for one in store.verify()} == {"missing-partition"}
    _delete_when_read(monkeypatch, other, before=False)
    assert store.verify() == []


def test_verify_finds_partitions_that_move_in_each_attempt(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a collection that copies a partition of the newest checkpoint into another pack before frames are read."""
    store, other = stores
    shared: dict[str, torch.Tensor] = {}
    for step in range(4):
        shared[str(step)] = torch.randn(3000)
        store.save({"shared": dict(shared), "own": torch.randn(12_000)}, step=step)
    original, steps = verify_module.ProgressMeter, itertools.count()

    def move(progress: Progress | None, total: int) -> ProgressMeter:
        other.delete(next(steps))
        assert other.gc().repacked_packs == 1
        return original(progress, total)

    monkeypatch.setattr(verify_module, "ProgressMeter", move)
    assert store.verify() == []
    # The check was not repeated.
    assert next(steps) == 1


def test_packs_being_read_are_not_recycled(store_path: Path) -> None:
    """Test that a reader gets the right bytes while its checkpoint is deleted, collected and overwritten."""
    files = _Reading()
    with open_store(store_path) as writer, open_store(store_path, read_only=True, files=files) as reader:
        writer.save(make_state(0), step=0)
        collections = []

        def recycle() -> None:
            writer.delete(0)
            collections.append(writer.gc())
            writer.save({"w": torch.randn(96, 128), "x": torch.randn(64, 128)}, step=2)

        files.act = recycle
        assert fingerprint(reader.load(0)) == fingerprint(make_state(0))
        # Use two packs, of which the reader holds both.
        assert [(one.freed_packs, one.busy_packs) for one in collections] == [(0, 2)]
        with pytest.raises(CheckpointNotFoundError):
            reader.load(0)
        assert writer.gc().freed_packs == 2
        assert writer.verify() == []


def test_recycling_under_a_reader_is_noticed(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a reader without the lock detects wrong bytes and never returns them."""
    files = _Reading()
    with open_store(store_path) as writer, open_store(store_path, read_only=True, files=files) as reader:
        writer.save(make_state(0), step=0)

        def recycle() -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    "asymcheck.storage.nvme.pack_writer.try_lock", lambda _descriptor, *, exclusive: exclusive
                )
                patch.setattr("asymcheck.storage.local_files.try_lock", lambda _descriptor, *, exclusive: exclusive)
                writer.delete(0)
                assert writer.gc().freed_packs == 2
                for step in (2, 4, 6):
                    writer.save({"w": torch.randn(96, 128), "x": torch.randn(64, 128)}, step=step)

        files.act = recycle
        with pytest.raises(RecoveryError):
            reader.load(0)
