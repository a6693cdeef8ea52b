"""Retention carried out in a remote location: what no rule keeps is deleted there, and what it alone needed, later."""

from __future__ import annotations

import time
from collections.abc import Sequence

from asymcheck.errors import AsymcheckError
from asymcheck.migration.collect_remote import collect_remote
from asymcheck.migration.known import Known
from asymcheck.policies.retention import Retention, Verdict, judge
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

        What was left unfinished before the newest that is whole goes, too, when nobody has gone on with it for long.

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
        left = self._remove_left(verdicts, now_ns)
        self._has_garbage |= bool(going) or left
        now = time.monotonic()
        if self._has_garbage and (self._collected_at is None or now - self._collected_at >= self._collect_s):
            # One that fails does so after it has read as much, and is no sooner begun again.
            self._collected_at = now
            self._collect(found_more=bool(going))
        return going

    def _remove_left(self, verdicts: Sequence[Verdict], now_ns: int) -> bool:
        """Remove parts of checkpoints whose other parts never came: machines were lost, or have deleted theirs."""
        newest = max((one.checkpoint.ref for one in verdicts if one.stays and one.checkpoint.on_line), default=None)
        before_ns = now_ns - int(self._there.config.remote.grace_s * 1e9)
        # What is newer may be on its way, or is all that a machine can come back from.
        old = [ref for ref in self._known.unfinished() if newest is not None and ref < newest]
        return bool([ref for ref in old if self._there.manifests.remove_left(self._run, ref, before_ns)])

    def _collect(self, *, found_more: bool) -> None:
        try:
            collected = collect_remote(self._there)
        except AsymcheckError as error:
            self.failure = error
        else:
            self.failure = None
            # What is too young goes with a later one.
            self._has_garbage = found_more or collected.freed_packs > 0
