"""Meaning: what the bytes of a partition are, and what they were one checkpoint earlier, as manifests tell it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asymcheck.codecs.container import Segment, segment_of
from asymcheck.format.digest_set import DigestSet
from asymcheck.format.manifest import Manifest
from asymcheck.pipeline.encoder import Contents
from asymcheck.types import Digest


class Meaning:
    """The partitions of one checkpoint. Thread-safe."""

    def __init__(self, manifests: Sequence[Manifest], older: Sequence[Manifest]) -> None:
        """Look into ``manifests``, and into those of an older checkpoint; none where there is nothing older."""
        self._manifests = manifests
        self._older = [
            other if other is not None and _is_cut_alike(manifest, other) else None
            for manifest, other in zip(manifests, _by_rank(manifests, older), strict=True)
        ]
        digests = np.concatenate([manifest.extent_digests for manifest in manifests])
        self._set = DigestSet(digests)
        numbers = self._set.numbers(digests)
        # The extents of a partition are neighbours in this order.
        self._order = np.argsort(numbers, kind="stable")
        self._starts = np.searchsorted(numbers[self._order], np.arange(len(self._set) + 1))
        self._firsts = np.cumsum([0, *(len(manifest.extent_digests) for manifest in manifests)])
        self._dtypes = [manifest.columns[2].to_pylist() for manifest in manifests]
        self._roles = [manifest.roles() for manifest in manifests]

    def _places(self, name: Digest) -> list[tuple[int, int]]:
        """Return the extents of a partition: which manifest, and which of its extents."""
        number = self._set.number(name)
        if number < 0:
            return []
        found = self._order[self._starts[number] : self._starts[number + 1]]
        ranks = np.searchsorted(self._firsts, found, side="right") - 1
        return list(zip(ranks.tolist(), (found - self._firsts[ranks]).tolist(), strict=True))

    def contents(self, name: Digest) -> Contents | None:
        """Return what the bytes of a partition are; None when that is not clear for all of them."""
        segments: list[Segment] = []
        role, at, length = "", 0, 0
        for rank, extent in sorted(self._places(name), key=lambda place: self._offset(*place)):
            manifest = self._manifests[rank]
            length = int(manifest.extent_partition_lengths[extent])
            offset, count = self._offset(rank, extent), int(manifest.extent_lengths[extent])
            if offset < at:
                # The same bytes once more, of a tensor that is equal.
                continue
            row = int(np.searchsorted(manifest.extent_starts, extent, side="right")) - 1
            segment = segment_of(self._dtypes[rank][row], count)
            if offset > at or count % segment.width:
                return None
            segments.append(segment)
            role, at = role or self._roles[rank][row], at + count
        return Contents(role, tuple(segments)) if segments and at == length else None

    def _offset(self, rank: int, extent: int) -> int:
        return int(self._manifests[rank].extent_offsets[extent])

    def older(self, name: Digest) -> Digest | None:
        """Return the partition that lay in the same place one checkpoint earlier; None where there is none."""
        for rank, extent in self._places(name):
            older = self._older[rank]
            if older is not None:
                found = Digest(older.extent_digests[extent].tobytes())
                return None if found == name else found
        return None


def _by_rank(manifests: Sequence[Manifest], older: Sequence[Manifest]) -> list[Manifest | None]:
    ranks = {other.header.rank: other for other in older}
    return [ranks.get(manifest.header.rank) for manifest in manifests]


def _is_cut_alike(manifest: Manifest, other: Manifest) -> bool:
    """Tell whether the partitions of two checkpoints lie in the same places."""
    return manifest.names() == other.names() and all(
        np.array_equal(getattr(manifest, column), getattr(other, column))
        for column in ("extent_starts", "extent_offsets", "extent_lengths", "extent_partition_lengths")
    )
