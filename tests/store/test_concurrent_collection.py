"""Test a garbage collection concurrent with processes that reuse pins and manifests of others."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from asymcheck import Store
from asymcheck.format.catalog_records import manifest_key, pin_key
from asymcheck.fsck import rebuild_catalog as rebuild_module
from asymcheck.fsck.verify import Severity
from asymcheck.gc import collect as collect_module
from asymcheck.storage import reachability as reachability_module
from asymcheck.storage.process_identity import hold, let_go, this_process
from asymcheck.storage.reachability import StoreReachability
from asymcheck.types import Owner, SaveId

PIN = pin_key(SaveId(b"k" * 16), 0)
DEAD = Owner(1, 1, "another boot", "pid:[1]")
FIRST = dataclasses.replace(this_process(), pid=999_999_999, pid_namespace="pid:[1]")
"""Owner in another container, whose state is unknown, so it counts as alive."""


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    """Return a store whose packs belong to no checkpoint, as after a save that was killed before its commit."""
    with Store.open(store_path, create=True) as opened:
        opened.save({"w": torch.rand(100_000)}, step=0)
        opened.delete(0)
        yield opened


def pin(store: Store, owner: Owner) -> None:
    """Pin all packs."""
    with store.resources.catalog().write() as transaction:
        transaction.put_pin(PIN, owner, store.resources.nvme.pack_ids())


def pins(store: Store) -> dict[bytes, Owner]:
    """Return the owners of all pins."""
    with store.resources.catalog().read() as transaction:
        return {key: owner for key, (owner, _) in transaction.pins().items()}


def once(monkeypatch: pytest.MonkeyPatch, where: object, name: str, action: Callable[[], object]) -> None:
    """Call a function once, right after another function was called for the first time."""
    original, done = getattr(where, name), list[bool]()

    def call(*arguments: object) -> object:
        result = original(*arguments)
        if not done:
            done.append(True)
            action()
        return result

    monkeypatch.setattr(where, name, call)


@pytest.mark.parametrize("dead", [DEAD, this_process()], ids=["of-another", "let-go"])
@pytest.mark.parametrize("living", [FIRST, this_process()], ids=["by-another", "here"])
def test_a_pin_that_is_taken_up_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch, dead: Owner, living: Owner
) -> None:
    """Test the recovery of a ring, or a resumed pull, which pins packs under the key of a killed process."""
    pin(store, dead)

    def take_up() -> None:
        if living == this_process():
            hold(PIN)
        pin(store, living)

    once(monkeypatch, StoreReachability, "refresh", take_up)
    packs = store.resources.nvme.pack_ids()
    assert store.gc().freed_packs == 0
    assert store.resources.nvme.pack_ids() == packs
    assert pins(store) == {PIN: living}
    let_go(PIN)
    if living == this_process():
        assert store.gc().freed_packs == len(packs)
        assert pins(store) == {}


def test_two_collections_keep_the_checkpoint_of_a_killed_save(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a save that commits after the first collection listed manifests, and is killed before it enters its own.

    The second collection drops the pin of the save, before the first one frees packs.
    """
    nvme, catalog = store.resources.nvme, store.resources.catalog()
    store.save({"w": torch.rand(100_000)}, step=1)
    (listing,) = nvme.manifests.checkpoints("default")
    (manifest,) = nvme.manifests.directory("default", listing.ref).glob("*.manifest")
    hidden = manifest.with_suffix(".tmp")
    manifest.rename(hidden)
    with catalog.write() as transaction:
        for key in transaction.manifests():
            transaction.delete("manifests", key)
    pin(store, FIRST)

    def commit_die_and_collect() -> None:
        hidden.rename(manifest)
        pin(store, DEAD)
        collect_module.collect(nvme, catalog)

    once(monkeypatch, StoreReachability, "refresh", commit_die_and_collect)
    store.gc()
    assert pins(store) == {}
    assert not [one for one in store.verify() if one.severity == Severity.ERROR]
    store.load(step=1)


def test_a_pin_that_is_taken_up_stays_when_the_catalog_is_compared(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a repair, which compares the catalog with the packs."""
    pin(store, DEAD)
    hold(PIN)
    once(monkeypatch, rebuild_module, "read_indexes", lambda: pin(store, this_process()))
    assert store.resources.rebuild_catalog().kept_pins == 1
    assert pins(store) == {PIN: this_process()}
    let_go(PIN)


@pytest.fixture
def location(tmp_path: Path) -> str:
    """Return the location from which checkpoints are restored."""
    return (tmp_path / "there").as_uri()


def lose_manifest(store: Store, step: int) -> None:
    """Delete only the manifest, like a deletion that is killed before it updates the catalog."""
    (listing,) = (one for one in store.resources.nvme.manifests.checkpoints("default") if one.ref.step == step)
    store.resources.nvme.manifests.remove("default", listing.ref)


def test_a_checkpoint_that_comes_back_keeps_its_packs(
    store: Store, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a manifest that reappears under a name that the catalog still has."""
    store.save({"w": torch.rand(100_000)}, step=1)
    store.push(location)
    lose_manifest(store, 1)
    once(monkeypatch, reachability_module, "is_manifest_deleted", lambda: store.pull(location, 1))
    store.gc()
    assert store.verify() == []
    assert [one.step for one in store.checkpoints()] == [1]


def test_a_checkpoint_that_comes_back_between_two_batches_keeps_its_packs(
    store: Store, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a manifest that reappears after the first batch has removed it from the catalog."""
    monkeypatch.setattr(collect_module, "_BATCH", 1)
    garbage = set(store.resources.nvme.pack_ids())
    store.save({"w": torch.rand(100_000)}, step=1)
    store.push(location)
    lose_manifest(store, 1)
    whole = collect_module.StoreSweep._free

    def free(sweep: collect_module.StoreSweep, *, blocks_commits: bool) -> bool:
        sweep.candidates = dict(sorted(sweep.candidates.items(), key=lambda one: one[0] not in garbage))
        return whole(sweep, blocks_commits=blocks_commits)

    monkeypatch.setattr(collect_module.StoreSweep, "_free", free)
    once(monkeypatch, collect_module.StoreSweep, "_retire", lambda: store.pull(location, 1))
    store.gc()
    assert store.verify() == []
    assert [one.step for one in store.checkpoints()] == [1]


def test_a_checkpoint_that_comes_back_is_seen_by_repacking(
    store: Store, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that data that only this checkpoint needs is copied from a pack that is mostly garbage."""
    shared = torch.rand(200_000)
    store.save({"own": torch.rand(2_000_000), "shared": shared, "other": torch.rand(200_000)}, step=1)
    store.save({"shared": shared}, step=2)
    store.push(location, everything=True)
    store.delete(1)
    manifest: list[tuple[Path, bytes]] = []

    def come_and_go() -> None:
        store.pull(location, 1)
        (path,) = (store.path / "manifests" / "default").glob("*-000000000001-*/*")
        manifest.append((path, path.read_bytes()))
        lose_manifest(store, 1)

    def come_again() -> None:
        ((path, data),) = manifest
        path.parent.mkdir()
        path.write_bytes(data)

    once(monkeypatch, collect_module.StoreSweep, "_retire", come_and_go)
    once(monkeypatch, reachability_module, "is_manifest_deleted", come_again)
    store.gc()
    assert store.verify() == []
    assert [one.step for one in store.checkpoints()] == [1, 2]


def test_deletion_keeps_a_returned_manifest_in_the_catalog(
    store: Store, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a manifest that reappears between its removal and the transaction."""
    store.save({"w": torch.rand(100)}, step=1)
    store.push(location)
    (listing,) = store.resources.nvme.manifests.checkpoints("default")
    once(monkeypatch, type(store.resources.nvme.manifests), "remove", lambda: store.pull(location, 1))
    store.delete(1)
    with store.resources.catalog().read() as transaction:
        assert transaction.manifests() == {manifest_key("default", listing.ref, name) for name in listing.manifests}


def test_collection_ends_beside_saves_that_do_not(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test saves that need garbage again after each search for garbage; in the end, saves wait for the collection."""
    again, saves = torch.rand(100_000), list[int]()
    find_garbage = collect_module.StoreSweep._find_garbage

    def find_and_save(sweep: collect_module.StoreSweep) -> None:
        find_garbage(sweep)
        saves.append(len(saves) + 2)
        store.save({"again": again, "new": torch.rand(100_000)}, step=saves[-1])

    with Store.open(store_path, create=True) as store:
        store.save({"again": again}, step=0)
        store.save({"useless": torch.rand(100_000)}, step=1)
        store.delete(0)
        store.delete(1)
        monkeypatch.setattr(collect_module.StoreSweep, "_find_garbage", find_and_save)
        assert store.gc().freed_packs == 1
        assert saves == list(range(2, 2 + collect_module._PATIENT_ATTEMPTS + 1))
        assert store.verify() == []
        for step in saves:
            assert torch.equal(store.load(step=step)["again"], again)


def test_a_pin_of_a_process_that_opens_the_store_again_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a living process that had closed the store when the collection looked for dead pins."""
    start = int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19])
    init = dataclasses.replace(this_process(), pid=1, start_ticks=start)
    pin(store, init)
    catalog = store.resources.catalog()
    mark = catalog.path / "open" / f"1-{start}-{init.boot_id}-{init.pid_namespace}"
    with contextlib.ExitStack() as opened:
        assert PIN in catalog.dead_pins()

        def open_again() -> None:
            fcntl.flock(opened.enter_context(mark.open("x")), fcntl.LOCK_EX)

        once(monkeypatch, StoreReachability, "refresh", open_again)
        assert store.gc().freed_packs == 0
        assert pins(store) == {PIN: init}
    mark.unlink()
    assert store.gc().freed_packs > 0
