"""Parity: whether the copies that several machines have of a partition stay copies, as rank 0 sees it.

Ranks of one store find that out when one of them writes for all. Of those of different stores only the reports tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_Keys = npt.NDArray[np.uint64]
_Ints = npt.NDArray[np.int64]


class Difference(NamedTuple):
    """A partition that was a copy of what a rank on another machine has, and is none any more."""

    number: int
    """Which partition of this rank."""
    other: int
    """The other rank."""
    step: int
    """The last step at which they were found equal."""


class Parity:
    """Compares what the ranks report, round by round. For the commit thread of rank 0."""

    def __init__(self) -> None:
        """Begin without having seen anything."""
        self._places: _Keys = np.empty(0, dtype=np.uint64)
        self._keys = self._places
        self._are_same = np.empty(0, dtype=bool)
        self._are_copies = self._are_same
        self._step = 0

    def look(
        self, places: Sequence[_Keys], keys: Sequence[_Keys], store_of: Sequence[int], step: int
    ) -> list[list[Difference]]:
        """Return for each rank what has become different since the last time.

        Only what has changed and stayed equal before counts: what is equal at first by chance is no copy.

        Args:
            places: for each rank, of each partition what says where in the state it is.
            keys: likewise, what says that and what is in it.
            store_of: for each rank, its store.
            step: at which that was so.
        """
        counts = [len(one) for one in places]
        ranks = np.repeat(np.arange(len(counts)), counts)
        every = np.concatenate(places)
        order = np.argsort(every, kind="stable")
        found = every[order]
        is_new = np.ones(len(found), dtype=bool)
        is_new[1:] = found[1:] != found[:-1]
        first = np.flatnonzero(is_new)
        if not len(first):
            return [[] for _ in counts]
        key, store = np.concatenate(keys)[order], np.asarray(store_of)[ranks[order]]
        least = np.minimum.reduceat(key, first)
        is_across = np.minimum.reduceat(store, first) != np.maximum.reduceat(store, first)
        is_same = is_across & (least == np.maximum.reduceat(key, first))
        was_same, was_copy, has_changed = self._before(found[first], least)
        differing = np.flatnonzero(is_across & ~is_same & was_copy)
        told: list[list[Difference]] = [[] for _ in counts]
        starts = np.concatenate([[0], np.cumsum(counts)])
        ends = np.append(first[1:], len(order))
        for group in differing.tolist():
            inside = slice(int(first[group]), int(ends[group]))
            others = np.flatnonzero((key[inside] != key[first[group]]) & (store[inside] != store[first[group]]))
            if len(others):
                row = int(order[inside][others[0]])
                rank, other = int(ranks[row]), int(ranks[order[first[group]]])
                told[rank].append(Difference(row - int(starts[rank]), other, self._step))
        self._places, self._keys, self._are_same = found[first], least, is_same
        self._are_copies = is_same & (was_copy | (was_same & has_changed))
        self._step = step
        return told

    def _before(
        self, places: _Keys, keys: _Keys
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Tell of each place whether it was the same on all machines, was known to be a copy, and has changed since."""
        if not len(self._places):
            nothing = np.zeros(len(places), dtype=bool)
            return nothing, nothing, nothing
        at = np.minimum(np.searchsorted(self._places, places), len(self._places) - 1)
        is_known = self._places[at] == places
        return is_known & self._are_same[at], is_known & self._are_copies[at], self._keys[at] != keys
