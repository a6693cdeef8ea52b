"""Sample: a few bytes of each kind of tensor in the newest checkpoint, to measure codecs on."""

from __future__ import annotations

import dataclasses
import itertools

from asymcheck.errors import FormatError, RecoveryError, StorageError
from asymcheck.format import registry
from asymcheck.format.manifest import Extent, Manifest, TensorRow
from asymcheck.restore.frame_reader import read_any
from asymcheck.restore.lineage import read_line
from asymcheck.restore.partition_locator import PartitionLocator, PartitionSet
from asymcheck.restore.resolve import read_manifests
from asymcheck.storage.nvme import CheckpointFiles, NvmeTier, Slot
from asymcheck.types import CheckpointRef, Sample


@dataclasses.dataclass(frozen=True)
class CheckpointSample:
    """Sample of the newest checkpoint of a store."""

    run: str
    """Its run."""
    ref: CheckpointRef
    """Which checkpoint."""
    state_bytes: int
    """Bytes of all its tensors."""
    samples: tuple[Sample, ...]
    """One for each role and dtype of floats that has bytes outside the manifest."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """A piece of a tensor, and where in a partition it lies."""

    tensor: str
    start: int
    extent: Extent

    def key(self) -> tuple[str, int, int]:
        """Say which piece it is, in any checkpoint."""
        return self.tensor, self.start, self.extent.length


def sample(tier: NvmeTier, bytes_each: int) -> CheckpointSample | None:
    """Read up to ``bytes_each`` bytes of each role and dtype; None when no checkpoint can be read.

    The run with the newest save is sampled. Damaged partitions are skipped: ``verify`` reports them.
    """
    newest = _newest(tier)
    if newest is None:
        return None
    try:
        manifests = read_manifests(tier, newest[0])
        samples = _read(tier, _choose(manifests, bytes_each), _older(tier, newest[1:]), bytes_each)
    except (FormatError, RecoveryError, StorageError):
        return None
    state_bytes = sum(manifest.total_bytes for manifest in manifests)
    return CheckpointSample(newest[0].run, newest[0].ref, state_bytes, samples)


def _newest(tier: NvmeTier) -> list[CheckpointFiles] | None:
    """Return the checkpoints on the line of the run that was saved last, newest first."""
    found: list[list[CheckpointFiles]] = []
    for run in tier.manifests.runs():
        try:
            line = read_line(tier, run)
        except (FormatError, RecoveryError):
            continue
        listings = [one for one in tier.manifests.checkpoints(run) if one.ref in line and one.is_complete]
        found.append(sorted(listings, key=lambda one: one.ref, reverse=True))
    return max(filter(None, found), key=lambda line: line[0].ref.save_id, default=None)


def _older(tier: NvmeTier, listings: list[CheckpointFiles]) -> dict[tuple[str, int, int], _Place]:
    """Return the pieces of the checkpoint before, as far as it can be read."""
    try:
        manifests = read_manifests(tier, listings[0]) if listings else []
    except (FormatError, RecoveryError, StorageError):
        return {}
    rows = (row for manifest in manifests for row in manifest.rows(range(len(manifest))))
    return {place.key(): place for row in rows for place in _places(row)}


def _choose(manifests: list[Manifest], bytes_each: int) -> dict[tuple[str, str], list[_Place]]:
    """Take pieces of the largest tensors of each kind, one of each tensor in turn, until there are enough bytes."""
    rows = [row for manifest in manifests for row in manifest.rows(range(len(manifest)))]
    by_kind: dict[tuple[str, str], list[list[_Place]]] = {}
    for row in sorted(rows, key=lambda row: -row.nbytes):
        if row.dtype.startswith(("float", "bfloat")) and registry.DTYPE_BYTES[row.dtype] > 1 and row.extents:
            by_kind.setdefault((row.role, row.dtype), []).append(_places(row))
    return {kind: _in_turn(tensors, bytes_each) for kind, tensors in by_kind.items()}


def _places(row: TensorRow) -> list[_Place]:
    ends = list(itertools.accumulate(extent.length for extent in row.extents))
    return [_Place(row.name, end - one.length, one) for end, one in zip(ends, row.extents, strict=True)]


def _in_turn(tensors: list[list[_Place]], enough: int) -> list[_Place]:
    taken: list[_Place] = []
    for turn in itertools.zip_longest(*tensors):
        for place in filter(None, turn):
            if sum(one.extent.length for one in taken) >= enough:
                return taken
            taken.append(place)
    return taken


def _read(
    tier: NvmeTier,
    chosen: dict[tuple[str, str], list[_Place]],
    older: dict[tuple[str, int, int], _Place],
    bytes_each: int,
) -> tuple[Sample, ...]:
    before = {kind: [older[place.key()] for place in places if place.key() in older] for kind, places in chosen.items()}
    wanted = [place.extent for places in (*chosen.values(), *before.values()) for place in places]
    samples = []
    with PartitionLocator(
        tier, PartitionSet.of_lengths({one.digest: one.partition_length for one in wanted}), (), must_be_complete=False
    ) as sources:
        for (role, dtype), places in chosen.items():
            plain, base = (_bytes_of(sources, pieces, bytes_each) for pieces in (places, before[role, dtype]))
            if plain:
                samples.append(Sample(role, dtype, plain, base if len(base) == len(plain) else None))
    return tuple(samples)


def _bytes_of(sources: PartitionLocator, places: list[_Place], most: int) -> bytes:
    """Read pieces, every partition verified whole; nothing when one of them lies nowhere."""
    if not all(sources.find(place.extent.digest) for place in places):
        return b""
    found = bytearray()
    for place in places:
        extent = place.extent
        slot = Slot(sources.payload_bytes([extent.digest])[0])
        plain = read_any(sources, extent.digest, slot)
        # Whole elements of any dtype.
        found += plain[extent.offset : extent.offset + min(extent.length, max(most - len(found), 0) // 16 * 16)]
    return bytes(found)
