"""Retention carried out in a remote location: what no rule keeps is deleted there, and what it alone needed, later."""

from __future__ import annotations

import time

from asymcheck.errors import AsymcheckError
from asymcheck.migration.collect_remote import collect_remote
from asymcheck.migration.known import Known
from asymcheck.policies.retention import Retention, judge
from asymcheck.pruning import newest_consistent
from asymcheck.tiers.remote import RemoteTier
from asymcheck.types import Checkpoint

_COLLECT_S = 3600.0
"""A collection reads all manifests there, and frees only what is older than a day: more of them would find nothing."""


class RemotePruner:
    """Prunes one run of a remote location, again and again. For one thread."""

    def __init__(self, there: RemoteTier, run: str, retention: Retention) -> None:
        """Keep of ``run`` what ``retention`` says."""
        self._there = there
        self._run = run
        self._retention = retention
        self._known = Known(there, run, metrics=retention.keep_best is not None)
        self._collect_s = min(_COLLECT_S, there.config.remote.grace_s)
        self._collected_at: float | None = None
        self._has_garbage = True
        self.failure: AsymcheckError | None = None
        """Why nothing could be freed the last time; None when it could."""

    def prune(self, now_ns: int) -> list[Checkpoint]:
        """Delete what no rule keeps, and return it; now and then free what nothing needs.

        Raises:
            RemoteUnreachableError, StorageError: the location did not answer, or refused.
        """
        found = self._known.look()
        verdicts = judge(self._retention, found, now_ns)
        if not all(verdict.stays for verdict in verdicts):
            verdicts = judge(self._retention, found, now_ns, newest_consistent(self._there, found, self._known.listing))
        going = [verdict.checkpoint for verdict in verdicts if not verdict.stays]
        for one in going:
            self._there.manifests.remove(self._run, one.ref)
        self._has_garbage |= bool(going)
        now = time.monotonic()
        if self._has_garbage and (self._collected_at is None or now - self._collected_at >= self._collect_s):
            # One that fails does so after it has read as much, and is no sooner begun again.
            self._collected_at = now
            self._collect(found_more=bool(going))
        return going

    def _collect(self, *, found_more: bool) -> None:
        try:
            collected = collect_remote(self._there)
        except AsymcheckError as error:
            self.failure = error
        else:
            self.failure = None
            # What is too young goes with a later one.
            self._has_garbage = found_more or collected.freed_packs > 0
