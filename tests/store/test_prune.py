"""Test pruning: checkpoints that no rule keeps are deleted and freed, and protected ones stay."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path, PurePath

import pytest
import torch

from asymcheck import Retention, Store
from asymcheck.errors import (
    CheckpointNotFoundError,
    ClosedStoreError,
    InconsistentCheckpointError,
    InvalidInputError,
    ReadOnlyStoreError,
    SkippedCheckpointWarning,
)
from asymcheck.format import layout
from asymcheck.format.record import HeadRecord
from asymcheck.gc.collect import Collected
from asymcheck.gc.retention_runner import Pruner
from asymcheck.policies.retention import choose_kept
from asymcheck.storage.local_files import Files
from asymcheck.storage.nvme.manifests import ManifestFiles
from asymcheck.types import CheckpointRef
from tests.store.equality import assert_same, directory_content

MIB = 1 << 20


def _state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randint(256, (2 * MIB,), dtype=torch.uint8, generator=generator)}


def _save(store: Store, *steps: int, run: str = "default") -> None:
    for step in steps:
        store.save(_state(step), step=step, run=run, metrics={"loss": abs(step - 2.5)})


def _steps(store: Store, run: str = "default") -> list[int]:
    return [checkpoint.step for checkpoint in store.checkpoints(run)]


def test_unkept_checkpoints_are_deleted_and_freed(store: Store) -> None:
    """Test the reasons for the kept checkpoints, and that other runs are not changed."""
    _save(store, *range(6))
    # Step 1 has the same bytes in both runs.
    _save(store, 1, 7, run="other")
    pruned = store.prune(Retention(keep_last=1, keep_every=4, keep_best=("loss", 1)))
    assert {one.checkpoint.step: one.reasons for one in pruned.verdicts} == {
        0: ("keep every 4",),
        1: (),
        2: ("keep best 1 by loss: 0.5, number 1",),
        3: (),
        4: ("keep every 4",),
        5: ("newest consistent", "newest", "keep last 1"),
    }
    assert [one.step for one in pruned.removed] == [1, 3]
    assert (pruned.run, pruned.collected.freed_packs) == ("default", 1)
    assert _steps(store) == [0, 2, 4, 5]
    assert _steps(store, "other") == [1, 7]
    for run in ("default", "other"):
        for step in _steps(store, run):
            assert_same(store.load(step, run=run), _state(step))
    assert store.verify() == []


def test_dry_run_of_pruning_equals_the_real_run(store: Store) -> None:
    """Test deletions, reasons and freed bytes, and that nothing is changed."""
    _save(store, *range(5))
    before = directory_content(store.path)
    retention = Retention(keep_last=2)
    expected = store.prune(retention, dry_run=True)
    after = directory_content(store.path)
    assert {name: after[name] for name in after if "lock.mdb" not in name} == {
        name: before[name] for name in before if "lock.mdb" not in name
    }
    assert [one.step for one in expected.removed] == [0, 1, 2]
    assert expected.collected.freed_bytes >= 6 * MIB
    assert store.prune(retention) == expected
    assert [one.reasons for one in store.prune(retention).verdicts] == [
        ("keep last 2",),
        ("newest", "keep last 2"),
    ]


def test_fallback_of_a_broken_newest_checkpoint_stays(store: Store) -> None:
    """Test that the newest consistent checkpoint stays in addition to a damaged newest one."""
    _save(store, 0)
    packs = {path: path.name for path in (store.path / "packs").iterdir()}
    _save(store, 1, 2)
    for path in (store.path / "packs").iterdir():
        if path not in packs:
            path.unlink()
    pruned = store.prune(Retention(keep_last=1))
    assert [one.step for one in pruned.removed] == [1]
    assert pruned.verdicts[0].reasons == ("newest consistent",)
    with pytest.warns(SkippedCheckpointWarning, match="step 2"):
        assert_same(store.load(), _state(0))


def test_nothing_goes_while_none_is_consistent(store: Store) -> None:
    """Test a run without a consistent checkpoint, which may be repaired later."""
    _save(store, 0, 1, 2)
    for path in (store.path / "packs").iterdir():
        path.unlink()
    pruned = store.prune(Retention(keep_last=1))
    assert pruned.removed == []
    assert pruned.verdicts[0].reasons == ("none on the line is consistent",)


def test_abandoned_checkpoints_stay_by_default(store: Store) -> None:
    """Test after a restore of an older step, also before the new line has a newer checkpoint."""
    _save(store, 1, 2, 3)
    generation = store.training.begin_generation(store.checkpoints()[0])
    store.save(_state(9), step=2, generation=generation)
    assert [(one.step, one.generation) for one in store.prune(Retention(keep_last=1)).removed] == [(1, 1)]
    gone = store.prune(Retention(keep_last=1, keep_abandoned=False)).removed
    assert [(one.step, one.generation) for one in gone] == [(2, 1), (3, 1)]
    store.training.begin_generation(None)
    pruned = store.prune(Retention(keep_last=1, keep_abandoned=False))
    assert [one.reasons for one in pruned.verdicts] == [("none on the line is consistent",)]


def test_nothing_goes_while_the_line_cannot_be_known(store: Store) -> None:
    """Test a lost head record, after which the line is unknown."""
    _save(store, 1, 2)
    store.training.begin_generation(store.checkpoints()[0])
    store.training.begin_generation(store.checkpoints()[0])
    max((store.path / "heads/default").iterdir()).write_bytes(b"")
    pruned = store.prune(Retention(keep_last=1, keep_abandoned=False))
    assert pruned.removed == []
    assert pruned.verdicts[0].reasons == ("line of training unknown",)


def test_young_checkpoints_stay(store: Store) -> None:
    """Test that the start time of the save counts."""
    _save(store, 1)
    time.sleep(0.05)
    between_ns = time.time_ns()
    _save(store, 2, 3)
    keep = Retention(keep_for=timedelta(milliseconds=10))
    pruner = Pruner(store.resources.nvme, store.resources.catalog(), "default", keep)
    assert [one.step for one in pruner.prune(between_ns).removed] == [1]
    assert [one.step for one in store.prune(Retention(keep_for=timedelta(hours=1))).removed] == []


def test_damaged_manifest_is_reported_after_the_deletions(store: Store) -> None:
    """Test that the damaged manifest keeps all packs, and does not count as a checkpoint."""
    _save(store, 1, 2, 3, 4)
    (manifest,) = (store.path / "manifests/default").glob(f"*{2:012d}*/*.manifest") or [None]
    manifest.write_bytes(b"x")
    with pytest.raises(InconsistentCheckpointError, match="delete that checkpoint first"):
        store.prune(Retention(keep_last=2, keep_every=2))
    assert _steps(store) == [2, 3, 4]
    assert store.prune(Retention(keep_last=2)).collected.freed_packs == 2


def test_checkpoint_that_may_not_be_deleted_blocks_no_other(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test an old checkpoint of another user: newer ones are deleted, and their packs are freed."""
    _save(store, 1, 2, 3, 4)
    remove = ManifestFiles.remove

    def refuse(manifests: ManifestFiles, run: str, ref: CheckpointRef) -> None:
        if ref.step == 1:
            raise ReadOnlyStoreError("remove: permission denied")
        remove(manifests, run, ref)

    monkeypatch.setattr(ManifestFiles, "remove", refuse)
    with pytest.raises(ReadOnlyStoreError, match="permission denied"):
        store.prune(Retention(keep_last=1))
    assert _steps(store) == [1, 4]
    assert store.gc().kept_packs == len(list((store.path / "packs").iterdir())) == 2


READER = """
import sys
from asymcheck import Store
from asymcheck.restore.resolve import resolve_one
store = Store.open(sys.argv[1], read_only=True)
tier = store.resources.tier
listing = next(one for one in tier.manifests.checkpoints("default") if one.ref.step == int(sys.argv[2]))
with resolve_one(tier, listing).sources:
    print("reading", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_checkpoint_in_use_by_a_reader_stays(store: Store) -> None:
    """Test locks on packs that only this checkpoint needs, and locks on shared packs."""
    shared = _state(99)["x"]
    for step in range(4):
        store.save({"x": _state(step)["x"], "shared": shared}, step=step)
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(store.path), "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdin is not None
        assert reader.stdout.readline() == b"reading\n"
        assert store.prune(Retention(keep_last=1), dry_run=True).verdicts[1].reasons == ("being read",)
        pruned = store.prune(Retention(keep_last=1))
        assert [one.step for one in pruned.removed] == [0, 2]
        assert pruned.verdicts[1].reasons == ("being read",)
        assert_same(store.load(1), {"x": _state(1)["x"], "shared": shared})
        reader.stdin.close()
        assert reader.wait() == 0
    assert [one.step for one in store.prune(Retention(keep_last=1)).removed] == [1]


def test_rollback_during_pruning_loses_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a restore of a checkpoint between its verdict and its deletion."""
    _save(store, 1, 2, 3)
    first = store.checkpoints()[0]
    begun: list[int] = []

    def judge_and_go_back(*arguments: object) -> object:
        verdicts = choose_kept(*arguments)  # type: ignore[arg-type]  # as it was called
        if not begun and any(not verdict.stays for verdict in verdicts):
            begun.append(store.training.begin_generation(first))
        return verdicts

    monkeypatch.setattr("asymcheck.gc.retention_runner.choose_kept", judge_and_go_back)
    pruned = store.prune(Retention(keep_last=1))
    assert begun
    assert _steps(store) == [1, 2, 3]
    assert [one.reasons[-1] for one in pruned.verdicts] == ["keep last 1", "abandoned", "abandoned"]


def test_pruning_reads_only_new_manifests(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the cost does not depend on the number of kept checkpoints."""
    keep = Retention(keep_last=1, keep_every=2)
    pruner = Pruner(store.resources.nvme, store.resources.catalog(), "default", keep)
    _save(store, *range(10))
    pruner.prune(0)
    read: list[int] = []
    original = type(store.resources.tier.manifests).read_bytes

    def counted(self: object, run: str, ref: object, name: object) -> bytes:
        read.append(ref.step)  # type: ignore[attr-defined]  # a CheckpointRef
        return original(self, run, ref, name)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(type(store.resources.tier.manifests), "read_bytes", counted)
    for step in range(10, 14):
        _save(store, step)
        read.clear()
        pruner.prune(0)
        assert set(read) == {step}
    assert _steps(store) == [0, 2, 4, 6, 8, 10, 12, 13]


def test_pruning_reads_only_new_head_records(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a training that was restarted a thousand times does not read a thousand records for each save."""
    pruner = Pruner(store.resources.nvme, store.resources.catalog(), "default", Retention(keep_last=1))
    read: list[int] = []
    original = ManifestFiles.read_head

    def counted(self: ManifestFiles, run: str, generation: int) -> tuple[HeadRecord, int] | None:
        read.append(generation)
        return original(self, run, generation)

    monkeypatch.setattr(ManifestFiles, "read_head", counted)
    parent = None
    for generation in range(1, 6):
        assert store.training.begin_generation(parent) == generation
        _save(store, 2 * generation, 2 * generation + 1)
        parent = store.checkpoints()[-1]
        read.clear()
        assert len(pruner.prune(0).removed) == min(generation, 2)
        assert read == [generation]


def test_pruning_lists_each_kept_checkpoint_three_times(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a training with thousands of kept checkpoints does not spend its time on listings."""
    count = 10
    for step in range(count):
        store.save({"step": step}, step=step)
    pruner = Pruner(store.resources.nvme, store.resources.catalog(), "default", Retention(keep_every=1))
    pruner.prune(0)
    listed: list[str] = []
    original = Files.list

    def listing(files: Files, path: PurePath) -> list[str]:
        listed.append(path.name)
        return original(files, path)

    monkeypatch.setattr(Files, "list", listing)
    kept = [layout.checkpoint_name(checkpoint.ref) for checkpoint in store.checkpoints()]
    for rules, times in ((Retention(keep_every=1), 1), (Retention(keep_last=count - 1), 3)):
        listed.clear()
        pruner._retention = rules
        pruner.prune(0)
        # By the policy. Only after a deletion, also by the mark phase, and to make deletions durable.
        assert listed.count(kept[0 if times == 1 else 1]) == times


def test_invalid_arguments_are_refused(store: Store) -> None:
    """Test that the error is raised before any deletion."""
    _save(store, 1, 2)
    with pytest.raises(InvalidInputError, match="Retention"):
        store.prune(2)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(CheckpointNotFoundError, match="no run 'othr'"):
        store.prune(Retention(keep_last=1), run="othr")
    with Store.open(store.path, read_only=True) as reader, pytest.raises(ReadOnlyStoreError):
        reader.prune(Retention(keep_last=1))
    assert _steps(store) == [1, 2]
    store.close()
    with pytest.raises(ClosedStoreError):
        store.prune(Retention(keep_last=1))


def test_pruning_twice_is_nothing(store: Store) -> None:
    """Test that the second run deletes and frees nothing."""
    _save(store, *range(4))
    store.prune(Retention(keep_last=2))
    again = store.prune(Retention(keep_last=2))
    assert (again.removed, again.collected) == ([], Collected(kept_packs=2))


def test_a_run_without_checkpoints_has_nothing_to_prune(store_path: Path) -> None:
    """Test the empty folder of a deleted run."""
    with Store.open(store_path, create=True) as store:
        _save(store, 1)
        store.delete(1)
        assert store.prune(Retention(keep_last=1)).verdicts == ()
