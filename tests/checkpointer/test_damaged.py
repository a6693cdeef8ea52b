"""Test restores of damaged checkpoints in a training loop, and the errors."""

import itertools
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asymcheck import Checkpointer, Store, StoreConfig
from asymcheck.config import Compression
from asymcheck.errors import (
    InconsistentCheckpointError,
    PartialRestoreError,
    RemoteUnreachableError,
    SkippedCheckpointWarning,
    StateDifferenceWarning,
)
from asymcheck.restore import frame_reader
from tests.damage.flips import flip


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    """Return a new store without encoding, because encoding depends on the speed of the drive."""
    with Store.open(store_path, config=StoreConfig(compression="off"), create=True) as opened:
        yield opened


def _two_large_tensors() -> dict[str, Any]:
    """Return a state with several partitions, some of which are read before the damaged one."""
    return {"a": torch.zeros(2_000_000), "b": torch.zeros(2_000_000)}


def _save_random(checkpointer: Checkpointer, steps: range) -> None:
    for step in steps:
        for tensor in checkpointer._state.values():
            tensor.normal_()  # type: ignore[attr-defined]  # a tensor
        checkpointer.save(step)


def _damage(path: Path) -> None:
    """Damage the payload of the first frame of a pack."""
    (start,) = struct.unpack_from("<I", path.read_bytes(), 4096 + 72)
    flip(path, 8 * (4096 + start + 10))


def _flip_newest(store: Store) -> None:
    _damage(max((store.path / "packs").iterdir(), key=lambda path: path.stat().st_mtime_ns))


@pytest.mark.parametrize("compression", ["off", "smallest"])
def test_replayed_step_does_not_rely_on_a_damaged_frame(store_path: Path, compression: Compression) -> None:
    """Test a training that, after a restore of the older checkpoint, computes the damaged bytes again."""
    config = StoreConfig(compression=compression)

    def train(store: Store, steps: range) -> None:
        state = _two_large_tensors()
        checkpointer = Checkpointer(store, state, every=1, keep=None)
        checkpointer.restore()
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for tensor in state.values():
                tensor.normal_(generator=generator)
            checkpointer.save(step)

    with Store.open(store_path, config=config, create=True) as store:
        train(store, range(3))
        _flip_newest(store)
    with Store.open(store_path, config=config) as store, pytest.warns(SkippedCheckpointWarning, match="step 2"):
        train(store, range(2, 3))
    with Store.open(store_path, config=config) as store:
        checkpointer = Checkpointer(store, _two_large_tensors(), every=1, keep=None)
        restored = checkpointer.restore()
        assert restored is not None
        assert restored.step == 2


def test_a_damaged_partition_gives_way_to_the_next_older_checkpoint(store: Store) -> None:
    """Test that the older checkpoint overwrites all tensors, including those filled from the damaged one."""
    state = _two_large_tensors()
    checkpointer = Checkpointer(store, state, every=1, keep=None)
    for step in range(3):
        state["a"].fill_(step)
        state["b"].normal_()
        checkpointer.save(step)
        if step == 1:
            expected = state["b"].clone()
    _flip_newest(store)
    restored = _two_large_tensors()
    with pytest.warns(SkippedCheckpointWarning, match=r"digest mismatch.*step 2"):
        checkpoint = Checkpointer(store, restored, every=1, keep=None).restore()
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert torch.equal(restored["b"], expected)
    assert set(restored["a"].tolist()) == {1.0}


def test_a_damaged_step_that_is_asked_for_is_not_replaced(store: Store) -> None:
    """Test that a restore by step raises an error and never restores another step."""
    checkpointer = Checkpointer(store, _two_large_tensors(), every=1, keep=None)
    _save_random(checkpointer, range(2))
    _flip_newest(store)
    with pytest.raises((PartialRestoreError, InconsistentCheckpointError), match="digest mismatch"):
        checkpointer.restore(1)


@pytest.mark.slow(quick=["None"])
@pytest.mark.parametrize("wanted", [None, 2])
def test_a_step_saved_twice_gives_way_to_its_older_save(store: Store, wanted: int | None) -> None:
    """Test that the older save of the same step is restored if the newer save is damaged."""
    state = _two_large_tensors()
    checkpointer = Checkpointer(store, state, every=1, keep=None)
    for value, step in enumerate((1, 2, 2)):
        state["a"].fill_(value)
        state["b"].normal_()
        checkpointer.save(step)
    _flip_newest(store)
    with pytest.warns(SkippedCheckpointWarning, match=r"digest mismatch"):
        checkpoint = Checkpointer(store, state, every=1, keep=None).restore(wanted)
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert set(state["a"].tolist()) == {1.0}


def test_a_state_that_only_damaged_checkpoints_filled_is_an_error(store: Store) -> None:
    """Test that the error lists the overwritten tensors and says that no older checkpoint is left."""
    checkpointer = Checkpointer(store, _two_large_tensors(), every=1, keep=None)
    _save_random(checkpointer, range(2))
    for path in (store.path / "packs").iterdir():
        _damage(path)
    with pytest.raises((PartialRestoreError, InconsistentCheckpointError), match="digest mismatch"):
        Checkpointer(store, _two_large_tensors(), every=1, keep=None).restore()
    assert [c.on_line for c in store.checkpoints()] == [True, True]


class _Refusing:
    """Stateful object that refuses its state until it is allowed."""

    refuses = False

    def state_dict(self) -> dict[str, Any]:
        return {"x": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            raise ValueError("not this state")
        assert state["x"].tolist() == [1, 1, 1]


def test_state_that_a_failed_restore_left_is_not_saved(store: Store) -> None:
    """Test step() and save() after a restore that has overwritten a part of the state, and after a good restore."""
    part = _Refusing()
    checkpointer = Checkpointer(store, {"w": torch.zeros(5000), "part": part}, every=1, keep=None)
    checkpointer.save(1)
    part.refuses = True
    with pytest.raises(PartialRestoreError, match="not this state"):
        checkpointer.restore()
    for save in (checkpointer.step, checkpointer.save):
        with pytest.raises(PartialRestoreError, match="failed after it had overwritten"):
            save(2)
    part.refuses = False
    assert checkpointer.restore() is not None
    checkpointer.save(2)
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1, 2]


@pytest.mark.parametrize("place", ["object", "object in memory", "generation", "generation in memory"])
def test_state_that_an_interrupted_restore_left_is_not_saved(
    store: Store, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Test an interrupt among the objects of the state, and one before the new generation begins.

    Programs often catch the interrupt, and save their state a last time.
    """

    def interrupt(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    state = {"w": torch.zeros(5000), "part": _Refusing()}
    checkpointer = Checkpointer(store, state, every=1, keep=None)
    checkpointer.step(1)
    checkpointer.wait()
    restore = checkpointer.rollback if place.endswith("memory") else checkpointer.restore
    owner, name = (
        (state["part"], "load_state_dict") if place.startswith("object") else (store.training, "begin_generation")
    )
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            restore()
    for save in (checkpointer.step, checkpointer.save):
        with pytest.raises(PartialRestoreError, match="failed after it had overwritten"):
            save(2)
    restore()
    checkpointer.save(2)
    checkpointer.close()
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1, 2]


class _Interrupted:
    """Stateful object without tensors, whose restore is interrupted."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("restores_from_memory", [False, True])
def test_state_that_an_interrupted_conversion_left_is_not_saved(store: Store, *, restores_from_memory: bool) -> None:
    """Test an interrupt after a model of another dtype, into which torch copies the tensors."""
    state = {"model": torch.nn.Linear(3, 2), "part": _Interrupted()}
    with Checkpointer(store, state, every=1) as checkpointer:
        checkpointer.step(1)
        checkpointer.wait()
        state["model"].double()  # type: ignore[attr-defined]  # a module
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StateDifferenceWarning)
            with pytest.raises(KeyboardInterrupt):
                (checkpointer.rollback if restores_from_memory else checkpointer.restore)()
        with pytest.raises(PartialRestoreError, match="failed after it had overwritten"):
            checkpointer.step(2)


def test_state_that_an_unreachable_location_left_is_not_saved(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test step() and save() after a restore that was cut off by an error that is no damage."""
    checkpointer = Checkpointer(store, _two_large_tensors(), every=1, keep=None)
    _save_random(checkpointer, range(1))
    whole, calls = frame_reader.read_checked, itertools.count()

    def read_checked(*arguments: object) -> memoryview:
        if next(calls):
            raise RemoteUnreachableError("it went away")
        return whole(*arguments)  # type: ignore[arg-type]  # handed on

    with monkeypatch.context() as patch:
        patch.setattr(frame_reader, "read_checked", read_checked)
        with pytest.raises(RemoteUnreachableError, match="is a mixture") as caught:
            checkpointer.restore()
    assert caught.value.overwritten
    for save in (checkpointer.step, checkpointer.save):
        with pytest.raises(PartialRestoreError, match="failed after it had overwritten"):
            save(1)
    assert checkpointer.restore() is not None
    checkpointer.save(1)
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [0, 1]
