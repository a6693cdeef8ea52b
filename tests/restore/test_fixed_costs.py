"""Test fixed costs of a restore of a small state."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import asymcheck
from asymcheck.storage.nvme import NvmeTier


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return the location of a store with one small checkpoint."""
    with (
        asymcheck.Store.open(tmp_path / "store", create=True) as store,
        asymcheck.Checkpointer(store, _state(), every=1, keep=None) as checkpointer,
    ):
        checkpointer.save(0)
    return tmp_path / "store"


def _state() -> dict[str, object]:
    return {"weights": [torch.full((4096,), float(number)) for number in range(8)]}


def test_a_small_restore_starts_no_thread(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the calling thread reads a few megabytes, which is faster than starting threads."""
    state = _state()

    def start(thread: threading.Thread) -> None:
        pytest.fail(f"{thread.name} was started")

    with asymcheck.Store.open(saved, create=True) as store:
        monkeypatch.setattr(threading.Thread, "start", start)
        store.load(into=state)
        assert store.restore().state


def test_a_restore_without_rings_does_not_open_the_catalog(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that manifests and pack indexes are sufficient."""
    monkeypatch.setattr(NvmeTier, "open_catalog", lambda *_, **__: pytest.fail("the catalog was opened"))
    with (
        asymcheck.Store.open(saved, create=True) as store,
        asymcheck.Checkpointer(store, _state(), every=1, keep=None) as checkpointer,
    ):
        assert checkpointer.restore() is not None
