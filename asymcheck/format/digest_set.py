"""Sets of digests in numpy columns. Sorting a million digests takes a tenth of the time of building a dict."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from asymcheck.format.registry import DIGEST_BYTES
from asymcheck.types import Digest

_DIGEST_DTYPE = f"S{DIGEST_BYTES}"


class DigestSet:
    """Distinct digests with dense integer ids from 0, in no particular order."""

    def __init__(self, digests: npt.NDArray[np.void]) -> None:
        """Number the distinct values of ``digests``."""
        # The first eight bytes distinguish digests, except duplicates and collisions made on purpose.
        keys: npt.NDArray[np.generic] = _words(digests)[:, 0]
        self.first: npt.NDArray[np.intp] = np.argsort(keys)
        """For each id, a position of that digest in the given column."""
        if _has_duplicates(keys[self.first]):
            # A stable sort keeps the first of several equal digests. Ranks with replicas repeat every digest.
            order = np.argsort(keys, kind="stable")
            first_halves, second_halves = keys[order], _words(digests)[order, 1]
            is_same = first_halves[1:] == first_halves[:-1]
            if not np.any(is_same & (second_halves[1:] != second_halves[:-1])):
                self.first = order[np.concatenate([[True], ~is_same])]
            else:
                keys = digests.view(_DIGEST_DTYPE)
                _, self.first = np.unique(keys, return_index=True)
        self._keys = keys[self.first]
        self.column = digests[self.first]
        """All digests, by id."""

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, number: int) -> Digest:
        return Digest(self.column[number].tobytes())

    def numbers(self, digests: npt.NDArray[np.void]) -> npt.NDArray[np.intp]:
        """Return the id of each of ``digests``, or -1 for digests that are not in the set."""
        if not len(self):
            return np.full(len(digests), -1)
        keys = _words(digests)[:, 0] if self._keys.dtype == np.uint64 else digests.view(_DIGEST_DTYPE)
        # Sorted lookups hit the CPU cache.
        order = np.argsort(keys)
        positions = np.empty(len(keys), dtype=np.intp)
        positions[order] = np.searchsorted(self._keys, keys[order])
        positions = np.minimum(positions, len(self) - 1)
        is_equal = _words(self.column[positions]) == _words(digests)
        return np.where(is_equal[:, 0] & is_equal[:, 1], positions, -1)

    def number(self, digest: Digest) -> int:
        """Return the id of one digest, or -1 if it is not in the set."""
        return int(self.numbers(as_column([digest]))[0])


def as_column(digests: Sequence[Digest]) -> npt.NDArray[np.void]:
    """Return digests as a column."""
    return np.frombuffer(b"".join(digests), dtype=f"V{DIGEST_BYTES}")


def has_two_values(digests: npt.NDArray[np.void], values: npt.NDArray[np.int64]) -> bool:
    """Tell whether equal digests have different values."""
    words = _words(digests)
    if not _has_duplicates(np.sort(words[:, 0])):
        # Most manifests have no duplicate digests.
        return False
    order = np.lexsort((words[:, 1], words[:, 0]))
    ordered, ordered_values = words[order], values[order]
    is_same = (ordered[1:] == ordered[:-1]).all(axis=1)
    return bool(np.any(is_same & (ordered_values[1:] != ordered_values[:-1])))


def _words(digests: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    words: npt.NDArray[np.uint64] = np.ascontiguousarray(digests).view(np.uint64).reshape(-1, 2)
    return words


def _has_duplicates(ordered: npt.NDArray[np.generic]) -> bool:
    return bool(np.any(ordered[1:] == ordered[:-1]))
