"""A training loop of a user, for type checkers: each result is assigned to its documented type."""

from __future__ import annotations

from pathlib import Path

import torch

import asymcheck
from asymcheck.errors import CheckpointNotFoundError, StorageError
from asymcheck.types import Checkpoint


def train(folder: Path, steps: int) -> Checkpoint | None:
    """Train, and return the newest checkpoint."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer, "rng": asymcheck.RngState(), "epoch": 0}
    config = asymcheck.StoreConfig(compression="auto")
    with (
        asymcheck.Store.open(folder, create=True, config=config) as store,
        asymcheck.Checkpointer(store, state, every=10, keep=asymcheck.Retention(keep_last=3)) as checkpointer,
    ):
        restored = checkpointer.restore()
        start: int = restored.step + 1 if restored else 0
        for step in range(start, steps):
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpointer.step(step, metrics={"loss": loss.item()})
        checkpointer.save(steps)
        latest: int | None = checkpointer.latest_step
        checkpoints: list[Checkpoint] = store.checkpoints()
        return checkpoints[-1] if latest else None


def load(folder: Path) -> object:
    """Load the newest state."""
    try:
        with asymcheck.Store.open(folder, read_only=True) as store:
            return store.load(tensors="model.*", device="cpu")
    except (CheckpointNotFoundError, StorageError) as error:
        return str(error)
