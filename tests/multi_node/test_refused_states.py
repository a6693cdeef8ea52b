"""Test that a refused state in a restore is no damage: no rank restores an older checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from asymcheck import Checkpointer, Push, Ranks, Store
from asymcheck.commit.save_request import new_save_id
from asymcheck.config import CaptureConfig
from asymcheck.errors import AsymcheckError, RankFailedError, RefusedStateError, StateMismatchError, StorageError
from asymcheck.format.manifest import TensorRow
from asymcheck.restore import assemble
from asymcheck.types import Part
from tests.distributed.launched import CONFIG
from tests.distributed.test_coordinator import each


class Picky:
    """An object that loads its state only if there is space for it."""

    def __init__(self, room: int) -> None:
        self.step, self.room = 0, room

    def state_dict(self) -> dict[str, object]:
        """Return the step."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load a step, or refuse it, like a GPU without free memory."""
        step = state_dict["step"]
        assert isinstance(step, int)
        if step > self.room:
            message = "CUDA out of memory"
            raise RuntimeError(message)
        self.step = step


@pytest.mark.slow
@pytest.mark.parametrize("refusing", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("stores", [1, 2])
def test_a_state_that_an_object_refuses_is_no_damage(tmp_path: Path, stores: int, refusing: tuple[int, ...]) -> None:
    """Test one store and one for each rank, also with a remote location: no older checkpoint is restored."""

    def trained(rank: int, keys: dist.Store, room: int, steps: range) -> object:
        memory = tmp_path / f"memory-{rank}"
        memory.mkdir(exist_ok=True)
        machine = rank % stores
        ranks = Ranks(rank, 2, keys, timeout_s=60.0, node=f"node-{machine}")
        picky = Picky(room)
        weight = torch.zeros(3000)
        state = {"weight": weight, f"rank-{rank}": torch.ones(300), "picky": picky}
        push = Push((tmp_path / "there").as_uri())
        capture = CaptureConfig(ring_folder=str(memory))
        with (
            Store.open(tmp_path / f"machine-{machine}", config=CONFIG, remote=push.remote, create=True) as store,
            Checkpointer(store, state, capture=capture, push=push, ranks=ranks, every=1, keep=None) as checkpointer,
        ):
            for step in steps:
                picky.step = step
                weight += 1
                checkpointer.save(step)
            try:
                return None if steps else checkpointer.restore()
            except AsymcheckError as error:
                return error

    saving, restoring = dist.HashStore(), dist.HashStore()
    assert each(2, lambda rank: trained(rank, saving, 9, range(1, 3))) == [None, None]
    errors = each(2, lambda rank: trained(rank, restoring, 1 if rank in refusing else 9, range(0)))
    expected = [RefusedStateError if rank in refusing else RankFailedError for rank in range(2)]
    assert [type(error) for error in errors] == expected
    assert all("CUDA out of memory" in str(error) for error in errors)


def _restored(folder: Path, saved: dict[int, dict[str, object]], given: dict[str, object]) -> list[object]:
    """Save steps on two machines, restore them into a state, and return the results or errors of both ranks."""
    for step, state in saved.items():
        save_id = new_save_id().hex()
        for rank in range(2):
            with Store.open(folder / f"machine-{rank}", config=CONFIG, create=True) as store:
                store.save(state, step=step, part=Part(rank, 2, save_id))
    keys = dist.HashStore()

    def work(rank: int) -> object:
        ranks = Ranks(rank, 2, keys, timeout_s=60.0, node=f"node-{rank}")
        capture = CaptureConfig(ring_folder=str(folder))
        with (
            Store.open(folder / f"machine-{rank}", config=CONFIG) as store,
            Checkpointer(store, copy.deepcopy(given), capture=capture, ranks=ranks, every=1) as checkpointer,
        ):
            try:
                return checkpointer.restore()
            except AsymcheckError as error:
                return error

    return each(2, work)


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.ones(4000)},
        {"w": torch.ones(3000, dtype=torch.float64)},
        {"w": [torch.ones(3000)]},
        {"a: is not in b": torch.ones(2)},
    ],
    ids=["shape", "dtype", "kind", "name"],
)
def test_a_state_that_fits_an_older_checkpoint_only_is_no_damage(tmp_path: Path, other: dict[str, object]) -> None:
    """Test a wrong configuration: no other rank can have saved what is missing, so no older step is restored."""
    given: dict[str, object] = {"w": torch.ones(3000), "a: is not in b": torch.ones(1)}
    errors = _restored(tmp_path, {1: given, 2: {**given, **other}}, given)
    assert [type(error) for error in errors] == [StateMismatchError] * 2


def test_an_entry_that_no_machine_has_is_no_damage(tmp_path: Path) -> None:
    """Test an entry that only an older checkpoint has: no older step is restored."""
    older: dict[str, object] = {"w": torch.ones(3000), "average": torch.ones(3000)}
    errors = _restored(tmp_path, {1: older, 2: {"w": torch.ones(3000)}}, older)
    assert [type(error) for error in errors] == [StateMismatchError] * 2
    assert all("average: is not in the checkpoint; add it to the state after the restore" in str(it) for it in errors)


def test_a_lack_of_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a tensor that cannot be allocated, which the older checkpoint does not have."""

    def refuse(row: TensorRow, *_more: object) -> torch.Tensor:
        raise StorageError(f"tensor {row.name} cannot be allocated on cpu")

    monkeypatch.setattr(assemble, "allocate", refuse)
    saved: dict[int, dict[str, object]] = {1: {"w": torch.ones(3000), "average": None}}
    saved[2] = {"w": torch.ones(3000), "average": torch.ones(3000)}
    errors = _restored(tmp_path, saved, {"w": torch.zeros(3000), "average": None})
    assert [type(error) for error in errors] == [StorageError] * 2
