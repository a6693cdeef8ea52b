"""Test that a StatefulDataLoader of torchdata in the state continues with the next sample."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import IterableDataset
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
