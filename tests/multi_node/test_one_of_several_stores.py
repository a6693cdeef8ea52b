"""Test the store of one of several machines: unreadable, deleted, repaired and pulled data."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import asymcheck.replication.cross_node_dedup as module
import asymcheck.replication.push as push_module
import asymcheck.replication.push_loop as push_loop_module
from asymcheck import Checkpointer, Push, Ranks, Retention, Store
from asymcheck.cli.main import commands
from asymcheck.config import CaptureConfig
from asymcheck.errors import (
    AsymcheckError,
    InconsistentCheckpointError,
    ReadOnlyStoreError,
    RemoteUnreachableError,
    StorageError,
)
from asymcheck.executor import begin
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Manifest
from asymcheck.gc.collect import Collected
from asymcheck.replication.collect_remote import RemotePruner, RemoteSweep
from asymcheck.replication.cross_node_dedup import wait_for_others
from asymcheck.replication.push_status import PushRequest
from asymcheck.storage.local_files import Files
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.remote import RemoteTier, parse_location
from asymcheck.storage.remote.manifests import RemoteManifests
from asymcheck.types import CheckpointRef, Digest, Part, SaveId
from tests.damage.flips import flip
from tests.distributed.launched import CONFIG
from tests.distributed.test_coordinator import each
from tests.zygote import wait_until

STEPS = 3


@pytest.fixture
def stores(tmp_path: Path) -> list[Path]:
    """Return the stores of two machines with a rank each, with the same steps."""
    paths = [tmp_path / f"machine-{rank}" for rank in range(2)]
    for rank, path in enumerate(paths):
        with Store.open(path, config=CONFIG, create=True) as store:
            request = store.training.request

            def of_a_part(*words: object, request: object = request, rank: int = rank) -> object:
                return dataclasses.replace(request(*words), store_ranks=((rank, rank),))  # type: ignore[operator]  # as it was

            store.training.request = of_a_part  # type: ignore[method-assign, assignment]  # as a Checkpointer of several makes it
            for step in range(STEPS):
                state = {"all": torch.full((9000,), step), f"rank-{rank}": torch.full((9000,), 10.0 * step + rank)}
                metrics = {"loss": abs(step - 1.0)}
                store.save(state, step=step, metrics=metrics, part=Part(rank, 2, f"{step + 1:016x}{7:016x}"))
    return paths


@pytest.fixture
def there(stores: list[Path], tmp_path: Path) -> str:
    """Return the location to which both have pushed."""
    location = (tmp_path / "there").as_uri()
    for path in stores:
        with Store.open(path, config=CONFIG, create=True) as store:
            assert len(store.push(location, everything=True).committed) == STEPS
    return location


def manifest_of(store: Path, step: int) -> Path:
    """Return the only manifest of a step."""
    (found,) = (store / "manifests" / "default").glob(f"00000001-{step:012d}-*/*")
    return found


def steps_in(path: Path | str, **more: str) -> list[tuple[int, str]]:
    """Return the complete steps of a store without damage, and the ranks of its parts."""
    with Store.open(path, config=CONFIG, **more, create=True) as store:  # type: ignore[arg-type]  # remote
        assert not store.verify()
        return [(one.step, one.ranks) for one in store.checkpoints() if one.complete]


def test_unreadable_manifest_is_not_unfinished(stores: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that nothing is deleted if the manifest that names the ranks of the store cannot be read."""
    read_small, refused = Files.read_small, manifest_of(stores[0], 1)

    def read(files: Files, path: PurePath, limit: int) -> bytes | None:
        if path == refused:
            raise StorageError(f"cannot read {path}: Input/output error")
        return read_small(files, path, limit)

    with monkeypatch.context() as patch, Store.open(stores[0], config=CONFIG, create=True) as store:
        patch.setattr(Files, "read_small", read)
        with pytest.raises(StorageError, match="Input/output error"):
            store.prune(Retention(keep_last=2))
    assert steps_in(stores[0]) == [(0, "0 of 2"), (1, "0 of 2"), (2, "0 of 2")]


def test_repair_fetches_own_shards_only(stores: list[Path], there: str) -> None:
    """Test a damaged only manifest; the remote one names the ranks of this store."""
    path = manifest_of(stores[1], 1)
    flip(path, 8 * (path.stat().st_size // 2))
    with Store.open(stores[1], config=CONFIG, remote=there, create=True) as store:
        assert not store.repair().left
    assert steps_in(stores[1]) == [(0, "1 of 2"), (1, "1 of 2"), (2, "1 of 2")]


def test_repair_needs_no_part_of_other_machines(stores: list[Path], tmp_path: Path) -> None:
    """Test lost packs of a checkpoint of which no other machine has pushed its part."""
    location = (tmp_path / "there").as_uri()
    with Store.open(stores[1], config=CONFIG, remote=location) as store:
        store.push(location, everything=True)
        for pack in (stores[1] / "packs").iterdir():
            pack.unlink()
        assert not store.repair().left
    assert steps_in(stores[1]) == [(0, "1 of 2"), (1, "1 of 2"), (2, "1 of 2")]


def test_verify_does_not_say_that_a_part_can_be_restored(stores: list[Path]) -> None:
    """Test an intact part whose other parts are in another store."""
    outcome = CliRunner().invoke(commands, ["verify", str(stores[0])])
    assert outcome.output == "3 checkpoints checked: all shards in this store are intact\n"


@pytest.mark.slow
def test_pull_fetches_shards_of_others(stores: list[Path], there: str) -> None:
    """Test that a store with one part has no checkpoint."""
    with Store.open(stores[1], config=CONFIG, create=True) as store:
        assert len(store.pull(there, 1).committed) == 1
        assert store.pull(there, 1).present == 1
        state = store.load(1)
    assert isinstance(state, dict)
    assert [float(state[f"rank-{rank}"][0]) for rank in range(2)] == [10.0, 11.0]
    assert steps_in(stores[1]) == [(0, "1 of 2"), (1, "2"), (2, "1 of 2")]


def test_parts_whose_others_never_came_do_not_stay_at_the_location_for_ever(stores: list[Path], tmp_path: Path) -> None:
    """Test that they are deleted when they are old and a newer checkpoint is complete."""
    location = (tmp_path / "there").as_uri()
    for path, steps in zip(stores, ((0, 1, 2), (1,)), strict=True):
        with Store.open(path, config=CONFIG, create=True) as store:
            for step in steps:
                store.push(location, step)
    with contextlib.closing(RemoteTier(parse_location(location), CONFIG)) as there:
        pruner = RemotePruner(there, "default", Retention(keep_last=1))
        for days, left in ((0, [0, 1, 2]), (2, [1, 2])):
            assert not pruner.prune(time.time_ns() + days * 86_400_000_000_000)
            assert [ref.step for ref in there.manifests.refs("default")] == left
    # Another machine that still has the newer part may push it again.
    with Store.open(stores[0], config=CONFIG, create=True) as store:
        assert len(store.push(location, 0).committed) == 1


def test_a_part_that_may_not_be_deleted_does_not_prevent_a_collection(
    stores: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test an old part of another user: the packs of deleted checkpoints are freed, and the refusal is reported."""
    location, collected = (tmp_path / "there").as_uri(), list[Collected]()
    for path, steps in zip(stores, ((0, 1), (1,)), strict=True):
        with Store.open(path, config=CONFIG, create=True) as store:
            for step in steps:
                store.push(location, step)
    carry_out = RemoteSweep.carry_out

    def refuse(*_: object) -> bool:
        raise ReadOnlyStoreError("remove: permission denied")

    def collect(sweep: RemoteSweep) -> Collected:
        collected.append(carry_out(sweep))
        return collected[-1]

    monkeypatch.setattr(RemoteManifests, "remove_left", refuse)
    monkeypatch.setattr(RemoteSweep, "carry_out", collect)
    with contextlib.closing(RemoteTier(parse_location(location), CONFIG)) as there:
        pruner = RemotePruner(there, "default", Retention(keep_last=1))
        with pytest.raises(ReadOnlyStoreError, match="permission denied"):
            pruner.prune(time.time_ns() + 2 * 86_400_000_000_000)
    assert len(collected) == 1


def test_progress_is_reported_while_checkpoints_wait(
    stores: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that an outage counts as over, and a step as complete, although the backlog never becomes empty."""
    location = (tmp_path / "there").as_uri()
    with Store.open(stores[1], config=CONFIG) as store:
        store.push(location, everything=True)
    seen: list[tuple[int | None, str]] = []
    push = push_loop_module.push

    def watched(*arguments: object) -> object:
        seen.append((loop.status().statistics.newest_step, loop.status().statistics.problem))
        if len(seen) == 1:
            raise RemoteUnreachableError("no answer")
        return push(*arguments)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(push_loop_module, "push", watched)
    with Store.open(stores[0], config=CONFIG) as store:
        loop = store.training.push_loop(Push(location))
        assert not loop._round()
        assert loop._round()
    outage = "RemoteUnreachableError: no answer"
    assert seen == [(None, ""), (None, outage), (2, ""), (2, "")]


def test_steps_that_were_not_pushed_do_not_ask_for_the_given_location(stores: list[Path], tmp_path: Path) -> None:
    """Test a restore of all ranks on one machine, after the loss of the other machine."""
    location = (tmp_path / "there").as_uri()
    # The message names two places, of which a command takes one.
    command = "can be restored; run asymcheck verify for a complete list"
    with (
        Store.open(stores[0], config=CONFIG, remote=location, create=True) as store,
        pytest.raises(InconsistentCheckpointError, match=command),
    ):
        store.restore()
    for path in stores:
        with Store.open(path, config=CONFIG, create=True) as store:
            store.push(location, 0)
    with Store.open(stores[0], config=CONFIG, create=True) as store:
        store.push(location, 1)
    with Store.open(stores[0], config=CONFIG, remote=location, create=True) as store:
        restored = store.restore()
    assert restored.checkpoint.step == 0
    (reason,) = restored.skipped
    assert reason.endswith(" and 1 older one: the manifest of rank 1 is missing (world size 2)")


@pytest.mark.parametrize("has_remote", [False, True])
def test_swapped_machines_are_told_to_pass_a_location_only_without_one(
    stores: list[Path], tmp_path: Path, has_remote: bool
) -> None:
    """Test a restore of all ranks before anything was pushed."""
    keys, remote = dist.HashStore(), (tmp_path / "there").as_uri() if has_remote else None

    def work(rank: int) -> str:
        ranks = Ranks(rank, 2, keys, timeout_s=60.0, node=f"node-{rank}")
        state: dict[str, object] = {"all": torch.zeros(9000), f"rank-{rank}": torch.zeros(9000)}
        with (
            Store.open(stores[1 - rank], config=CONFIG, remote=remote, create=True) as store,
            Checkpointer(store, state, ranks=ranks, capture=CaptureConfig(ring_folder=str(tmp_path))) as checkpointer,
            pytest.raises(AsymcheckError, match="can be restored by all ranks") as caught,
        ):
            checkpointer.restore()
        return str(caught.value)

    for message in each(2, work):
        assert ("pass the remote location" in message) is not has_remote
        assert (f"{remote} lacks the parts" in message) is has_remote
        assert "To start from scratch, choose another run" in message


def test_best_checkpoint_need_not_be_pushed(stores: list[Path], tmp_path: Path) -> None:
    """Test a step of which each machine has its part, and a location with another step."""
    keys, location = dist.HashStore(), (tmp_path / "there").as_uri()
    for path in stores:
        with Store.open(path, config=CONFIG) as store:
            store.push(location, 0)

    def work(rank: int) -> tuple[int | None, str]:
        ranks = Ranks(rank, 2, keys, timeout_s=60.0, node=f"node-{rank}")
        state: dict[str, object] = {
            "all": torch.zeros(9000, dtype=torch.int64),
            f"rank-{rank}": torch.zeros(9000),
        }
        with (
            Store.open(stores[rank], config=CONFIG, remote=location) as store,
            Checkpointer(store, state, ranks=ranks, capture=CaptureConfig(ring_folder=str(tmp_path))) as checkpointer,
        ):
            with pytest.raises(AsymcheckError, match="has the metric 'accuracy'; it has loss") as caught:
                checkpointer.restore("best:accuracy")
            restored = checkpointer.restore("best:loss")
            return restored and restored.step, type(caught.value).__name__

    assert each(2, work) == [(1, "CheckpointNotFoundError"), (1, "RankFailedError")]


class Busy:
    """A location to which other trainings push continuously."""

    def __init__(self) -> None:
        """Begin without packs."""
        self.manifests, self._numbers = self, itertools.count()

    def listing(self, run: str, ref: CheckpointRef) -> CheckpointFiles:
        """Return no other part of this checkpoint."""
        return CheckpointFiles(run, ref, ())

    def list_packs(self) -> SimpleNamespace:
        """Return one more pack each time."""
        return SimpleNamespace(lasting=[next(self._numbers)])

    def read_indexes(self, _pack_ids: list[int]) -> dict[int, None]:
        """Return an index without useful partitions."""
        return {}


@pytest.mark.slow
def test_packs_of_other_trainings_do_not_keep_a_push_waiting_for_a_machine_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Test that new packs of others do not extend the wait for a missing machine forever."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    monkeypatch.setattr(module, "_POLL_S", (0.005, 0.01))
    began = time.monotonic()

    def report() -> None:
        assert time.monotonic() - began < 20

    names = (ManifestName(0, 2, bytes(16)),)
    listing = CheckpointFiles("run", CheckpointRef(1, 0, SaveId(bytes(16))), names)
    wait_for_others(cast(RemoteTier, Busy()), listing, {Digest(bytes(16))}, report, lambda: False)


def test_a_push_that_ends_does_not_wait_for_packs_of_the_next_training(
    stores: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test the push of a killed training: restarts would collect processes that wait for a machine that is gone."""

    def wait(_remote: RemoteTier, *arguments: object) -> None:
        wait_for_others(cast(RemoteTier, Busy()), *arguments)  # type: ignore[arg-type]  # as given

    monkeypatch.setattr(Manifest, "elsewhere", lambda manifest: set(manifest.partitions()))
    monkeypatch.setattr(push_module, "wait_for_others", wait)
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    monkeypatch.setattr(module, "_PATIENCE_FACTOR", 1_000_000)
    monkeypatch.setattr(module, "_POLL_S", (0.005, 0.01))
    location = (tmp_path / "there").as_uri()
    with Store.open(stores[0], config=CONFIG, create=True) as store:
        loop = store.training.push_loop(Push(location))
        pushing = begin(loop.run, "pushing")
        wait_until(lambda: loop.status().sending is not None, "an upload")
        loop.end()
        try:
            pushing.result(20)
        finally:
            loop.end()  # a second call cancels the upload
    assert len(list((tmp_path / "there" / "manifests" / "default").glob("*2-*/*"))) == 1


def test_a_push_does_not_wait_for_a_machine_whose_rank_has_ended(
    stores: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test close() after the loss of a rank: no partition of the other machine will arrive."""
    monkeypatch.setattr(Manifest, "elsewhere", lambda manifest: set(manifest.partitions()))
    with Store.open(stores[0], config=CONFIG, create=True) as store:
        loop = store.training.push_loop(Push((tmp_path / "there").as_uri()))
        loop.apply(PushRequest(is_closing=True, is_alone=True))
        began = time.monotonic()
        loop.run()
        assert time.monotonic() - began < module.PATIENCE_S
        assert "another rank has ended" in loop.status().statistics.problem
        assert loop.status().statistics.backlog > 0


def test_a_push_notes_which_checkpoint_another_machine_begins(
    stores: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a long upload: without the note, retention would delete what the other machine pushes meanwhile."""
    monkeypatch.setattr(push_loop_module, "_WATCH_S", 0.01)
    monkeypatch.setattr(
        Manifest, "elsewhere", lambda manifest: set() if manifest.header.rank else set(manifest.partitions())
    )
    location = (tmp_path / "there").as_uri()
    with Store.open(stores[0], config=CONFIG, create=True) as store:
        save_ids = [one.save_id for one in store.checkpoints()]
        loop = store.training.push_loop(Push(location))
        pushing = begin(loop.run, "pushing")
        try:
            wait_until(lambda: loop.status().sending == save_ids[2], "the upload of step 2")
            assert loop.status().begun is None
            with Store.open(stores[1], config=CONFIG, create=True) as other:
                other.push(location, 1)
            wait_until(lambda: loop.status().begun == save_ids[1], "the note of step 1")
        finally:
            loop.end()
            loop.end()  # a second call cancels the upload
        pushing.result(20)


def test_undelivered_partitions_are_sent_after_all(
    stores: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a hint that names a machine that is gone."""
    location = (tmp_path / "there").as_uri()
    with Store.open(stores[0], config=CONFIG, create=True) as store:
        monkeypatch.setattr(Manifest, "elsewhere", lambda manifest: set(manifest.partitions()))
        monkeypatch.setattr(module, "PATIENCE_S", 0.1)
        moved = store.push(location, 0)
    assert moved.moved_partitions > 1
    with Store.open(stores[1], config=CONFIG, create=True) as store:
        store.push(location, 0)
    assert steps_in(location) == [(0, "2")]
