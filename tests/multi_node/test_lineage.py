"""Test the line of training over several stores, with ranks as threads."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from asymcheck import Ranks, Store
from asymcheck.distributed import Session
from asymcheck.distributed.rendezvous import RankLocation
from asymcheck.errors import AsymcheckError, HeadRecordError, RankFailedError, StorageError
from asymcheck.training.resume import align
from tests.distributed.launched import CONFIG
from tests.distributed.test_coordinator import each


@pytest.mark.parametrize("broken", [0, 1])
def test_a_store_that_cannot_be_read_ends_the_start_of_all_at_once(tmp_path: Path, broken: int) -> None:
    """Test that all ranks get the reason, instead of waiting for that rank."""
    keys = dist.HashStore()

    def heads(*_words: object, **_more: object) -> None:
        raise StorageError("cannot read its folder: Input/output error")

    def work(rank: int) -> AsymcheckError | None:
        with Store.open(tmp_path / f"machine-{rank}", config=CONFIG, create=True) as store:
            home = RankLocation(store.resources.tier.descriptor.store_id.hex(), f"node-{rank}", "boot")
            session = Session.join(Ranks(rank, 2, keys, timeout_s=60.0), "run", home)
            if rank == broken:
                store.training.heads = heads  # type: ignore[method-assign, assignment]  # a device that fails
            try:
                align(session, store, "run")
            except AsymcheckError as error:
                return error
        return None

    began = time.monotonic()
    errors = each(2, work)
    assert time.monotonic() - began < 30
    assert isinstance(errors[broken], StorageError)
    assert isinstance(errors[1 - broken], RankFailedError)
    assert all("Input/output error" in str(error) for error in errors)


def aligned(folder: Path) -> list[list[int] | AsymcheckError]:
    """Compare the lines of two stores; return the generations that each knows afterwards, or the error."""
    keys = dist.HashStore()

    def work(rank: int) -> list[int] | AsymcheckError:
        with Store.open(folder / f"machine-{rank}", config=CONFIG, create=True) as store:
            home = RankLocation(store.resources.tier.descriptor.store_id.hex(), f"node-{rank}", "boot")
            session = Session.join(Ranks(rank, 2, keys, timeout_s=60.0), "run", home)
            try:
                align(session, store, "run")
            except AsymcheckError as error:
                return error
            return [head.generation for head in store.training.heads("run")]

    return each(2, work)


def begun(folder: Path, machine: int, count: int) -> Path:
    """Open so many generations in the store of a machine; return the folder of their records."""
    with Store.open(folder / f"machine-{machine}", config=CONFIG, create=True) as store:
        for _ in range(count):
            store.training.begin_generation(None, run="run")
    return folder / f"machine-{machine}" / "heads" / "run"


def test_damaged_data_of_one_store_comes_from_the_other(tmp_path: Path) -> None:
    """Test equal bytes; also if each store lacks another record."""
    first, second = begun(tmp_path, 0, 2), begun(tmp_path, 1, 0)
    assert aligned(tmp_path) == [[1, 2], [1, 2]]
    begun(tmp_path, 1, 1)
    (second / "00000001.head").write_bytes(bytes(8192))
    assert aligned(tmp_path) == [[1, 2, 3], [1, 2, 3]]
    for name in ("00000001.head", "00000002.head", "00000003.head"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_stores_of_two_trainings_do_not_save_together(tmp_path: Path) -> None:
    """Test that their checkpoints are not mixed, and that neither store is changed."""
    folders = [begun(tmp_path, machine, 1 + machine) for machine in range(2)]
    before = [sorted((path.name, path.read_bytes()) for path in folder.iterdir()) for folder in folders]
    found = aligned(tmp_path)
    assert isinstance(found[0], HeadRecordError)
    assert isinstance(found[1], RankFailedError)
    for error in found:
        assert "generation 1 of run 'run' differs between the store of rank 0 and that of rank 1" in str(error)
    assert before == [sorted((path.name, path.read_bytes()) for path in folder.iterdir()) for folder in folders]
    with Store.open(tmp_path / "machine-1", config=CONFIG, create=True) as other:
        theirs = other.training.heads("run")[0]
    with (
        Store.open(tmp_path / "machine-0", config=CONFIG, create=True) as one,
        pytest.raises(HeadRecordError, match="has another generation 1 of run 'run'"),
    ):
        one.resources.nvme.manifests.take_head(theirs)
