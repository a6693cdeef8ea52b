"""Test transfer plans for unusual frames: uploaded data can be decoded, or nothing is uploaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asymcheck.errors import BaseDamagedError
from asymcheck.format import registry
from asymcheck.format.digest import ZERO_DIGEST
from asymcheck.format.pack import ENTRY_DTYPE
from asymcheck.replication.decodable_frames import DecodableFrames
from asymcheck.replication.transfer_plan import TransferPlanner
from asymcheck.restore.partition_locator import PartitionCopy
from asymcheck.storage.pack_index import PackIndex
from asymcheck.types import Digest

FULL, DELTA, DERIVED = registry.KIND_FULL, registry.KIND_DELTA, registry.KIND_DERIVED
CODECS = {FULL: registry.CODEC_IDENTITY, DELTA: registry.CODEC_DELTA, DERIVED: registry.CODEC_DERIVED}


def name(number: int) -> Digest:
    """Return the name of a partition."""
    return Digest(number.to_bytes(16, "big"))


class Packs:
    """Stands for the packs of a tier: a pack of frames, each with a partition, its kind, and its base."""

    def __init__(self, *frames: tuple[int, int, int | None]) -> None:
        rows = [
            (name(this), ZERO_DIGEST if base is None else name(base), 0, 8, 8, kind, CODECS[kind], 1, 0, bytes(3))
            for this, kind, base in frames
        ]
        pack: Any = SimpleNamespace(
            entries=np.array(rows, dtype=ENTRY_DTYPE), header=SimpleNamespace(pack_id=bytes(16)), damage=None
        )
        self.index = PackIndex(pack.header, pack.entries, None)
        self.copies: dict[Digest, list[PartitionCopy]] = {}
        for number, (this, _, _) in enumerate(frames):
            self.copies.setdefault(name(this), []).append(PartitionCopy(pack, number))

    def copy(self, digest: Digest) -> PartitionCopy:
        """Return a copy of the first frame."""
        return self.copies[digest][0]

    def base_copies(self, digest: Digest) -> list[PartitionCopy]:
        """Return all frames, full frames first."""
        return sorted(self.copies.get(digest, []), key=PartitionCopy.kind)


def sent(local: Packs, *numbers: int, remote: Packs | None = None) -> list[tuple[Digest, int]]:
    """Return the chosen partitions, with their encoding."""
    sources: Any = local
    chooser = TransferPlanner(sources, DecodableFrames([] if remote is None else [remote.index]), set())
    chooser.choose([name(number) for number in numbers])
    return [(frame.name, int(frame.entry["kind"])) for frame in (*chooser.full, *chooser.based)]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_derived_frame_is_no_base(order: tuple[int, int]) -> None:
    """Test two ranks that stored the same bytes, one of them as a derived partition."""
    found = sent(Packs((1, DERIVED, 3), (1, FULL, None), (2, DERIVED, 1), (3, FULL, None)), *order)
    assert (name(1), FULL) in found
    assert (name(2), DERIVED) in found


@pytest.mark.parametrize("kind", [DELTA, DERIVED])
def test_frames_that_are_their_own_bases_are_not_sent(kind: int) -> None:
    """Test frames that no writer creates; the push reports them."""
    with pytest.raises(BaseDamagedError, match="cyclic"):
        sent(Packs((1, kind, 2), (2, DELTA, 3), (3, DELTA, 2)), 1)


def test_undecodable_chain_is_not_followed() -> None:
    """Test both sides, and a chain of maximum length, which is followed."""
    longest = [(number, DELTA, number + 1) for number in range(1, 9)]
    original = [(0, DERIVED, 1), *longest, (9, FULL, None)]
    assert len(sent(Packs(*original), 0)) == 10
    assert sent(Packs((0, FULL, None)), 0, remote=Packs(*original)) == []
    endless = [(number, DELTA, number + 1) for number in range(5_000)]
    with pytest.raises(BaseDamagedError, match="too long"):
        sent(Packs(*endless), 0)
    assert sent(Packs((0, FULL, None)), 0, remote=Packs(*endless)) == [(name(0), FULL)]


def test_partition_with_a_usable_copy_is_not_sent() -> None:
    """Test a partition whose first copy at the location lacks its base."""
    remote = Packs((0, DELTA, 1), (0, FULL, None), (2, DELTA, 0))
    local = Packs((0, FULL, None), (2, FULL, None), (3, DELTA, 2))
    assert sent(local, 0, 2, 3, remote=remote) == [(name(3), DELTA)]
    lost = Packs((0, DELTA, 1), (2, DELTA, 0))
    assert sent(local, 0, 2, remote=lost) == [(name(0), FULL), (name(2), FULL)]
