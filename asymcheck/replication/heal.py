"""Heal: what a repair could not make whole is brought from a remote location, as far as that has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from asymcheck.errors import FormatError, InvalidInputError
from asymcheck.format import layout
from asymcheck.format.spans import Spans
from asymcheck.fsck.repair import Repair, Unrepaired
from asymcheck.replication.head_records import bring_head
from asymcheck.replication.pull import copy_one, each
from asymcheck.replication.transfer_stats import Moved
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.nvme import Catalog, NvmeTier
from asymcheck.storage.remote import RemoteTier
from asymcheck.types import Progress, readable_size

_HEADS = ("damaged-head", "missing-head")


def can_be_healed(left: Sequence[Unrepaired]) -> bool:
    """Tell whether anything that a repair left is of a kind that a remote location may have."""
    return any(one.checkpoints or one.kind in _HEADS for one in left)


@dataclasses.dataclass(frozen=True)
class Healed:
    """Partitions and records that were fetched."""

    done: tuple[Repair, ...]
    _location: str
    _failed: dict[str, str]

    def told(self, left: Sequence[Unrepaired]) -> tuple[Unrepaired, ...]:
        """Return what is still wrong, each with the reason for which it could not be brought."""
        told = []
        for one in left:
            names = (one.where, *one.checkpoints)
            reasons = dict.fromkeys(self._failed[name] for name in names if name in self._failed)
            why = "".join(f"; it could not be brought from {self._location}: {reason}" for reason in reasons)
            told.append(dataclasses.replace(one, message=one.message + why))
        return tuple(told)


def heal(
    there: RemoteTier, here: NvmeTier, catalog: Catalog, left: Sequence[Unrepaired], progress: Progress | None
) -> Healed:
    """Bring head records and checkpoints that a repair has left; what cannot be had stops nothing else.

    Raises:
        RemoteUnreachableError: nobody answers there any more; what was brought stays.
        StorageError: the device is full, or refuses; likewise.
    """
    failed: dict[str, str] = {}
    done = _heads(there, here, left, failed)
    lost = dict.fromkeys(name for one in left for name in one.checkpoints)
    listings = _listings(there, lost, failed)
    tally = Moved(str(there.location))

    def bring(listing: CheckpointFiles) -> None:
        # It may have been deleted since the repair saw it.
        known = here.manifests.listing(listing.run, listing.ref)
        if known.manifests:
            copy_one(there, here, catalog, listing.of_ranks(_store_ranks(there, listing, known)), tally, progress)

    failed |= {name: str(error) for name, error in each(there, listings, bring).items()}
    if tally.committed:
        what = f"{len(tally.committed)} of {len(lost)} checkpoints with lost partitions or manifests"
        count = tally.moved_partitions
        partitions = f"{count} partition{'' if count == 1 else 's'} fetched, {readable_size(tally.moved_bytes)}"
        fetched = partitions if count else "manifests fetched"
        done.append(Repair("remote", str(there.location), what, fetched))
    return Healed(tuple(done), str(there.location), failed)


def _store_ranks(there: RemoteTier, listing: CheckpointFiles, known: CheckpointFiles) -> Spans | None:
    """Return the ranks that save into this store: where its own manifests cannot be read, those there say it."""
    if known.store_ranks is None:
        for name in known.manifests:
            if name in listing.manifests:
                return there.manifests.read(listing.run, listing.ref, name).header.store_ranks
    return known.store_ranks


def _heads(there: RemoteTier, here: NvmeTier, left: Sequence[Unrepaired], failed: dict[str, str]) -> list[Repair]:
    done = []
    for one in left:
        _, run, name = one.where.split("/") if one.kind in _HEADS else ("", "", "")
        generation = layout.parse_head_name(name)
        if generation is None:
            continue
        try:
            bring_head(there, here, run, generation)
        except (FormatError, InvalidInputError) as error:
            failed[one.where] = str(error)
        else:
            done.append(Repair("record", one.where, one.message, f"brought from {there.location}"))
    return done


def _listings(there: RemoteTier, lost: dict[str, None], failed: dict[str, str]) -> list[CheckpointFiles]:
    """Return the lost checkpoints that are complete there."""
    runs = dict.fromkeys(name.split(" ", 1)[0] for name in lost)
    found = {f"{run} {listing.ref}": listing for run in runs for listing in there.manifests.checkpoints(run)}
    failed |= {name: "it is not there" for name in lost if name not in found or not found[name].is_complete}
    return [found[name] for name in lost if name not in failed]
