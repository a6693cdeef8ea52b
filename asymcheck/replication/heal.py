"""Heal: fetch head records and checkpoints that a repair could not restore from a remote location."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from asymcheck.errors import FormatError, InvalidInputError
from asymcheck.format import layout
from asymcheck.format.spans import Spans
from asymcheck.fsck.repair import Repair, Unrepaired
from asymcheck.replication.head_records import fetch_head
from asymcheck.replication.pull import CheckpointCopier, each
from asymcheck.replication.transfer_stats import Moved
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.nvme import Catalog, NvmeTier
from asymcheck.storage.remote import RemoteTier
from asymcheck.types import Progress, readable_size

_HEADS = ("damaged-head", "missing-head")


def can_be_healed(unrepaired: Sequence[Unrepaired]) -> bool:
    """Tell whether a remote location may have any of the unrepaired objects."""
    return any(problem.checkpoints or problem.kind in _HEADS for problem in unrepaired)


@dataclasses.dataclass(frozen=True)
class Healed:
    """Result of a heal."""

    done: tuple[Repair, ...]
    _location: str
    _failed: dict[str, str]

    def with_reasons(self, unrepaired: Sequence[Unrepaired]) -> tuple[Unrepaired, ...]:
        """Add the reasons why the remaining problems could not be healed to their messages."""
        explained = []
        for problem in unrepaired:
            names = (problem.where, *problem.checkpoints)
            reasons = dict.fromkeys(self._failed[name] for name in names if name in self._failed)
            suffix = "".join(f"; cannot fetch it from {self._location}: {reason}" for reason in reasons)
            explained.append(dataclasses.replace(problem, message=problem.message + suffix))
        return tuple(explained)


def heal(
    remote: RemoteTier, local: NvmeTier, catalog: Catalog, unrepaired: Sequence[Unrepaired], progress: Progress | None
) -> Healed:
    """Fetch unrepaired head records and checkpoints. A failure of one does not stop the others.

    Raises:
        RemoteUnreachableError: the location does not respond; fetched data stays.
        StorageError: the drive is full or failed; fetched data stays.
    """
    failed: dict[str, str] = {}
    done = _heads(remote, local, unrepaired, failed)
    lost = dict.fromkeys(name for problem in unrepaired for name in problem.checkpoints)
    listings = _listings(remote, lost, failed)
    moved = Moved(str(remote.location))
    copier = CheckpointCopier(remote, local, catalog, progress, moved)

    def fetch(listing: CheckpointFiles) -> None:
        # A checkpoint that was deleted since the repair is not fetched.
        known = local.manifests.listing(listing.run, listing.ref)
        if known.manifests:
            copier.copy(listing.of_ranks(_store_ranks(remote, listing, known)))

    failed |= {name: str(error) for name, error in each(remote, listings, fetch).items()}
    if moved.committed:
        repaired = f"{len(moved.committed)} of {len(lost)} checkpoints with lost partitions or manifests"
        count = moved.moved_partitions
        partitions = f"{count} partition{'' if count == 1 else 's'} fetched, {readable_size(moved.moved_bytes)}"
        fetched = partitions if count else "manifests fetched"
        done.append(Repair("remote", str(remote.location), repaired, fetched))
    return Healed(tuple(done), str(remote.location), failed)


def _store_ranks(remote: RemoteTier, listing: CheckpointFiles, known: CheckpointFiles) -> Spans | None:
    """Return the ranks that save into this store, from a remote manifest if the local ones are unreadable."""
    if known.store_ranks is None:
        for name in known.manifests:
            if name in listing.manifests:
                return remote.manifests.read(listing.run, listing.ref, name).header.store_ranks
    return known.store_ranks


def _heads(
    remote: RemoteTier, local: NvmeTier, unrepaired: Sequence[Unrepaired], failed: dict[str, str]
) -> list[Repair]:
    done = []
    # Newest first, because a fetched record proves that the earlier ones are of the same training.
    for problem in sorted(unrepaired, key=lambda problem: problem.where, reverse=True):
        _, run, name = problem.where.split("/") if problem.kind in _HEADS else ("", "", "")
        generation = layout.parse_head_name(name)
        if generation is None:
            continue
        try:
            fetch_head(remote, local, run, generation)
        except (FormatError, InvalidInputError) as error:
            failed[problem.where] = str(error)
        else:
            done.append(Repair("record", problem.where, problem.message, f"fetched from {remote.location}"))
    return done


def _listings(remote: RemoteTier, lost: dict[str, None], failed: dict[str, str]) -> list[CheckpointFiles]:
    """Return the lost checkpoints of which the location has a part: other machines may not have pushed theirs."""
    runs = dict.fromkeys(name.removeprefix("run ").partition(",")[0] for name in lost)
    found = {f"run {run}, {listing.ref}": listing for run in runs for listing in remote.manifests.checkpoints(run)}
    failed |= {name: "the location does not have it" for name in lost if name not in found}
    return [found[name] for name in lost if name in found]
