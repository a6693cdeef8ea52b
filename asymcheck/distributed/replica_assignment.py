"""Replicas: which rank writes a partition that several ranks have in common, and whether replicas stay equal.

Rank 0 decides for all ranks, in columns: 16,384 ranks with 400 partitions each report 6.5 million rows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asymcheck.errors import StructureError
from asymcheck.format.spans import Spans, ranks_in

_ROW = np.dtype([("key", "<u8"), ("length", "<u4")])
NOBODY = -1  # the owner of a partition that only one rank has
_OWNER_BYTES, _PLACE_BYTES = 4, 8
_DIFFERENCES_MAX = 8  # limit for the differences of one rank that are reported for one checkpoint

_Ints = npt.NDArray[np.int64]
_Keys = npt.NDArray[np.uint64]
_MIX = np.uint64(0x9E3779B97F4A7C15)


class DivergedPartition(NamedTuple):
    """A partition that was a copy of what a rank on another machine has, and is none any more."""

    number: int  # which partition of this rank
    other: int
    step: int  # the last step at which they were found equal


class DivergenceDetector:
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
    ) -> list[list[DivergedPartition]]:
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
        told: list[list[DivergedPartition]] = [[] for _ in counts]
        starts = np.concatenate([[0], np.cumsum(counts)])
        ends = np.append(first[1:], len(order))
        for group in differing.tolist():
            inside = slice(int(first[group]), int(ends[group]))
            others = np.flatnonzero((key[inside] != key[first[group]]) & (store[inside] != store[first[group]]))
            if len(others):
                row = int(order[inside][others[0]])
                rank, other = int(ranks[row]), int(ranks[order[first[group]]])
                told[rank].append(DivergedPartition(row - int(starts[rank]), other, self._step))
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


@dataclasses.dataclass(frozen=True)
class ReplicaAssignment:
    """The decision of rank 0 on the partitions of one rank."""

    owners: list[int]  # for each partition, the rank that writes it for all ranks of the store, or :data:`NOBODY`
    elsewhere: list[bool]  # for each partition, whether another store pushes it to the common location
    differences: list[DivergedPartition]  # replicas that are not equal to those of other machines any more


def encode_rows(keys: Sequence[bytes], lengths: Sequence[int], places: Sequence[bytes] = ()) -> bytes:
    """Return a rank's report: of each partition a key of 8 bytes, which says where and what it is, and its length.

    Where there are several stores, also ``places``: likewise what says only where it is.
    """
    rows = np.empty(len(keys), dtype=_ROW)
    rows["key"] = np.frombuffer(b"".join(keys), dtype="<u8")
    rows["length"] = lengths
    return rows.tobytes() + b"".join(places)


def decode_shares(data: bytes, count: int) -> ReplicaAssignment:
    """Return what :class:`ReplicaAssigner` decided on a report of ``count`` partitions."""
    owners: list[int] = np.frombuffer(data, dtype="<i4", count=count).tolist()
    if len(data) == count * _OWNER_BYTES:
        return ReplicaAssignment(owners, [False] * count, [])
    elsewhere: list[bool] = np.frombuffer(data, dtype=bool, offset=count * _OWNER_BYTES, count=count).tolist()
    differences = json.loads(data[count * (_OWNER_BYTES + 1) :])
    return ReplicaAssignment(owners, elsewhere, [DivergedPartition(*one) for one in differences])


class ReplicaAssigner:
    """Shares out on rank 0, save by save, what ranks of the same store have in common, and what stores have."""

    def __init__(self, groups: Sequence[Spans]) -> None:
        """Share out among ``groups``, the ranks of each store."""
        self._groups = [ranks_in(spans) for spans in groups]
        self._parity = DivergenceDetector()

    def __call__(self, reports: Sequence[bytes], step: int) -> list[bytes]:
        """Apply :func:`share_out` to the ranks of each store, which cannot use partitions of another store.

        Among the stores those partitions are shared out, too, that several of them have: one brings each of them to
        where all are together. Also says which are copies on different machines no more.
        """
        if len(self._groups) == 1:
            return share_out(reports)
        if any(len(report) % (_ROW.itemsize + _PLACE_BYTES) for report in reports):
            raise StructureError("a rank reported something else than partitions and their places")
        counts = [len(report) // (_ROW.itemsize + _PLACE_BYTES) for report in reports]
        rows = [report[: count * _ROW.itemsize] for report, count in zip(reports, counts, strict=True)]
        store_of = np.empty(len(reports) + 1, dtype="<i4")
        for number, group in enumerate(self._groups):
            store_of[group] = number
        places = [np.frombuffer(report[len(one) :], dtype="<u8") for report, one in zip(reports, rows, strict=True)]
        keys = [np.frombuffer(one, dtype=_ROW)["key"] for one in rows]
        differences = self._parity.look(places, keys, store_of[:NOBODY].tolist(), step)
        verdicts = share_out(rows)
        for number, group in enumerate(self._groups):
            ranks = np.array([*group, NOBODY], dtype="<i4")
            store_of[NOBODY] = number
            for rank, verdict in zip(group, share_out([rows[rank] for rank in group]), strict=True):
                # Nobody is the last of them.
                owners = ranks[np.frombuffer(verdict, dtype="<i4")]
                is_elsewhere = store_of[np.frombuffer(verdicts[rank], dtype="<i4")] != number
                told = json.dumps(differences[rank][:_DIFFERENCES_MAX]).encode()
                verdicts[rank] = owners.tobytes() + is_elsewhere.tobytes() + told
        return verdicts


def share_out(reports: Sequence[bytes]) -> list[bytes]:
    """Choose an owner for each partition that several ranks have, so that each of them writes about as many bytes.

    Partitions that the same ranks have are dealt out to these, the longest first, to and fro. Duplicates in the report
    of one rank count once. Returns for each rank its owners, four bytes each.
    """
    if any(len(report) % _ROW.itemsize for report in reports):
        raise StructureError("a rank reported something else than partitions")
    counts = [len(report) // _ROW.itemsize for report in reports]
    rows = np.frombuffer(b"".join(reports), dtype=_ROW)
    owners = np.full(len(rows), NOBODY, dtype="<i4")
    if len(rows):
        _choose(rows, np.repeat(np.arange(len(counts), dtype=np.int32), counts), owners)
    parts = np.split(owners, np.cumsum(counts)[:-1])
    return [part.tobytes() for part in parts]


def _choose(rows: npt.NDArray[np.void], ranks: npt.NDArray[np.int32], owners: npt.NDArray[np.int32]) -> None:
    # Stable: within a group, members are in order of rank.
    order = np.argsort(rows["key"], kind="stable")
    keys = rows["key"][order]
    is_new = np.ones(len(keys), dtype=bool)
    is_new[1:] = keys[1:] != keys[:-1]
    del keys
    first = np.flatnonzero(is_new)
    size = np.diff(np.append(first, len(order)))
    member = ranks[order]
    shared = np.flatnonzero(member[first] != member[first + size - 1])
    first, size = first[shared], size[shared]
    if not len(first):
        return
    length = rows["length"][order[first]].astype(np.int64)
    chosen = first + _places(_classes(member, first, size), length, size)
    # Every member of a group gets its owner.
    inside = np.repeat(first - np.concatenate([[0], np.cumsum(size)[:-1]]), size) + np.arange(int(size.sum()))
    owners[order[inside]] = np.repeat(member[chosen], size)


def _classes(member: npt.NDArray[np.int32], first: _Ints, size: _Ints) -> npt.NDArray[np.uint64]:
    """Return a number for each group that says which ranks are in it; a chance in 2^64 to mistake it costs balance."""
    mixed = (member.astype(np.uint64) + np.uint64(1)) * _MIX
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MIX
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    classes: npt.NDArray[np.uint64] = sums[first + size] - sums[first]
    return classes


def _places(classes: npt.NDArray[np.uint64], length: _Ints, size: _Ints) -> _Ints:
    """Return for each group which of its members is to write it."""
    order = np.lexsort((-length, classes))
    ordered = classes[order]
    is_new = np.ones(len(ordered), dtype=bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    begins = np.flatnonzero(is_new)
    turn = np.arange(len(ordered)) - np.repeat(begins, np.diff(np.append(begins, len(ordered))))
    # Classes of one group each would else all go to their first member.
    lead = (ordered >> np.uint64(33)).astype(np.int64)
    sizes = size[order]
    lap, place = np.divmod(turn, sizes)
    place = np.where(lap % 2 == 0, place, sizes - 1 - place)
    places = np.empty(len(ordered), dtype=np.int64)
    places[order] = (place + lead) % sizes
    return places
