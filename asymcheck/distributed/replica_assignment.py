"""Replicas: assign each partition that several ranks have to one writer, and detect replicas that diverge.

Rank 0 decides for all ranks, vectorised: 16,384 ranks with 400 partitions each report 6.5 million rows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asymcheck.format.spans import Spans, ranks_in

_ROW = np.dtype([("key", "<u8"), ("length", "<u4")])
NOBODY = -1  # the owner of a partition that only one rank has
_OWNER_BYTES, _PLACE_BYTES = 4, 8
_DIFFERENCES_MAX = 8  # limit for the differences of one rank that are reported for one checkpoint

_Ints = npt.NDArray[np.int64]
_Keys = npt.NDArray[np.uint64]
_MIX = np.uint64(0x9E3779B97F4A7C15)


def _starts(ordered: _Keys) -> _Ints:
    """Return the index of the first element of each run of equal values."""
    is_start = np.ones(len(ordered), dtype=bool)
    is_start[1:] = ordered[1:] != ordered[:-1]
    return np.flatnonzero(is_start)


class DivergedPartition(NamedTuple):
    """A partition that no longer equals its replica on another machine."""

    number: int  # number of the partition on this rank
    other: int  # rank of the replica
    step: int  # last step at which both were equal


class DivergenceDetector:
    """Compares the reports of the ranks over time. For the commit thread of rank 0."""

    def __init__(self) -> None:
        self._places: _Keys = np.empty(0, dtype=np.uint64)
        self._keys = self._places
        self._are_same = np.empty(0, dtype=bool)
        self._are_copies = self._are_same
        self._step = 0

    def diverged(
        self, places: Sequence[_Keys], keys: Sequence[_Keys], store_of: Sequence[int], step: int
    ) -> list[list[DivergedPartition]]:
        """Return for each rank the partitions that have diverged since the last call.

        Only partitions that were equal after a change count as replicas, because initial values may be equal by chance.

        For each rank, ``places`` has a hash of the position of each partition in the state, ``keys`` has a hash of
        position and content, and ``store_of`` is its store.
        """
        counts = [len(rank_places) for rank_places in places]
        ranks = np.repeat(np.arange(len(counts)), counts)
        unordered = np.concatenate(places)
        order = np.argsort(unordered, kind="stable")
        ordered = unordered[order]
        first = _starts(ordered)
        if not len(first):
            return [[] for _ in counts]
        key, store = np.concatenate(keys)[order], np.asarray(store_of)[ranks[order]]
        least = np.minimum.reduceat(key, first)
        is_across = np.minimum.reduceat(store, first) != np.maximum.reduceat(store, first)
        is_same = is_across & (least == np.maximum.reduceat(key, first))
        was_same, was_copy, has_changed = self._before(ordered[first], least)
        differing = np.flatnonzero(is_across & ~is_same & was_copy)
        diverged: list[list[DivergedPartition]] = [[] for _ in counts]
        starts = np.concatenate([[0], np.cumsum(counts)])
        ends = np.append(first[1:], len(order))
        for group in differing.tolist():
            inside = slice(int(first[group]), int(ends[group]))
            others = np.flatnonzero((key[inside] != key[first[group]]) & (store[inside] != store[first[group]]))
            if len(others):
                row = int(order[inside][others[0]])
                rank, other = int(ranks[row]), int(ranks[order[first[group]]])
                diverged[rank].append(DivergedPartition(row - int(starts[rank]), other, self._step))
        self._places, self._keys, self._are_same = ordered[first], least, is_same
        self._are_copies = is_same & (was_copy | (was_same & has_changed))
        self._step = step
        return diverged

    def _before(
        self, places: _Keys, keys: _Keys
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return for each place whether it was equal everywhere, was a known replica, and has changed since then."""
        if not len(self._places):
            nothing = np.zeros(len(places), dtype=bool)
            return nothing, nothing, nothing
        at = np.minimum(np.searchsorted(self._places, places), len(self._places) - 1)
        is_known = self._places[at] == places
        return is_known & self._are_same[at], is_known & self._are_copies[at], self._keys[at] != keys


@dataclasses.dataclass(frozen=True)
class ReplicaAssignment:
    """Decision of rank 0 on the partitions of one rank."""

    owners: list[int]  # for each partition, the rank that writes it for the store, or NOBODY
    elsewhere: list[bool]  # for each partition, whether another store pushes it
    differences: list[DivergedPartition]  # replicas that no longer equal those of other machines


def encode_rows(keys: Sequence[bytes], lengths: Sequence[int], places: Sequence[bytes] = ()) -> bytes:
    """Return a rank's report: for each partition a hash of 8 bytes of position and content, and the length.

    With several stores, ``places`` has a hash of 8 bytes of each position.
    """
    rows = np.empty(len(keys), dtype=_ROW)
    rows["key"] = np.frombuffer(b"".join(keys), dtype="<u8")
    rows["length"] = lengths
    return rows.tobytes() + b"".join(places)


def decode_shares(data: bytes, count: int) -> ReplicaAssignment:
    """Decode the decision of :class:`ReplicaAssigner` on a report of ``count`` partitions."""
    owners: list[int] = np.frombuffer(data, dtype="<i4", count=count).tolist()
    if len(data) == count * _OWNER_BYTES:
        return ReplicaAssignment(owners, [False] * count, [])
    elsewhere: list[bool] = np.frombuffer(data, dtype=bool, offset=count * _OWNER_BYTES, count=count).tolist()
    differences = json.loads(data[count * (_OWNER_BYTES + 1) :])
    return ReplicaAssignment(owners, elsewhere, [DivergedPartition(*fields) for fields in differences])


class ReplicaAssigner:
    """Assigns, on rank 0, common partitions to the ranks of each store, and to the stores."""

    def __init__(self, groups: Sequence[Spans]) -> None:
        """Assign partitions to the ranks in ``groups``, one group per store."""
        self._groups = [ranks_in(spans) for spans in groups]
        self._divergence = DivergenceDetector()

    def __call__(self, reports: Sequence[bytes], step: int) -> list[bytes]:
        """Apply :func:`share_out` to the ranks of each store, because no rank reads partitions of another store.

        Partitions that several stores have are also assigned to one store, which pushes them. The result includes the
        replicas on different machines that have diverged.
        """
        if len(self._groups) == 1:
            return share_out(reports)
        counts = [len(report) // (_ROW.itemsize + _PLACE_BYTES) for report in reports]
        rows = [report[: count * _ROW.itemsize] for report, count in zip(reports, counts, strict=True)]
        store_of = np.empty(len(reports) + 1, dtype="<i4")
        for number, group in enumerate(self._groups):
            store_of[group] = number
        places = [np.frombuffer(report[len(part) :], dtype="<u8") for report, part in zip(reports, rows, strict=True)]
        keys = [np.frombuffer(part, dtype=_ROW)["key"] for part in rows]
        differences = self._divergence.diverged(places, keys, store_of[:NOBODY].tolist(), step)
        verdicts = share_out(rows)
        for number, group in enumerate(self._groups):
            ranks = np.array([*group, NOBODY], dtype="<i4")
            store_of[NOBODY] = number
            for rank, verdict in zip(group, share_out([rows[rank] for rank in group]), strict=True):
                # NOBODY is the index of the last element.
                owners = ranks[np.frombuffer(verdict, dtype="<i4")]
                is_elsewhere = store_of[np.frombuffer(verdicts[rank], dtype="<i4")] != number
                diverged = json.dumps(differences[rank][:_DIFFERENCES_MAX]).encode()
                verdicts[rank] = owners.tobytes() + is_elsewhere.tobytes() + diverged
        return verdicts


def share_out(reports: Sequence[bytes]) -> list[bytes]:
    """Choose an owner for each common partition, so that all ranks write about the same number of bytes.

    Partitions that the same ranks have are dealt to these ranks, longest first, in alternating direction. Duplicates in
    the report of one rank count once. Returns the owners for each rank, four bytes each.
    """
    counts = [len(report) // _ROW.itemsize for report in reports]
    rows = np.frombuffer(b"".join(reports), dtype=_ROW)
    owners = np.full(len(rows), NOBODY, dtype="<i4")
    _choose(rows, np.repeat(np.arange(len(counts), dtype=np.int32), counts), owners)
    parts = np.split(owners, np.cumsum(counts)[:-1])
    return [part.tobytes() for part in parts]


def _choose(rows: npt.NDArray[np.void], ranks: npt.NDArray[np.int32], owners: npt.NDArray[np.int32]) -> None:
    # The sort is stable, so members of a group are in the order of ranks.
    order = np.argsort(rows["key"], kind="stable")
    first = _starts(rows["key"][order])
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
    """Return a hash of the ranks in each group. A collision would only cost balance."""
    mixed = (member.astype(np.uint64) + np.uint64(1)) * _MIX
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MIX
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    classes: npt.NDArray[np.uint64] = sums[first + size] - sums[first]
    return classes


def _places(classes: npt.NDArray[np.uint64], length: _Ints, size: _Ints) -> _Ints:
    """Return for each group the index of the member that writes it."""
    order = np.lexsort((-length, classes))
    ordered = classes[order]
    begins = _starts(ordered)
    turn = np.arange(len(ordered)) - np.repeat(begins, np.diff(np.append(begins, len(ordered))))
    # Otherwise, the first member would write all classes that have only one group.
    lead = (ordered >> np.uint64(33)).astype(np.int64)
    sizes = size[order]
    lap, place = np.divmod(turn, sizes)
    place = np.where(lap % 2 == 0, place, sizes - 1 - place)
    places = np.empty(len(ordered), dtype=np.int64)
    places[order] = (place + lead) % sizes
    return places
