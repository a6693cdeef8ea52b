"""Ways to break the protocol in the code of a process, so that some schedule must show a problem."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from asymcheck.capture.inflight import Capture
from asymcheck.capture.ring_flush import RingFlusher
from asymcheck.capture.two_phase_commit import TwoPhaseCommit
from asymcheck.commit.orphan_recovery import _Adoption
from asymcheck.commit.pack_builder import PackBuilder
from asymcheck.commit.transaction import CommitTransaction
from asymcheck.format import layout, registry
from asymcheck.gc.collect import StoreSweep
from asymcheck.replication import push
from asymcheck.storage.local_files import OpenFile
from asymcheck.storage.nvme import NvmeTier, Transaction, pack_writer
from asymcheck.storage.nvme.pack_writer import Pool
from asymcheck.storage.reachability import Reachability, StoreReachability
from asymcheck.storage.shm import orphaned_rings
from asymcheck.storage.shm.orphaned_rings import IsDead
from asymcheck.storage.shm.ring_reader import RingReader
from asymcheck.types import PackId
from tests.crash.power import RecordingFiles


def ignore_pins() -> None:
    """Free packs that a save has pinned (SPEC.md §B5 step 4)."""
    Transaction.pins = lambda _self: {}  # here and below, this process is to go wrong


def ignore_new_manifests() -> None:
    """Free packs although a manifest was committed since the listing (§B5 step 4)."""
    StoreReachability.is_current = lambda *_arguments: True


def remove_before_the_mark() -> None:
    """Move garbage packs into the pool before the catalog marks them freed (§B5 step 5)."""
    announce = StoreSweep._announce_freed

    def retire_and_announce(self: StoreSweep, locked: Sequence[PackId], *, blocks_commits: bool) -> list[PackId] | None:
        for pack_id in locked:
            self._tier.pool.put(self._tier.pack_path(pack_id))
        return announce(self, locked, blocks_commits=blocks_commits)

    StoreSweep._announce_freed = retire_and_announce
    StoreSweep._retire = lambda self, _freed: self._tier.pool.sync(self._tier.packs)


def reuse_freed_packs() -> None:
    """Pin reused packs without a look at their state (§B2 step 3)."""
    Transaction.pack_state = lambda _self, _pack: registry.PACK_LIVE


def unlock_before_the_pin() -> None:
    """Release the lock on a new pack before the pack is pinned (§B2 step 3)."""
    seal = PackBuilder.seal

    def seal_and_unlock(self: PackBuilder) -> None:
        seal(self)
        self.close()

    PackBuilder.seal = seal_and_unlock


def commit_before_the_pin() -> None:
    """Publish the manifest before its packs are pinned (§B2 step 4)."""
    CommitTransaction._pin_packs = lambda _self: []


def recycle_without_locks() -> None:
    """Collect and overwrite packs that a reader or a writer has locked (§B5 step 3)."""

    @contextlib.contextmanager
    def locked(_self: NvmeTier, path: Path, *, exclusive: bool = True) -> Iterator[bool]:
        yield path.exists() and exclusive

    NvmeTier.locked = locked
    pack_writer.try_lock = lambda _descriptor, *, exclusive: exclusive


def list_packs_once() -> None:
    """Reject a checkpoint without another look at the packs (§A12)."""
    pack_ids = NvmeTier.pack_ids

    def first_pack_ids(self: NvmeTier) -> list[PackId]:
        return self.__dict__.setdefault("first_pack_ids", pack_ids(self))

    NvmeTier.pack_ids = first_pack_ids


def skip_the_sync_of_packs() -> None:
    """Rename a pack before its content is synced (§B2 step 2)."""
    OpenFile.sync = lambda _self: None


def skip_the_sync_of_folders(name: str) -> None:
    """Do not sync folders with a name, or below a folder with this name."""
    sync = RecordingFiles.sync_directory

    def sync_others(self: RecordingFiles, path: Path) -> None:
        if name not in path.parts[-3:]:
            sync(self, path)

    RecordingFiles.sync_directory = sync_others


def skip_the_sync_of_the_pool() -> None:
    """Overwrite a file whose move into the pool may be lost (§B5)."""
    Pool.sync = lambda _self, _packs: None


def push_without_checks() -> None:
    """Do not look again for the packs that a push relies on (§C2 steps 4 and 6)."""
    push._Push._packs_remain = lambda _self, _relied: True


def remove_without_reading_again() -> None:
    """Remove announced packs at a remote location without another look at the manifests (§C3 step 3)."""
    refresh = Reachability.refresh

    def refresh_once(self: Reachability) -> None:
        if isinstance(self, StoreReachability) or not self.__dict__.setdefault("is_fresh", False):
            refresh(self)
        self.__dict__["is_fresh"] = True

    Reachability.refresh = refresh_once


def remove_rings_first() -> None:
    """Remove the ring of a killed process before its captures are committed (§B9)."""
    commit_all = _Adoption.commit_all

    def remove_and_commit(self: _Adoption, readers: Sequence[RingReader]) -> None:
        for reader in readers:
            reader.unlink()
        commit_all(self, readers)

    _Adoption.commit_all = remove_and_commit


def mark_captures_first() -> None:
    """Mark a capture as durable before its commit (§B9)."""
    settle = RingFlusher._settle

    def mark_and_settle(self: RingFlusher, capture: Capture) -> None:
        if capture.entry is not None:
            self._ring.mark_durable(capture.entry)
        settle(self, capture)

    RingFlusher._settle = mark_and_settle


def take_used_rings() -> None:
    """Take the ring of a living process for that of a dead one (§B9)."""

    def opened(path: Path, is_dead: IsDead, _patience_s: float) -> tuple[RingReader, bool]:
        reader = RingReader(path, hold=False)
        return reader, is_dead(reader.header.owner)

    orphaned_rings._open_locked = opened
    RingReader.is_owned = property(lambda _self: False, lambda _self, _value: None)


def publish_before_all_have_stored() -> None:
    """Publish the manifest of a rank before all ranks have stored their partitions (§C5)."""
    TwoPhaseCommit._all_stored = lambda self, capture, _at: (self._placing(capture), True, None)


BREAKS: dict[str, Callable[[], None]] = {
    "pins": ignore_pins,
    "new-manifests": ignore_new_manifests,
    "mark": remove_before_the_mark,
    "freed": reuse_freed_packs,
    "lock-until-pin": unlock_before_the_pin,
    "pin": commit_before_the_pin,
    "locks-of-collections": recycle_without_locks,
    "list-again": list_packs_once,
    "sync-packs": skip_the_sync_of_packs,
    "sync-folder-of-packs": lambda: skip_the_sync_of_folders(layout.PACKS),
    "sync-manifests": lambda: skip_the_sync_of_folders(layout.MANIFESTS),
    "sync-pool": skip_the_sync_of_the_pool,
    "packs-of-pushes": push_without_checks,
    "read-again": remove_without_reading_again,
    "rings-last": remove_rings_first,
    "durable-last": mark_captures_first,
    "locks-of-rings": take_used_rings,
    "first-phase": publish_before_all_have_stored,
}
"""Broken rules by name."""
