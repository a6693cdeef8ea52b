"""Test that large tensors are written in place, with a payload shifted to their address."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from asymcheck import Store, StoreConfig
from asymcheck.errors import TornCaptureError
from asymcheck.storage.local_files import Files
from asymcheck.storage.nvme import NvmeTier
from tests.spec.frozen import whole_stores

CONFIG = StoreConfig(partition_bytes=1 << 20, bundle_below_bytes=1 << 16)
LENGTHS = [65_536, 65_537, 65_536 + 4_095, 69_632, 100_000, (1 << 20) - 1, (1 << 20) + 5, 3 << 20]


def _shifts(store: Store) -> set[int]:
    tier = NvmeTier(store.path, CONFIG, read_only=True)
    found: set[int] = set()
    for pack_id in tier.pack_ids():
        pack = tier.open_pack(pack_id)
        found |= set(pack.entries["payload_shift"].tolist())
        pack.close()
    return found


@pytest.mark.parametrize("offset", [0, 1, 63, 2_048, 4_095])
def test_any_address_and_length(offset: int, store_path: Path) -> None:
    """Test that the shift is the address modulo a block, and that every byte is restored."""
    state = {}
    for length in LENGTHS:
        memory = torch.randint(0, 256, (length + 8_192,), dtype=torch.uint8)
        start = (offset - memory.data_ptr()) % 4_096
        state[str(length)] = memory[start : start + length]
    with Store.open(store_path, config=CONFIG, create=True) as store:
        store.save(state, step=1)
        assert _shifts(store) == {offset}
        found = store.load(1)
        assert isinstance(found, dict)
        assert all(torch.equal(found[name], state[name]) for name in state)
        assert store.verify() == []


def test_a_store_without_the_feature_has_no_shifts(store_path: Path) -> None:
    """Test that a store without the feature stays readable by older programs."""
    frozen = next(frozen for frozen in whole_stores() if frozen.whole.name == "v1-by-0.1.0")
    frozen.copy_to(store_path)
    memory = torch.arange(1 << 18, dtype=torch.int32)
    state = {"shifted": memory[16:], "aligned": memory[-memory.data_ptr() % 4_096 // 4 :]}
    with Store.open(store_path, config=CONFIG, create=True) as store:
        store.save(state, step=1, run="new")
        assert _shifts(store) == {0}
        found = store.load(1, run="new")
        assert isinstance(found, dict)
        assert all(torch.equal(found[name], state[name]) for name in state)
        assert store.verify() == []


def test_memory_pages_are_judged_once_for_each_tensor(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a tensor of three partitions, by the number of its bytes that were judged."""
    judged: list[int] = []
    monkeypatch.setattr(NvmeTier, "needs_slot", lambda _tier, memory: bool(judged.append(len(memory))))
    with Store.open(store_path, config=dataclasses.replace(CONFIG, slots=1), create=True) as store:
        store.save({"large": torch.randn(3 << 18), "small": torch.randn(1 << 17)}, step=1)
    assert sorted(judged) == [1 << 19, 3 << 20]


class Changing(Files):
    """A disk whose writes take so long that the state changes meanwhile."""

    change: Callable[[], object] = staticmethod(lambda: None)

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
        """Change the state, then write."""
        if sum(map(len, buffers)) > 65_536:
            self.change()
        super().pwrite(descriptor, buffers, offset, path)


@pytest.mark.parametrize("how", ["one element, by torch", "all elements, by numpy"])
def test_state_that_changes_during_a_save_is_refused(how: str, store_path: Path) -> None:
    """Test that the error names the tensor, no checkpoint is made, and the next save succeeds."""
    files = Changing()
    state = {"steady": torch.zeros(1 << 18), "weight": torch.randn(1 << 18)}
    weight: torch.Tensor = state["weight"]
    array: np.ndarray = weight.numpy()
    with Store(NvmeTier(store_path, CONFIG, files=files)) as store:
        store.save(state, step=1)
        weight += 1
        files.change = (lambda: weight[70_001].add_(1)) if "torch" in how else (lambda: array.__iadd__(1))
        with pytest.raises(TornCaptureError, match="weight"):
            store.save(state, step=2)
        files.change = lambda: None
        assert [one.step for one in store.checkpoints()] == [1]
        store.save(state, step=3)
        found = store.load()
        assert isinstance(found, dict)
        assert torch.equal(found["weight"], weight)
