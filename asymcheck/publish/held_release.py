"""The release that a subscriber holds in memory, in the form of a pack.

The read path finds unchanged partitions and the bases of differences there, so that only new frames are fetched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePath

import torch

from asymcheck.format import registry
from asymcheck.format.frame import FrameDescriptor
from asymcheck.format.manifest import Manifest
from asymcheck.format.pack import PackHeader, entries_of
from asymcheck.state.leaves import Leaf, make_leaf
from asymcheck.storage.interfaces import OpenPack
from asymcheck.storage.pack_index import PackIndex
from asymcheck.storage.slots import Slot
from asymcheck.types import Digest, PackId

_Piece = tuple[Leaf, int, int, int]
"""Tensor, first byte in the tensor, first byte in the partition, and length."""


class HeldRelease(OpenPack):
    """Partitions of a release, gathered from the tensors of the subscriber when they are read.

    Readers verify digests, so a tensor that was changed meanwhile only makes them read the location instead.
    """

    def __init__(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Describe the partitions of ``manifest`` that ``tensors``, by stored name, hold completely."""
        pieces: dict[Digest, list[_Piece]] = {}
        lengths = manifest.partitions()
        for row in manifest.rows():
            if row.name not in tensors:
                continue
            # Detached, because the consumer's parameters may be of a subclass.
            start, leaf = 0, make_leaf(tensors[row.name].detach(), row.name, "")
            for extent in row.extents:
                pieces.setdefault(extent.digest, []).append((leaf, start, extent.offset, extent.length))
                start += extent.length
        # Partitions that tensors outside the selection share are left out.
        whole = [
            name for name, parts in pieces.items() if sum({at: n for *_, at, n in parts}.values()) == lengths[name]
        ]
        self._pieces = [pieces[name] for name in whole]
        self._descriptors = [FrameDescriptor.identity(name, lengths[name]) for name in whole]
        entries = entries_of((descriptor, registry.BLOCK_BYTES) for descriptor in self._descriptors)
        header = PackHeader(PackId(os.urandom(16)), len(entries), registry.BLOCK_BYTES, 0, "")
        super().__init__(PackIndex(header, entries, None), PurePath("memory"))

    def read_frame(self, sequence: int, slot: Slot) -> memoryview:
        """Return a frame with the present bytes of the tensors, in the memory of ``slot``."""
        descriptor = self._descriptors[sequence]
        payload = slot.payload(descriptor.plain_length)
        for leaf, start, offset, length in self._pieces[sequence]:
            leaf.copy_bytes(start, payload[offset : offset + length])
        return slot.stamp(descriptor, self.header.pack_id, sequence)

    def close(self) -> None:
        """Do nothing, because the tensors stay."""
