"""Locate partitions: look up digests in the indexes of packs, and keep these packs open and locked for reading."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asymcheck.errors import (
    AsymcheckError,
    LockTimeoutError,
    MissingPartitionError,
    ReadOnlyStoreError,
    UnsupportedFormatError,
    result_or_error,
)
from asymcheck.format import layout, registry
from asymcheck.format.digest_set import DigestSet, as_column
from asymcheck.format.manifest import Manifest
from asymcheck.format.spans import first_of
from asymcheck.storage.interfaces import OpenPack, ReadTier
from asymcheck.types import Digest, PackId

_FRAME_BITS = 32
_FRAME_MASK = (1 << _FRAME_BITS) - 1
_NOWHERE = -1
_ROUNDS = registry.DELTA_DEPTH_MAX + 1
"""Maximum number of bases below a partition: a derived frame may be on top of the longest chain of deltas."""
_SHOWN = 8  # maximum number of packs that an error names


@dataclasses.dataclass(frozen=True)
class PartitionCopy:
    """One stored copy of a partition."""

    pack: OpenPack
    sequence: int  # number of the frame in the pack

    @property
    def entry(self) -> np.void:
        """Index entry of the frame."""
        entry: np.void = self.pack.entries[self.sequence]
        return entry

    @property
    def stored_length(self) -> int:
        """Bytes of the payload."""
        return int(self.entry["stored_length"])

    @property
    def plain_length(self) -> int:
        """Bytes of the partition."""
        return int(self.entry["plain_length"])

    def kind(self) -> int:
        """Return the kind of the frame."""
        return int(self.entry["kind"])

    def bases(self) -> set[Digest]:
        """Return the digest of the base as a set, which is empty for a full frame."""
        return _bases_of(self.pack, np.array([self.sequence]))

    def __str__(self) -> str:
        return f"frame {self.sequence} of pack {self.pack.header.pack_id.hex()}"


def _bases_of(pack: OpenPack, frames: npt.NDArray[np.int64]) -> set[Digest]:
    entries = pack.entries[frames]
    return {Digest(base.tobytes()) for base in entries["base_digest"][entries["kind"] != registry.KIND_FULL]}


class PartitionSet:
    """A set of partitions with their plain lengths, in columns."""

    def __init__(self, digests: npt.NDArray[np.void], lengths: npt.NDArray[np.int64]) -> None:
        self.digests = DigestSet(digests)
        self.lengths = lengths[self.digests.first]

    @classmethod
    def of_manifests(cls, manifests: Sequence[Manifest]) -> PartitionSet:
        """Return the partitions of manifests.

        Raises:
            MissingPartitionError: manifests contradict each other about the length of a partition.
        """
        # Ranks with equal replicas share the same column objects.
        columns = {
            (digests.ctypes.data, lengths.ctypes.data, len(digests)): (digests, lengths)
            for digests, lengths in (
                (manifest.extent_digests, manifest.extent_partition_lengths) for manifest in manifests
            )
        }
        digests, lengths = (np.concatenate(parts) for parts in zip(*columns.values(), strict=True))
        needs = cls(digests, lengths)
        if len(columns) > 1 and len(needs.digests) < len(digests):
            # Within a manifest, the format requires this. With a wrong length, some bytes of a tensor would not be set.
            wrong = needs.lengths[needs.digests.numbers(digests)] != lengths
            if wrong.any():
                name = Digest(digests[int(np.argmax(wrong))].tobytes())
                raise MissingPartitionError(f"partition {name.hex()} has two lengths in the manifests", name)
        return needs

    @classmethod
    def of_lengths(cls, lengths: Mapping[Digest, int]) -> PartitionSet:
        """Return the partitions of a mapping from digest to length."""
        return cls(as_column(list(lengths)), np.fromiter(lengths.values(), dtype=np.int64))


class Hints(NamedTuple):
    """Packs to search first."""

    packs: tuple[PackId, ...] = ()  # of the store that wrote the manifests
    prefixes: frozenset[bytes] = frozenset()  # of the ids of packs at a remote location

    @classmethod
    def of_manifests(cls, manifests: Iterable[Manifest]) -> Hints:
        """Return the hints in manifests."""
        headers = [manifest.header for manifest in manifests]
        packs = dict.fromkeys(pack_id for header in headers for pack_id in header.packs)
        return cls(tuple(packs), frozenset(layout.pack_prefix(first_of(header.store_ranks)) for header in headers))


class PartitionLocator(contextlib.AbstractContextManager["PartitionLocator"]):
    """Open packs that hold a set of partitions. Close it, or use it in a ``with`` block."""

    def __init__(
        self, tier: ReadTier, needs: PartitionSet, hints: Hints | None = None, *, must_be_complete: bool = True
    ) -> None:
        """Find all partitions and their bases, in the packs of ``hints`` first.

        Raises:
            UnsupportedFormatError: a pack that may hold partitions requires a newer version of asymcheck.
            LockTimeoutError: a pack that may hold partitions was locked by another process for too long.
            MissingPartitionError: partitions were not found; the message names unreadable packs, with reasons.
            ReadOnlyStoreError: this user may not read a pack that may hold partitions.
            TooManyFilesError: this process has reached its limit of open files.
        """
        self.tier = tier  # where the packs are
        self._needs = needs
        self._hints = hints or Hints()
        self._packs: dict[PackId, OpenPack] = {}
        self._problems: dict[PackId, AsymcheckError] = {}
        self._scanned: dict[PackId, AsymcheckError] = {}
        # Columns of numbers, because a million objects would dominate the cost.
        self._places = np.full(len(needs.digests), _NOWHERE, dtype=np.int64)
        self._missing = len(self._places)
        self._numbered: list[OpenPack] = []
        self._bases: dict[Digest, list[PartitionCopy]] = {}
        # Content of packs that were searched for copies, and closed again.
        self._closed: dict[PackId, npt.NDArray[np.void]] = {}
        self._searching = threading.Lock()
        try:
            self._search()
            self._search_bases()
            if must_be_complete:
                self._check_complete()
        except BaseException:
            self.close()
            raise

    @classmethod
    def of_manifests(
        cls, tier: ReadTier, manifests: Sequence[Manifest], *, must_be_complete: bool = True
    ) -> PartitionLocator:
        """Find the partitions of manifests, in the packs that these name first."""
        hints = Hints.of_manifests(manifests)
        return cls(tier, PartitionSet.of_manifests(manifests), hints, must_be_complete=must_be_complete)

    def _search(self) -> None:
        """Find the partitions, until none is missing."""
        refusal: ReadOnlyStoreError | None = None
        for pack_id in self._everywhere(self._needs.digests) if self._missing else ():
            try:
                pack = self._open(pack_id)
            except ReadOnlyStoreError as error:
                # Other packs may hold the partitions.
                refusal = error
                continue
            if pack is not None and pack.damage is not None:
                self._scanned[pack_id] = pack.damage
            if pack is not None and not self._take(pack):
                del self._packs[pack_id]
                pack.close()
            if not self._missing:
                return
        if refusal is not None:
            raise refusal

    def _open(self, pack_id: PackId) -> OpenPack | None:
        if pack_id in self._packs or pack_id in self._problems:
            return None
        pack = result_or_error(self.tier.open_pack, pack_id)
        if isinstance(pack, AsymcheckError):
            self._problems[pack_id] = pack
            return None
        self._packs[pack_id] = pack
        return pack

    def _take(self, pack: OpenPack) -> bool:
        """Note the missing partitions that the pack has; return whether there are any."""
        numbers = self._needs.digests.numbers(pack.entries["digest"])
        frames = np.flatnonzero(numbers >= 0)
        numbers = numbers[frames]
        same = self._needs.lengths[numbers] == pack.entries["plain_length"][frames].astype(np.int64)
        new = same & (self._places[numbers] == _NOWHERE)
        if not new.any():
            return False
        # In reverse, so that the first frame wins if a scanned pack has a partition twice.
        self._places[numbers[new][::-1]] = (len(self._numbered) << _FRAME_BITS) + frames[new][::-1]
        # np.unique() would import numpy.ma at its first call.
        ordered = np.sort(numbers[new])
        self._missing -= 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))
        self._numbered.append(pack)
        return True

    def _search_bases(self) -> None:
        """Find the bases of all found frames, and the bases of these."""
        wanted: set[Digest] = set()
        for pack, frames in self._by_pack(self._places):
            if pack.entries["kind"].any():
                wanted |= _bases_of(pack, frames)
        # Each is searched only if the packs before it do not hold all bases.
        for pack_ids in (lambda _: self.tier.hinted(self._hints.packs), self._near, self._everywhere):
            self._bases = self._with_their_bases(wanted, pack_ids)
            if all(self._bases.values()):
                return

    def _with_their_bases(
        self, wanted: set[Digest], pack_ids: Callable[[DigestSet], Iterable[PackId]]
    ) -> dict[Digest, list[PartitionCopy]]:
        """Return the copies of partitions in some packs, and the copies of all their bases.

        Bases beyond the maximum length of a chain are left out, because they are useless (SPEC.md §A10.5).
        """
        bases: dict[Digest, list[PartitionCopy]] = {}
        for _ in range(_ROUNDS):
            if not wanted:
                break
            located = self._copies_in(pack_ids, wanted)
            bases.update(located)
            wanted = {base for copies in located.values() for copy in copies for base in copy.bases()} - bases.keys()
        return bases

    def _everywhere(self, digests: DigestSet) -> Iterator[PackId]:
        """Yield all packs that may hold some partitions once, near ones first, so that callers can stop early."""
        seen: set[PackId] = set()
        for pack_id in self._near(digests):
            if pack_id not in seen:
                seen.add(pack_id)
                yield pack_id
        # Repeated while new packs appear, because a listed pack may have been copied into another one and removed.
        while new := [pack_id for pack_id in self.tier.pack_ids() if pack_id not in seen]:
            seen.update(new)
            yield from self._announced(new, digests)

    def _near(self, digests: DigestSet) -> Iterator[PackId]:
        """Yield the packs of the hints that may hold some partitions."""
        yield from self.tier.hinted(self._hints.packs)
        yield from self._announced(self.tier.with_prefixes(self._hints.prefixes), digests)

    def _announced(self, pack_ids: list[PackId], digests: DigestSet) -> Iterator[PackId]:
        """Yield packs that may hold some partitions, and announce the next ones to the tier."""
        pack_ids = self.tier.may_hold(pack_ids, digests)
        announced = 0
        for number, pack_id in enumerate(pack_ids):
            # Few at first, because most searches end at one of the first packs.
            until = number + min(number + 1, self.tier.config.remote.reads)
            # Known packs are not opened again, and each read of the index of a damaged one is a scan.
            self.tier.expect([expected for expected in pack_ids[announced:until] if not self._is_known(expected)])
            announced = until
            yield pack_id

    def _is_known(self, pack_id: PackId) -> bool:
        return pack_id in self._packs or pack_id in self._problems or pack_id in self._closed

    def _copies_in(
        self, pack_ids: Callable[[DigestSet], Iterable[PackId]], names: set[Digest]
    ) -> dict[Digest, list[PartitionCopy]]:
        """Return all copies of partitions in some packs, full frames first. Each pack is searched once.

        Only packs with a hit stay open, because a store may have more packs than a process may open files.
        """
        copies_by_name: dict[Digest, list[PartitionCopy]] = {name: [] for name in names}
        digests = DigestSet(as_column(sorted(names)))
        for pack_id in pack_ids(digests):
            for copy in self._copies_of(digests, pack_id):
                copies_by_name[Digest(copy.pack.entries["digest"][copy.sequence].tobytes())].append(copy)
        return {name: sorted(copies, key=PartitionCopy.kind) for name, copies in copies_by_name.items()}

    def _copies_of(self, digests: DigestSet, pack_id: PackId) -> list[PartitionCopy]:
        """Return the copies of partitions in one pack, which stays open if it has any or was open before."""
        was_open = pack_id in self._packs
        if not was_open and pack_id in self._closed and (digests.numbers(self._closed[pack_id]) < 0).all():
            return []
        pack = self._packs.get(pack_id) or self._open(pack_id)
        if pack is None:
            return []
        copies = [
            PartitionCopy(pack, number)
            for number in np.flatnonzero(digests.numbers(pack.entries["digest"]) >= 0).tolist()
        ]
        if not copies and not was_open:
            # Later searches would open the pack again.
            self._closed[pack_id] = pack.entries["digest"].copy()
            del self._packs[pack_id]
            pack.close()
        return copies

    def base_copies(self, digest: Digest) -> list[PartitionCopy]:
        """Return copies of a base, full frames first. Thread-safe.

        The result may lack copies in packs that are not near; :meth:`other_copies` finds these.
        """
        with self._searching:
            if digest not in self._bases:
                # Another copy of a damaged partition may have another base.
                self._bases.update(self._copies_in(self._everywhere, {digest}))
            return self._bases[digest]

    def _lost_base(self) -> tuple[Digest, Digest] | None:
        """Return a partition whose base is missing, with that base."""
        lost = {name for name, copies in self._bases.items() if not copies}
        for _ in range(_ROUNDS):
            # From here on, the chain is too long in any case.
            more = {
                name
                for name, copies in self._bases.items()
                if name not in lost and all(lost.intersection(copy.bases()) for copy in copies)
            }
            if not more:
                break
            lost |= more
        if lost:
            for number in range(len(self._places)):
                copy = self._copy(int(self._places[number]))
                for base in lost.intersection(copy.bases()):
                    name = self._needs.digests[number]
                    if all(lost.intersection(other.bases()) for other in self.other_copies(name, [copy])):
                        return name, base
        return None

    def _copy(self, place: int) -> PartitionCopy:
        return PartitionCopy(self._numbered[place >> _FRAME_BITS], place & _FRAME_MASK)

    def _check_complete(self) -> None:
        lost = None if self._missing else self._lost_base()
        if not self._missing and lost is None:
            return
        for problem in self._problems.values():
            if isinstance(problem, (UnsupportedFormatError, LockTimeoutError)):
                # That pack may hold an intact copy.
                raise problem
        known = [*self._problems.values(), *self._scanned.values()]
        problems = "".join(f"; {problem}" for problem in known[:_SHOWN])
        problems += f"; and so with {len(known) - _SHOWN} more packs" if len(known) > _SHOWN else ""
        if lost is not None:
            raise MissingPartitionError(
                f"partition {lost[0].hex()} needs base {lost[1].hex()}, which cannot be read from any pack{problems}",
                lost[0],
            )
        first = self._needs.digests[int(np.argmax(self._places == _NOWHERE))]
        raise MissingPartitionError(
            f"{self._missing} of {len(self._places)} partitions are in no readable pack, such as "
            f"{first.hex()}{problems}",
            first,
        )

    def copy(self, digest: Digest) -> PartitionCopy:
        """Return the first copy of a partition."""
        return self._copy(int(self._places[self._needs.digests.number(digest)]))

    def find(self, digest: Digest) -> PartitionCopy | None:
        """Return the first copy of a partition; None if no readable pack has it."""
        number = self._needs.digests.number(digest)
        place = _NOWHERE if number < 0 else int(self._places[number])
        return None if place == _NOWHERE else self._copy(place)

    def direct_shift(self, digest: Digest, length: int) -> int | None:
        """Return the address, modulo a block, of memory for a direct read of a partition; None if impossible."""
        copy = self.copy(digest)
        is_whole = copy.plain_length == length
        return copy.pack.direct_shift(copy.sequence) if is_whole else None

    def other_copies(self, digest: Digest, damaged: Sequence[PartitionCopy]) -> Iterator[PartitionCopy]:
        """Yield the copies of a partition except ``damaged`` ones, near ones first. Thread-safe."""
        digests = DigestSet(as_column([digest]))
        for pack_id in self._everywhere(digests):
            with self._searching:
                copies = self._copies_of(digests, pack_id)
            yield from (copy for copy in copies if copy not in damaged)

    def check_locks(self) -> None:
        """Raise LockTimeoutError if another process has locked a pack that may hold further copies. Thread-safe."""
        with self._searching:
            locked = [problem for problem in self._problems.values() if isinstance(problem, LockTimeoutError)]
        if locked:
            raise locked[0]

    def in_reading_order(self, digests: Sequence[Digest]) -> list[Digest]:
        """Sort digests by the position of their frames, pack by pack."""
        order = np.argsort(self._places_of(digests), kind="stable")
        return [digests[place] for place in order.tolist()]

    def expect(self, digests: Sequence[Digest]) -> tuple[int, int]:
        """Announce the frames to be read to their packs; return the payload bytes of the longest one, and of all."""
        longest = total = 0
        for pack, frames in self._by_pack(self._places_of(digests)):
            if len(frames):
                pack.expect(frames.tolist())
                lengths = pack.entries["stored_length"][frames]
                longest, total = max(longest, int(lengths.max())), total + int(lengths.sum())
        return longest, total

    def _places_of(self, digests: Sequence[Digest]) -> npt.NDArray[np.int64]:
        return self._places[self._needs.digests.numbers(as_column(digests))]

    def _by_pack(self, places: npt.NDArray[np.int64]) -> Iterator[tuple[OpenPack, npt.NDArray[np.int64]]]:
        """Group ``places`` by pack."""
        packs, frames = places >> _FRAME_BITS, places & _FRAME_MASK
        for number, pack in enumerate(self._numbered):
            yield pack, frames[packs == number]

    def close(self) -> None:
        """Close all packs."""
        for pack in self._packs.values():
            pack.close()
        self._packs.clear()

    def __exit__(self, *_error: object) -> None:
        self.close()
