"""Pins that protect nothing more: what they were seen to be, and whether they still are that."""

from __future__ import annotations

from collections.abc import Mapping

from asymcheck.tiers.nvme.catalog import Catalog, Transaction
from asymcheck.tiers.owners import is_let_go, this_process
from asymcheck.types import Owner


class DeadPins:
    """Pins whose owners have ended, or whose saves have.

    By their owners, for another process may take up a save that was killed, and pins under the same key.
    """

    def __init__(self, owners: Mapping[bytes, Owner]) -> None:
        """Take those with these keys, as long as they are of these owners."""
        self._owners = owners

    @classmethod
    def of(cls, catalog: Catalog) -> DeadPins:
        """Return those that are dead now.

        Whoever calls this before it lists the manifests sees all that these owners committed.
        """
        with catalog.read() as transaction:
            pins = transaction.pins().items()
        return cls({key: owner for key, (owner, _) in pins if catalog.has_ended(owner) or is_let_go(key, owner)})

    def among(self, transaction: Transaction) -> set[bytes]:
        """Return the keys of those that are still the same."""
        return {
            key
            for key, (owner, _) in transaction.pins().items()
            if self._owners.get(key) == owner and (owner != this_process() or is_let_go(key, owner))
        }
