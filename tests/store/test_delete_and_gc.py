"""Test deletion and garbage collection: unreferenced packs are recycled, and no other file is changed."""

import dataclasses
import fcntl
import shutil
from pathlib import Path

import pytest
import torch

from asymcheck import Store, StoreConfig, events
from asymcheck.errors import CheckpointNotFoundError, InconsistentCheckpointError, InvalidInputError
from asymcheck.format.catalog_records import pin_key
from asymcheck.gc.collect import Collected
from asymcheck.storage.process_identity import this_process
from asymcheck.types import SaveId
from tests.damage.flips import flip
from tests.store.equality import assert_same, directory_content

MIB = 1 << 20


def _state(seed: int, mebibytes: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randint(256, (mebibytes * MIB,), dtype=torch.uint8, generator=generator)}


def _inodes(folder: Path) -> dict[int, int]:
    return {path.stat().st_ino: path.stat().st_size for path in folder.iterdir()}


def _durable_content(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return all files except LMDB's table of readers, which every read of the catalog changes."""
    return {name: found for name, found in directory_content(root).items() if name != "catalog/lock.mdb"}


def test_a_deleted_checkpoint_is_gone_and_the_others_stay(store: Store) -> None:
    """Test that the checkpoint is returned, not listed, and not loadable, and that the previous one is the newest."""
    for step in (1, 2, 3):
        store.save(_state(step), step=step, metrics={"loss": step / 2})
    deleted = store.delete(3)
    assert [(c.step, c.metrics, c.complete, c.state_bytes) for c in deleted] == [(3, {"loss": 1.5}, True, 4 * MIB)]
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1, 2]
    with pytest.raises(CheckpointNotFoundError, match="steps 1, 2"):
        store.load(3)
    assert_same(store.load(), _state(2))


def test_deleting_a_missing_checkpoint_is_an_error(store: Store) -> None:
    """Test another step, run or generation, and that nothing is changed."""
    store.save(_state(1), step=1)
    before = directory_content(store.path / "manifests")
    for step, options in [(2, {}), (1, {"run": "other"}), (1, {"generation": 2})]:
        with pytest.raises(CheckpointNotFoundError):
            store.delete(step, **options)  # type: ignore[arg-type]  # options differ in type
    assert directory_content(store.path / "manifests") == before


def test_one_generation_of_a_step_can_be_deleted(store: Store) -> None:
    """Test that without a generation, all saves of the step are deleted."""
    for seed in (1, 2):
        store.save(_state(seed), step=5)
        store.training.begin_generation(None)
    store.save(_state(3), step=5)
    with pytest.raises(InvalidInputError, match="generation '2': give an integer"):
        store.delete(5, generation="2")  # type: ignore[arg-type]  # refused
    assert [checkpoint.generation for checkpoint in store.delete(5, generation=2)] == [2]
    assert [checkpoint.generation for checkpoint in store.checkpoints()] == [1, 3]
    assert [checkpoint.generation for checkpoint in store.delete(5)] == [1, 3]
    assert store.checkpoints() == []


def test_one_save_of_a_step_can_be_deleted(store: Store) -> None:
    """Test two saves of a step in one generation, as after two imports."""
    first, second = (store.save(_state(seed), step=5) for seed in (1, 2))
    with pytest.raises(CheckpointNotFoundError, match=f"save:{first.save_id} of run 'default' in generation 2"):
        store.delete(f"save:{first.save_id}", generation=2)
    with pytest.raises(InvalidInputError, match="matches 2 checkpoints"):
        store.delete(f"save:{first.save_id[:6]}")
    with pytest.raises(InvalidInputError, match="may soon be another"):
        store.delete("best:loss")
    assert [found.save_id for found in store.delete(f"save:{first.save_id[:-1]}")] == [first.save_id]
    assert [found.save_id for found in store.checkpoints()] == [second.save_id]


def test_dry_run_of_a_deletion_changes_nothing(store: Store) -> None:
    """Test the returned checkpoints, also in a read-only store, and the error that lists the generations."""
    store.save(_state(1), step=5)
    store.training.begin_generation(None)
    store.save(_state(2), step=5)
    with Store.open(store.path, read_only=True) as reader:
        assert [checkpoint.generation for checkpoint in reader.delete(5, dry_run=True)] == [1, 2]
        with pytest.raises(CheckpointNotFoundError, match=r"in generation 3; it has that step in generation 1, 2"):
            reader.delete(5, generation=3, dry_run=True)
        assert [checkpoint.generation for checkpoint in reader.checkpoints()] == [1, 2]


def test_collecting_frees_unreferenced_packs(store: Store) -> None:
    """Test that freed packs move into the pool, and that the other checkpoints can be loaded."""
    for step in (1, 2, 3):
        store.save(_state(step), step=step)
    files = _inodes(store.path / "packs")
    store.delete(2)
    collected = store.gc()
    freed = _inodes(store.path / "pool")
    assert len(freed) == 1
    assert freed.items() <= files.items()
    nbytes = sum(freed.values())
    assert collected == Collected(freed_packs=1, freed_bytes=nbytes, pooled_packs=1, pool_bytes=nbytes, kept_packs=2)
    assert_same(store.load(1), _state(1))
    assert_same(store.load(3), _state(3))
    assert store.verify() == []


def test_dry_run_equals_the_real_run(store_path: Path) -> None:
    """Test every number, also with a pool for some packs only, and that nothing is changed."""
    with Store.open(store_path, config=StoreConfig(pool_bytes=9 * MIB), create=True) as store:
        for step in range(6):
            store.save(_state(step), step=step)
        (store_path / "packs" / f"{'ab' * 16}.tmp").write_bytes(b"left by a crash")
        for step in range(4):
            store.delete(step)
        before = _durable_content(store_path)
        expected = store.gc(dry_run=True)
        assert _durable_content(store_path) == before
        assert store.gc() == expected
        assert (expected.freed_packs, expected.pooled_packs, expected.kept_packs) == (4, 2, 2)
        assert expected.removed_temporaries == 1
        nothing = Collected(kept_packs=2, pool_bytes=expected.pool_bytes)
        assert store.gc(dry_run=True) == store.gc() == nothing


def test_pool_is_as_large_as_one_checkpoint(store: Store) -> None:
    """Test the default limit when many checkpoints are deleted at once, and a dry run, which reports the same."""
    for step in range(8):
        store.save(_state(step), step=step)
    for step in range(6):
        store.delete(step)
    expected = store.gc(dry_run=True)
    collected = store.gc()
    assert collected == expected
    assert (collected.freed_packs, collected.pooled_packs) == (6, 1)
    assert collected.returned_bytes + collected.pool_bytes == collected.freed_bytes
    assert collected.pool_bytes == sum(_inodes(store.path / "pool").values()) <= 1.25 * collected.freed_bytes / 6


def test_pool_is_trimmed_when_checkpoints_become_smaller(store: Store) -> None:
    """Test that packs of large checkpoints do not stay in the pool of a store with small ones."""
    for step in range(2):
        store.save(_state(step, mebibytes=8), step=step)
    store.delete(0)
    assert store.gc().pooled_packs == 1
    store.save(_state(2), step=2)
    store.save(_state(3), step=3)
    store.delete(1)
    expected = store.gc(dry_run=True)
    collected = store.gc()
    assert collected == expected
    pooled = sum(_inodes(store.path / "pool").values())
    assert collected.pool_bytes == pooled
    assert pooled <= 1.25 * store.resources.usage().pack_bytes / 2
    with Store.open(store.path, config=StoreConfig(pool_bytes=0)) as emptying:
        emptied = emptying.gc()
    assert (emptied.returned_bytes, emptied.pool_bytes) == (pooled, 0)


def test_a_dry_run_sees_packs_that_are_in_use(store: Store) -> None:
    """Test that both count a pack as busy while a reader uses it, and free it later."""
    store.save(_state(1), step=1)
    store.delete(1)
    (pack,) = store.resources.tier.pack_ids()
    reader = store.resources.tier.open_pack(pack)
    try:
        expected = store.gc(dry_run=True)
        assert store.gc() == expected == Collected(busy_packs=1)
    finally:
        reader.close()
    assert store.gc().freed_packs == 1


def test_a_freed_file_is_overwritten_by_the_next_save(store: Store) -> None:
    """Test that the file is recycled: the same inode under a new name."""
    store.save(_state(1), step=1)
    (inode,) = _inodes(store.path / "packs")
    (name,) = [path.name for path in (store.path / "packs").iterdir()]
    store.delete(1)
    store.gc()
    store.save(_state(2), step=2)
    assert list(_inodes(store.path / "packs")) == [inode]
    assert [path.name for path in (store.path / "packs").iterdir()] != [name]
    assert list((store.path / "pool").iterdir()) == []
    assert_same(store.load(), _state(2))
    assert store.verify() == []


@pytest.mark.slow(quick=["16-2"])
@pytest.mark.parametrize(("old", "new"), [(16, 2), (16, 15), (2, 16), (5, 5)])
def test_a_recycled_file_may_have_any_size(store: Store, old: int, new: int) -> None:
    """Test that bytes after the end of the pack are ignored, and that a file with mostly old bytes is truncated."""
    store.save(_state(1, old), step=1)
    store.delete(1)
    store.gc()
    store.save(_state(2, new), step=2)
    (size,) = _inodes(store.path / "packs").values()
    assert size <= 2 * (new * MIB + 16 * 4096)
    assert_same(store.load(), _state(2, new))
    assert store.verify() == []


@pytest.mark.slow
def test_many_rounds_of_recycling_need_the_room_of_three_checkpoints(store: Store) -> None:
    """Test with two kept checkpoints that the files of a third are reused, and no new file is made."""
    inodes: set[int] = set()
    for step in range(12):
        store.save(_state(step), step=step)
        inodes |= set(_inodes(store.path / "packs"))
        if step >= 2:
            store.delete(step - 2)
            store.gc()
        assert_same(store.load(), _state(step))
    assert len(inodes) == 3
    assert store.verify() == []


def test_full_pool_unlinks_files(store_path: Path) -> None:
    """Test that the disk space is freed immediately."""
    with Store.open(store_path, config=StoreConfig(pool_bytes=0), create=True) as store:
        store.save(_state(1), step=1)
        store.delete(1)
        collected = store.gc()
    assert (collected.freed_packs, collected.pooled_packs) == (1, 0)
    assert list((store_path / "pool").iterdir()) == list((store_path / "packs").iterdir()) == []


def test_pack_stays_while_one_partition_is_needed(store: Store) -> None:
    """Test that deduplicated bytes stay in their first pack."""
    # Much less than half of a pack becomes garbage, so the pack is not repacked with any encoding.
    shared, own = _state(1)["x"], [_state(number)["x"][:200_000] for number in (2, 3)]
    store.save({"shared": shared, "own": own[0]}, step=1)
    store.save({"shared": shared, "own": own[1]}, step=2)
    store.delete(1)
    assert store.gc() == Collected(kept_packs=2)
    assert_same(store.load(), {"shared": shared, "own": own[1]})
    store.delete(2)
    assert store.gc().freed_packs == 2


def test_collected_partition_is_written_again(store: Store) -> None:
    """Test that the catalog forgets freed partitions, so that it does not grow."""
    for step in range(3):
        assert store.save(_state(1), step=step).written_bytes == 4 * MIB
        store.delete(step)
        store.gc()
        with store.resources.catalog().read() as transaction:
            assert list(transaction.locations()) == []
            assert transaction.pins() == {}
            assert transaction.manifests() == set()


def test_collecting_an_empty_store_is_nothing(store: Store) -> None:
    """Test a store without checkpoints and packs: all numbers are zero."""
    assert store.gc() == store.gc(dry_run=True) == Collected()


def test_pool_that_was_removed_is_made_again(store: Store) -> None:
    """Test a user who removes the pool during a training, to free space."""
    for step in (1, 2):
        store.save(_state(step), step=step)
    shutil.rmtree(store.path / "pool")
    store.save(_state(3), step=3)
    store.delete(1)
    assert store.gc().pooled_packs == 1
    store.save(_state(4), step=4)
    assert store.verify() == []


def test_temporary_manifests_without_a_pin_are_removed(store: Store) -> None:
    """Test a temporary file beside a manifest, as a killed rank leaves it, and an unfinished folder."""
    saved = store.save(_state(1), step=1)
    (manifest,) = (store.path / "manifests").rglob("*.manifest")
    unfinished = manifest.parent.with_name(f"00000001-000000000002-{'ab' * 16}")
    unfinished.mkdir()
    left = [manifest.with_name("00001-0.tmp"), unfinished / "00000-0.tmp"]
    for path in left:
        path.write_bytes(b"left by a crash")
    keys = [pin_key(SaveId(bytes.fromhex(save_id)), 1) for save_id in (saved.save_id, "ab" * 16)]
    alive = dataclasses.replace(this_process(), pid_namespace="another")
    mark = store.path / "catalog" / "open" / f"{alive.pid}-{alive.start_ticks}-{alive.boot_id}-another"
    with mark.open("x") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with store.resources.catalog().write() as transaction:
            for key in keys:
                transaction.put_pin(key, alive, [])
        store.gc()
        assert all(path.exists() for path in left)
    store.gc()
    assert [path.exists() for path in (*left, unfinished, manifest)] == [False, False, False, True]


def test_freed_pack_that_a_killed_collection_left_is_freed_again(store: Store) -> None:
    """Test a pack that is still among the packs, without and with a live partition (SPEC.md §B5, step 5)."""
    for saves in (0, 1):
        store.save(_state(1), step=1)
        store.delete(1)
        (pack,) = (store.path / "packs").iterdir()
        with pytest.raises(KeyboardInterrupt), events.observe(_stop_after_the_mark):
            store.gc()
        assert pack.exists()
        if saves:
            assert store.save(_state(1), step=1).written_bytes == 4 * MIB
        assert store.gc().freed_packs == 1
        assert not pack.exists()
        assert len(list((store.path / "packs").iterdir())) == saves
    assert_same(store.load(), _state(1))


def _stop_after_the_mark(event: events.Event) -> None:
    if event.name == "gc.marked_freed":
        raise KeyboardInterrupt


def test_a_damaged_manifest_stops_the_collection(store: Store) -> None:
    """Test that nothing is freed until the checkpoint with the unreadable manifest is deleted."""
    for step in (1, 2):
        store.save(_state(step), step=step)
    store.delete(1)
    (manifest,) = (store.path / "manifests").rglob("*.manifest")
    flip(manifest, 8 * (manifest.stat().st_size // 2))
    for dry_run in (True, False):
        with pytest.raises(InconsistentCheckpointError, match="delete that checkpoint"):
            store.gc(dry_run=dry_run)
    assert len(_inodes(store.path / "packs")) == 2
    store.delete(2)
    assert store.gc().freed_packs == 2
