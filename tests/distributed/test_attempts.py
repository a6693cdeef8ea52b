"""Test several saves of one step: if one is damaged on a rank, all ranks restore another one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from asymcheck import Checkpointer, Ranks, Store
from asymcheck.commit.save_request import new_save_id
from asymcheck.config import CaptureConfig
from asymcheck.errors import (
    AsymcheckError,
    InvalidInputError,
    PartialRestoreError,
    RankFailedError,
    SkippedCheckpointWarning,
)
from asymcheck.format.frame import payload_offset
from asymcheck.types import Checkpoint, Part
from tests.damage.flips import flip
from tests.distributed.launched import CONFIG
from tests.distributed.test_coordinator import each

ATTEMPTS = [(1, 0.0), (2, 1.0), (2, 2.0)]
"""Steps, with the values of the weights."""


def _save(store: Store) -> list[list[Path]]:
    """Save all attempts; return the packs of the last one, by rank."""
    packs: list[list[Path]] = [[], []]
    for step, value in ATTEMPTS:
        save_id = new_save_id().hex()
        for rank in range(2):
            before = set((store.path / "packs").iterdir())
            store.save({"w": torch.full((3000,), value + rank / 2)}, step=step, part=Part(rank, 2, save_id))
            packs[rank] = sorted(set((store.path / "packs").iterdir()) - before)
    return packs


@pytest.mark.parametrize("damaged", [(), (0,), (1,), (0, 1)])
def test_the_other_attempt_is_tried_before_an_older_step(tmp_path: Path, damaged: tuple[int, ...]) -> None:
    """Test wrong bytes in a frame that only the reading rank can detect."""
    with Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        packs = _save(store)
        for rank in damaged:
            (pack,) = packs[rank]
            # Skip the headers of the pack and of its only frame.
            flip(pack, 8 * (4096 + 200))
    keys = dist.HashStore()
    os.mkdir(tmp_path / "memory")

    def restored(rank: int) -> tuple[Checkpoint | None, float]:
        state = {"w": torch.zeros(3000)}
        capture = CaptureConfig(ring_folder=str(tmp_path / "memory"))
        ranks = Ranks(rank, 2, keys, timeout_s=60.0)
        with (
            Store.open(tmp_path / "store", config=CONFIG, create=True) as store,
            Checkpointer(store, state, capture=capture, ranks=ranks, every=1, keep=None) as checkpointer,
        ):
            checkpoint = checkpointer.restore()
            assert state["w"].eq(state["w"][0]).all()
            return checkpoint, state["w"][0].item()

    reports = pytest.warns(SkippedCheckpointWarning, match="skipped step 2") if damaged else contextlib.nullcontext()
    with reports:
        found = each(2, restored)
    step, value = ATTEMPTS[-2 if damaged else -1]
    assert [weight for _, weight in found] == [value, value + 0.5]
    assert [checkpoint is not None and checkpoint.step for checkpoint, _ in found] == [step, step]


def test_values_of_a_checkpoint_that_another_rank_cannot_read_are_replaced(tmp_path: Path) -> None:
    """Test plain values that the older checkpoint lacks, or has in another form."""
    history: dict[int, dict[str, object]] = {
        1: {"losses": {1: 0.5}, "best": None},
        2: {"losses": {1: 0.5, 2: 0.25}, "best": {"step": 2}},
    }
    with Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        for step, values in history.items():
            save_id = new_save_id().hex()
            for rank in range(2):
                before = set((store.path / "packs").iterdir())
                state = {"w": torch.full((3000,), step + rank / 2), **values}
                store.save(state, step=step, part=Part(rank, 2, save_id))
        (pack,) = set((store.path / "packs").iterdir()) - before
        flip(pack, 8 * (4096 + 200))
    keys = dist.HashStore()
    os.mkdir(tmp_path / "memory")

    def restored(rank: int) -> dict[str, object]:
        state = {"w": torch.zeros(3000), "losses": dict[int, float](), "best": None}
        capture = CaptureConfig(ring_folder=str(tmp_path / "memory"))
        ranks = Ranks(rank, 2, keys, timeout_s=60.0)
        with (
            Store.open(tmp_path / "store", config=CONFIG) as store,
            Checkpointer(store, state, capture=capture, ranks=ranks, every=1, keep=None) as checkpointer,
        ):
            checkpointer.restore()
        return {name: value for name, value in state.items() if name != "w"}

    with pytest.warns(SkippedCheckpointWarning, match="skipped step 2"):
        assert each(2, restored) == [history[1]] * 2


@pytest.mark.filterwarnings("ignore::asymcheck.errors.AbandonedCheckpointsWarning")
@pytest.mark.parametrize("stores", [1, 2])
@pytest.mark.parametrize("step", [None, 1])
@pytest.mark.parametrize("is_empty", [False, True])
def test_state_that_a_damaged_checkpoint_left_on_one_rank_is_not_saved(
    tmp_path: Path, stores: int, step: int | None, *, is_empty: bool
) -> None:
    """Test that no rank saves a mixture: rank 1 was restored in part or not at all, and rank 0 as a whole."""
    save_id = new_save_id().hex()
    for rank in range(2):
        with Store.open(tmp_path / f"machine-{rank % stores}", config=CONFIG, create=True) as store:
            before = set(store.resources.tier.pack_ids())
            store.save({"w": torch.arange(3000.0) + rank}, step=1, part=Part(rank, 2, save_id))
            (pack_id,) = set(store.resources.tier.pack_ids()) - before
            if rank == 1:
                with contextlib.closing(store.resources.tier.open_pack(pack_id)) as pack:
                    entries = sorted(pack.entries, key=lambda entry: int(entry["offset"]))
                    assert len(entries) > 1
                    for entry in entries if is_empty else entries[-1:]:
                        offset = int(entry["offset"]) + payload_offset(int(entry["stored_length"])) + 1
                        flip(pack.path, 8 * offset)
    keys = dist.HashStore()
    os.mkdir(tmp_path / "memory")

    def restored(rank: int) -> list[type[Exception]]:
        machine, failures = rank % stores, list[type[Exception]]()
        capture = CaptureConfig(ring_folder=str(tmp_path / "memory"))
        ranks = Ranks(rank, 2, keys, timeout_s=60.0, node=f"node-{machine}")
        state = {"w": torch.zeros(3000)}
        with (
            Store.open(tmp_path / f"machine-{machine}", config=CONFIG, create=True) as store,
            Checkpointer(store, state, capture=capture, ranks=ranks, every=1, keep=None) as checkpointer,
        ):
            for call in (lambda: checkpointer.restore(step), lambda: checkpointer.save(2)):
                try:
                    call()
                except AsymcheckError as error:
                    failures.append(type(error))
        return failures

    first, damaged = each(2, restored)
    assert first[1:] == [PartialRestoreError]
    assert damaged[1:] == [RankFailedError if is_empty else PartialRestoreError]


def test_digits_without_save_are_not_taken_for_a_save_id(tmp_path: Path) -> None:
    """Test a step that is passed as text, which would otherwise restore any save whose id begins with the digits."""
    save_id = new_save_id().hex()
    with Store.open(tmp_path / "store", create=True) as store:
        for rank in range(2):
            store.save({"w": torch.zeros(3000)}, step=1, part=Part(rank, 2, save_id))
    keys = dist.HashStore()
    os.mkdir(tmp_path / "memory")

    def restored(rank: int) -> int | None:
        capture = CaptureConfig(ring_folder=str(tmp_path / "memory"))
        ranks = Ranks(rank, 2, keys, timeout_s=60.0)
        with (
            Store.open(tmp_path / "store") as store,
            Checkpointer(store, {"w": torch.ones(3000)}, capture=capture, ranks=ranks, every=1) as checkpointer,
        ):
            with pytest.raises(InvalidInputError, match="give an integer, save:DIGITS"):
                checkpointer.restore(save_id[:2])
            checkpoint = checkpointer.restore(f"save:{save_id[:20]}")
            return checkpoint and checkpoint.step

    assert each(2, restored) == [1, 1]


class Interrupted:
    """An object that is interrupted while it loads its state."""

    is_due = False

    def state_dict(self) -> dict[str, object]:
        """Return a state."""
        return {"step": 1}

    def load_state_dict(self, _state: dict[str, object]) -> None:
        """Load the state, or be interrupted."""
        if self.is_due:
            raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["5", 1.5, -1, True])
def test_invalid_step_is_refused_before_a_rank_waits(tmp_path: Path, step: object) -> None:
    """Test a restore on several ranks: the error names the argument, as that of a single process does."""
    ranks = Ranks(0, 2, dist.HashStore(), timeout_s=0.1)
    with (
        Store.open(tmp_path / "store", create=True) as store,
        Checkpointer(store, {"w": torch.zeros(8)}, ranks=ranks) as checkpointer,
        pytest.raises(InvalidInputError, match="give an integer"),
    ):
        checkpointer.restore(step)  # type: ignore[arg-type]  # as a program without type checks


@pytest.mark.parametrize("action", ["restore", "rollback"])
def test_state_is_not_saved_if_another_rank_was_interrupted(tmp_path: Path, action: str) -> None:
    """Test an error of rank 1 that is no error of the store: no rank may save a mixture."""
    keys = dist.HashStore()

    def restored(rank: int) -> list[type[BaseException]]:
        failures, loaded = list[type[BaseException]](), Interrupted()
        state = {"w": torch.zeros(3000) + rank, "loaded": loaded}
        capture, ranks = CaptureConfig(ring_folder=str(tmp_path)), Ranks(rank, 2, keys, timeout_s=60.0)
        with (
            Store.open(tmp_path / "store", config=CONFIG, create=True) as store,
            Checkpointer(store, state, capture=capture, ranks=ranks, every=1, keep=None) as checkpointer,
        ):
            checkpointer.save(1)
            loaded.is_due = rank == 1
            for call in (getattr(checkpointer, action), lambda: checkpointer.save(2)):
                try:
                    call()
                except (AsymcheckError, KeyboardInterrupt) as error:
                    failures.append(type(error))
        return failures

    assert each(2, restored) == [[RankFailedError, PartialRestoreError], [KeyboardInterrupt, PartialRestoreError]]
