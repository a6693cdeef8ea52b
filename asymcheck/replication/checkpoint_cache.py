"""Cache of the checkpoints of a run, and verification of remote checkpoints against indexes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from asymcheck.errors import (
    INCONCLUSIVE,
    AsymcheckError,
    FormatError,
    HeadRecordError,
    MissingPartitionError,
    StorageError,
    UnsupportedFormatError,
    result_or_error,
)
from asymcheck.format import layout
from asymcheck.format.manifest import Manifest
from asymcheck.inspect.history import describe_by
from asymcheck.replication.decodable_frames import DecodableFrames
from asymcheck.restore.lineage import Lineage, read_line
from asymcheck.restore.partition_locator import PartitionSet
from asymcheck.restore.resolve import read_manifests
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.pack_index import PackIndex
from asymcheck.storage.remote import RemoteTier
from asymcheck.types import Checkpoint, CheckpointRef, PackId

_FIRST_PACKS = 16
"""Number of indexes that are read first, and doubled then. The newest packs serve the newest checkpoint."""


class CheckpointCache:
    """Complete checkpoints of a run in one tier, for repeated decisions. For one thread."""

    def __init__(self, tier: ReadTier, run: str, *, metrics: bool) -> None:
        """Cache the checkpoints of ``tier``. Without ``metrics``, no manifest is read, because names suffice."""
        self._tier = tier
        self._run = run
        self._metrics = metrics
        self._listings: dict[CheckpointRef, CheckpointFiles] = {}
        self._described: dict[CheckpointRef, Checkpoint] = {}
        self._heads: list[int] | None = None
        self._line: Lineage | None = None
        self._present: Lineage | None = None
        self.unread: dict[str, str] = {}
        """Save ids of checkpoints whose metrics the last refresh could not read, with the reasons."""

    def refresh(self) -> list[Checkpoint]:
        """Return the complete checkpoints, oldest first.

        After the first call, this lists the run, and each checkpoint that is new or was incomplete.
        """
        manifests = self._tier.manifests
        if before := self._listings:
            self._listings = {
                ref: before[ref] if ref in before and before[ref].is_complete else manifests.listing(self._run, ref)
                for ref in manifests.refs(self._run)
            }
        else:
            self._listings = {listing.ref: listing for listing in manifests.checkpoints(self._run)}
        line = self._present = self._present_line()
        complete = [ref for ref, listing in self._listings.items() if listing.is_complete]
        # A failed read may succeed now.
        known = {ref: one for ref, one in self._described.items() if one.save_id not in self.unread}
        self.unread = {}
        self._described = {ref: known.get(ref) or self._describe(ref) for ref in complete}
        return [
            dataclasses.replace(checkpoint, on_line=None if line is None else ref in line)
            for ref, checkpoint in self._described.items()
        ]

    @property
    def generation(self) -> int:
        """Newest generation of the last refresh, from head records and checkpoints."""
        return max([*(self._heads or ()), *(ref.generation for ref in self._listings)], default=1)

    def placed(self, remote: Iterable[Checkpoint], generation: int) -> list[Checkpoint]:
        """Return checkpoints of another tier with ``on_line`` set by the line of training in this tier.

        If this line is unknown, or older than ``generation``, the newest of the other tier, they are unchanged.
        """
        line = self._present
        if line is None or line.generation < generation:
            return list(remote)
        return [dataclasses.replace(checkpoint, on_line=checkpoint.ref in line) for checkpoint in remote]

    def listing(self, checkpoint: Checkpoint) -> CheckpointFiles | None:
        """Return the manifests of a checkpoint; None if the last refresh did not find the checkpoint."""
        return self._listings.get(checkpoint.ref)

    def unfinished(self) -> list[CheckpointRef]:
        """Return the checkpoints of the last refresh that lack manifests."""
        return [ref for ref, listing in self._listings.items() if listing.manifests and not listing.is_complete]

    def _describe(self, ref: CheckpointRef) -> Checkpoint:
        listing = self._listings[ref]
        manifests: list[Manifest] = []
        if self._metrics:
            read = result_or_error(read_manifests, self._tier, listing)
            # A damaged or deleted checkpoint raises when it is copied.
            manifests = [] if isinstance(read, AsymcheckError) else read
            if isinstance(read, StorageError):
                self.unread[ref.save_id.hex()] = f"its metrics are unknown: {read}"
        return describe_by(listing, manifests, None)

    def _present_line(self) -> Lineage | None:
        heads = self._tier.manifests.heads(self._run)
        # A record that could not be read may be repaired.
        if heads != self._heads or self._line is None:
            try:
                self._line = read_line(self._tier, self._run)
            except HeadRecordError:
                self._line = None
            self._heads = heads
        if self._line is not None and any(ref.generation > self._line.generation for ref in self._listings):
            return None
        return self._line


class RemotePresence:
    """Content of a remote location. Indexes are read on demand, and kept until a collection removes a pack.

    For one thread.
    """

    def __init__(self, remote: RemoteTier) -> None:
        self._remote = remote
        self._indexes: dict[PackId, PackIndex | None] = {}
        self._frames = DecodableFrames(())
        self._needs: dict[tuple[str, CheckpointRef], PartitionSet | UnsupportedFormatError | None] = {}
        self._lasting: list[PackId] = []

    def expect(self, listings: Iterable[CheckpointFiles]) -> None:
        """Read the manifests of checkpoints for :meth:`has`, then list the packs once for all of them."""
        listings, manifests = [*listings], self._remote.manifests
        self._needs = {(listing.run, listing.ref): self._needed(listing) for listing in manifests.each(listings)}
        # Packs are listed after the manifests were read. A collection that has not announced a pack by then will see
        # these manifests, and keep the pack.
        lasting = list(self._remote.list_packs().lasting) if self._needs else []
        prefixes = tuple({layout.pack_prefix(listing.first_rank) for listing in listings})
        self._lasting = sorted(lasting, key=lambda pack_id: not pack_id.startswith(prefixes))
        if not self._indexes.keys() <= set(self._lasting):
            self._indexes, self._frames = {}, DecodableFrames(())

    def _needed(self, listing: CheckpointFiles) -> PartitionSet | UnsupportedFormatError | None:
        """Return the partitions of a checkpoint; None if a manifest is damaged or missing."""
        try:
            return PartitionSet.of_manifests(read_manifests(self._remote, listing))
        except UnsupportedFormatError as error:
            return error
        except INCONCLUSIVE:
            raise
        except (FormatError, MissingPartitionError, StorageError):
            return None

    def has(self, listing: CheckpointFiles) -> bool:
        """Tell whether a checkpoint is whole: its manifests and packs are intact.

        Packs whose removal a collection has announced do not count, because a user has to reprieve them first.

        Raises:
            UnsupportedFormatError: the checkpoint requires a newer version of asymcheck.
        """
        key = listing.run, listing.ref
        if key not in self._needs:
            self.expect([listing])
        needs = self._needs.pop(key)
        if isinstance(needs, UnsupportedFormatError):
            raise needs
        if needs is None:
            return False
        while not self._frames.have(needs.digests.column, needs.lengths).all():
            unread = [pack_id for pack_id in self._lasting if pack_id not in self._indexes]
            if not unread:
                return False
            self._indexes |= self._remote.read_indexes(unread[: max(len(self._indexes), _FIRST_PACKS)])
            self._frames = DecodableFrames(self._indexes.values())
        return True
