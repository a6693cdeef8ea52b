"""Test that a StatefulDataLoader of torchdata in the state continues with the next sample."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from asymcheck import Checkpointer, RngState, Store

# Hide warnings of torch about torchdata.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
ROWS, BATCH, EPOCHS = 23, 4, 3


class Counting(IterableDataset[int]):
    """Consecutive rows, with a position that can be stored."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < ROWS:
            self.place += 1
            yield self.place
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the position."""
        self.place = state["place"]


def loader(kind: str) -> StatefulDataLoader:
    """Return shuffled rows, also with workers, or a stream."""
    if kind == "stream":
        return StatefulDataLoader(Counting(), batch_size=BATCH)
    return StatefulDataLoader(range(ROWS), batch_size=BATCH, shuffle=True, num_workers=2 * (kind == "workers"))


def train(store: Store, kind: str, stop: int) -> list[list[int]]:
    """Train on data from the newest checkpoint up to a batch; return the batches of this run."""
    torch.manual_seed(5 if not store.checkpoints() else 6)
    place, weights, rows = {"epoch": 0}, torch.zeros(5_000), loader(kind)
    state: dict[str, object] = {"loader": rows, "rng": RngState(), "place": place, "weights": weights}
    seen: list[list[int]] = []
    with Checkpointer(store, state, every=1, keep=None) as checkpointer:
        restored = checkpointer.restore()
        step = restored.step + 1 if restored else 0
        while place["epoch"] < EPOCHS:
            for batch in rows:
                weights += 1
                seen.append(batch.tolist())
                checkpointer.step(step)
                if step == stop:
                    # Close the workers here. The garbage collector would wait five seconds for each worker.
                    getattr(rows._iterator, "_shutdown_workers", int)()
                    return seen
                step += 1
            place["epoch"] += 1
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shuffled", "workers", "stream"])
def test_a_resumed_run_goes_on_with_the_next_sample(kind: str, tmp_path: Path) -> None:
    """Test a stop within an epoch, and at its last batch."""
    with Store.open(tmp_path / "whole", create=True) as store:
        whole = train(store, kind, 10**6)
    assert len(whole) == EPOCHS * -(-ROWS // BATCH)
    assert sorted(row for batch in whole for row in batch) == sorted(
        [row for row in range(ROWS) for _ in range(EPOCHS)] if kind != "stream" else [*range(1, ROWS + 1)] * EPOCHS
    )
    with Store.open(tmp_path / "stopped", create=True) as store:
        pieces = [train(store, kind, stop) for stop in (2, 5, 8, 10**6)]
    assert [len(piece) for piece in pieces[:3]] == [3, 3, 3]
    assert [batch for piece in pieces for batch in piece] == whole


def epochs(path: Path, ends: tuple[int, int], workers: int) -> list[list[int]]:
    """Train as in docs/getting-started.md up to a place, an epoch and a number of batches; return the batches."""
    rows = range(ROWS)
    sampler: DistributedSampler[int] = DistributedSampler(rows, num_replicas=1, rank=0)  # type: ignore[arg-type]  # a range is enough
    data = StatefulDataLoader(rows, batch_size=BATCH, sampler=sampler, generator=torch.Generator(), num_workers=workers)
    progress = {"step": 0, "epoch": 0}
    seen: list[list[int]] = []
    with (
        Store.open(path, create=True) as store,
        Checkpointer(store, {"loader": data, "progress": progress}, every=100, save_on_exit=True) as checkpointer,
    ):
        checkpointer.restore()
        for epoch in range(progress["epoch"], EPOCHS):
            sampler.set_epoch(epoch)
            for number, batch in enumerate(data):
                seen.append(batch.tolist())
                progress["step"] += 1
                checkpointer.step(progress["step"])
                if (epoch, number + 1) == ends:
                    getattr(data._iterator, "_shutdown_workers", int)()
                    return seen
            progress["epoch"] = epoch + 1
            if (epoch + 1, 0) == ends:
                break
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ends", [(1, 0), (1, 1), (1, 5), (1, 6)])
def test_a_resume_repeats_no_epoch(ends: tuple[int, int], workers: int, tmp_path: Path) -> None:
    """Test checkpoints between two epochs, and after the first, the last but one and the last batch of an epoch."""
    whole = epochs(tmp_path / "whole", (EPOCHS, 0), workers)
    assert len(whole) == EPOCHS * -(-ROWS // BATCH)
    parts = [epochs(tmp_path / "parts", end, workers) for end in (ends, (EPOCHS, 0))]
    assert [batch for part in parts for batch in part] == whole
