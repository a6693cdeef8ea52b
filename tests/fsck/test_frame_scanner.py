"""Test that a scan reads every frame and its bases, in time linear in the number of packs."""

from __future__ import annotations

from pathlib import Path

import pytest

from asymcheck.codecs.encode import encode_zstd
from asymcheck.format.digest import digest
from asymcheck.fsck.frame_scanner import scan_packs
from asymcheck.storage.nvme import NvmeTier
from asymcheck.types import PackId
from tests.damage.small_store import CONFIG
from tests.restore.test_bases import delta_of, pack_with, plain_of, save_steps, swap, write_pack

COUNT = 12


@pytest.fixture
def tier(store_path: Path) -> NvmeTier:
    """Return a store with a full frame, and many packs of frames that are encoded against it."""
    save_steps(store_path, *range(COUNT))
    swap(store_path, *(delta_of(step, 0) for step in range(1, COUNT)))
    return NvmeTier(store_path, CONFIG)


def test_packs_are_opened_a_few_times_each(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the opens for the search of bases, and for each frame with a base."""
    opened: list[PackId] = []
    open_pack = tier.open_pack
    monkeypatch.setattr(tier, "open_pack", lambda pack_id: opened.append(pack_id) or open_pack(pack_id))
    found = scan_packs(tier)
    assert len(found.packs) == COUNT
    assert all(pack.reusable() == [0] for pack in found.packs.values())
    assert len(opened) <= 3 * COUNT


def test_base_that_moves_during_the_scan_is_found(tier: NvmeTier) -> None:
    """Test a base that a garbage collection copies into another pack."""
    moves = []

    def move(_done: int, _total: int) -> None:
        moves.append(len(moves))
        if moves[-1] in (2, 5):
            old = pack_with(tier.root, plain_of(0))
            write_pack(tier.root, encode_zstd(digest(plain_of(0)), memoryview(plain_of(0))))
            old.unlink()

    found = scan_packs(tier, move)
    # A second listing reads the new packs.
    assert COUNT <= len(moves) <= COUNT + 2
    assert len(found.packs) >= COUNT - 1
    assert all(pack.reusable() == [0] for pack in found.packs.values())


def test_a_base_that_is_lost_is_not_looked_for_again_and_again(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the number of listings, which may be slow at a remote location."""
    pack_with(tier.root, plain_of(0)).unlink()
    listings = []
    pack_ids = tier.pack_ids
    monkeypatch.setattr(tier, "pack_ids", lambda: listings.append(1) or pack_ids())
    found = scan_packs(tier)
    assert all(pack.without_base == {0} for pack in found.packs.values())
    assert len(listings) < COUNT
