"""Places on the command line: which checkpoint lies in the store, in a remote location, or in both."""

from __future__ import annotations

import dataclasses

from asymcheck.store import Store
from asymcheck.types import Checkpoint


@dataclasses.dataclass(frozen=True)
class Places:
    """The checkpoints of a store and of a remote location, by save id."""

    location: str
    """The remote location."""
    here: dict[str, Checkpoint]
    """Those of the store."""
    there: dict[str, Checkpoint]
    """Those of the location."""
    runs: list[str]
    """The runs of the location."""

    @property
    def only_there(self) -> list[Checkpoint]:
        """Those that the store does not have."""
        return [one for save_id, one in self.there.items() if save_id not in self.here]

    @property
    def all(self) -> list[Checkpoint]:
        """All, in the order in which the store has its own."""
        return sorted([*self.here.values(), *self.only_there], key=lambda one: (one.run, one.ref))

    def of(self, one: Checkpoint) -> str:
        """Say where a checkpoint lies whole."""
        found = [
            name
            for name, known in (("here", self.here), ("there", self.there))
            if one.save_id in known and known[one.save_id].complete
        ]
        return " and ".join(found) or "nowhere whole"


def places_of(store: Store, location: str, run: str | None) -> Places:
    """Look into both.

    Raises:
        StoreNotFoundError: nothing was pushed there.
        RemoteUnreachableError: it does not answer.
        InvalidInputError: it is no location.
    """
    here = {one.save_id: one for one in store.checkpoints(run)}
    with Store.open(location, read_only=True) as opened:
        there = {one.save_id: one for one in opened.checkpoints(run)}
        return Places(str(opened.location), here, there, opened.runs())
