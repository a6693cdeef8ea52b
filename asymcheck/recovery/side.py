"""Side: one of two checkpoints that are compared, which a user names, by the names of what it holds."""

from __future__ import annotations

import dataclasses
import re

from asymcheck.errors import HeadRecordError, InvalidInputError
from asymcheck.format import layout
from asymcheck.format.manifest import Manifest, TensorRow
from asymcheck.recovery.describe import describe_by
from asymcheck.recovery.line import Line, read_line
from asymcheck.recovery.names import told_apart
from asymcheck.recovery.resolve import by_save_id, candidates, read_manifests
from asymcheck.recovery.values import plain_values
from asymcheck.tiers.manifests import CheckpointFiles
from asymcheck.tiers.reading import ReadTier
from asymcheck.types import Digest

_STEP = re.compile(r"[0-9]{1,12}\Z", re.ASCII)
_SAVE = re.compile(r"save:([0-9a-f]{1,32})\Z")


@dataclasses.dataclass(frozen=True)
class Named:
    """The checkpoint that a name stands for."""

    listing: CheckpointFiles
    """The checkpoint."""
    others: tuple[CheckpointFiles, ...]
    """Further checkpoints of the same step, newest first; a save id would name them."""


def find_checkpoint(tier: ReadTier, name: int | str, run: str) -> Named:
    """Return the checkpoint of a name: ``STEP``, ``save:DIGITS``, or either after ``RUN@``.

    A step that was saved several times means the checkpoint that a restore would take: the newest attempt on the line,
    or else of the newest generation. ``DIGITS`` are the first hexadecimal digits of a save id; one checkpoint must
    have them.

    Args:
        tier: where to look.
        name: the name; an integer is a step.
        run: the run of a name without ``RUN@``.

    Raises:
        InvalidInputError: it is no such name, or several checkpoints have these digits.
        CheckpointNotFoundError: no checkpoint has this name.
        HeadRecordError: the step was saved several times, and the line cannot be followed.
    """
    text = str(name)
    if "@" in text:
        run, text = text.split("@", 1)
    layout.check_run(run)
    if _STEP.match(text):
        return _by_step(tier, run, int(text))
    digits = _SAVE.match(text)
    if digits is None:
        raise InvalidInputError(
            f"{str(name)!r} names no checkpoint: give STEP or save:DIGITS (the first hexadecimal digits of a save id), "
            "or RUN@ and one of the two"
        )
    return Named(by_save_id(tier, run, digits[1]), ())


def _by_step(tier: ReadTier, run: str, step: int) -> Named:
    chosen = candidates(tier, run, step)[0]
    same = [listing for listing in tier.manifests.checkpoints(run) if listing.ref.step == step]
    others = [listing for listing in reversed(same) if listing.ref != chosen.ref]
    return Named(chosen, tuple(others))


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
