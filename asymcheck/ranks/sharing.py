"""Sharing: which of the partitions that several ranks have in common each of them writes.

Rank 0 decides for all, in columns: of 16,384 ranks with 400 partitions each it gets 6.5 million rows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from asymcheck.errors import StructureError
from asymcheck.format.spans import Spans, ranks_in
from asymcheck.ranks.parity import Difference, Parity

_ROW = np.dtype([("key", "<u8"), ("length", "<u4")])
NOBODY = -1
"""The owner of a partition that only one rank has."""
_OWNER_BYTES, _PLACE_BYTES = 4, 8
_DIFFERENCES_MAX = 8
"""So many differences of one rank are told of one checkpoint."""

_Ints = npt.NDArray[np.int64]
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True)
class Shares:
    """What rank 0 has decided on the partitions of one rank."""

    owners: list[int]
    """Of each partition: the rank that writes it for all of its store, or :data:`NOBODY`."""
    elsewhere: list[bool]
    """Of each partition: whether another store brings it to where all are together."""
    differences: list[Difference]
    """What is not any more as it is on another machine."""


def encode_rows(keys: Sequence[bytes], lengths: Sequence[int], places: Sequence[bytes] = ()) -> bytes:
    """Return a rank's report: of each partition a key of 8 bytes, which says where and what it is, and its length.

    Where there are several stores, also ``places``: likewise what says only where it is.
    """
    rows = np.empty(len(keys), dtype=_ROW)
    rows["key"] = np.frombuffer(b"".join(keys), dtype="<u8")
    rows["length"] = lengths
    return rows.tobytes() + b"".join(places)


def decode_shares(data: bytes, count: int) -> Shares:
    """Return what :class:`Sharing` decided on a report of ``count`` partitions."""
    owners: list[int] = np.frombuffer(data, dtype="<i4", count=count).tolist()
    if len(data) == count * _OWNER_BYTES:
        return Shares(owners, [False] * count, [])
    elsewhere: list[bool] = np.frombuffer(data, dtype=bool, offset=count * _OWNER_BYTES, count=count).tolist()
    differences = json.loads(data[count * (_OWNER_BYTES + 1) :])
    return Shares(owners, elsewhere, [Difference(*one) for one in differences])


class Sharing:
    """Shares out on rank 0, save by save, what ranks of the same store have in common, and what stores have."""

    def __init__(self, groups: Sequence[Spans]) -> None:
        """Share out among ``groups``, the ranks of each store."""
        self._groups = [ranks_in(spans) for spans in groups]
        self._parity = Parity()

    def __call__(self, reports: Sequence[bytes], step: int) -> list[bytes]:
        """Do as :func:`share_out` does among the ranks of each store: what lies in another one is of no use there.

        Among the stores those partitions are shared out, too, that several of them have: one brings each of them to
        where all are together. Also says which are copies on different machines no more.

        Raises:
            StructureError: a report is none.
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

    Partitions that the same ranks have are dealt out to these, the longest first, to and fro. What one rank reports
    twice counts once. Returns for each rank its owners, four bytes each.

    Raises:
        StructureError: a report is none.
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
