"""Fixtures: an open store, and one with a delta."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Store
from asymcheck.storage.nvme import NvmeTier
from tests.store.deltas import CONFIG, entries_of, noise


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    """Return a new store with the default settings, closed after the test."""
    with Store.open(store_path, create=True) as opened:
        yield opened


@pytest.fixture
def weights(store_path: Path) -> torch.Tensor:
    """Return the weights of step 2, the only step: a delta in a pack to be repacked, on an unreferenced base."""
    torch.manual_seed(0)
    state = {"weights": torch.randn(60_000) * 0.02, "noise": noise(0)}
    with (
        Store.open(store_path, config=CONFIG, create=True) as store,
        Checkpointer(store, state, every=1, keep=None) as checkpointer,
    ):
        for step in range(3):
            if step == 1:
                state["weights"].add_(torch.randn(60_000), alpha=1e-6)
            state["noise"].copy_(noise(step))
            checkpointer.step(step)
            checkpointer.wait()
        store.delete(step=0)
        store.delete(step=1)
    tier = NvmeTier(store_path, CONFIG, read_only=True)
    assert sum(int(entries_of(tier, pack)["kind"].any()) for pack in tier.pack_ids()) == 1
    return state["weights"].clone()
