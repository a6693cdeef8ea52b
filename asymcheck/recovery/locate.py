"""Where partitions lie: digests looked up in the indexes of packs, which stay open (and locked) while they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from asymcheck.errors import AsymcheckError, MissingPartitionError, TooManyFilesError, UnsupportedFormatError
from asymcheck.format.digest_set import DigestSet, as_column
from asymcheck.format.manifest import Manifest
from asymcheck.tiers.nvme import NvmeTier, PackFile
from asymcheck.types import Digest, PackId

_FRAME_BITS = 32
_FRAME_MASK = (1 << _FRAME_BITS) - 1
_NOWHERE = -1


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


class Needs:
    """A set of partitions with their plain lengths, in columns."""

    def __init__(self, digests: npt.NDArray[np.void], lengths: npt.NDArray[np.int64]) -> None:
        """Take each of ``digests`` once, with the length beside it."""
        self.digests = DigestSet(digests)
        self.lengths = lengths[self.digests.first]

    @classmethod
    def of_manifests(cls, manifests: Sequence[Manifest]) -> Needs:
        """Return what manifests name."""
        digests = [manifest.extent_digests for manifest in manifests]
        lengths = [manifest.extent_partition_lengths for manifest in manifests]
        return cls(np.concatenate(digests), np.concatenate(lengths))

    @classmethod
    def of_lengths(cls, lengths: Mapping[Digest, int]) -> Needs:
        """Return what a mapping names."""
        return cls(as_column(list(lengths)), np.fromiter(lengths.values(), dtype=np.int64))


class Sources:
    """The packs that hold a set of partitions. Close it, or use it in a ``with`` block."""

    def __init__(self, tier: NvmeTier, needs: Needs, hints: Iterable[PackId], *, must_be_complete: bool = True) -> None:
        """Find everything that is needed, in the packs of ``hints`` first.

        Raises:
            UnsupportedFormatError: a pack that may hold them needs a newer program.
            MissingPartitionError: some lie nowhere; the message says which packs could not be read, and why.
            TooManyFilesError: this process may not open as many packs as they lie in.
        """
        self._tier = tier
        self._needs = needs
        self._packs: dict[PackId, PackFile] = {}
        self._problems: dict[PackId, AsymcheckError] = {}
        self._scanned: dict[PackId, AsymcheckError] = {}
        # For each partition a number, pack and frame: of a million, an object for each costs more than all the rest.
        self._places = np.full(len(needs.digests), _NOWHERE, dtype=np.int64)
        self._missing = len(self._places)
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
        while self._missing:
            # Again while there are new ones: a repair may have put a pack in the place of one that was listed.
            new = [pack_id for pack_id in self._tier.pack_ids() if pack_id not in searched]
            if not new:
                return
            self._search(new)
            searched.update(new)

    def _search(self, pack_ids: Iterable[PackId]) -> None:
        for pack_id in pack_ids:
            if not self._missing:
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
        """Note what the pack has of what is still needed; return whether that is anything."""
        numbers = self._needs.digests.numbers(pack.entries["digest"])
        frames = np.flatnonzero(numbers >= 0)
        numbers = numbers[frames]
        same = self._needs.lengths[numbers] == pack.entries["plain_length"][frames].astype(np.int64)
        new = same & (self._places[numbers] == _NOWHERE)
        if not new.any():
            return False
        # Backwards: a pack that was scanned may hold a partition twice, and then the first frame of it counts.
        self._places[numbers[new][::-1]] = (len(self._numbered) << _FRAME_BITS) + frames[new][::-1]
        self._missing -= len(np.unique(numbers[new]))
        self._numbered.append(pack)
        return True

    def _copy(self, place: int) -> Copy:
        return Copy(self._numbered[place >> _FRAME_BITS], place & _FRAME_MASK)

    def _check_complete(self) -> None:
        if self._missing:
            first = self._needs.digests[int(np.argmax(self._places == _NOWHERE))]
            unsupported = [
                problem for problem in self._problems.values() if isinstance(problem, UnsupportedFormatError)
            ]
            if unsupported:
                raise unsupported[0]
            problems = "".join(f"; {problem}" for problem in (*self._problems.values(), *self._scanned.values()))
            raise MissingPartitionError(
                f"{self._missing} of {len(self._places)} partitions lie in no readable pack, one is "
                f"{first.hex()}{problems}",
                first,
            )

    def copy(self, digest: Digest) -> Copy:
        """Return the first copy of a partition."""
        return self._copy(int(self._places[self._needs.digests.number(digest)]))

    def find(self, digest: Digest) -> Copy | None:
        """Return the first copy of a partition, or None when it lies in no readable pack."""
        place = int(self._places[self._needs.digests.number(digest)])
        return None if place == _NOWHERE else self._copy(place)

    def largest(self, digests: Sequence[Digest]) -> int:
        """Return the bytes of payload of the longest frame among those of ``digests``."""
        places = self._places[self._needs.digests.numbers(as_column(digests))]
        packs, frames = places >> _FRAME_BITS, places & _FRAME_MASK
        lengths = (
            self._numbered[pack].entries["stored_length"][frames[packs == pack]].max() for pack in np.unique(packs)
        )
        return int(max(lengths, default=0))

    def other_copies(self, digest: Digest, damaged: Copy) -> list[Copy]:
        """Search every pack for further copies of a partition of which one is damaged."""
        found = []
        for pack_id in self._tier.pack_ids():
            pack = self._packs.get(pack_id) or self._open(pack_id)
            if pack is not None:
                here = pack.entries["digest"] == as_column([digest])
                found += [Copy(pack, int(sequence)) for sequence in np.flatnonzero(here)]
        return [copy for copy in found if copy.pack is not damaged.pack or copy.sequence != damaged.sequence]

    def in_reading_order(self, digests: Sequence[Digest]) -> list[Digest]:
        """Return digests in the order in which their frames lie, pack by pack."""
        order = np.argsort(self._places[self._needs.digests.numbers(as_column(digests))], kind="stable")
        return [digests[place] for place in order.tolist()]

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
