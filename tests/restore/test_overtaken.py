"""A reader that is overtaken by deletions finds a checkpoint as long as one exists at every moment."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asymcheck import Store, StoreConfig
from asymcheck.commit.save_request import new_save_id
from asymcheck.errors import CheckpointNotFoundError, InconsistentCheckpointError
from asymcheck.storage.local_files import Files
from asymcheck.storage.nvme import NvmeTier
from asymcheck.types import Part


class Overtaken(Files):
    """Before it opens a manifest, the trainer beside it saves a step and deletes those before."""

    def __init__(self, trainer: Store, times: int, *, save: bool = True) -> None:
        self.trainer = trainer
        self.left = times
        self.save = save
        self.step = 1

    def open_read(self, path: Path) -> int:
        """Let the trainer work, then open."""
        if path.suffix == ".manifest" and self.left:
            self.left -= 1
            if self.save:
                self.step += 1
                _save(self.trainer, self.step)
            for checkpoint in self.trainer.checkpoints():
                if checkpoint.step != self.step or not self.save:
                    self.trainer.delete(checkpoint.step)
        return super().open_read(path)


def _save(store: Store, step: int) -> None:
    store.save({"x": torch.full((3000,), float(step)), "step": step}, step=step)


@pytest.fixture
def trainer(store_path: Path) -> Iterator[Store]:
    """The store of a training that keeps one checkpoint."""
    with Store.open(store_path, create=True) as store:
        _save(store, 1)
        yield store


def _reader(trainer: Store, files: Files) -> Store:
    return Store(NvmeTier(trainer.path, StoreConfig(), read_only=True, files=files))


@pytest.mark.parametrize("times", [1, 3])
def test_reader_takes_a_checkpoint_saved_meanwhile(trainer: Store, times: int) -> None:
    """Everything listed first is gone; it lists again, without a warning."""
    restored = _reader(trainer, Overtaken(trainer, times)).restore()
    assert restored.checkpoint.step == 1 + times
    assert restored.skipped == ()


def test_a_reader_that_is_overtaken_for_ever_gives_up(trainer: Store) -> None:
    """With the reasons of its last attempt."""
    with pytest.raises(InconsistentCheckpointError, match=r"is gone|was deleted"):
        _reader(trainer, Overtaken(trainer, 1000)).restore()


def test_a_reader_of_one_step_is_not_given_another(trainer: Store) -> None:
    """It asked for what is gone."""
    with pytest.raises(InconsistentCheckpointError, match="step 1"):
        _reader(trainer, Overtaken(trainer, 1)).restore(1)


def test_a_reader_of_a_store_that_was_emptied_finds_nothing(trainer: Store) -> None:
    """Deleted while it was reading, and nothing new: there is no checkpoint."""
    with pytest.raises(CheckpointNotFoundError):
        _reader(trainer, Overtaken(trainer, 1, save=False)).restore()


class Completed(Files):
    """Before an old manifest is opened, the last rank commits the newest checkpoint, and the old one is deleted."""

    def __init__(self, trainer: Store, save_id: str) -> None:
        self.trainer, self.save_id, self.is_done = trainer, save_id, False

    def open_read(self, path: Path) -> int:
        """Let the other rank work, then open."""
        if path.suffix == ".manifest" and "-000000000001-" in str(path) and not self.is_done:
            self.is_done = True
            _save_part(self.trainer, 2, 1, self.save_id)
            self.trainer.delete(1)
        return super().open_read(path)


def _save_part(store: Store, step: int, rank: int, save_id: str) -> None:
    store.save({"x": torch.full((3000,), float(step))}, step=step, part=Part(rank, 2, save_id))


def test_reader_takes_a_checkpoint_completed_meanwhile(store_path: Path) -> None:
    """One of two ranks had not committed at the time of the listing."""
    with Store.open(store_path, create=True) as store:
        for step, ranks in ((1, 2), (2, 1)):
            save_id = new_save_id().hex()
            for rank in range(ranks):
                _save_part(store, step, rank, save_id)
        restored = _reader(store, Completed(store, save_id)).restore()
        assert (restored.checkpoint.step, restored.skipped) == (2, ())
