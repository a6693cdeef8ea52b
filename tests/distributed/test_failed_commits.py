"""Test commits that one rank cannot complete because its drive is full: no rank keeps data of the lost checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asymcheck import Checkpointer, Ranks, Retention, Store
from asymcheck.capture.background_saver import BackgroundSaver
from asymcheck.commit.transaction import RingTransaction
from asymcheck.config import CaptureConfig
from asymcheck.errors import LostCheckpointError, LostCheckpointWarning, OutOfSpaceError
from asymcheck.storage.nvme import ManifestFiles
from asymcheck.storage.shm.ring_writer import Ring
from asymcheck.types import PackId
from tests.distributed.launched import CONFIG
from tests.distributed.test_coordinator import each


def _lose_a_step(folder: Path, stores: int, before: Callable[[Store], object]) -> None:
    """Save step 0, and step 1, which rank 1 cannot store; rank 0 calls ``before`` between both."""
    keys = dist.HashStore()

    def work(rank: int) -> None:
        machine = rank % stores
        memory = folder / f"memory-{rank}"
        memory.mkdir()
        capture, keep = CaptureConfig(ring_folder=str(memory)), Retention(keep_last=1)
        ranks = Ranks(rank, 2, keys, timeout_s=60.0, node=f"node-{machine}")
        state: dict[str, object] = {f"own-{rank}": torch.full((3000,), rank + 1.0)}
        with (
            Store.open(folder / f"machine-{machine}", config=CONFIG, create=True) as store,
            Checkpointer(store, state, capture=capture, keep=keep, ranks=ranks, every=1) as checkpointer,
        ):
            checkpointer.save(0)
            if rank == 0:
                before(store)
            state[f"own-{rank}"] = torch.full((3000,), rank + 9.0)
            with pytest.raises(LostCheckpointError, match="no space"):
                checkpointer.save(1)

    each(2, work)


@pytest.mark.parametrize("stores", [1, 2])
def test_no_rank_keeps_its_manifest_if_one_cannot_publish_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stores: int
) -> None:
    """Test that incomplete checkpoints do not fill the drive, and that no machine counts them in its retention."""
    publish, is_published = ManifestFiles.publish, threading.Event()

    def refuse(files: ManifestFiles, run: str, ref: Any, rank: int, *more: Any) -> object:  # noqa: ANN401 - passed on
        if (rank, ref.step) == (1, 1):
            assert is_published.wait(60)
            raise OutOfSpaceError("no space for a manifest")
        published = publish(files, run, ref, rank, *more)
        if ref.step == 1:
            is_published.set()
        return published

    monkeypatch.setattr(ManifestFiles, "publish", refuse)
    _lose_a_step(tmp_path, stores, lambda _store: None)
    for machine in range(stores):
        with Store.open(tmp_path / f"machine-{machine}", config=CONFIG) as store:
            assert [(one.step, one.complete) for one in store.checkpoints()] == [(0, True)]
            assert store.verify() == []
            store.gc()


def test_packs_are_freed_if_the_drive_is_full_for_another_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the packs that rank 0, which prunes for all ranks, has written before."""
    seal = RingTransaction.seal_frames

    def refuse(transaction: RingTransaction) -> None:
        if transaction._rank == 1 and packs:
            raise OutOfSpaceError("no space for a pack")
        seal(transaction)

    packs: list[PackId] = []
    monkeypatch.setattr(RingTransaction, "seal_frames", refuse)
    _lose_a_step(tmp_path, 1, lambda store: packs.extend(store.resources.tier.pack_ids()))
    with Store.open(tmp_path / "machine-0", config=CONFIG) as store:
        assert store.resources.tier.pack_ids() == packs


@pytest.mark.parametrize("full", [0, 1])
def test_training_of_all_ranks_continues_if_the_memory_of_one_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    """Test a ring that cannot be created: with ``on_error="warn"``, the next step is saved by all ranks."""
    make, keys, refused = BackgroundSaver._make_ring, dist.HashStore(), list[int]()

    def refuse(saver: BackgroundSaver, *sizes: Any) -> Ring:  # noqa: ANN401 - passed on
        if saver._session is not None and saver._session.rank == full and not refused:
            refused.append(full)
            raise OutOfSpaceError("no space for a ring")
        return make(saver, *sizes)

    monkeypatch.setattr(BackgroundSaver, "_make_ring", refuse)

    def work(rank: int) -> list[bool]:
        capture, ranks = CaptureConfig(ring_folder=str(tmp_path)), Ranks(rank, 2, keys, timeout_s=60.0)
        state: dict[str, object] = {}
        with (
            Store.open(tmp_path / "store", config=CONFIG, create=True) as store,
            Checkpointer(store, state, capture=capture, ranks=ranks, every=1, on_error="warn") as checkpointer,
        ):
            begun = []
            for step in range(2):
                state[f"own-{rank}"] = torch.full((3000,), rank + 9.0 * step)
                begun.append(checkpointer.step(step))
                checkpointer.wait()
            return begun

    with pytest.warns(LostCheckpointWarning, match="step 0 of run 'default' was not saved: .*no space for a ring"):
        assert each(2, work)[full] == [False, True]
    with Store.open(tmp_path / "store", config=CONFIG) as store:
        assert [(one.step, one.complete) for one in store.checkpoints()] == [(1, True)]
