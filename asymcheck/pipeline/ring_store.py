"""Ring store: whether the store of a ring lies where the ring says (SPEC.md §8.5)."""

from __future__ import annotations

import os
from pathlib import Path

from asymcheck.errors import FormatError, StorageError
from asymcheck.format.layout import DESCRIPTOR_NAME
from asymcheck.format.record import RECORD_BYTES, decode_descriptor
from asymcheck.tiers.nvme import NvmeTier


def is_gone(tier: NvmeTier, store: str | None, store_id: bytes) -> bool:
    """Tell whether the store of a ring is certainly not where it was."""
    path = _path(store)
    if path is None:
        # Where it was, nobody can tell from that.
        return False
    try:
        return _id_at(tier, path) != store_id
    except (StorageError, FormatError):
        # Damaged, or not for this user to see; but there.
        return False


def is_of_a_copy(tier: NvmeTier, store: str | None) -> bool:
    """Tell whether a ring with the id of this store is of one with the same id that lies elsewhere, where it says.

    One of the two is a copy of the other. What is taken from the ring would be missing where the training goes on.
    """
    path = _path(store)
    try:
        there = path is not None and _id_at(tier, path) == tier.descriptor.store_id
        return there and not os.path.samefile(str(path), tier.root)
    except (StorageError, FormatError, OSError):
        return False


def _path(store: str | None) -> Path | None:
    return None if store is None or "\0" in store or not Path(store).is_absolute() else Path(store)


def _id_at(tier: NvmeTier, path: Path) -> bytes | None:
    descriptor = path / DESCRIPTOR_NAME
    data = tier.files.read_small(descriptor, RECORD_BYTES)
    return None if data is None else decode_descriptor(data, str(descriptor))[0].store_id
