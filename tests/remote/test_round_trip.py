"""Test that push and pull restore every bit, and that nothing is sent twice."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path, PurePath

import pytest
import torch

from asymcheck import Store
from asymcheck.commit.pack_builder import PackBuilder
from asymcheck.errors import (
    CheckpointNotFoundError,
    DamagedPartitionError,
    InconsistentCheckpointError,
    InvalidInputError,
    ReadOnlyStoreError,
    StorageError,
    StoreNotFoundError,
)
from asymcheck.format.manifest import Manifest
from asymcheck.storage.local_files import Files
from asymcheck.storage.manifests import CheckpointFiles, ManifestReader
from asymcheck.storage.nvme import PackFile, Slot
from asymcheck.storage.nvme.manifests import ManifestFiles
from asymcheck.types import Digest
from tests.crash import faults
from tests.damage.flips import flip
from tests.remote.conftest import CONFIG, check_location, check_state, config, save_steps, state_of
from tests.restore.test_bases import delta_of, plain_of, swap, weights
from tests.restore.test_bases import save_steps as save_weights


@pytest.mark.slow(quick=["file", "hdfs"])
def test_push_and_pull_of_the_newest(store: Path, any_location: str, tmp_path: Path) -> None:
    """Test a partial and a full remote restore, and a pull into a new store."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        done = opened.push(any_location)
    assert [len(done.committed), done.present, done.reused_partitions] == [1, 0, 0]
    assert done.packs > 1
    shutil.rmtree(store)
    check_location(any_location, 2)
    with Store.open(any_location, config=CONFIG, create=True) as remote:
        part = remote.load(tensors="model.fixed")
        assert torch.equal(part["model"]["fixed"], torch.arange(20_000.0))  # type: ignore[index]  # a mapping
        into = {"model": {"w": torch.zeros(40_000)}}
        remote.load(into=into, tensors="model.w")
        assert torch.equal(into["model"]["w"], state_of(2)["model"]["w"])  # type: ignore[index]  # a mapping
    with Store.open(tmp_path / "new", config=CONFIG, create=True) as new:
        pulled = new.pull(any_location)
        assert pulled.moved_partitions == done.moved_partitions
        check_state(new.load(), 2)
        assert new.verify() == []
        new.save(state_of(3), step=3)


@pytest.mark.slow(quick=["file"])
def test_present_data_is_not_sent_again(store: Path, any_location: str) -> None:
    """Test that step 2 shares a third of its bytes with step 1, and that its second push sends nothing."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        first, second, third = (
            opened.push(any_location, 1),
            opened.push(any_location, 2),
            opened.push(any_location, everything=True),
        )
    assert second.reused_partitions > 0
    assert second.moved_partitions + second.reused_partitions == first.moved_partitions
    assert (third.present, third.packs, third.moved_bytes) == (2, 0, 0)
    check_location(any_location, 1, 2)


@pytest.mark.slow(long=["hdfs", "objects"])
def test_packs_are_cut_at_their_size(store: Path, any_location: str) -> None:
    """Test that the number of files follows from the bytes, plus the last file of each push."""
    with Store.open(store, config=config(pack_bytes=1 << 30), create=True) as opened:
        assert opened.push(any_location).packs == 1
    check_location(any_location, 2)


@pytest.mark.slow(long=["hdfs", "objects"])
def test_the_line_goes_with_the_checkpoints(store: Path, any_location: str) -> None:
    """Test a restore of step 1: the remote step 2 is abandoned, too, and the new step 2 is the newest."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(any_location, everything=True)
        generation = opened.training.begin_generation(opened.checkpoints()[0])
        opened.save(state_of(7), step=2, generation=generation)
        opened.push(any_location)
        local = [(one.step, one.generation, one.on_line) for one in opened.checkpoints()]
    with Store.open(any_location, config=CONFIG, create=True) as remote:
        assert [(one.step, one.generation, one.on_line) for one in remote.checkpoints()] == local
        state = remote.load()
        assert torch.equal(state["model"]["w"], state_of(7)["model"]["w"])  # type: ignore[index]  # a mapping


def test_the_line_goes_also_when_no_checkpoint_does(store: Path, folder: str) -> None:
    """Test a restore of step 1 without a new checkpoint: step 2 is abandoned at the location, too."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, everything=True)
        opened.training.begin_generation(opened.checkpoints()[0])
        assert opened.push(folder).present == 1
    with Store.open(folder, config=CONFIG, create=True) as remote:
        assert [(one.step, one.on_line) for one in remote.checkpoints()] == [(1, True), (2, False)]
        check_state(remote.load(), 1)


@pytest.mark.slow(quick=["file"], long=["hdfs", "objects"])
def test_two_trainings_of_one_name_are_kept_apart(any_location: str, tmp_path: Path) -> None:
    """Test different head records: the second push is refused, and the first run is not changed."""
    for name, parent in (("a", 0), ("b", 1)):
        save_steps(tmp_path / name, 1, 2)
        with Store.open(tmp_path / name, config=CONFIG, create=True) as opened:
            generation = opened.training.begin_generation(opened.checkpoints()[parent])
            opened.save(state_of(3), step=3, generation=generation)
            if name == "a":
                opened.push(any_location)
            else:
                with pytest.raises(InvalidInputError, match="another training"):
                    opened.push(any_location)
    check_location(any_location, 3)


@pytest.mark.slow(quick=["file"], long=["hdfs", "objects"])
def test_two_trainings_from_nothing_are_kept_apart(any_location: str, tmp_path: Path) -> None:
    """Test trainings without a parent that began at different times, for example after the loss of a store."""
    for name in ("a", "b"):
        with Store.open(tmp_path / name, config=CONFIG, create=True) as opened:
            opened.save(state_of(1), step=1, generation=opened.training.begin_generation(None))
            if name == "a":
                opened.push(any_location)
            else:
                with pytest.raises(InvalidInputError, match="another training"):
                    opened.push(any_location)
    check_location(any_location, 1)


@pytest.mark.slow(quick=["file"], long=["hdfs", "objects"])
def test_two_stores_share_equal_partitions(any_location: str, tmp_path: Path) -> None:
    """Test runs of different names at one location: the second push sends only new bytes."""
    for name in ("a", "b"):
        with Store.open(tmp_path / name, config=CONFIG, create=True) as opened:
            opened.save(state_of(1), step=1, run=name)
            done = opened.push(any_location, run=name)
    assert (done.moved_partitions, len(done.committed)) == (0, 1)
    with Store.open(any_location, config=CONFIG, create=True) as remote:
        check_state(remote.load(run="b"), 1)


@pytest.fixture
def chain(store_path: Path) -> Path:
    """Return a store with steps 0 to 2, in which 1 is a delta on 0, and 2 a delta on 1."""
    save_weights(store_path, 0, 1, 2)
    swap(store_path, delta_of(1, 0), delta_of(2, 1))
    return store_path


@pytest.mark.slow(quick=["file"])
def test_a_delta_arrives_with_its_bases(chain: Path, any_location: str, tmp_path: Path) -> None:
    """Test that a push of step 2 alone sends its bases, although no remote manifest references them."""
    with Store.open(chain, config=CONFIG, create=True) as opened:
        done = opened.push(any_location, 2)
        assert done.moved_partitions == 3
        assert done.moved_bytes < 3 * len(plain_of(0))
        assert opened.push(any_location, 1).moved_partitions == 0
    with Store.open(any_location, config=CONFIG, create=True) as remote:
        assert torch.equal(remote.load()["w"], weights(2))  # type: ignore[index]  # a mapping
        assert remote.verify() == []
        assert remote.gc().freed_packs == 0
    with Store.open(tmp_path / "new", config=CONFIG, create=True) as new:
        new.pull(any_location)
        assert torch.equal(new.load()["w"], weights(2))  # type: ignore[index]  # a mapping


def test_delta_with_a_lost_base_is_missing(chain: Path, folder: str) -> None:
    """Test that the checkpoint is consistent once the base is restored."""
    with Store.open(chain, config=CONFIG, create=True) as opened:
        opened.push(folder, 2)
        assert opened.push(folder, 2).present == 1
        packs = (Path(folder.removeprefix("file://")) / "packs").iterdir()
        min(packs, key=lambda pack: pack.stat().st_mtime_ns).unlink()
        second = opened.push(folder, 2)
        assert (len(second.committed), second.moved_partitions) == (1, 3)
        assert opened.push(folder, 2).present == 1
    with Store.open(folder, config=CONFIG, create=True) as remote:
        assert torch.equal(remote.load()["w"], weights(2))  # type: ignore[index]  # a mapping


def test_a_delta_on_too_long_a_chain_is_sent_whole(store_path: Path, folder: str, tmp_path: Path) -> None:
    """Test chains of two stores that together exceed the maximum length."""
    save_weights(tmp_path / "a", *range(9))
    swap(tmp_path / "a", *(delta_of(step, step - 1) for step in range(1, 9)))
    save_weights(store_path, 8, 9)
    swap(store_path, delta_of(9, 8))
    with Store.open(tmp_path / "a", config=CONFIG, create=True) as opened:
        assert opened.push(folder, 8).moved_partitions == 9
    with Store.open(store_path, config=CONFIG, create=True) as opened:
        done = opened.push(folder, 9)
    assert (done.moved_partitions, done.moved_bytes) == (1, len(plain_of(9)))
    with Store.open(folder, config=CONFIG, create=True) as remote:
        assert torch.equal(remote.load(9)["w"], weights(9))  # type: ignore[index]  # a mapping
        assert remote.verify() == []


def test_nothing_is_written_by_reading(any_location: str) -> None:
    """Test that an empty path is reported, and not changed."""
    for _ in range(2):
        with pytest.raises(StoreNotFoundError, match="does not exist"):
            Store.open(any_location, config=CONFIG, create=True)


def test_a_remote_location_is_not_saved_to(store: Path, folder: str) -> None:
    """Test that the errors name an alternative."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder)
    with Store.open(folder, config=CONFIG, create=True) as remote:
        with pytest.raises(ReadOnlyStoreError, match="push from there"):
            remote.save({"x": torch.ones(1)}, step=3)
        with pytest.raises(InvalidInputError, match="pull it first"):
            remote.disk_usage()
        with pytest.raises(InvalidInputError, match="location"):
            _ = remote.path


def test_unpushable_request_is_an_error(store: Path, folder: str) -> None:
    """Test a missing step, and a path that is no URI; nothing is created."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        with pytest.raises(CheckpointNotFoundError, match="step 9"):
            opened.push(folder, 9)
        with pytest.raises(InvalidInputError, match="give a URI"):
            opened.push(store)
    with pytest.raises(StoreNotFoundError):
        Store.open(folder, create=True)


def test_damaged_local_frame_is_not_uploaded(store: Path, folder: str) -> None:
    """Test that the damaged checkpoint is not committed, and that an earlier one can be."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        newest = max((store / "packs").iterdir(), key=lambda pack: pack.stat().st_mtime_ns)
        flip(newest, 8 * (4096 + 2000))
        with pytest.raises(DamagedPartitionError, match="digest mismatch"):
            opened.push(folder, 2)
        opened.push(folder, 1)
    check_location(folder, 1)


def test_damaged_checkpoints_do_not_stop_a_push(store: Path, folder: str) -> None:
    """Test damage in any position; at the end, each damaged checkpoint is named with its reason."""
    for step in (3, 4, 5):
        before = set((store / "packs").iterdir())
        save_steps(store, step)
        if step != 4:
            for pack in set((store / "packs").iterdir()) - before:
                pack.unlink()
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.delete(1)
        opened.delete(2)
        opened.save({"w": torch.ones(5000)}, step=6)
        with pytest.raises(InconsistentCheckpointError, match="some checkpoints could not be copied") as caught:
            opened.push(folder, everything=True)
    assert [reason.split(" (")[0] for reason in caught.value.reasons] == ["run default, step 3", "run default, step 5"]
    assert all("no readable pack" in reason for reason in caught.value.reasons)
    with Store.open(folder, config=CONFIG, create=True) as remote:
        assert [one.step for one in remote.checkpoints()] == [4, 6]
        check_state(remote.load(4), 4)


def test_foreign_run_does_not_stop_other_runs(tmp_path: Path, folder: str) -> None:
    """Test that nothing of the foreign run is sent."""
    for name in ("a", "b"):
        with Store.open(tmp_path / name, config=CONFIG, create=True) as opened:
            opened.save(state_of(1), step=1, generation=opened.training.begin_generation(None))
            if name == "a":
                opened.push(folder)
            else:
                opened.save(state_of(2), step=2, run="other")
                with pytest.raises(InvalidInputError, match="another training"):
                    opened.push(folder, everything=True)
    with Store.open(folder, config=CONFIG, create=True) as remote:
        assert [(one.run, one.step) for one in remote.checkpoints()] == [("default", 1), ("other", 2)]


def test_a_manifest_that_the_drive_does_not_give_keeps_no_other_from_going(
    store: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that an unreadable manifest is not reported as a refusal of the location."""
    original = ManifestReader.read_all

    def read_all(manifests: ManifestReader, listing: CheckpointFiles) -> list[Manifest]:
        if listing.ref.step == 1 and isinstance(manifests, ManifestFiles):
            raise StorageError("read manifest: Input/output error")
        return original(manifests, listing)

    monkeypatch.setattr(ManifestReader, "read_all", read_all)
    with (
        Store.open(store, config=CONFIG, create=True) as opened,
        pytest.raises(InconsistentCheckpointError, match=r"step 1 .*its manifests cannot be read: .*Input/output"),
    ):
        opened.push(folder, everything=True)
    check_location(folder, 2)


def refuse_newest(store: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to read the newest pack or manifest, as if it belonged to another user, for instance to root."""
    files = (store / kind).rglob(f"*.{kind[:-1]}")
    refused = max(files, key=lambda file: file.stat().st_mtime_ns)
    open_read = Files.open_read

    def checked(files: Files, path: PurePath) -> int:
        if path == refused:
            faults.refuse(errno.EACCES)("open_read", refused)
        return open_read(files, path)

    monkeypatch.setattr(Files, "open_read", checked)


@pytest.mark.parametrize("kind", ["packs", "manifests"])
def test_files_that_this_user_may_not_read_keep_no_other_from_going(
    store: Path, folder: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Test that only the checkpoint that needs them is not pushed."""
    refuse_newest(store, kind, monkeypatch)
    save_steps(store, 3)
    with (
        Store.open(store, config=CONFIG, create=True) as opened,
        pytest.raises(InconsistentCheckpointError, match=rf"step 2 .*its {kind} cannot be read: .*Permission denied"),
    ):
        opened.push(folder, everything=True)
    check_location(folder, 1, 3)


@pytest.mark.parametrize("kind", ["packs", "manifests"])
def test_older_checkpoint_that_this_user_may_not_read_only_costs_compression(
    store: Path, folder: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Test a push that would send differences from that checkpoint."""
    with Store.open(store, config=config(compression="smallest"), create=True) as opened:
        opened.push(folder, 2)
        refuse_newest(store, kind, monkeypatch)
        opened.save(state_of(3), step=3)
        opened.push(folder, 3)
    check_location(folder, 2, 3)


def test_local_read_error_is_not_blamed_on_the_location(
    store: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the error reports damage of the store, and that no upload is retried."""

    def read_frame(pack: PackFile, sequence: int, _: Slot) -> memoryview:
        raise StorageError(f"read frame {sequence} of {pack.path}: Input/output error")

    monkeypatch.setattr(PackFile, "read_frame", read_frame)
    with (
        Store.open(store, config=CONFIG, create=True) as opened,
        pytest.raises(DamagedPartitionError, match="Input/output error") as caught,
    ):
        opened.push(folder, 1)
    assert "attempt" not in str(caught.value)


@pytest.mark.slow(quick=["file"])
def test_pull_fetches_partitions_that_a_collection_takes(
    store: Path, any_location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test partitions of a deleted checkpoint that are collected between lookup and claim."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(any_location, 1)
        for step in (1, 2):
            opened.delete(step)
        claim, collected = PackBuilder.claim, list[object]()

        def claim_after_collection(packing: PackBuilder, name: Digest) -> bool:
            if not collected:
                collected.append(opened.gc())
            return claim(packing, name)

        monkeypatch.setattr(PackBuilder, "claim", claim_after_collection)
        done = opened.pull(any_location, 1)
        assert collected
        assert done.reused_partitions == 0
        check_state(opened.load(1), 1)


def test_a_checkpoint_that_is_deleted_before_its_turn_is_no_failure(store: Path, folder: str, tmp_path: Path) -> None:
    """Test a training that deletes old checkpoints while all are copied: the others arrive, and nothing is damaged."""
    save_steps(store, 3)

    def deleting(place: str) -> Callable[[int, int], None]:
        def progress(_done: int, _total: int) -> None:
            with Store.open(place, config=CONFIG) as other:
                if any(item.step == 2 for item in other.checkpoints()):
                    other.delete(2)

        return progress

    with Store.open(store, config=CONFIG) as opened:
        opened.push(folder, everything=True)
    with Store.open(tmp_path / "pulled", config=CONFIG, create=True) as pulled:
        pulled.pull(folder, everything=True, progress=deleting(folder))
        assert [item.step for item in pulled.checkpoints()] == [1, 3]
    other = f"{folder}-other"
    with Store.open(store, config=CONFIG) as opened:
        opened.push(other, everything=True, progress=deleting(str(store)))
    with Store.open(other, read_only=True) as pushed:
        assert [item.step for item in pushed.checkpoints()] == [1, 3]
