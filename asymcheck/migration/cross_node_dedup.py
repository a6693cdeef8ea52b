"""Others: the stores of one job share out what they have in common, so that each byte is sent by one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from asymcheck.format.manifest import Manifest
from asymcheck.tiers.manifests import CheckpointFiles
from asymcheck.tiers.remote import RemoteTier
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
    """Put in front what other stores of the job have begun to push: only what is there whole can be restored."""
    begun = set(there.manifests.refs(run)) if len(left) > 1 else set()
    return sorted(left, key=lambda one: one.ref not in begun)


class SentParts:
    """Checkpoints of which this store has sent its part, and others may not have sent theirs."""

    def __init__(self, run: str) -> None:
        """Begin with none of ``run``."""
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


class Others:
    """What other stores bring of one checkpoint, as it arrives."""

    def __init__(self, there: RemoteTier, listing: CheckpointFiles, report: Callable[[], object]) -> None:
        """Look into ``there`` for what belongs to the checkpoint of ``listing``; ``report`` may raise to stop that."""
        self._there, self._listing, self._report = there, listing, report
        self._seen: set[PackId] = set()

    def wait_for(self, names: set[Digest]) -> None:
        """Wait until all of these are there, or the other stores have come to their end, or nothing more comes.

        Raises:
            RemoteUnreachableError, StorageError: nobody knows.
        """
        missing, pause_s = set(names), _POLL_S[0]
        news = last_use = time.monotonic()
        while missing:
            count = len(missing)
            # Before the packs: who has published all manifests has sent all packs.
            are_done = self._are_done()
            new = [pack_id for pack_id in self._there.lasting_packs() if pack_id not in self._seen]
            self._seen.update(new)
            for index in self._there.read_indexes(new).values():
                if index is not None and index.damage is None:
                    missing -= {Digest(name.tobytes()) for name in index.entries["digest"]}
            now = time.monotonic()
            if len(missing) < count:
                last_use = now
            if are_done or now - news > PATIENCE_S or now - last_use > _AT_MOST * PATIENCE_S:
                return
            if new:
                news, pause_s = now, _POLL_S[0]
            self._report()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])

    def _are_done(self) -> bool:
        """Tell whether the manifests of all other stores are there."""
        listing = self._there.manifests.listing(self._listing.run, self._listing.ref)
        own = {name.rank for name in self._listing.manifests}
        return {name.rank for name in listing.manifests} | own >= set(range(self._listing.world_size))
