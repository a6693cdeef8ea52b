"""Histories of the runs of a store that is followed: each manifest is read once."""

from __future__ import annotations

import dataclasses
import threading
import time

from asymcheck.errors import CheckpointNotFoundError
from asymcheck.inspect.history import History, Known, read_history
from asymcheck.store import Store


@dataclasses.dataclass(frozen=True)
class RunState:
    """State of a run, from names of files."""

    run: str
    version: int
    """A number that changes with the checkpoints or generations of the run."""
    checkpoints: int
    read: int
    """Number of complete checkpoints whose manifests were read. A slow first read shows its progress here."""
    newest_step: int | None


class Histories:
    """Histories of all runs of one store or remote location. Threads may share it."""

    def __init__(self, store: Store, interval_s: float) -> None:
        """Follow ``store``, and list its folders at most once in ``interval_s`` seconds."""
        self._tier = store.resources.tier
        self._interval_s = interval_s
        self._known: dict[str, Known] = {}
        self._read: dict[str, tuple[int, History]] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._listing = threading.Lock()
        self._listed_s = -interval_s
        self._states: list[RunState] = []

    def states(self) -> list[RunState]:
        """Return the state of each run."""
        with self._listing:
            if time.monotonic() - self._listed_s >= self._interval_s:
                self._states = [self._state(run) for run in self._tier.manifests.runs()]
                self._listed_s = time.monotonic()
        return [dataclasses.replace(state, read=len(self._known.get(state.run, ()))) for state in self._states]

    def _state(self, run: str) -> RunState:
        manifests, known = self._tier.manifests, self._known.setdefault(run, {})
        refs, heads = manifests.refs(run), manifests.heads(run)
        # Manifests of other ranks may complete a checkpoint later.
        incomplete = [manifests.listing(run, ref).manifests for ref in refs if ref not in known] if known else []
        version = hash((tuple(refs), tuple(heads), tuple(incomplete)))
        newest = max(refs, key=lambda ref: ref.save_id, default=None)
        return RunState(run, version & 0xFFFFFFFF, len(refs), 0, None if newest is None else newest.step)

    def history(self, run: str) -> History:
        """Return the history of a run with all its checkpoints.

        Raises:
            CheckpointNotFoundError: the store has no such run.
        """
        version = next((state.version for state in self.states() if state.run == run), None)
        if version is None:
            raise CheckpointNotFoundError(f"store {self._tier.root} has no run {run!r:.100}; reload the page")
        with self._locks.setdefault(run, threading.Lock()):
            before = self._read.get(run)
            if before is None or before[0] != version:
                history = read_history(self._tier, run, everything=True, known=self._known[run])
                self._read[run] = version, history
            return self._read[run][1]
