"""Test that derived partitions with equal bytes are never bases of others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from asymcheck import Store, StoreConfig
from asymcheck.commit.pack_builder import PackBuilder
from asymcheck.format.registry import CODEC_DERIVED, KIND_DERIVED
from asymcheck.fsck.verify import Severity
from asymcheck.state.leaves import Leaf
from asymcheck.state.partition_plan import Originals
from asymcheck.storage.nvme import NvmeTier
from asymcheck.types import Digest
from tests.store.deltas import entries_of, noise

CONFIG = StoreConfig(compression="smallest", partition_bytes=4 << 20)
A, B, C = (Digest(bytes([number]) * 16) for number in range(3))


def masters_and_copies(mib: int) -> dict[str, object]:
    """Return masters and rounded copies, all zero, as in layers that are initialised with zeros."""
    master = torch.zeros(mib << 18)
    return {f"{mib} MiB": {"master": master, "copy": master.bfloat16()}}


def test_derived_partition_is_no_base_when_it_is_saved_again(store_path: Path) -> None:
    """Test 2 MiB of zeros, as float32 and as bfloat16 derived from 4 MiB of zeros."""
    with Store.open(store_path, config=CONFIG, create=True) as store:
        two, large = masters_and_copies(2), noise(0, 1 << 18)
        store.save({"master": torch.zeros(2 << 18)}, step=1)
        store.save(two | {"large": large}, step=2)
        store.save({"large": large}, step=3)
        for step in (1, 2):
            store.delete(step)
        store.gc()
        store.save(masters_and_copies(4), step=4)
        both = masters_and_copies(4) | two
        store.save(both, step=5)
        loaded = store.load(step=5)
        # The base of the unneeded frame has changed.
        assert {finding.severity for finding in store.verify()} <= {Severity.WARNING}
    for name, layer in both.items():
        for part, tensor in layer.items():  # type: ignore[attr-defined]  # a dict
            assert torch.equal(loaded[name][part], tensor)  # type: ignore[index]  # as saved
    tier = NvmeTier(store_path, CONFIG, read_only=True)
    assert any((entries_of(tier, pack)["kind"] == KIND_DERIVED).any() for pack in tier.pack_ids())


@pytest.mark.parametrize("first", [(B, A), (C, B)], ids=["lower", "upper"])
def test_second_of_two_copies_in_one_save_is_not_derived(store_path: Path, first: tuple[Digest, Digest]) -> None:
    """Test two copies that threads encode in any order."""
    with Store.open(store_path, config=CONFIG, create=True) as store:
        tier = store.resources.tier
        assert isinstance(tier, NvmeTier)
        packing = PackBuilder(tier, store.resources.catalog())
        assert all(map(packing.claim, (A, B, C)))
        (second,) = {(B, A), (C, B)} - {first}
        assert packing.rely(*first, CODEC_DERIVED)
        assert not packing.rely(*second, CODEC_DERIVED)


def test_strided_masters_are_not_made_contiguous(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that strided masters are not copied in memory; their copies are stored in full."""
    master = torch.randn(64, 64, 16, 16).to(memory_format=torch.channels_last)
    state = {"master": master, "copy": master.bfloat16()}
    with Store.open(store_path, config=CONFIG, create=True) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Leaf, "some_bytes", Mock(side_effect=AssertionError))
            store.save(state, step=1)
        loaded = store.load(step=1)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_where_nothing_is_encoded_no_original_is_looked_for(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that no time is spent on the search, which takes seconds for a state of many layers."""
    monkeypatch.setattr(Originals, "candidates", Mock(side_effect=AssertionError))
    with Store.open(store_path, config=dataclasses.replace(CONFIG, compression="off"), create=True) as store:
        store.save(masters_and_copies(2), step=1)
    with Store.open(store_path, config=CONFIG, create=True) as store, pytest.raises(AssertionError):
        store.save(masters_and_copies(4), step=2)
