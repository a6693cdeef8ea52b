"""Test deltas and damage: recoverable frames keep their bases, and lost ones are reported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Store
from asymcheck.errors import InconsistentCheckpointError
from asymcheck.format import registry
from asymcheck.fsck.verify import Severity
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.pack_index import bases_in, digests_of
from asymcheck.types import PackId
from tests.damage.flips import flip
from tests.store.deltas import CONFIG, PLAIN, entries_of, noise, pack_of_the_delta


def test_garbage_whose_base_was_collected_is_no_finding(store_path: Path) -> None:
    """Test an unneeded delta in a pack that stays because of another partition."""
    torch.manual_seed(0)
    state = {"weights": torch.randn(60_000) * 0.02, "kept": noise(0, 100_000)}
    with Store.open(store_path, config=CONFIG, create=True) as store:
        with Checkpointer(store, state, every=1, keep=None) as checkpointer:
            checkpointer.step(0)
            checkpointer.wait()
            state["weights"].add_(torch.randn(60_000), alpha=1e-6)
            state["kept"].copy_(noise(1, 100_000))
            checkpointer.step(1)
            checkpointer.wait()
        store.save({"weights": torch.randn(60_000), "kept": state["kept"]}, step=2)
        store.delete(step=0)
        store.delete(step=1)
        assert store.gc().freed_packs == 1
        assert pack_of_the_delta(store_path)
        assert store.verify() == []
        repaired = store.repair()
        assert (repaired.left, repaired.copied_partitions) == ((), 0)
        assert store.verify() == []


def _spoil(path: Path, *places: int) -> None:
    for place in places:
        flip(path, 8 * place)


@pytest.mark.parametrize("with_frame", [False, True], ids=["header", "header and another frame"])
def test_recoverable_frames_of_a_damaged_pack_keep_their_bases(
    store_path: Path, weights: torch.Tensor, *, with_frame: bool
) -> None:
    """Test a delta after a damaged frame, which a plain read of the pack does not reach."""
    name = pack_of_the_delta(store_path)
    entries = entries_of(NvmeTier(store_path, CONFIG, read_only=True), PackId(bytes.fromhex(Path(name).stem)))
    # The order of the frames depends on the speed of the threads.
    others = [int(entry["offset"]) for entry in entries if entry["kind"] == registry.KIND_FULL]
    _spoil(store_path / "packs" / name, 8, *others[: 1 if with_frame else 0])
    with Store.open(store_path, config=CONFIG, create=True) as store:
        store.gc()
        store.repair()
        store.gc()
        assert torch.equal(store.load(step=2)["weights"], weights)


def test_a_repair_says_of_a_damaged_pack_that_bases_are_lost(store_path: Path, weights: torch.Tensor) -> None:
    """Test the report, that the file stays, and that a save of the same bytes restores the base."""
    name = pack_of_the_delta(store_path)
    tier = NvmeTier(store_path, CONFIG, read_only=True)
    (base,) = bases_in(entries_of(tier, bytes.fromhex(Path(name).stem))).values()
    for pack in tier.pack_ids():
        if base in digests_of(entries_of(tier, pack)):
            (store_path / "packs" / f"{pack.hex()}.pack").unlink()
    _spoil(store_path / "packs" / name, 8)
    with Store.open(store_path, config=CONFIG, create=True) as store:
        left = {one.kind: one for one in store.repair().left}
        assert "the bases of 1 frames are lost" in left["unreadable-pack"].message
        assert left["unreadable-pack"].remedy.startswith("remove the file when")
        assert "lost-partitions" in left
    assert (store_path / "packs" / name).exists()
    assert len(weights) == 60_000


def test_a_damaged_base_is_no_loss_once_its_partition_is_stored_again_in_full(
    store_path: Path, weights: torch.Tensor
) -> None:
    """Test that a check reports no checkpoint as lost after a save of the same bytes."""
    tier = NvmeTier(store_path, CONFIG, read_only=True)
    (base,) = bases_in(entries_of(tier, bytes.fromhex(Path(pack_of_the_delta(store_path)).stem))).values()
    for pack in tier.pack_ids():
        entries = entries_of(tier, pack)
        for number in [number for number, name in enumerate(digests_of(entries)) if name == base]:
            _spoil(tier.pack_path(pack), int(entries["offset"][number]) + 2 * registry.BLOCK_BYTES)
    with Store.open(store_path, config=CONFIG) as store:
        with pytest.raises(InconsistentCheckpointError):
            store.load(step=2)
        store.save({"weights": weights}, step=3)
        assert torch.equal(store.load(step=2)["weights"], weights)
        assert {one.severity for one in store.verify()} == {Severity.WARNING}


def test_a_lost_base_is_not_missing_once_its_partition_is_stored_in_full(
    store_path: Path, weights: torch.Tensor, tmp_path: Path
) -> None:
    """Test the disk usage of a delta whose base is lost, before and after its partition is stored in full."""
    tier = NvmeTier(store_path, CONFIG, read_only=True)
    (base,) = bases_in(entries_of(tier, bytes.fromhex(Path(pack_of_the_delta(store_path)).stem))).values()
    for pack in tier.pack_ids():
        if base in digests_of(entries_of(tier, pack)):
            tier.pack_path(pack).unlink()
    with Store.open(tmp_path / "twin", config=PLAIN, create=True) as twin:
        twin.save({"weights": weights}, step=2)
    with Store.open(store_path, config=CONFIG, read_only=True) as store:
        assert [item.missing_partitions for item in store.disk_usage().checkpoints] == [1]
        (twin_pack,) = (tmp_path / "twin" / "packs").iterdir()
        shutil.copy(twin_pack, store_path / "packs")
        assert [item.missing_partitions for item in store.disk_usage().checkpoints] == [0]
        assert torch.equal(store.load(step=2)["weights"], weights)


def test_a_store_is_verified_in_the_end_though_packs_come_all_the_time(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test packs that appear during a training, and garbage without a base, for which the search is repeated."""
    torch.manual_seed(0)
    state = {"weights": torch.randn(60_000) * 0.02, "kept": noise(0, 100_000)}
    with Store.open(store_path, config=CONFIG, create=True) as store:
        with Checkpointer(store, state, every=1, keep=None) as checkpointer:
            for step in range(2):
                checkpointer.step(step)
                checkpointer.wait()
                state["weights"].add_(torch.randn(60_000), alpha=1e-6)
                state["kept"].copy_(noise(1, 100_000))
        store.save({"weights": torch.randn(60_000), "kept": state["kept"]}, step=2)
        store.delete(step=0)
        store.delete(step=1)
        store.gc()
        whole = NvmeTier.pack_ids
        listed: list[int] = []

        def pack_ids(self: NvmeTier) -> list[PackId]:
            listed.append(1)
            assert len(listed) < 100, "it goes on and on"
            return [*whole(self), PackId(len(listed).to_bytes(16, "big"))]

        monkeypatch.setattr(NvmeTier, "pack_ids", pack_ids)
        assert [one for one in store.verify() if one.severity != Severity.HINT] == []
        assert store.repair().left == ()
