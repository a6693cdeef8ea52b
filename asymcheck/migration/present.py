"""Present: which checkpoints of a remote location are whole, so that they need not be sent again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from asymcheck.errors import FormatError, MissingPartitionError, UnsupportedFormatError
from asymcheck.format import registry
from asymcheck.format.digest_set import DigestSet
from asymcheck.format.pack import ENTRY_DTYPE, Entries
from asymcheck.recovery.locate import Needs
from asymcheck.recovery.resolve import read_manifests
from asymcheck.tiers.manifests import CheckpointFiles
from asymcheck.tiers.remote import RemoteTier
from asymcheck.types import PackId

_FIRST_PACKS = 16
"""So many are looked into first: the newest packs serve the newest checkpoint."""


class Present:
    """What lies in a location now. Each index is read once, and no more of them than are needed. For one thread."""

    def __init__(self, there: RemoteTier) -> None:
        """Look into ``there`` when the first question comes."""
        self._there = there
        self._unread: list[PackId] | None = None
        self._read = 0
        self._entries: Entries = np.empty(0, dtype=ENTRY_DTYPE)
        self._readable = self._entries
        self._digests = DigestSet(self._readable["digest"])

    def has(self, listing: CheckpointFiles) -> bool:
        """Tell whether a checkpoint is whole: its manifests are intact, and all that they name is in sound packs.

        A pack that a collection is about to remove does not count: whoever relies on it has to take that back.

        Raises:
            UnsupportedFormatError: it needs a newer program.
            RemoteUnreachableError, StorageError: nobody knows.
        """
        try:
            needs = Needs.of_manifests(read_manifests(self._there, listing))
        except UnsupportedFormatError:
            raise
        except (FormatError, MissingPartitionError):
            return False
        while not self._holds(needs):
            if not self._read_more():
                return False
        return True

    def _holds(self, needs: Needs) -> bool:
        numbers = self._digests.numbers(needs.digests.column)
        if (numbers < 0).any():
            return False
        lengths = self._readable["plain_length"][self._digests.first[numbers]]
        return bool(np.array_equal(lengths.astype(np.int64), needs.lengths))

    def _read_more(self) -> bool:
        """Look into as many packs as before once more; return False when all were looked into."""
        if self._unread is None:
            self._unread = list(self._there.lasting_packs())
        count = max(self._read, _FIRST_PACKS)
        some, self._unread = self._unread[:count], self._unread[count:]
        if not some:
            return False
        self._read += len(some)
        found = self._there.read_indexes(some).values()
        new = [index.entries for index in found if index is not None and index.damage is None]
        self._entries = np.concatenate([self._entries, *new])
        self._readable = _readable(self._entries)
        self._digests = DigestSet(self._readable["digest"])
        return True


def _readable(entries: Entries) -> Entries:
    """Return the frames that can be decoded from these alone (SPEC.md §12.5)."""
    bases = entries[entries["kind"] == registry.KIND_FULL]
    deltas = entries[entries["kind"] == registry.KIND_DELTA]
    for _ in range(registry.DELTA_DEPTH_MAX):
        has_base = _have_bases(deltas, bases)
        if not has_base.any():
            break
        bases, deltas = np.concatenate([bases, deltas[has_base]]), deltas[~has_base]
    derived = entries[entries["kind"] == registry.KIND_DERIVED]
    return np.concatenate([bases, derived[_have_bases(derived, bases)]])


def _have_bases(entries: Entries, bases: Entries) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = DigestSet(bases["digest"]).numbers(entries["base_digest"]) >= 0
    return found
