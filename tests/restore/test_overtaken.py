"""Test that a reader overtaken by deletions finds a checkpoint if one exists at every moment."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from asymcheck import Store, StoreConfig
from asymcheck.commit.save_request import new_save_id
from asymcheck.errors import CheckpointNotFoundError, InconsistentCheckpointError
from asymcheck.restore import load, resolve
from asymcheck.restore.resolve import candidates
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.local_files import Files
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.nvme import NvmeTier
from asymcheck.types import Part


class Overtaken(Files):
    """Saves a step and deletes the previous ones before a manifest is opened."""

    def __init__(self, trainer: Store, times: int, *, save: bool = True) -> None:
        self.trainer = trainer
        self.left = times
        self.save = save
        self.step = 1

    def open_read(self, path: Path) -> int:
        """Run the trainer, then open."""
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
    """Return the store of a training that keeps one checkpoint."""
    with Store.open(store_path, create=True) as store:
        _save(store, 1)
        yield store


def _reader(trainer: Store, files: Files) -> Store:
    return Store(NvmeTier(trainer.path, StoreConfig(), read_only=True, files=files))


@pytest.mark.parametrize("times", [1, 3])
def test_reader_takes_a_checkpoint_saved_meanwhile(trainer: Store, times: int) -> None:
    """Test that the reader lists again after all listed checkpoints are gone, without a warning."""
    restored = _reader(trainer, Overtaken(trainer, times)).restore()
    assert restored.checkpoint.step == 1 + times
    assert restored.skipped == ()


def _pushed(reader: Store) -> int:
    (name,) = reader.push(f"{reader.path.absolute().as_uri()}-copy").committed
    return int(name.split()[3])


@pytest.mark.parametrize("use", [lambda reader: reader.tensors()[0].step, _pushed], ids=["tensors", "push"])
def test_a_list_or_a_push_takes_a_checkpoint_saved_meanwhile(trainer: Store, use: Callable[[Store], int]) -> None:
    """Test that the newest checkpoint is listed or pushed, without a warning, after all listed ones are gone."""
    assert use(_reader(trainer, Overtaken(trainer, 3))) == 4


@pytest.mark.parametrize("use", [Store.restore, Store.tensors])
def test_a_reader_that_is_overtaken_for_ever_gives_up(trainer: Store, use: Callable[[Store], object]) -> None:
    """Test that the error has the reasons of the last attempt."""
    with pytest.raises(InconsistentCheckpointError, match=r"is gone|was deleted"):
        use(_reader(trainer, Overtaken(trainer, 1000)))


def test_a_reader_of_one_step_is_not_given_another(trainer: Store) -> None:
    """Test that a request for a deleted step is an error."""
    with pytest.raises(InconsistentCheckpointError, match="step 1"):
        _reader(trainer, Overtaken(trainer, 1)).restore(1)


def test_a_reader_of_a_store_that_was_emptied_finds_nothing(trainer: Store) -> None:
    """Test that a store that was emptied during the read has no checkpoint."""
    with pytest.raises(CheckpointNotFoundError):
        _reader(trainer, Overtaken(trainer, 1, save=False)).restore()


class Completed(Files):
    """Commits the last part of the newest checkpoint, and deletes the old one, before an old manifest is opened."""

    def __init__(self, trainer: Store, save_id: str) -> None:
        self.trainer, self.save_id, self.is_done = trainer, save_id, False

    def open_read(self, path: Path) -> int:
        """Run the other rank, then open."""
        if path.suffix == ".manifest" and "-000000000001-" in str(path) and not self.is_done:
            self.is_done = True
            _save_part(self.trainer, 2, 1, self.save_id)
            self.trainer.delete(1)
        return super().open_read(path)


def _save_part(store: Store, step: int, rank: int, save_id: str) -> None:
    store.save({"x": torch.full((3000,), float(step))}, step=step, part=Part(rank, 2, save_id))


def test_reader_takes_a_checkpoint_completed_meanwhile(store_path: Path) -> None:
    """Test a checkpoint of which one of two ranks had not committed at the time of the listing."""
    with Store.open(store_path, create=True) as store:
        for step, ranks in ((1, 2), (2, 1)):
            save_id = new_save_id().hex()
            for rank in range(ranks):
                _save_part(store, step, rank, save_id)
        restored = _reader(store, Completed(store, save_id)).restore()
        assert (restored.checkpoint.step, restored.skipped) == (2, ())


def test_a_checkpoint_that_was_withdrawn_hides_no_other(trainer: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a save that fails after its manifest was seen, beside the deletion of the newest checkpoint."""
    _save(trainer, 2)

    def withdrawn(tier: ReadTier, run: str, step: int | None) -> list[CheckpointFiles]:
        listings = candidates(tier, run, step)
        if any(listing.ref.step == 3 for listing in listings):
            trainer.delete(3)
        return listings

    class Deleted(Overtaken):
        def open_read(self, path: Path) -> int:
            if path.suffix == ".manifest" and "-000000000002-" in str(path):
                trainer.delete(2)
                _save(trainer, 3)
            return Files.open_read(self, path)

    for module in (load, resolve):
        monkeypatch.setattr(module, "candidates", withdrawn)
    assert _reader(trainer, Deleted(trainer, 0)).restore().checkpoint.step == 1
