"""Test disk usage against sets of digests, and against the bytes that collections free."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import asymcheck
from asymcheck.errors import CheckpointNotFoundError
from asymcheck.format.frame import frame_length
from asymcheck.inspect.disk_usage import _ROLES, DiskUsage, _divide_by_role
from asymcheck.types import PackId

CONFIG = asymcheck.StoreConfig(partition_bytes=8192, bundle_below_bytes=4096, inline_bytes=64)


def trained(path: Path) -> asymcheck.Store:
    """Return a store with a run that changes a few of its tensors at each step, and a second run that shares some."""
    dice = random.Random(3)
    tensors = {str(number): torch.full((3000,), float(number)) for number in range(8)}
    store = asymcheck.Store.open(path, config=CONFIG, create=True)
    for step in range(6):
        for name in dice.sample(sorted(tensors), 2):
            tensors[name] = tensors[name] + 100
        state = {"model": dict(tensors), "optimizer": {0: {"exp_avg": torch.full((2000,), -1.0 - step)}}}
        store.save(state, step=step)
    store.save({"model": {"0": tensors["0"]}}, step=0, run="other")
    return store


def frames_of(store: asymcheck.Store) -> dict[bytes, int]:
    """Return the bytes of all frames of each partition, read from the packs."""
    found: dict[bytes, int] = {}
    for pack_id in store.resources.tier.pack_ids():
        pack = store.resources.tier.open_pack(pack_id)
        for name, stored in zip(pack.digests(), pack.entries["stored_length"].tolist(), strict=True):
            found[name] = found.get(name, 0) + frame_length(stored)
        pack.close()
    return found


def needs_of(store: asymcheck.Store) -> dict[str, set[bytes]]:
    """Return the partitions of each checkpoint, by save id."""
    found = {}
    for run in store.resources.tier.manifests.runs():
        for listing in store.resources.tier.manifests.checkpoints(run):
            (name,) = listing.manifests
            manifest = store.resources.tier.manifests.read(run, listing.ref, name)
            found[listing.ref.save_id.hex()] = {bytes(digest) for digest in manifest.partitions()}
    return found


def check_sums(found: DiskUsage) -> None:
    """Check that the parts of the packs' bytes add up."""
    parts = (found.live_bytes, found.locked_bytes, found.freeable_bytes, found.overhead_bytes, found.unreadable_bytes)
    assert sum(parts) == found.pack_bytes
    assert min(parts) >= 0


def test_bytes_are_those_of_sets_of_digests(store_path: Path) -> None:
    """Test stored, own and shared bytes of every checkpoint, and live bytes, against sets of digests."""
    with trained(store_path) as store:
        frames, needs = frames_of(store), needs_of(store)
        found = store.disk_usage()
        assert len(found.checkpoints) == 7
        for item in found.checkpoints:
            others = set().union(*(need for save, need in needs.items() if save != item.save_id))
            need = needs[item.save_id]
            assert item.stored_bytes == sum(frames[name] for name in need)
            assert item.own_bytes == sum(frames[name] for name in need - others)
            assert item.shared_bytes == item.stored_bytes - item.own_bytes
        assert any(item.own_bytes and item.shared_bytes for item in found.checkpoints)
        assert found.live_bytes == sum(frames[name] for name in set().union(*needs.values()))
        assert (found.locked_bytes, found.freeable_bytes, found.damaged_packs) == (0, 0, 0)
        check_sums(found)
        states = {checkpoint.save_id: checkpoint.state_bytes for checkpoint in store.checkpoints()}
        assert {item.save_id: item.state_bytes for item in found.checkpoints} == states


def test_own_bytes_become_garbage_after_deletion(store_path: Path) -> None:
    """Test that a collection frees the announced number of bytes."""
    with trained(store_path) as store:
        for step in (2, 0, 4):
            before = store.disk_usage()
            own = next(item.own_bytes for item in before.checkpoints if (item.run, item.step) == ("default", step))
            store.delete(step)
            after = store.disk_usage()
            assert before.live_bytes - after.live_bytes == own
            check_sums(after)
            dry = store.gc(dry_run=True)
            assert (after.freeable_packs, after.freeable_bytes) == (dry.freed_packs, dry.freed_bytes)
        assert after.locked_bytes > 0
        store.delete(0, run="other")
        for step in (1, 3, 5):
            store.delete(step)
        alone = store.disk_usage()
        assert alone.checkpoints == ()
        assert (alone.freeable_packs, alone.freeable_bytes) == (alone.packs, alone.pack_bytes)
        freed = store.gc()
        assert freed.freed_bytes == alone.freeable_bytes
        empty = store.disk_usage()
        assert (empty.packs, empty.pooled_packs, empty.pooled_bytes) == (0, freed.pooled_packs, freed.freed_bytes)
        assert empty.catalog_bytes > 0


def test_one_run_is_listed_but_all_runs_are_counted(store_path: Path) -> None:
    """Test that shared data of another run is not exclusive, and that the totals are those of the store."""
    with trained(store_path) as store:
        everything, one = store.disk_usage(), store.disk_usage("other")
        assert one.checkpoints == everything.checkpoints[-1:]
        assert one.checkpoints[0].own_bytes == 0
        assert one.live_bytes == everything.live_bytes
        assert [(role.role, role.state_bytes) for role in one.roles] == [("weights", 12_000)]
        assert one.roles[0].stored_bytes == one.checkpoints[0].stored_bytes
        with pytest.raises(CheckpointNotFoundError, match="it has runs default, other"):
            store.disk_usage("nobody")


def test_roles_come_from_the_manifests(store_path: Path) -> None:
    """Test that state bytes count every checkpoint, and stored bytes each partition once."""
    with trained(store_path) as store:
        found = store.disk_usage()
    roles = {role.role: role for role in found.roles}
    assert set(roles) == {"weights", "first_moment"}
    assert roles["weights"].state_bytes == 6 * 8 * 12_000 + 12_000
    assert roles["first_moment"].state_bytes == 6 * 8000
    assert roles["weights"].stored_bytes + roles["first_moment"].stored_bytes == found.live_bytes
    assert roles["first_moment"].stored_bytes == 6 * frame_length(8000)


def test_a_partition_of_several_roles_is_shared_out(store_path: Path) -> None:
    """Test shares by bytes, whose sum is the stored size."""
    config = asymcheck.StoreConfig(partition_bytes=1 << 16, bundle_below_bytes=1 << 14, inline_bytes=64)
    state = {
        "model": {"w": torch.randn(100)},
        "optimizer": {"state": {0: {"exp_avg": torch.randn(100), "exp_avg_sq": torch.rand(300)}}},
    }
    with asymcheck.Store.open(store_path, config=config, create=True) as store:
        for step in (1, 2):
            store.save(state, step=step)
        found = store.disk_usage()
        assert len(needs_of(store).popitem()[1]) == 2
    roles = {role.role: role for role in found.roles}
    assert {role: one.stored_bytes for role, one in roles.items()} == {
        "weights": frame_length(400),
        "first_moment": frame_length(1600) // 4,
        "second_moment": frame_length(1600) // 4 * 3,
    }
    assert {role: one.state_bytes for role, one in roles.items()} == {
        "weights": 800,
        "first_moment": 800,
        "second_moment": 2400,
    }


def test_shares_are_whole_and_add_up() -> None:
    """Test remainders of the division, and a partition of one role."""
    count = len(_ROLES)
    dice = np.random.default_rng(5)
    bytes_of = dice.integers(1, 1 << 30, 50)
    partitions, roles = dice.integers(0, 50, 1000), dice.integers(0, count, 1000)
    found = _divide_by_role(partitions, roles, dice.integers(1, 1 << 26, 1000), bytes_of)
    assert found.sum() == bytes_of[np.unique(partitions)].sum()
    assert found.min() >= 0
    alone = _divide_by_role(np.array([7]), np.array([2]), np.array([13]), bytes_of)
    assert alone[2] == alone.sum() == bytes_of[7]
    assert _divide_by_role(partitions[:0], roles[:0], roles[:0], bytes_of).sum() == 0


def test_an_empty_store(store_path: Path) -> None:
    """Test that all numbers are zero."""
    with asymcheck.Store.open(store_path, create=True) as store:
        found = store.disk_usage()
    assert (found.checkpoints, found.roles, found.packs, found.pack_bytes, found.manifests) == ((), (), 0, 0, 0)


def test_the_catalog_is_not_read(store_path: Path) -> None:
    """Test a damaged catalog, which stays unchanged."""
    trained(store_path).close()
    with asymcheck.Store.open(store_path, read_only=True) as store:
        before = store.disk_usage()
    data = store_path / "catalog" / "data.mdb"
    data.write_bytes(b"rubbish" * 1000)
    with asymcheck.Store.open(store_path, read_only=True) as store:
        after = store.disk_usage()
    assert after.checkpoints == before.checkpoints
    assert after.live_bytes == before.live_bytes
    assert data.read_bytes() == b"rubbish" * 1000


def test_a_damaged_manifest_makes_nothing_freeable(store_path: Path) -> None:
    """Test that the report agrees with a collection, which frees nothing."""
    with trained(store_path) as store:
        store.delete(5)
        assert store.disk_usage().locked_bytes + store.disk_usage().freeable_bytes > 0
        listing = store.resources.tier.manifests.checkpoints("default")[0]
        path = store.resources.tier.manifests.directory("default", listing.ref) / str(listing.manifests[0])
        path.write_bytes(path.read_bytes()[:-1])
        found = store.disk_usage()
    assert (found.unreadable_manifests, found.freeable_packs, found.freeable_bytes) == (1, 0, 0)
    assert [item.complete for item in found.checkpoints] == [False, True, True, True, True, True]
    check_sums(found)


def test_damaged_and_lost_packs(store_path: Path) -> None:
    """Test that a lost pack shows as missing partitions, and that an unreadable one has only a size."""
    with trained(store_path) as store:
        packs = sorted((store_path / "packs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        header = bytearray(packs[0].read_bytes())
        header[10] ^= 255
        packs[0].write_bytes(header)
        scanned = store.disk_usage()
        assert (scanned.damaged_packs, scanned.unreadable_bytes) == (1, 0)
        assert not any(item.missing_partitions for item in scanned.checkpoints)
        packs[0].write_bytes(bytes(len(header)))
        lost = store.disk_usage()
        assert (lost.damaged_packs, lost.unreadable_bytes) == (1, len(header))
        assert lost.checkpoints[0].missing_partitions == len(needs_of(store)[lost.checkpoints[0].save_id])
        assert lost.packs == len(packs)
        check_sums(lost)


def test_a_locked_pack_is_no_damage(store_path: Path) -> None:
    """Test a pack that a save or a collection holds."""
    trained(store_path).close()
    config = dataclasses.replace(CONFIG, read_lock_timeout_s=0)
    with asymcheck.Store.open(store_path, config=config, read_only=True) as store:
        before, pack = store.disk_usage(), next((store_path / "packs").iterdir())
        with store.resources.nvme.locked(pack) as held:
            assert held
            assert store.disk_usage() == before


@pytest.mark.parametrize("is_listed_before", [False, True], ids=["before", "after"])
def test_a_deletion_during_the_account_is_no_loss(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, is_listed_before: bool
) -> None:
    """Test checkpoints that a training deletes, and frames that it moves, before or after packs are listed."""
    with trained(store_path) as store:
        tier = store.resources.tier
        pack_ids, collected = tier.pack_ids, list[int]()

        def listed_late() -> list[PackId]:
            before = list(pack_ids())
            if not collected:
                collected.append(0)
                for step in (0, 1, 2, 3):
                    store.delete(step)
                collected[0] = store.gc().repacked_packs
                return before if is_listed_before else list(pack_ids())
            return before

        monkeypatch.setattr(tier, "pack_ids", listed_late)
        found = store.disk_usage()
        assert collected[0] > 0
        assert [(item.run, item.step) for item in found.checkpoints if item.missing_partitions] == []
        assert [(item.run, item.step) for item in found.checkpoints if not item.complete] == []
        if not is_listed_before:
            assert found == store.disk_usage()
        check_sums(found)


def test_partitions_in_two_packs_count_twice(store_path: Path, tmp_path: Path) -> None:
    """Test that both copies are live, so a collection frees neither."""
    with trained(store_path) as store:
        before = store.disk_usage()
        # Two concurrent saves leave this state: the second pack has the same partitions as the first.
        with asymcheck.Store.open(tmp_path / "twin", config=CONFIG, create=True) as twin:
            twin.save({"model": {"0": torch.full((3000,), 0.0), "1": torch.full((3000,), 1.0)}}, step=0)
            (pack,) = (tmp_path / "twin" / "packs").iterdir()
        (store_path / "packs" / pack.name).write_bytes(pack.read_bytes())
        store.resources.rebuild_catalog()
        after = store.disk_usage()
        dry = store.gc(dry_run=True)
    shared = sum(one.stored_bytes for one in after.checkpoints) > sum(one.stored_bytes for one in before.checkpoints)
    assert shared
    assert after.live_bytes > before.live_bytes
    assert (after.freeable_packs, dry.freed_packs) == (0, 0)
    check_sums(after)
