"""Test an open store whose manifests vanish: missing manifests do not make their packs garbage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asymcheck import Retention, Store, StoreConfig
from asymcheck.errors import StructureError
from asymcheck.gc.collect import Collected
from asymcheck.gc.retention_runner import Pruner
from asymcheck.storage.reachability import StoreReachability
from tests.store.equality import assert_same


def _state(step: int) -> dict[str, torch.Tensor]:
    return {"own": torch.full((300_000,), float(step)), "shared": torch.arange(300_000)}


def _move_away(store: Path) -> None:
    (store / "manifests").rename(store / "manifests.aside")


def _copy_in(store: Path) -> None:
    """Copy folders first, like a copy tool that has just begun."""
    _move_away(store)
    (store / "manifests" / "default").mkdir(parents=True)


def _begin_to_copy_in(store: Path) -> None:
    _move_away(store)
    (store / "manifests").mkdir()


def _put_back(store: Path) -> None:
    shutil.rmtree(store / "manifests", ignore_errors=True)
    (store / "manifests.aside").rename(store / "manifests")


LOST = [((1, 2), _move_away), ((1, 2), _copy_in), ((1, 2), _begin_to_copy_in), ((1,), _begin_to_copy_in)]


@pytest.mark.slow(quick=["steps0-_move_away-<lambda>"])
@pytest.mark.parametrize("collect", [Store.gc, lambda store: store.gc(dry_run=True)])
@pytest.mark.parametrize(("steps", "lose"), LOST)
def test_nothing_is_freed_while_the_manifests_are_somewhere_else(
    store_path: Path, steps: tuple[int, ...], lose: Callable[[Path], None], collect: Callable[[Store], Collected]
) -> None:
    """Test a store that was opened before its manifests were moved away and back."""
    with Store.open(store_path, create=True) as store:
        for step in steps:
            store.save(_state(step), step=step)
        lose(store_path)
        with pytest.raises(
            StructureError, match=r"manifests (that its catalog names are|is) missing.*Restore the folder"
        ):
            collect(store)
        _put_back(store_path)
        for step in steps:
            assert_same(store.load(step), _state(step))
        assert store.verify() == []
        assert store.gc() == Collected(kept_packs=len(steps))


@pytest.mark.slow(quick=["steps0-_move_away"])
@pytest.mark.parametrize(("steps", "lose"), LOST)
def test_moved_manifests_are_not_taken_for_deleted(
    store: Store, steps: tuple[int, ...], lose: Callable[[Path], None]
) -> None:
    """Test a training that prunes after each commit, and reads only new manifests."""
    pruner = Pruner(store.resources.nvme, store.resources.catalog(), "default", Retention(keep_last=2))
    for step in steps:
        store.save(_state(step), step=step)
        pruner.prune(0, always_collect=True)
    lose(store.path)
    with pytest.raises(StructureError, match="Restore the folder"):
        pruner.prune(0, always_collect=True)
    _put_back(store.path)
    assert pruner.prune(0, always_collect=True).collected == Collected(kept_packs=len(steps))
    assert_same(store.load(), _state(steps[-1]))


@pytest.mark.slow
def test_manifests_that_vanish_during_a_repack_stop_it(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that copies are deleted, and that the original packs stay."""
    with Store.open(store_path, config=StoreConfig(repack_waste=0.1), create=True) as store:
        for step in range(3):
            store.save(_state(step), step=step)
        store.delete(0)
        real, looks = StoreReachability.refresh, list[int]()

        def refresh(needed: StoreReachability) -> None:
            looks.append(1)
            if len(looks) == 2:
                _copy_in(store_path)
            real(needed)

        monkeypatch.setattr(StoreReachability, "refresh", refresh)
        with pytest.raises(StructureError, match="all manifests that its catalog names are missing"):
            store.gc()
        _put_back(store_path)
        for step in (1, 2):
            assert_same(store.load(step), _state(step))
        assert store.gc().repacked_packs == 1
        assert store.verify() == []


def test_checkpoints_that_were_deleted_are_not_missed(store: Store) -> None:
    """Test deleted checkpoints, also by a deletion that was killed before it updated the catalog."""
    for step in (1, 2):
        store.save(_state(step), step=step)
    store.delete(1)
    store.delete(2)
    assert store.gc().freed_packs == 2
    store.save(_state(3), step=3)
    (folder,) = (store.path / "manifests" / "default").iterdir()
    shutil.rmtree(folder)
    assert store.gc().freed_packs == 1


def test_manually_removed_manifests_are_forgotten_on_request(store: Store) -> None:
    """Test that single manifests are forgotten automatically, and all manifests only on request."""
    for step in (1, 2, 3):
        store.save({"own": _state(step)["own"]}, step=step)
    first, *others = sorted((store.path / "manifests" / "default").iterdir())
    shutil.rmtree(first)
    assert store.gc().freed_packs == 1
    for folder in others:
        shutil.rmtree(folder)
    with pytest.raises(StructureError, match=f"removed on purpose, run asymcheck rebuild-catalog {store.path}"):
        store.gc()
    store.resources.rebuild_catalog()
    assert store.gc().kept_packs == 0
    assert store.disk_usage().locked_bytes == 0
