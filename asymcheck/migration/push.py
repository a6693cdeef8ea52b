"""Push: a checkpoint copied to a remote location, in the order of SPEC.md §8.6."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath

from asymcheck.errors import (
    UNKNOWING,
    AsymcheckError,
    ClosedStoreError,
    DamagedPartitionError,
    ForkedStoreError,
    FormatError,
    HeadRecordError,
    InconsistentCheckpointError,
    InvalidInputError,
    MissingPartitionError,
    RecoveryError,
    StorageError,
    UnsupportedFormatError,
)
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Manifest
from asymcheck.migration.choice import Choice, Chooser, all_needs, search
from asymcheck.migration.meaning import Meaning
from asymcheck.migration.others import Others, held_back
from asymcheck.migration.present import Present
from asymcheck.migration.reencode import Older, Reencoder, older_of
from asymcheck.migration.sending import Sending
from asymcheck.migration.tally import Moved, Tally
from asymcheck.pipeline.encoder import Encoder
from asymcheck.recovery.locate import Needs, Sources
from asymcheck.recovery.resolve import read_manifests
from asymcheck.threads import begin
from asymcheck.tiers.manifests import CheckpointFiles
from asymcheck.tiers.reading import ReadTier
from asymcheck.tiers.remote import RemoteTier
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
    listings: Sequence[CheckpointFiles],
    progress: Progress | None = None,
    encoder: Encoder | None = None,
) -> Moved:
    """Copy checkpoints to a remote location, in the order given. Those that are whole there are passed over.

    The head records of their runs go there, too, also when no checkpoint does. One that cannot be copied keeps no
    other from it.

    Args:
        here: where they lie.
        there: where they shall lie, too.
        listings: which ones.
        progress: called with payload bytes sent and to be sent, for the checkpoint that is being copied.
        encoder: of an earlier push to the same location.

    Raises:
        InconsistentCheckpointError, MissingPartitionError, DamagedPartitionError, FormatError: one cannot be copied,
            because it is damaged here; of several the error names all, and the others are there.
        HeadRecordError: a head record of a run is damaged, here or there.
        InvalidInputError: the location has another training of that run name.
        RemoteUnreachableError, StorageError: the location refused; what was committed stays, and the next push
            goes on from there.
    """
    tally = Tally()
    encoder = encoder or encoder_for(there)
    present, heads = Present(there), _Heads(here, there)
    failures: dict[str, AsymcheckError] = {}
    committed: dict[str, dict[CheckpointRef, CheckpointFiles]] = {}
    for listing in listings:
        run = listing.run
        if run in failures:
            continue
        if run not in committed:
            committed[run] = {found.ref: found for found in there.manifests.checkpoints(run)}
        try:
            # Of several stores of one job each brings what its ranks saved.
            parts = {ref: found.of_ranks(listing.store_ranks) for ref, found in committed[run].items()}
            found = parts.get(listing.ref)
            if found is not None and found.is_complete and present.has(found):
                tally.present += 1
                continue
            older = _older(here, listing, [ref for ref, part in parts.items() if part.is_complete])
            _Push(here, there, listing, tally, progress, encoder, older).carry_out(heads)
            committed[run][listing.ref] = listing
        except (HeadRecordError, InvalidInputError) as error:
            # So it is with every checkpoint of the run.
            failures[run] = error
        except (FormatError, RecoveryError) as error:
            failures[f"{run} {listing.ref}"] = error
    for run in [run for run in committed if run not in failures]:
        try:
            heads.publish(run)
        except (HeadRecordError, InvalidInputError) as error:
            failures[run] = error
    _raise_any(failures, len(listings), there)
    return tally.result(str(there.location))


def _raise_any(failures: Mapping[str, AsymcheckError], asked: int, there: RemoteTier) -> None:
    """Raise what kept checkpoints or runs from being copied, if anything did."""
    if not failures:
        return
    first = next(iter(failures.values()))
    if asked == 1 or (len(failures) == 1 and isinstance(first, (HeadRecordError, InvalidInputError))):
        raise first
    raise InconsistentCheckpointError(
        f"{there.location}: these could not be copied, all else is there; run asymcheck verify:",
        [f"{name}: {error}" for name, error in failures.items()],
    ) from first


def publish_heads(here: ReadTier, there: RemoteTier, run: str) -> None:
    """Publish the head records of a run that are not there.

    Raises:
        HeadRecordError: one is damaged, here or there.
        InvalidInputError: the location has another training of that run name.
        RemoteUnreachableError, StorageError: the location refused.
    """
    try:
        found = [here.manifests.read_head(run, generation) for generation in here.manifests.heads(run)]
    except FormatError as error:
        raise HeadRecordError(f"{here.root}: {error}; run asymcheck verify {here.root}") from error
    try:
        there.manifests.publish_heads([one[0] for one in found if one is not None])
    except UnsupportedFormatError as error:
        raise HeadRecordError(f"{there.location}: {error}") from error
    except FormatError as error:
        raise HeadRecordError(f"{there.location}: {error}; remove that file there, and push again") from error


_Staging = Callable[[], dict[ManifestName, PurePosixPath]]
"""Waits for manifests that are written under temporary names, and returns those names."""


class _Heads:
    """The head records of runs on their way, once each."""

    def __init__(self, here: ReadTier, there: RemoteTier) -> None:
        self._here = here
        self._there = there
        self._done: set[str] = set()

    def publish(self, run: str) -> None:
        if run not in self._done:
            publish_heads(self._here, self._there, run)
            self._done.add(run)


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
        self._reported = 0, 0

    def carry_out(self, heads: _Heads) -> None:
        """Send what is missing, then heads, then manifests; again while collection takes away what is relied upon."""
        run, ref = self._listing.run, self._listing.ref
        try:
            manifests = read_manifests(self._here, self._listing)
            data = {name: self._here.manifests.read_bytes(run, ref, name) for name in self._listing.manifests}
        except (ClosedStoreError, ForkedStoreError, *UNKNOWING):
            raise
        except StorageError as error:
            raise InconsistentCheckpointError(f"its manifests cannot be read: {error}") from error
        # Their bytes travel beside the packs: to close a file takes half a second there. The rename comes last.
        names, threads = list(data), min(self._there.config.remote.uploads, len(data))
        shares = [{name: data[name] for name in names[start::threads]} for start in range(threads)]
        staging: list[_Staging] = [begin(partial(self._stage, share), "push-manifest").result for share in shares]
        staged: dict[ManifestName, PurePosixPath] = {}
        try:
            self._send_and_commit(manifests, data, staging, staged, heads)
        except BaseException:
            self._unstage(staging, staged)
            raise

    def _stage(self, data: Mapping[ManifestName, bytes]) -> dict[ManifestName, PurePosixPath]:
        """Write manifests under temporary names, one after the other; those are all there, or none."""
        staged: dict[ManifestName, PurePosixPath] = {}
        try:
            for name, content in data.items():
                staged[name] = self._there.manifests.stage(self._listing.run, self._listing.ref, name, content)
        except BaseException:
            self._unstage([], staged)
            raise
        return staged

    def _send_and_commit(
        self,
        manifests: Sequence[Manifest],
        data: Mapping[ManifestName, bytes],
        staging: list[_Staging],
        staged: dict[ManifestName, PurePosixPath],
        heads: _Heads,
    ) -> None:
        run, ref = self._listing.run, self._listing.ref
        committed = False
        held = held_back(manifests, self._listing)
        if held:
            # Other stores bring them. What does not come after all is sent with the rest.
            self._send(manifests, held)
            Others(self._there, self._listing, self._report).wait_for(held)
        for _ in range(_ATTEMPTS):
            relied = self._send(manifests)
            while staging:
                staged.update(staging.pop()())
            if not self._lasts(relied):
                continue
            if not committed:
                heads.publish(run)
                self._make_room(data)
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

    def _make_room(self, data: Mapping[ManifestName, bytes]) -> None:
        """Remove manifests whose bytes are not what their name says: they would keep the sound ones out."""
        run, ref = self._listing.run, self._listing.ref
        for name in data.keys() & set(self._there.manifests.listing(run, ref).manifests):
            try:
                self._there.manifests.read_bytes(run, ref, name)
            except MissingPartitionError:
                continue
            except FormatError:
                self._there.files.delete(self._there.manifests.directory(run, ref) / str(name))

    def _unstage(
        self,
        staging: Sequence[_Staging],
        staged: Mapping[ManifestName, PurePosixPath],
    ) -> None:
        """Remove what will not be published, as far as that can be done; collection removes the rest."""
        for wait in (lambda: staged, *staging):
            with contextlib.suppress(Exception):
                for path in wait().values():
                    self._there.manifests.unstage(path)

    def _lasts(self, relied: set[PackId]) -> bool:
        """Tell whether all packs are there to stay; a collection that was killed may have announced their removal."""
        return not self._there.reprieve(relied)

    def _report(self) -> None:
        """Say how far it is, to whoever may want to stop it."""
        if self._progress is not None:
            self._progress(*self._reported)

    def _note(self, done: int, total: int) -> None:
        self._reported = done, total
        self._report()

    def _send(self, manifests: Sequence[Manifest], but: Collection[Digest] = ()) -> set[PackId]:
        """Send what is missing, ``but`` for some; return the packs there that are relied upon, new ones too."""
        hints = dict.fromkeys(pack_id for manifest in manifests for pack_id in manifest.header.packs)
        needs = Needs.of_manifests(manifests)
        with (
            Sources(self._here, needs, hints) as here,
            older_of(self._here, self._older, self._encoder) as older,
        ):
            names = here.in_reading_order([needs.digests[number] for number in range(len(needs.digests))])
            names = [name for name in names if name not in but]
            while True:
                try:
                    return self._send_from(here, names, manifests, older)
                except DamagedPartitionError as error:
                    # Then another copy of it is decoded, and sent as that; if there is none, that says so.
                    if error.digest is None or error.digest in self._damaged:
                        raise
                    self._damaged.add(Digest(error.digest))

    def _send_from(
        self, here: Sources, names: Sequence[Digest], manifests: Sequence[Manifest], older: Older
    ) -> set[PackId]:
        # Looked for each time: what another attempt has sent is there.
        with search(self._there, all_needs(here, manifests, older.manifests)) as there:
            chooser = Chooser(here, there, self._damaged)
            choice = chooser.choose(names)
            new = self._upload(choice, self._reencoder(manifests, chooser, older))
            self._tally.reused_partitions += choice.reused
            return choice.relied | new

    def _reencoder(self, manifests: Sequence[Manifest], chooser: Chooser, older: Older) -> Reencoder | None:
        if self._there.config.remote.compression == "off":
            return None
        return Reencoder(self._encoder, Meaning(manifests, older.manifests), chooser, older)

    def _upload(self, choice: Choice, reencoder: Reencoder | None) -> set[PackId]:
        sending = Sending(self._there, choice.stored, self._tally, self._note, reencoder)
        # A frame never arrives before its base.
        return sending.send(choice.full) | sending.send_in_order(choice.based)
