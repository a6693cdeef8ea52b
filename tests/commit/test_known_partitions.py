"""Test that the index of a pack is read once, and again after the pack has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from asymcheck import Store, StoreConfig
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.storage.nvme import NvmeTier, PackFile, tier
from asymcheck.types import PackId

STATE_BYTES = 400_000


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[PackId]:
    """Record the opened packs, in order."""
    opened: list[PackId] = []
    open_pack = NvmeTier.open_pack

    def counted(tier: NvmeTier, pack_id: PackId, *, wait: bool = True) -> PackFile:
        opened.append(pack_id)
        return open_pack(tier, pack_id, wait=wait)

    monkeypatch.setattr(NvmeTier, "open_pack", counted)
    return opened


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """Return a state that is saved several times."""
    return {"w": torch.rand(STATE_BYTES // 4)}


@pytest.fixture
def store(store_path: Path, state: dict[str, torch.Tensor]) -> Iterator[Store]:
    """Return a store that has the state, and has cached the index of its pack."""
    with Store.open(store_path, create=True) as store:
        for step in range(2):
            store.save(state, step=step)
        yield store


def test_an_index_is_read_once_for_many_saves(
    store: Store, state: dict[str, torch.Tensor], opened: list[PackId]
) -> None:
    """Test that the index of a later pack is read when a save reuses one of its partitions."""
    for step in range(2, 5):
        assert store.save(state, step=step).written_bytes == 0
    assert opened == []
    other = {"other": torch.rand(STATE_BYTES // 4)}
    for step in range(5, 8):
        store.save(state | other, step=step)
    assert len(opened) == 1


def test_the_indexes_of_many_packs_are_read_once(store_path: Path, opened: list[PackId]) -> None:
    """Test a state whose partitions are in as many packs as steps have changed one of them, as of rare experts."""
    steps = 70
    state = {str(step): torch.rand(2000) for step in range(steps)}
    with Store.open(store_path, config=StoreConfig(bundle_below_bytes=4096), create=True) as store:
        for step in range(steps):
            state[str(step)] += 1
            store.save(state, step=step)
        opened.clear()
        for step in range(2):
            assert store.save(state, step=steps + step).written_bytes == 0
    # The last save of the loop has read the others.
    assert len(opened) == 1


def test_cached_indexes_are_bounded(store_path: Path, opened: list[PackId], monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the least recently used indexes are dropped, so that they take no memory without limit."""
    states = [{"w": torch.rand(STATE_BYTES // 4)} for _ in range(3)]
    with Store.open(store_path, create=True) as store:
        for step, state in enumerate(states):
            store.save(state, step=step)
        store.save(states[0], step=3)
        frames = store.resources.nvme.index_of(opened[0]).entries
        monkeypatch.setattr(tier, "_INDEX_BYTES", 2 * frames.nbytes)
        for state in (*states, *states[1:], states[0]):
            store.save(state, step=4)
    assert [opened.index(pack_id) for pack_id in opened] == [0, 1, 2, 0]


def _damage_index(pack: Path) -> None:
    data = bytearray(pack.read_bytes())
    data[:BLOCK_BYTES] = data[-BLOCK_BYTES:] = bytes(BLOCK_BYTES)
    pack.write_bytes(data)


@pytest.mark.parametrize("lose", [Path.unlink, _damage_index])
def test_a_pack_that_is_gone_or_changed_is_not_believed(
    store: Store, state: dict[str, torch.Tensor], lose: Callable[[Path], object]
) -> None:
    """Test that the save writes its partitions again, and so repairs the checkpoint."""
    (pack,) = store.resources.nvme.packs.iterdir()
    lose(pack)
    assert store.save(state, step=2).written_bytes == STATE_BYTES
    assert torch.equal(store.load(step=2)["w"], state["w"])  # type: ignore[index]  # as saved


def test_a_pack_that_another_process_collects_is_not_believed(store: Store, state: dict[str, torch.Tensor]) -> None:
    """Test a pack file that was moved to the pool; its partitions are written again."""
    with Store.open(store.path, create=True) as other:
        for step in range(2):
            other.delete(step)
        assert other.gc().freed_packs == 1
    assert store.save(state, step=2).written_bytes == STATE_BYTES
    assert store.verify() == []
