"""Ledger: what of a run is here, what is known to be at a location, and so what is still to be sent."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence

from asymcheck.migration.failures import Hopeless
from asymcheck.migration.known import Known
from asymcheck.policies.pushing import Push, due
from asymcheck.tiers.reading import ReadTier
from asymcheck.types import Checkpoint


@dataclasses.dataclass(frozen=True)
class Balance:
    """What a look has found."""

    there: Sequence[Checkpoint]
    """What is known to be there, or was."""
    due: list[Checkpoint]
    """What is to be sent, the newest last; without those that cannot be."""
    damaged: list[str]
    """Why the others cannot be sent."""


class Ledger:
    """What pushing decides by. Threads may use it together: each takes ``lock`` for as long as it must not change."""

    def __init__(self, here: ReadTier, run: str, rules: Push) -> None:
        """Look into ``here``; nothing is known of the location yet."""
        self._rules = rules
        self.known = Known(here, run, metrics=rules.asks_for_metrics)
        """What is here."""
        self.sent: dict[str, Checkpoint] = {}
        """What is there, or was, by save id."""
        self.generation = 0
        """The newest that was known there when it was looked for."""
        self.hopeless = Hopeless()
        """What is damaged here."""
        self.lock = threading.RLock()

    def look(self) -> Balance:
        """Look what is here now, and what of it is to be sent.

        Raises:
            StorageError: nobody knows.
        """
        with self.lock:
            here = self.known.look()
            there = self._there_by(here)
            found = due(self._rules, here, there, time.time_ns())
            return Balance(there, self.hopeless.without(found), self.hopeless.problems(found))

    def _there_by(self, here: list[Checkpoint]) -> list[Checkpoint]:
        """Return what is there; whether it is on the line the store says, where training goes on."""
        own = {one.save_id: one for one in here}
        away = [one for save_id, one in self.sent.items() if save_id not in own]
        present = [own[save_id] for save_id in self.sent if save_id in own]
        return [*self.known.placed(away, self.generation), *present]
