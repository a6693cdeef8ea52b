"""Push: a checkpoint copied to a remote location, in the order of SPEC.md §8.6."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath

from asymcheck.errors import DamagedPartitionError, StorageError
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Manifest
from asymcheck.migration.choice import Choice, Chooser, all_needs, search
from asymcheck.migration.meaning import Meaning
from asymcheck.migration.reencode import Older, Reencoder, older_of
from asymcheck.migration.sending import Sending
from asymcheck.migration.tally import Moved, Tally
from asymcheck.pipeline.encoder import Encoder
from asymcheck.recovery.locate import Needs, Sources
from asymcheck.recovery.resolve import read_manifests
from asymcheck.tiers.manifests import CheckpointFiles
from asymcheck.tiers.reading import ReadTier
from asymcheck.tiers.remote import RemoteTier, beside
from asymcheck.types import CheckpointRef, Digest, PackId, Progress

_ATTEMPTS = 8
_OLDER_LOOKED_AT = 8


def encoder_for(there: RemoteTier) -> Encoder:
    """Return what decides how frames are stored in a location; who keeps it, keeps what it has measured."""
    config = there.config.remote
    return Encoder(config.compression, "hdfs", lambda: there.pace.write_bytes_per_s)


def push(
    here: ReadTier,
    there: RemoteTier,
    listings: Iterable[CheckpointFiles],
    progress: Progress | None = None,
    encoder: Encoder | None = None,
) -> Moved:
    """Copy checkpoints to a remote location, in the order given. Those that are there already are passed over.

    Args:
        here: where they lie.
        there: where they shall lie, too.
        listings: which ones.
        progress: called with payload bytes sent and to be sent, for the checkpoint that is being copied.
        encoder: of an earlier push to the same location.

    Raises:
        InconsistentCheckpointError, MissingPartitionError, DamagedPartitionError, FormatError: one cannot be copied.
        RemoteUnreachableError, StorageError: the location refused; what was committed stays, and the next push
            goes on from there.
    """
    tally = Tally()
    encoder = encoder or encoder_for(there)
    heads: set[str] = set()
    committed: dict[str, set[CheckpointRef]] = {}
    for listing in listings:
        if listing.run not in committed:
            there_now = there.manifests.checkpoints(listing.run)
            committed[listing.run] = {found.ref for found in there_now if found.is_complete}
        if listing.ref in committed[listing.run]:
            tally.present += 1
            continue
        older = _older(here, listing, committed[listing.run])
        _Push(here, there, listing, tally, progress, encoder, older).carry_out(with_heads=listing.run not in heads)
        committed[listing.run].add(listing.ref)
        heads.add(listing.run)
    return tally.result(str(there.location))


def _older(here: ReadTier, listing: CheckpointFiles, there: Iterable[CheckpointRef]) -> CheckpointFiles | None:
    """Return the newest checkpoint before one that lies on both sides."""
    for ref in sorted((ref for ref in there if ref < listing.ref), reverse=True)[:_OLDER_LOOKED_AT]:
        found = here.manifests.listing(listing.run, ref)
        if found.is_complete:
            return found
    return None


class _Push:
    """One checkpoint on its way."""

    def __init__(
        self,
        here: ReadTier,
        there: RemoteTier,
        listing: CheckpointFiles,
        tally: Tally,
        progress: Progress | None,
        encoder: Encoder,
        older: CheckpointFiles | None,
    ) -> None:
        self._here = here
        self._there = there
        self._listing = listing
        self._tally = tally
        self._progress = progress
        self._encoder = encoder
        self._older = older
        self._damaged: set[Digest] = set()

    def carry_out(self, *, with_heads: bool) -> None:
        """Send what is missing, then heads, then manifests; again while collection takes away what is relied upon."""
        manifests = read_manifests(self._here, self._listing)
        run, ref = self._listing.run, self._listing.ref
        data = {name: self._here.manifests.read_bytes(run, ref, name) for name in self._listing.manifests}
        # Their bytes travel beside the packs: to close a file takes half a second there. The rename comes last.
        staging = {
            name: beside(partial(self._there.manifests.stage, run, ref, name, data[name]), "push-manifest")
            for name in data
        }
        staged: dict[ManifestName, PurePosixPath] = {}
        try:
            self._send_and_commit(manifests, data, staging, staged, with_heads=with_heads)
        except BaseException:
            self._unstage(staging, staged)
            raise

    def _send_and_commit(
        self,
        manifests: Sequence[Manifest],
        data: Mapping[ManifestName, bytes],
        staging: dict[ManifestName, Callable[[], PurePosixPath]],
        staged: dict[ManifestName, PurePosixPath],
        *,
        with_heads: bool,
    ) -> None:
        run, ref = self._listing.run, self._listing.ref
        committed = False
        for _ in range(_ATTEMPTS):
            relied = self._send(manifests)
            for name in tuple(staging):
                staged[name] = staging.pop(name)()
            if not self._lasts(relied):
                continue
            if not committed:
                if with_heads:
                    self._heads(run)
                for name in data:
                    self._there.manifests.publish(run, ref, name, data[name], staged.pop(name))
                committed = True
            # A collection that had not seen the manifest may have taken a pack a moment ago. One that takes it from
            # now on has seen it, and puts it back.
            if self._lasts(relied):
                self._tally.committed.append(f"{run} {ref}")
                return
        raise StorageError(
            f"{self._there.location}: collection took packs away {_ATTEMPTS} times during the push of {ref}; push again"
        )

    def _unstage(
        self, staging: Mapping[ManifestName, Callable[[], PurePosixPath]], staged: Mapping[ManifestName, PurePosixPath]
    ) -> None:
        """Remove what will not be published, as far as that can be done; collection removes the rest."""
        with contextlib.suppress(Exception):
            for path in [*staged.values(), *(wait() for wait in staging.values())]:
                self._there.manifests.unstage(path)

    def _lasts(self, relied: set[PackId]) -> bool:
        """Tell whether all packs are there to stay; a collection that was killed may have announced their removal."""
        gone = relied.difference(self._there.lasting_packs())
        lost = [pack_id for pack_id in gone if not self._there.reprieve(pack_id)]
        return not lost

    def _heads(self, run: str) -> None:
        found = [self._here.manifests.read_head(run, generation) for generation in self._here.manifests.heads(run)]
        self._there.manifests.publish_heads([one[0] for one in found if one is not None])

    def _send(self, manifests: Sequence[Manifest]) -> set[PackId]:
        """Send what is missing; return the packs there that are relied upon, new ones too."""
        hints = dict.fromkeys(pack_id for manifest in manifests for pack_id in manifest.header.packs)
        needs = Needs.of_manifests(manifests)
        with (
            Sources(self._here, needs, hints) as here,
            older_of(self._here, self._older, self._encoder) as older,
            search(self._there, all_needs(here, manifests, older.manifests)) as there,
        ):
            names = here.in_reading_order([needs.digests[number] for number in range(len(needs.digests))])
            while True:
                chooser = Chooser(here, there, self._damaged)
                choice = chooser.choose(names)
                try:
                    new = self._upload(choice, self._reencoder(manifests, chooser, older))
                except DamagedPartitionError as error:
                    # Then another copy of it is decoded, and sent as that; if there is none, that says so.
                    if error.digest is None or error.digest in self._damaged:
                        raise
                    self._damaged.add(Digest(error.digest))
                    continue
                self._tally.reused_partitions += choice.reused
                return choice.relied | new

    def _reencoder(self, manifests: Sequence[Manifest], chooser: Chooser, older: Older) -> Reencoder | None:
        if self._there.config.remote.compression == "off":
            return None
        return Reencoder(self._encoder, Meaning(manifests, older.manifests), chooser, older)

    def _upload(self, choice: Choice, reencoder: Reencoder | None) -> set[PackId]:
        sending = Sending(self._there, choice.stored, self._tally, self._progress, reencoder)
        new = sending.send(choice.full, self._there.config.remote.uploads)
        # One after the other: a frame never arrives before its base.
        return new | sending.send(choice.based, 1)
