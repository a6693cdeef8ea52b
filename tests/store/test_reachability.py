"""Test reachability: garbage collection keeps bases, relied copies, and unreadable data."""

from __future__ import annotations

import dataclasses
import errno
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from asymcheck import Checkpointer, Retention, Store
from asymcheck.errors import LockTimeoutError, StorageError
from asymcheck.events import Event, observe
from asymcheck.fsck.verify import Severity
from asymcheck.gc.repack import BaseLocations
from asymcheck.gc.retention_runner import Pruner
from asymcheck.restore.load import LoadRequest
from asymcheck.storage.local_files import Files, translated
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.reachability import StoreReachability
from asymcheck.training.resume import _restored_part
from asymcheck.types import Digest, Location, PackId
from tests.damage.flips import flip
from tests.store.deltas import CONFIG, PLAIN, entries_of, noise, pack_of_the_delta

_CHILD = """
import sys
from asymcheck import Store
from asymcheck.events import observe

def hold(event):
    if event.name == "gc.repacked":
        print("held", flush=True)
        sys.stdin.readline()

with Store.open(sys.argv[1], create=True) as store, observe(hold):
    store.gc()
"""


def _is_whole(store: Store, weights: torch.Tensor) -> bool:
    return torch.equal(store.load(step=2)["weights"], weights) and store.verify() == []


@pytest.mark.slow
def test_a_base_stays_while_another_collection_moves_the_delta(store_path: Path, weights: torch.Tensor) -> None:
    """Test a delta whose old pack is marked as freed, and whose new pack is locked, so neither can be opened."""
    command = [sys.executable, "-c", _CHILD, str(store_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with Store.open(store_path, config=CONFIG, create=True) as store:
            store.gc()
        child.communicate("\n", timeout=60)
    with Store.open(store_path, config=CONFIG, create=True) as store:
        assert _is_whole(store, weights)


def _refuse(monkeypatch: pytest.MonkeyPatch, name: str, times: float) -> None:
    """Make the given number of reads of a file's first bytes fail."""
    whole: Callable[[Files, Path], int] = Files.open_read
    left = [times]

    def open_read(self: Files, path: Path) -> int:
        if path.name == name and left[0] > 0:
            left[0] -= 1
            with translated("open", path):
                raise OSError(errno.EIO, "input/output error")
        return whole(self, path)

    monkeypatch.setattr(Files, "open_read", open_read)


@pytest.mark.slow(quick=["1"])
@pytest.mark.parametrize("times", [1, np.inf])
def test_a_base_stays_when_the_pack_of_its_delta_cannot_be_read(
    store_path: Path, weights: torch.Tensor, monkeypatch: pytest.MonkeyPatch, times: float
) -> None:
    """Test temporary errors, and permanent errors, which are reported and prevent the collection."""
    with Store.open(store_path, config=CONFIG, create=True) as store:
        with monkeypatch.context() as patched:
            _refuse(patched, pack_of_the_delta(store_path), times)
            if times == 1:
                store.gc()
            else:
                with pytest.raises(StorageError, match=r"bases .*are unknown.*input/output error; run gc again"):
                    store.gc()
        assert _is_whole(store, weights)


def test_temporarily_unreadable_checkpoint_is_not_deleted(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the checkpoint is not treated as incomplete."""
    with Store.open(store_path, config=PLAIN, create=True) as store:
        for step in range(1, 5):
            store.save({"noise": noise(step)}, step=step)
        whole: Callable[[Files, Path], int] = Files.open_read

        def open_read(self: Files, path: Path) -> int:
            if path.suffix == ".manifest":
                with translated("open", path):
                    raise OSError(errno.EIO, "input/output error")
            return whole(self, path)

        with monkeypatch.context() as patched:
            patched.setattr(Files, "open_read", open_read)
            with pytest.raises(StorageError, match="input/output error"):
                store.prune(Retention(keep_last=3))
        assert [one.step for one in store.checkpoints()] == [1, 2, 3, 4]
        store.prune(Retention(keep_last=3))
        assert [one.step for one in store.checkpoints()] == [2, 3, 4]


def test_a_copy_that_is_damaged_stands_for_no_other(store_path: Path) -> None:
    """Test two runs that stored a tensor at the same time; one copy is damaged while the intact pack is garbage."""
    shared, small, large = noise(1, 60_000), noise(2, 1000), noise(3, 200_000)
    with (
        Store.open(store_path, config=PLAIN, create=True) as store,
        Store.open(store_path, config=PLAIN, create=True) as other,
    ):
        done: list[Event] = []

        def save_too(event: Event) -> None:
            if event.name == "pack.sealed" and not done:
                done.append(event)
                other.save({"shared": shared, "large": large}, step=1, run="b")
                other.save({"shared": shared}, step=2, run="b")

        with observe(save_too):
            store.save({"shared": shared, "small": small}, step=1, run="a")
        tier = NvmeTier(store_path, PLAIN, read_only=True)
        for pack in tier.pack_ids():
            entries = entries_of(tier, pack)
            if shared.nbytes in entries["plain_length"] and entries["plain_length"].sum() < large.nbytes:
                offset = int(entries["offset"][entries["plain_length"] == shared.nbytes][0])
                path = store_path / "packs" / f"{pack.hex()}.pack"
                flip(path, 8 * (offset + 100_000))
        store.delete(step=1, run="b")
        store.gc()
        for run in ("a", "b"):
            assert torch.equal(store.load(run=run)["shared"], shared)


def test_a_pack_with_a_damaged_frame_is_not_copied_again_and_again(store_path: Path) -> None:
    """Test that the intact frames are not copied and discarded after every commit."""
    state = {f"t{number}": noise(number, 60_000) for number in range(8)}
    with Store.open(store_path, config=PLAIN, create=True) as store:
        store.save({**state, "zeta": noise(9, 700_000)}, step=1)
        (path,) = (store_path / "packs").iterdir()
        store.save(state, step=2)
        store.delete(step=1)
        tier = NvmeTier(store_path, PLAIN, read_only=True)
        entries = entries_of(tier, bytes.fromhex(path.stem))
        flip(path, 8 * (int(entries["offset"][entries["plain_length"] == 240_000].max()) + 100_000))
        pruner = Pruner(store.resources.nvme, store.resources.catalog(), "default", Retention(keep_last=5))
        written = []
        for _ in range(2):
            copied: list[int] = []
            with observe(
                lambda event, into=copied: into.append(event.bytes) if event.name == "frame.written" else None
            ):
                pruner.prune(0, always_collect=True)
            written.append(len(copied))
        assert written[0] > 0
        assert written[1] == 0


def test_chain_of_deltas_does_not_grow_through_garbage(store_path: Path) -> None:
    """Test a base that is stored again, eight deltas deep, while a garbage delta stays in its pack."""
    torch.manual_seed(0)
    base = torch.randn(60_000) * 0.02
    on_base, kept = base + torch.randn_like(base) * 1e-6, noise(1, 100_000)
    state = {"weights": base.clone(), "kept": noise(0, 100_000)}
    with Store.open(store_path, config=CONFIG, create=True) as store:
        with Checkpointer(store, state, every=1, keep=None) as checkpointer:
            checkpointer.step(0)
            checkpointer.wait()
            state["weights"].copy_(on_base)
            state["kept"].copy_(kept)
            checkpointer.step(1)
            checkpointer.wait()
        store.save({"weights": torch.randn(60_000), "kept": kept}, step=2)
        store.delete(step=0)
        store.delete(step=1)
        store.gc()
        with Checkpointer(store, state, every=1, keep=None) as checkpointer:
            checkpointer.restore()
            wanted = [base + torch.randn_like(base) * 1e-6 for _ in range(8)] + [base, on_base]
            for step, weights in enumerate(wanted, 10):
                state["weights"].copy_(weights)
                checkpointer.step(step)
                checkpointer.wait()
        for step, weights in enumerate(wanted, 10):
            assert torch.equal(store.load(step=step)["weights"], weights)


@pytest.mark.usefixtures("weights")
def test_locked_pack_is_indexed_correctly(store_path: Path) -> None:
    """Test that garbage collection keeps the bases of frames that other processes have just sealed."""
    tier = NvmeTier(store_path, CONFIG, read_only=True)
    needed = StoreReachability(tier)
    needed.refresh()
    wanted = needed.live()
    with tier.locked(store_path / "packs" / pack_of_the_delta(store_path)) as held:
        assert held
        needed = StoreReachability(tier)
        needed.refresh()
        assert (needed.live(), needed.unread, needed.problem) == (wanted, 1, None)


def _collect_after(monkeypatch: pytest.MonkeyPatch, count: int, store: Store) -> None:
    """Collect a store right after packs are listed for the ``count``-th time."""
    whole = NvmeTier.pack_ids
    listed: list[int] = []

    def pack_ids(self: NvmeTier) -> list[PackId]:
        found = whole(self)
        listed.append(len(found))
        if len(listed) == count:
            store.gc()
        return found

    monkeypatch.setattr(NvmeTier, "pack_ids", pack_ids)


def test_base_moved_by_a_collection_is_found(
    store_path: Path, weights: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a collection between the listing of packs and their reading."""
    eager = dataclasses.replace(CONFIG, repack_waste=0.1)
    with Store.open(store_path, config=eager, create=True) as store, Store.open(store_path, read_only=True) as reader:
        _collect_after(monkeypatch, 1, store)
        restored = reader.restore()
        assert (restored.checkpoint.step, restored.skipped) == (2, ())
        assert torch.equal(restored.state["weights"], weights)


@pytest.mark.usefixtures("weights")
def test_a_sound_store_is_verified_beside_a_collection(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that data that the collection moves is not reported as missing."""
    eager = dataclasses.replace(CONFIG, repack_waste=0.1)
    with Store.open(store_path, config=eager, create=True) as store, Store.open(store_path, read_only=True) as reader:
        _collect_after(monkeypatch, 2, store)
        assert [one for one in reader.verify() if one.severity != Severity.HINT] == []


def _saved_twice(store: Store) -> Path:
    """Save two checkpoints; return the pack of the second one."""
    store.save({"noise": noise(1)}, step=1)
    before = {*(store.path / "packs").iterdir()}
    store.save({"noise": noise(2)}, step=2)
    (new,) = {*(store.path / "packs").iterdir()} - before
    return new


def test_a_pack_that_is_locked_for_too_long_makes_no_older_checkpoint_the_newest(store_path: Path) -> None:
    """Test that a locked pack does not count as damaged."""
    with Store.open(store_path, config=PLAIN, create=True) as store:
        new = _saved_twice(store)
    impatient = dataclasses.replace(PLAIN, read_lock_timeout_s=0.05)
    with Store.open(store_path, config=impatient, read_only=True) as reader:
        with NvmeTier(store_path, PLAIN, read_only=True).locked(new) as held:
            assert held
            with pytest.raises(LockTimeoutError, match="was locked"):
                reader.restore()
        assert reader.restore().checkpoint.step == 2


def test_a_rank_does_not_pass_over_a_checkpoint_in_a_locked_pack(store_path: Path) -> None:
    """Test that the part of a rank does not count as damaged, so that all ranks would restore an older checkpoint."""
    impatient = dataclasses.replace(PLAIN, read_lock_timeout_s=0.05)
    with Store.open(store_path, config=impatient, create=True) as store:
        ref = store.save({"noise": noise(1)}, step=1).ref
        (pack,) = (store_path / "packs").iterdir()
        wanted = LoadRequest("*", {"noise": noise(2)}, torch.device("cpu"), rank=0)
        with NvmeTier(store_path, PLAIN, read_only=True).locked(pack) as held:
            assert held
            with pytest.raises(LockTimeoutError, match="was locked"):
                _restored_part(store, "default", ref, wanted, None)
        assert _restored_part(store, "default", ref, wanted, None).step == 1


def test_a_copy_in_a_locked_pack_makes_no_older_checkpoint_the_newest(store_path: Path, tmp_path: Path) -> None:
    """Test a damaged frame, of which another process has locked the intact copy."""
    impatient = dataclasses.replace(PLAIN, read_lock_timeout_s=0.05)
    with Store.open(tmp_path / "twin", config=PLAIN, create=True) as twin:
        twin.save({"noise": noise(2)}, step=2)
    (twin_pack,) = (tmp_path / "twin" / "packs").iterdir()
    with Store.open(store_path, config=impatient, create=True) as store:
        new = _saved_twice(store)
        flip(new, 3 * 4096 * 8)
        copy = Path(shutil.copy(twin_pack, store_path / "packs"))
        with NvmeTier(store_path, PLAIN, read_only=True).locked(copy) as held:
            assert held
            with pytest.raises(LockTimeoutError, match="was locked"):
                store.restore()
        assert store.restore().checkpoint.step == 2


@pytest.mark.parametrize("deep", [True, False])
def test_verify_calls_nothing_missing_that_a_locked_pack_may_hold(store_path: Path, *, deep: bool) -> None:
    """Test that the check reports what it could not read, and no lost checkpoint."""
    with Store.open(store_path, config=PLAIN, create=True) as store:
        new = _saved_twice(store)
    impatient = dataclasses.replace(PLAIN, read_lock_timeout_s=0.05)
    with Store.open(store_path, config=impatient, read_only=True) as reader:
        with NvmeTier(store_path, PLAIN, read_only=True).locked(new) as held:
            assert held
            unchecked, busy = reader.verify(deep=deep)
        assert (busy.kind, busy.severity) == ("busy-pack", Severity.HINT)
        assert (unchecked.kind, unchecked.severity) == ("unchecked-partitions", Severity.WARNING)
        assert [name.split(" (")[0] for name in unchecked.checkpoints] == ["run default, step 2"]
        assert "run verify again" in unchecked.message
        assert reader.verify(deep=deep) == []


def test_a_home_that_cannot_be_found_any_more_is_none(store_path: Path) -> None:
    """Test a pack whose index was damaged after it was read: a scan finds other frames, or none."""
    with Store.open(store_path, config=PLAIN, create=True) as store:
        store.save({"noise": noise(1, 60_000)}, step=1)
    tier = NvmeTier(store_path, PLAIN, read_only=True)
    (pack,) = tier.pack_ids()
    entry = entries_of(tier, pack)[0]
    name = Digest(entry["digest"].tobytes())
    sizes = (int(entry["stored_length"]), int(entry["plain_length"]), 0, 0, 1)
    for offset, is_sound in ((int(entry["offset"]), True), (int(entry["offset"]) + 4096, False)):
        homes = BaseLocations(tier)
        homes.add([((name, bytes(16)), Location(pack, offset, *sizes, bytes(16)))])
        assert (homes.of((name, bytes(16))) is not None) == is_sound
