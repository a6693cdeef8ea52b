"""Others: the stores of one job share out what they have in common, so that each byte is sent by one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from asymcheck.format.manifest import Manifest
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.pack_index import digests_of
from asymcheck.storage.remote import RemoteTier
from asymcheck.types import Checkpoint, CheckpointRef, Digest, PackId

_LOOKED_AT = 4
_POLL_S = (0.05, 2.0)
LATE_S = 600.0
"""After so long it is said that others have not sent their parts."""
PATIENCE_S = 30.0
"""How long is waited for a new pack there, before what others were to bring is sent from here."""
_AT_MOST = 10
"""So many times as long when none of the new packs has any of it: other trainings push there, too."""


def held_back(manifests: Sequence[Manifest], listing: CheckpointFiles) -> set[Digest]:
    """Return what other stores bring of a checkpoint: all of this one's manifests that name it say so."""
    if listing.is_whole:
        # All of it lies here.
        return set()
    elsewhere = [manifest.elsewhere() for manifest in manifests]
    own = set[Digest]().union(
        *(manifest.partitions().keys() - theirs for manifest, theirs in zip(manifests, elsewhere, strict=True))
    )
    return set[Digest]().union(*elsewhere) - own


def begun_first(there: RemoteTier, run: str, left: list[Checkpoint]) -> list[Checkpoint]:
    """Put the checkpoints first that other stores of the job have begun to push: only complete ones can be restored."""
    begun = set(there.manifests.refs(run)) if len(left) > 1 else set()
    return sorted(left, key=lambda one: one.ref not in begun)


class SentParts:
    """Checkpoints of which this store has sent its part, and others may not have sent theirs."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._sent: Mapping[CheckpointRef, float] = {}

    def __contains__(self, ref: CheckpointRef) -> bool:
        """Tell whether one is not known to be there whole."""
        return ref in self._sent

    def add(self, ref: CheckpointRef) -> None:
        """Note that the part of this store is there."""
        self._sent = {**self._sent, ref: time.monotonic()}

    def late(self) -> str:
        """Say that others have not sent their parts for long; empty when they have."""
        now = time.monotonic()
        late = max((ref for ref, sent in self._sent.items() if now - sent > LATE_S), default=None)
        if late is None:
            return ""
        return (
            f"not whole there: of step {late.step} the other machines' parts have not come in {LATE_S / 60:.0f} "
            "minutes. See whether all of them push, and to a place that all of them see"
        )

    def look(self, there: RemoteTier) -> None:
        """See whether the newest are whole by now; what came before one that is matters no more."""
        for ref in sorted(self._sent, reverse=True)[:_LOOKED_AT]:
            if there.manifests.listing(self._run, ref).is_whole:
                self._sent = {one: sent for one, sent in self._sent.items() if one > ref}
                return


def wait_for_others(
    there: RemoteTier, listing: CheckpointFiles, names: set[Digest], report: Callable[[], object]
) -> None:
    """Wait until ``names`` are there, or the other stores of a checkpoint have sent all, or nothing more comes.

    ``report`` is called now and then, and may raise to stop that.
    """
    missing, seen, pause_s = set(names), set[PackId](), _POLL_S[0]
    own, everybody = {name.rank for name in listing.manifests}, set(range(listing.world_size))
    news = last_use = time.monotonic()
    while missing:
        count = len(missing)
        # Before the packs: who has published all manifests has sent all packs.
        come = {name.rank for name in there.manifests.listing(listing.run, listing.ref).manifests}
        new = [pack_id for pack_id in there.lasting_packs() if pack_id not in seen]
        seen.update(new)
        for index in there.read_indexes(new).values():
            if index is not None and index.damage is None:
                missing -= set(digests_of(index.entries))
        now = time.monotonic()
        if len(missing) < count:
            last_use = now
        if come | own >= everybody or now - news > PATIENCE_S or now - last_use > _AT_MOST * PATIENCE_S:
            return
        if new:
            news, pause_s = now, _POLL_S[0]
        report()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S[1])
