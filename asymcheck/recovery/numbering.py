"""Digests as numbers, so that what millions of them have to do with each other is told in columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int64]


def number_digests(digests: bytes) -> tuple[_Ints, int]:
    """Number equal digests alike, from 0; return a number for each digest, and how many numbers there are."""
    halves = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
    order = np.lexsort((halves[:, 0], halves[:, 1]))
    ordered = halves[order]
    is_new = np.ones(len(ordered), dtype=bool)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    numbers = np.empty(len(ordered), dtype=np.int64)
    numbers[order] = np.cumsum(is_new) - 1
    return numbers, int(is_new.sum())


def with_bases(pairs: _Ints, count: int, based: _Ints, bases: _Ints) -> _Ints:
    """Who needs a partition needs what it is encoded against, too: add these pairs of user and partition."""
    order = np.argsort(based, kind="stable")
    based, bases = based[order], bases[order]
    while len(based):
        users, needs = np.divmod(pairs, count)
        first, behind = np.searchsorted(based, needs), np.searchsorted(based, needs, side="right")
        times = behind - first
        within = np.arange(int(times.sum())) - np.repeat(np.cumsum(times) - times, times)
        more = np.repeat(users, times) * count + bases[np.repeat(first, times) + within]
        together: _Ints = np.unique(np.concatenate([pairs, more]))
        if len(together) == len(pairs):
            break
        pairs = together
    return pairs
