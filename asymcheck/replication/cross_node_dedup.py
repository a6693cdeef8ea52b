"""Deduplication between the stores of one job: each common partition is pushed by one store only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from asymcheck.errors import GivenUpError
from asymcheck.format.manifest import Manifest
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.pack_index import digests_of
from asymcheck.storage.remote import RemoteTier
from asymcheck.types import CheckpointRef, Digest, PackId

_CHECKED = 4
_POLL_S = (0.05, 2.0)
LATE_S = 600.0
"""Seconds after which the missing parts of other stores are reported."""
PATIENCE_S = 30.0
"""Seconds without a new pack, after which this store sends the partitions that another store should send."""
_PATIENCE_FACTOR = 10
"""Factor for new packs without needed partitions, because other trainings may push to the location, too."""


def held_back(manifests: Sequence[Manifest], listing: CheckpointFiles) -> set[Digest]:
    """Return the partitions that other stores push: every local manifest that names one assigns it elsewhere."""
    if listing.is_whole:
        return set()
    elsewhere = [manifest.elsewhere() for manifest in manifests]
    own = set[Digest]().union(
        *(manifest.partitions().keys() - theirs for manifest, theirs in zip(manifests, elsewhere, strict=True))
    )
    return set[Digest]().union(*elsewhere) - own


class SentParts:
    """Checkpoints of which this store has pushed its part, while parts of other stores may be missing."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._sent: Mapping[CheckpointRef, float] = {}

    def __contains__(self, ref: CheckpointRef) -> bool:
        """Tell whether parts of a checkpoint may be missing."""
        return ref in self._sent

    def add(self, ref: CheckpointRef) -> None:
        """Note that this store has pushed its part."""
        self._sent = {**self._sent, ref: time.monotonic()}

    def late(self) -> str:
        """Return a message if parts of other stores are late; otherwise an empty string."""
        now = time.monotonic()
        late = max((ref for ref, sent in self._sent.items() if now - sent > LATE_S), default=None)
        if late is None:
            return ""
        return (
            f"step {late.step} is incomplete: other machines have not pushed their parts for {LATE_S / 60:.0f} "
            "minutes. Check that all machines push, and to a location that they share"
        )

    def refresh(self, remote: RemoteTier) -> None:
        """Forget the newest whole checkpoint and all older ones."""
        for ref in sorted(self._sent, reverse=True)[:_CHECKED]:
            if remote.manifests.listing(self._run, ref).is_whole:
                self._sent = {newer: sent for newer, sent in self._sent.items() if newer > ref}
                return


def wait_for_others(
    remote: RemoteTier,
    listing: CheckpointFiles,
    names: set[Digest],
    report: Callable[[], object],
    is_ending: Callable[[], bool],
    is_alone: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until ``names`` are at the location, other stores have committed their parts, or uploads have stalled.

    ``report`` is called regularly, and may raise to stop the wait. In a process that ``is_ending``, new packs do not
    extend the wait.

    Raises:
        GivenUpError: this machine ``is_alone``, so parts of other stores may never arrive.
    """
    missing, seen, pause_s = set(names), set[PackId](), _POLL_S[0]
    own, all_ranks = {name.rank for name in listing.manifests}, set(range(listing.world_size))
    last_pack = last_use = time.monotonic()
    while missing:
        count = len(missing)
        # Listed before the packs: a store commits its manifests after its packs.
        committed = {name.rank for name in remote.manifests.listing(listing.run, listing.ref).manifests}
        new = [pack_id for pack_id in remote.list_packs().lasting if pack_id not in seen]
        seen.update(new)
        for index in remote.read_indexes(new).values():
            if index is not None and index.damage is None:
                missing -= set(digests_of(index.entries))
        now = time.monotonic()
        if len(missing) < count:
            last_use = now
        if (
            committed | own >= all_ranks
            or now - last_pack > PATIENCE_S
            or now - last_use > _PATIENCE_FACTOR * PATIENCE_S
        ):
            return
        if new and not is_ending():
            last_pack, pause_s = now, _POLL_S[0]
        report()
        if is_alone():
            raise GivenUpError("another rank has ended, and its machine has not pushed its part")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S[1])
