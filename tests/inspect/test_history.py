"""Test the history of a run: checkpoints, newest first, and branches of the training."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import asymcheck
from asymcheck.config import WRITER
from asymcheck.errors import CheckpointNotFoundError, HeadRecordError
from asymcheck.format.record import HeadRecord
from asymcheck.inspect.history import History, Known, read_history
from asymcheck.storage.nvme.manifests import ManifestFiles


@pytest.fixture
def store(store_path: Path) -> asymcheck.Store:
    """Return a store with steps 10 to 40, then 25 and 35 from 20, then 30 from 25."""
    with asymcheck.Store.open(store_path, create=True) as opened:
        for step in (10, 20, 30, 40):
            opened.save({"x": torch.full((4,), float(step))}, step=step, metrics={"loss": 1 / step})
        generation = opened.training.begin_generation(opened.checkpoints()[1])
        for step in (25, 35):
            opened.save({"x": torch.ones(4)}, step=step, generation=generation)
        generation = opened.training.begin_generation(opened.checkpoints()[-2])
        opened.save({"x": torch.ones(4)}, step=30, generation=generation)
    return asymcheck.Store.open(store_path, read_only=True)


def steps(history: History) -> list[tuple[int, int]]:
    """Return generation and step of the entries."""
    return [(entry.checkpoint.generation, entry.checkpoint.step) for entry in history.entries]


def test_the_line_newest_first(store: asymcheck.Store) -> None:
    """Test checkpoints on the line; the others are counted."""
    history = store.history()
    assert steps(history) == [(3, 30), (2, 25), (1, 20), (1, 10)]
    assert (history.generation, history.hidden_abandoned, history.hidden_incomplete) == (3, 3, 0)
    assert [entry.step_before for entry in history.entries] == [25, 20, 10, None]
    times = [entry.checkpoint.created_ns for entry in history.entries]
    assert [entry.since_before_ns for entry in history.entries] == [
        *(later - earlier for later, earlier in itertools.pairwise(times)),
        None,
    ]
    assert {entry.writer for entry in history.entries} == {WRITER}
    assert history.entries[-1].checkpoint.metrics == {"loss": 0.1}


def test_openings_say_where_training_went_back_to(store: asymcheck.Store) -> None:
    """Test that each names its parent, and the number of abandoned checkpoints of its own line."""
    third, second = store.history().openings
    assert (third.generation, third.parent_generation, third.parent_step, third.abandoned) == (3, 2, 25, 1)
    assert (second.generation, second.parent_generation, second.parent_step, second.abandoned) == (2, 1, 20, 2)
    assert second.parent_save_id == store.checkpoints()[1].save_id
    assert (second.on_line, second.problem, second.writer) == (True, "", WRITER)


def test_everything_includes_abandoned_checkpoints(store: asymcheck.Store) -> None:
    """Test that the parent of an abandoned checkpoint is on its own line."""
    history = store.history(everything=True)
    assert steps(history) == [(3, 30), (2, 35), (2, 25), (1, 40), (1, 30), (1, 20), (1, 10)]
    assert [entry.checkpoint.on_line for entry in history.entries] == [True, False, True, False, False, True, True]
    assert [entry.step_before for entry in history.entries] == [25, 25, 20, 30, 20, 10, None]
    assert (history.hidden_abandoned, history.hidden_incomplete) == (0, 0)


def test_training_from_nothing(store_path: Path) -> None:
    """Test that all earlier checkpoints are abandoned, and that the first one has no predecessor."""
    with asymcheck.Store.open(store_path, create=True) as store:
        store.save({"x": 1}, step=5)
        generation = store.training.begin_generation(None)
        store.save({"x": 1}, step=1, generation=generation)
        history = store.history()
    assert steps(history) == [(2, 1)]
    assert history.entries[0].step_before is None
    assert (history.openings[0].parent_step, history.openings[0].abandoned) == (None, 1)


def test_a_generation_off_the_line_is_an_opening_of_everything(store_path: Path) -> None:
    """Test generation 2, and generation 3 that continues from before it."""
    with asymcheck.Store.open(store_path, create=True) as store:
        first = store.save({"x": 1}, step=1)
        store.training.begin_generation(first)
        store.training.begin_generation(first)
        assert [opening.generation for opening in store.history().openings] == [3]
        found = store.history(everything=True).openings
    assert [(opening.generation, opening.on_line, opening.abandoned) for opening in found] == [
        *((3, True, 0), (2, False, 0))
    ]


def test_a_damaged_manifest_is_incomplete_and_not_before_anything(store: asymcheck.Store, store_path: Path) -> None:
    """Test that it is hidden, or shown with the reason; its neighbours follow each other."""
    damaged = next(path for path in sorted((store_path / "manifests" / "default").iterdir()) if "0020-" in path.name)
    (manifest,) = damaged.iterdir()
    manifest.write_bytes(manifest.read_bytes()[:-1])
    history = store.history()
    assert steps(history) == [(3, 30), (2, 25), (1, 10)]
    assert history.entries[1].step_before == 10
    assert history.hidden_incomplete == 1
    shown = store.history(everything=True).entries[-2]
    assert (shown.checkpoint.step, shown.checkpoint.complete, shown.writer) == (20, False, "")
    assert "digest" in shown.problem


def test_a_lost_head_record(store: asymcheck.Store, store_path: Path) -> None:
    """Test the error for an unknown line, and the full list with the reason."""
    (store_path / "heads" / "default" / "00000002.head").write_bytes(bytes(8192))
    with pytest.raises(HeadRecordError, match=r"both copies.*log --all"):
        store.history()
    history = store.history(everything=True)
    assert "both copies" in history.line_problem
    assert history.generation is None
    assert len(history.entries) == 7
    assert [opening.abandoned for opening in history.openings] == [None, None]
    assert "both copies" in history.openings[1].problem


def test_each_head_record_is_read_twice(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the cost grows with the number of restarts, and not with its square."""
    read: list[int] = []
    original = ManifestFiles.read_head

    def counted(self: ManifestFiles, run: str, generation: int) -> tuple[HeadRecord, int] | None:
        read.append(generation)
        return original(self, run, generation)

    with asymcheck.Store.open(store_path, create=True) as store:
        parents: list[asymcheck.Checkpoint | None] = [None]
        for step in range(12):
            # Each fourth training goes back to the checkpoint before the last one.
            store.training.begin_generation(parents[-2 if step % 4 == 3 else -1])
            parents.append(store.save({"x": step}, step=step))
        monkeypatch.setattr(ManifestFiles, "read_head", counted)
        history = store.history(everything=True)
    # Once for the lines, and once for the start of the generation.
    assert sorted(read) == sorted([*range(1, 13)] * 2)
    assert [start.abandoned for start in reversed(history.openings)] == [0, 0, 0, 1] * 3
    assert [entry.step_before for entry in reversed(history.entries)] == [None, 0, 1, 1, 3, 4, 5, 5, 7, 8, 9, 9]


def test_deleted_checkpoints_are_forgotten(store_path: Path) -> None:
    """Test that a page that follows a training for weeks keeps only the checkpoints that exist."""
    known: Known = {}
    with asymcheck.Store.open(store_path, create=True) as store:
        for step in range(4):
            store.save({"x": step}, step=step)
            if step > 1:
                store.delete(step - 2)
            entries = read_history(store.resources.tier, "default", known=known).entries
            assert {ref.step for ref in known} == {entry.checkpoint.step for entry in entries}
    assert {ref.step for ref in known} == {2, 3}


def test_missing_runs(store: asymcheck.Store, tmp_path: Path) -> None:
    """Test the error if other runs exist, and an empty store, whose history is empty."""
    with pytest.raises(CheckpointNotFoundError, match="it has runs default"):
        store.history("nobody")
    with asymcheck.Store.open(tmp_path / "empty", create=True) as empty:
        assert (empty.history().entries, empty.history().openings) == ((), ())


def test_a_checkpoint_of_one_rank_shares_nothing(store: asymcheck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that its manifest is not copied into the cache of several ranks, which doubles the time of a long run."""
    monkeypatch.delattr("asymcheck.storage.manifests.decode_manifests")
    assert [item.step for item in store.checkpoints() if item.complete] == [10, 20, 30, 40, 25, 35, 30]
