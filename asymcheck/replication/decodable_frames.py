"""Frames of a remote location that can be decoded, in columns (SPEC.md §A10.5)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from asymcheck.format import registry
from asymcheck.format.digest_set import DigestSet
from asymcheck.format.pack import ENTRY_DTYPE, Entries
from asymcheck.storage import damaged_frames
from asymcheck.storage.pack_index import PackIndex
from asymcheck.types import Digest, PackId


class DecodableFrames:
    """Frames that can be decoded from a set of packs alone. A partition is represented by a copy with few deltas."""

    def __init__(self, indexes: Iterable[PackIndex | None]) -> None:
        """Find the frames of intact packs; None stands for a pack without a readable index."""
        # Frames in a damaged pack may be readable, but no checkpoint may rely on them.
        intact = [index for index in indexes if index is not None and index.damage is None]
        sound = [_sound(index) for index in intact]
        entries = np.concatenate([np.empty(0, dtype=ENTRY_DTYPE), *sound])
        packs = np.repeat(np.arange(len(intact)), [len(part) for part in sound])
        # The frames of each level need the same number of deltas. Their bases are in the level before.
        levels = [np.flatnonzero(entries["kind"] == registry.KIND_FULL)]
        deltas = np.flatnonzero(entries["kind"] == registry.KIND_DELTA)
        for _ in range(registry.DELTA_DEPTH_MAX):
            is_based = _have_bases(entries, deltas, levels)
            if not is_based.any():
                break
            levels.append(deltas[is_based])
            deltas = deltas[~is_based]
        # A derived frame may have any of these as its base, and is never a base itself.
        derived = np.flatnonzero(entries["kind"] == registry.KIND_DERIVED)
        levels.append(derived[_have_bases(entries, derived, levels)])
        rows = np.concatenate(levels)
        columns = ("kind", "plain_length", "base_digest")
        self._kinds, self._lengths, self._bases = (entries[name][rows] for name in columns)
        self._depths = np.repeat(np.arange(len(levels)), [len(level) for level in levels])
        self._packs = [index.header.pack_id for index in intact]
        self._pack_numbers = packs[rows]
        # The first row of a digest counts, which has the fewest deltas.
        self._digests = DigestSet(entries["digest"][rows])

    def have(self, digests: npt.NDArray[np.void], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Tell which partitions, by digest and plain length, can be decoded."""
        numbers = self._digests.numbers(digests)
        is_present: npt.NDArray[np.bool_] = numbers >= 0
        rows = self._digests.first[numbers[is_present]]
        is_present[is_present] = self._lengths[rows].astype(np.int64) == lengths[is_present]
        return is_present

    def depth(self, base: Digest) -> int | None:
        """Return the number of deltas between a partition and its full frame; None if it cannot be a base."""
        number = self._digests.number(base)
        row = None if number < 0 else self._digests.first[number]
        return None if row is None or self._kinds[row] == registry.KIND_DERIVED else int(self._depths[row])

    def packs_of(self, digests: npt.NDArray[np.void]) -> set[PackId]:
        """Return the packs of decodable partitions and of all their bases."""
        packs: set[PackId] = set()
        while len(digests):
            rows = self._digests.first[self._digests.numbers(digests)]
            packs.update(self._packs[number] for number in set(self._pack_numbers[rows].tolist()))
            digests = self._bases[rows][self._kinds[rows] != registry.KIND_FULL]
        return packs


def _sound(index: PackIndex) -> Entries:
    """Return the entries of the frames that this process has not found damaged."""
    damaged = damaged_frames.offsets_in(index.header.pack_id)
    return index.entries[~np.isin(index.entries["offset"], damaged)] if damaged else index.entries


def _have_bases(
    entries: npt.NDArray[np.void], rows: npt.NDArray[np.intp], levels: list[npt.NDArray[np.intp]]
) -> npt.NDArray[np.bool_]:
    bases = DigestSet(entries["digest"][np.concatenate(levels)])
    is_based: npt.NDArray[np.bool_] = bases.numbers(entries["base_digest"][rows]) >= 0
    return is_based
