"""Side: one of two checkpoints that are compared, by the names of what it holds."""

from __future__ import annotations

from asymcheck.errors import HeadRecordError
from asymcheck.format.manifest import Manifest, TensorRow
from asymcheck.recovery.describe import describe_by
from asymcheck.recovery.line import Line, read_line
from asymcheck.recovery.names import told_apart
from asymcheck.recovery.naming import Named
from asymcheck.recovery.resolve import read_manifests
from asymcheck.recovery.values import plain_values
from asymcheck.tiers.reading import ReadTier
from asymcheck.types import Digest


class Side:
    """One of the two checkpoints."""

    def __init__(self, tier: ReadTier, named: Named) -> None:
        """Read its manifests.

        Raises:
            FormatError, StorageError: they cannot be read.
        """
        listing = named.listing
        self.ref = listing.ref
        self.manifests: list[Manifest] = read_manifests(tier, listing)
        try:
            line = read_line(tier, listing.run)
        except HeadRecordError:
            line = Line(0, {})
        self.checkpoint = describe_by(listing, self.manifests, line)
        self.other_saves = tuple(other.ref.save_id.hex() for other in named.others)
        self.partitions: set[Digest] = set()
        self.inline: set[bytes] = set()
        self.tensors: list[tuple[int, tuple[str, ...], TensorRow]] = []
        """Each tensor once, with its rank and its names there."""
        self.rows: dict[tuple[int, str], TensorRow] = {}
        """Each tensor by each of its names."""
        self.values: dict[str, str] = {}
        for manifest in self.manifests:
            self._take(manifest)

    def _take(self, manifest: Manifest) -> None:
        rank = manifest.header.rank
        self.partitions.update(manifest.partitions())
        taken: dict[str, int] = {}
        for row in manifest.rows(range(len(manifest))):
            if row.inline is not None:
                self.inline.add(row.inline)
            names = tuple(told_apart(name, taken) for name in (row.name, *row.aliases))
            self.tensors.append((rank, names, row))
            self.rows.update(dict.fromkeys([(rank, name) for name in names], row))
        prefix = f"rank {rank}: " if len(self.manifests) > 1 else ""
        self.values.update({prefix + name: text for name, text in plain_values(manifest).items()})

    def has_bytes_of(self, row: TensorRow) -> int:
        """Return how many bytes of another checkpoint's tensor are here, as partitions or in the manifest, as there."""
        if row.inline is not None:
            return len(row.inline) if row.inline in self.inline else 0
        return sum(extent.length for extent in row.extents if extent.digest in self.partitions)
