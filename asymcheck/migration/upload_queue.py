"""Upload queue: which checkpoints of a run are still to be sent to a location, and which are damaged here."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from asymcheck.errors import (
    UNKNOWING,
    ClosedStoreError,
    ForkedStoreError,
    GivenUpError,
    HeadRecordError,
    InvalidInputError,
    OutOfSpaceError,
    ReadOnlyStoreError,
)
from asymcheck.migration.checkpoint_cache import CheckpointCache
from asymcheck.policies.pushing import Push, due
from asymcheck.tiers.reading import ReadTier
from asymcheck.types import Checkpoint

SO_IS_ALL = (
    *(*UNKNOWING, OutOfSpaceError, ReadOnlyStoreError, ClosedStoreError, ForkedStoreError),
    *(GivenUpError, HeadRecordError, InvalidInputError),
)
"""Errors that every checkpoint would have. The last: another training has this name there, until somebody mends it."""

_AGAIN_S = 600.0
"""After so long a checkpoint that is damaged is tried again: nobody says when it has been repaired."""

Damaged = dict[str, tuple[str, float]]
"""Checkpoints that are damaged here, by save id: the reason, and when they are tried again, on the monotonic clock."""


def add_damaged(damaged: Damaged, checkpoint: Checkpoint, error: Exception) -> None:
    """Note why a checkpoint cannot be pushed: another attempt changes nothing until somebody has repaired it."""
    damaged[checkpoint.save_id] = f"{checkpoint.ref}: {error}", time.monotonic() + _AGAIN_S


class Backlog(NamedTuple):
    """The state of the queue at one look."""

    there: Sequence[Checkpoint]
    """Checkpoints that are known to be at the location, or were."""
    due: list[Checkpoint]
    """Checkpoints to be sent, the newest last; without those that cannot be."""
    damaged: list[str]
    """Why the others cannot be sent."""


class UploadQueue:
    """Decides what is to be pushed. Threads may share it: each takes ``lock`` for as long as it must not change."""

    def __init__(self, here: ReadTier, run: str, rules: Push) -> None:
        """Look into ``here``; nothing is known of the location yet."""
        self._rules = rules
        self.known = CheckpointCache(here, run, metrics=rules.asks_for_metrics)
        """The checkpoints of the store."""
        self.sent: dict[str, Checkpoint] = {}
        """The checkpoints that are at the location, or were, by save id."""
        self.generation = 0
        """The newest that was known there when it was looked for."""
        self.damaged: Damaged = {}
        """The checkpoints that are damaged here."""
        self.lock = threading.RLock()

    def look(self) -> Backlog:
        """Look what is here now, and what of it is to be sent.

        Raises:
            StorageError: nobody knows.
        """
        with self.lock:
            here = self.known.look()
            there = self._there_by(here)
            found = due(self._rules, here, there, time.time_ns())
            now = time.monotonic()
            reasons = [self.damaged[one.save_id][0] for one in found if one.save_id in self.damaged]
            return Backlog(there, [one for one in found if self._is_due(one, now)], reasons)

    def _is_due(self, one: Checkpoint, now: float) -> bool:
        return one.save_id not in self.damaged or self.damaged[one.save_id][1] <= now

    def _there_by(self, here: list[Checkpoint]) -> list[Checkpoint]:
        """Return what is there; whether it is on the line the store says, where training goes on."""
        own = {one.save_id: one for one in here}
        away = [one for save_id, one in self.sent.items() if save_id not in own]
        present = [own[save_id] for save_id in self.sent if save_id in own]
        return [*self.known.placed(away, self.generation), *present]
