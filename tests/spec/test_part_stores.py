"""Test the frozen stores of one job, one per machine, whose first store also has damage and incomplete tensors.

Tests of the two other readers are in ``test_encoded_stores.py`` and ``test_javascript_reader.py``.
"""

import shutil
from pathlib import Path

import pytest
import torch

import asymcheck
from asymcheck.errors import InconsistentCheckpointError, StateMismatchError
from asymcheck.format import layout
from asymcheck.format.manifest import Manifest
from asymcheck.format.manifest_reader import decode_manifest
from asymcheck.fsck.verify import Severity
from tests.spec.frozen import FrozenParts, check_everything, part_stores
from tests.spec.test_readers_agree import reader

ALL = part_stores()
DAMAGE = ["damaged-frame", "damaged-frame", "damaged-pack", "partial-tensor"]


def test_part_stores_exist() -> None:
    """Test that the first version exists."""
    assert "v1-by-0.1.0-parts" in {frozen.whole.name for frozen in ALL}


@pytest.mark.parametrize("frozen", ALL, ids=str)
def test_stores_together_restore(frozen: FrozenParts, store_path: Path) -> None:
    """Test every checkpoint and rank bit for bit, and that a check finds the damage and no loss."""
    frozen.copy_to(store_path)
    with asymcheck.Store.open(store_path, read_only=True) as store:
        check_everything(store, frozen)
        assert sorted(finding.kind for finding in store.verify()) == DAMAGE


@pytest.mark.parametrize("frozen", ALL, ids=str)
def test_one_store_has_no_consistent_checkpoint_of_the_job(frozen: FrozenParts, store_path: Path) -> None:
    """Test that the library and the reference reader refuse the job, and that the library names the ranks."""
    (facts,) = (facts for facts in frozen.checkpoints if "store_ranks" in facts)
    for machine in frozen.machines:
        path = frozen.of(machine).copy_to(store_path / str(machine))
        with asymcheck.Store.open(path, read_only=True) as store:
            (checkpoint,) = store.checkpoints("job")
            assert checkpoint.save_id == facts["save_id"]
            assert checkpoint.complete
            assert [list(span) for span in checkpoint.store_ranks or ()] == facts["store_ranks"][machine]
            assert not [finding for finding in store.verify() if finding.severity is Severity.ERROR]
            with pytest.raises(InconsistentCheckpointError, match="only the shards of ranks"):
                store.load(run="job")
        with pytest.raises(reader()["SpecError"], match="no checkpoint to read") as refused:
            reader()["read_store"](path, "job").resolve()
        assert refused.value.kind == "inconsistent-checkpoint"


@pytest.mark.parametrize("frozen", ALL, ids=str)
def test_missing_elements_are_refused_before_the_first_byte(frozen: FrozenParts) -> None:
    """Test that no given tensor changes, also not a tensor that has all elements."""
    state = {"bias": torch.full((8,), -1.0), "shard": torch.full((5, 8), -1.0)}
    missing = r"nothing was overwritten:\n  shard: \[4:5, 0:8\] of \[5, 8\]"
    with (
        asymcheck.Store.open(frozen.whole / "store-0", read_only=True) as store,
        pytest.raises(StateMismatchError, match=missing),
    ):
        store.load(run="lacking", into=state)
    assert all(bool((tensor == -1).all()) for tensor in state.values())


@pytest.mark.parametrize("with_catalog", [False, True], ids=["rebuilt", "old catalog"])
@pytest.mark.parametrize("frozen", ALL, ids=str)
def test_a_collection_keeps_the_parts(frozen: FrozenParts, store_path: Path, *, with_catalog: bool) -> None:
    """Test that a writer takes a checkpoint of some ranks for a complete one, in the store of each machine."""
    together = store_path / "together"
    for machine in frozen.machines:
        path = frozen.of(machine).copy_to(store_path / str(machine), with_catalog=with_catalog)
        with asymcheck.Store.open(path, create=True) as store:
            store.gc()
        shutil.rmtree(path / layout.CATALOG)
        shutil.copytree(path, together, dirs_exist_ok=True)
    with asymcheck.Store.open(together, read_only=True) as store:
        check_everything(store, frozen)


def manifests(folder: Path) -> list[Manifest]:
    """Return all manifests below a folder."""
    return [decode_manifest(path.read_bytes(), path.name) for path in sorted(folder.rglob("*.manifest"))]


@pytest.mark.parametrize("frozen", ALL, ids=str)
def test_the_job_has_one_store_per_machine(frozen: FrozenParts) -> None:
    """Test equal head records, the ranks of each store, and one partition that only one of the stores pushes."""
    paths = [frozen.whole / f"store-{machine}" for machine in frozen.machines]
    heads = [[path.read_bytes() for path in sorted((store / "heads" / "job").iterdir())] for store in paths]
    assert heads[0] == heads[1]
    assert heads[0]
    parts = [manifests(path / "manifests" / "job") for path in paths]
    assert [[one.header.rank for one in ranks] for ranks in parts] == [[0, 1], [2, 3]]
    assert [{one.header.store_ranks for one in ranks} for ranks in parts] == [{((0, 1),)}, {((2, 3),)}]
    named = [set().union(*(one.partitions() for one in ranks)) for ranks in parts]
    marked = [set().union(*(one.elsewhere() for one in ranks)) for ranks in parts]
    assert len(marked[0] | marked[1]) == 1
    assert marked[0] | marked[1] <= named[0] & named[1]
    assert not marked[0] & marked[1]
