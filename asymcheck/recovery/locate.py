"""Where partitions lie: digests looked up in the indexes of packs, which stay open (and locked) while they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import TracebackType

from asymcheck.errors import AsymcheckError, MissingPartitionError, TooManyFilesError, UnsupportedFormatError
from asymcheck.tiers.nvme import NvmeTier, PackFile
from asymcheck.types import Digest, PackId

_FRAME_BITS = 32
_FRAME_MASK = (1 << _FRAME_BITS) - 1


@dataclasses.dataclass(frozen=True)
class Copy:
    """One place where a partition lies."""

    pack: PackFile
    """The open pack."""
    sequence: int
    """Number of the frame in it."""

    def __str__(self) -> str:
        """Name it as errors do."""
        return f"frame {self.sequence} of pack {self.pack.header.pack_id.hex()}"


class Sources:
    """The packs that hold a set of partitions. Close it, or use it in a ``with`` block."""

    def __init__(
        self,
        tier: NvmeTier,
        wanted: Mapping[Digest, int],
        hints: Iterable[PackId],
        *,
        must_be_complete: bool = True,
    ) -> None:
        """Find all of ``wanted`` (digests with their plain lengths), in the packs of ``hints`` first.

        Raises:
            UnsupportedFormatError: a pack that may hold them needs a newer program.
            MissingPartitionError: some lie nowhere; the message says which packs could not be read, and why.
            TooManyFilesError: this process may not open as many packs as they lie in.
        """
        self._tier = tier
        self._wanted = wanted
        self._packs: dict[PackId, PackFile] = {}
        self._problems: dict[PackId, AsymcheckError] = {}
        self._scanned: dict[PackId, AsymcheckError] = {}
        # Of a million partitions, an object for each costs more than all the rest; so a number: pack, then frame.
        self._places: dict[Digest, int] = {}
        self._numbered: list[PackFile] = []
        try:
            self._search(hints)
            self._search_all()
            if must_be_complete:
                self._check_complete()
        except BaseException:
            self.close()
            raise

    def _search_all(self) -> None:
        searched: set[PackId] = set()
        while len(self._places) < len(self._wanted):
            # Again while there are new ones: a repair may have put a pack in the place of one that was listed.
            new = [pack_id for pack_id in self._tier.pack_ids() if pack_id not in searched]
            if not new:
                return
            self._search(new)
            searched.update(new)

    def _search(self, pack_ids: Iterable[PackId]) -> None:
        for pack_id in pack_ids:
            if len(self._places) == len(self._wanted):
                return
            pack = self._open(pack_id)
            if pack is not None and pack.damage is not None:
                self._scanned[pack_id] = pack.damage
            if pack is not None and not self._take(pack):
                del self._packs[pack_id]
                pack.close()

    def _open(self, pack_id: PackId) -> PackFile | None:
        if pack_id in self._packs or pack_id in self._problems:
            return None
        try:
            self._packs[pack_id] = self._tier.open_pack(pack_id)
        except TooManyFilesError:
            # Nothing is wrong with the pack. Taken for damage, this would give an older checkpoint for the newest.
            raise
        except AsymcheckError as error:
            self._problems[pack_id] = error
            return None
        return self._packs[pack_id]

    def _take(self, pack: PackFile) -> bool:
        """Note what the pack has of what is still wanted; return whether that is anything."""
        wanted, places = self._wanted, self._places
        first = len(self._numbered) << _FRAME_BITS
        lengths = pack.entries["plain_length"].tolist()
        found = {
            digest: place
            for place, (digest, length) in enumerate(zip(pack.digests(), lengths, strict=True), first)
            if wanted.get(digest) == length and digest not in places
        }
        places.update(found)
        if found:
            self._numbered.append(pack)
        return bool(found)

    def _copy(self, place: int) -> Copy:
        return Copy(self._numbered[place >> _FRAME_BITS], place & _FRAME_MASK)

    def _check_complete(self) -> None:
        missing = [digest for digest in self._wanted if digest not in self._places]
        if missing:
            unsupported = [
                problem for problem in self._problems.values() if isinstance(problem, UnsupportedFormatError)
            ]
            if unsupported:
                raise unsupported[0]
            problems = "".join(f"; {problem}" for problem in (*self._problems.values(), *self._scanned.values()))
            raise MissingPartitionError(
                f"{len(missing)} of {len(self._wanted)} partitions lie in no readable pack, the first is "
                f"{missing[0].hex()}{problems}",
                missing[0],
            )

    def copy(self, digest: Digest) -> Copy:
        """Return the first copy of a partition."""
        return self._copy(self._places[digest])

    def find(self, digest: Digest) -> Copy | None:
        """Return the first copy of a partition, or None when it lies in no readable pack."""
        place = self._places.get(digest)
        return None if place is None else self._copy(place)

    def other_copies(self, digest: Digest, damaged: Copy) -> list[Copy]:
        """Search every pack for further copies of a partition of which one is damaged."""
        found = []
        for pack_id in self._tier.pack_ids():
            pack = self._packs.get(pack_id) or self._open(pack_id)
            if pack is not None:
                found += [Copy(pack, sequence) for sequence, name in enumerate(pack.digests()) if name == digest]
        return [copy for copy in found if copy.pack is not damaged.pack or copy.sequence != damaged.sequence]

    def in_reading_order(self, digests: Iterable[Digest]) -> list[Digest]:
        """Return digests in the order in which their frames lie, pack by pack."""
        return sorted(digests, key=self._places.__getitem__)

    def close(self) -> None:
        """Close all packs."""
        for pack in self._packs.values():
            pack.close()
        self._packs.clear()

    def __enter__(self) -> Sources:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all packs."""
        self.close()
