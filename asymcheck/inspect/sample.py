"""Measure a store for the policies, with codecs on tensors of its newest checkpoint."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from asymcheck.errors import FormatError, RecoveryError, StorageError
from asymcheck.format import registry
from asymcheck.format.manifest import Extent, Manifest, TensorRow
from asymcheck.measurement import NOISE, measure, noise_samples
from asymcheck.policies.advice import Facts
from asymcheck.restore.frame_reader import read_any
from asymcheck.restore.lineage import read_line
from asymcheck.restore.partition_locator import PartitionLocator, PartitionSet
from asymcheck.restore.resolve import read_manifests
from asymcheck.storage.nvme import CheckpointFiles, NvmeTier
from asymcheck.types import CheckpointRef, Sample

_SAMPLE_BYTES = 8 << 20
_QUICK_SAMPLE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class CheckpointSample:
    """Sample of the newest checkpoint of a store."""

    run: str
    ref: CheckpointRef
    state_bytes: int
    """Bytes of all tensors."""
    samples: tuple[Sample, ...]
    """One sample for each role and float dtype with bytes outside the manifest."""


@dataclasses.dataclass(frozen=True)
class _Piece:
    tensor: str
    start: int
    extent: Extent

    def key(self) -> tuple[str, int, int]:
        """Identify the piece across checkpoints."""
        return self.tensor, self.start, self.extent.length


def measure_store(tier: NvmeTier, ring_folder: Path, *, quick: bool = False) -> Facts:
    """Measure memory, codecs and the drive in about ten seconds, or with ``quick`` less precisely in one.

    Measures codecs on tensors of the newest checkpoint. Writes some hundred MB into a temporary file inside the store
    and removes it; after a kill, garbage collection removes it. Does not change checkpoints.

    Raises:
        OutOfSpaceError: the drive has too little free space for the measurement.
        ReadOnlyStoreError, StorageError: the store cannot be written.
    """
    tier.check_writable()
    nbytes = _QUICK_SAMPLE_BYTES if quick else _SAMPLE_BYTES
    sampled = sample(tier, nbytes)
    if sampled is None or not sampled.samples:
        samples, described = noise_samples(nbytes), NOISE
    else:
        samples, described = sampled.samples, f"step {sampled.ref.step} of run {sampled.run}"
    state_bytes = None if sampled is None else sampled.state_bytes
    return measure(tier, samples, described, state_bytes, ring_folder, quick=quick)


def sample(tier: NvmeTier, bytes_each: int) -> CheckpointSample | None:
    """Read up to ``bytes_each`` bytes of each role and dtype. Return None if no checkpoint is readable.

    The run with the newest save is sampled. Damaged partitions are skipped; ``verify`` reports them.
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
    """Return the checkpoints on the line of the run with the newest save, newest first."""
    lines: list[list[CheckpointFiles]] = []
    for run in tier.manifests.runs():
        try:
            line = read_line(tier, run)
        except (FormatError, RecoveryError):
            continue
        listings = [
            listing for listing in tier.manifests.checkpoints(run) if listing.ref in line and listing.is_complete
        ]
        lines.append(sorted(listings, key=lambda listing: listing.ref, reverse=True))
    return max(filter(None, lines), key=lambda line: line[0].ref.save_id, default=None)


def _older(tier: NvmeTier, listings: list[CheckpointFiles]) -> dict[tuple[str, int, int], _Piece]:
    try:
        manifests = read_manifests(tier, listings[0]) if listings else []
    except (FormatError, RecoveryError, StorageError):
        return {}
    rows = (row for manifest in manifests for row in manifest.rows())
    return {piece.key(): piece for row in rows for piece in _pieces(row)}


def _choose(manifests: list[Manifest], bytes_each: int) -> dict[tuple[str, str], list[_Piece]]:
    """Choose pieces of the largest tensors of each role and dtype, in rotation, up to ``bytes_each`` bytes."""
    rows = [row for manifest in manifests for row in manifest.rows()]
    by_kind: dict[tuple[str, str], list[list[_Piece]]] = {}
    for row in sorted(rows, key=lambda row: -row.nbytes):
        if row.dtype.startswith(("float", "bfloat")) and registry.DTYPE_BYTES[row.dtype] > 1 and row.extents:
            by_kind.setdefault((row.role, row.dtype), []).append(_pieces(row))
    return {kind: _rotate(tensors, bytes_each) for kind, tensors in by_kind.items()}


def _pieces(row: TensorRow) -> list[_Piece]:
    ends = list(itertools.accumulate(extent.length for extent in row.extents))
    return [_Piece(row.name, end - extent.length, extent) for end, extent in zip(ends, row.extents, strict=True)]


def _rotate(tensors: list[list[_Piece]], nbytes: int) -> list[_Piece]:
    chosen: list[_Piece] = []
    for pieces in itertools.zip_longest(*tensors):
        for piece in filter(None, pieces):
            if sum(other.extent.length for other in chosen) >= nbytes:
                return chosen
            chosen.append(piece)
    return chosen


def _read(
    tier: NvmeTier,
    chosen: dict[tuple[str, str], list[_Piece]],
    older: dict[tuple[str, int, int], _Piece],
    bytes_each: int,
) -> tuple[Sample, ...]:
    bases = {kind: [older[piece.key()] for piece in pieces if piece.key() in older] for kind, pieces in chosen.items()}
    extents = [piece.extent for pieces in (*chosen.values(), *bases.values()) for piece in pieces]
    samples = []
    with PartitionLocator(
        tier,
        PartitionSet.of_lengths({extent.digest: extent.partition_length for extent in extents}),
        (),
        must_be_complete=False,
    ) as sources:
        for (role, dtype), pieces in chosen.items():
            plain, base = (_bytes_of(sources, each, bytes_each) for each in (pieces, bases[role, dtype]))
            if plain:
                samples.append(Sample(role, dtype, plain, base if len(base) == len(plain) else None))
    return tuple(samples)


def _bytes_of(sources: PartitionLocator, pieces: list[_Piece], max_bytes: int) -> bytes:
    """Read pieces from verified partitions. Return nothing if a partition is missing."""
    if not all(sources.find(piece.extent.digest) for piece in pieces):
        return b""
    sampled = bytearray()
    for piece in pieces:
        extent = piece.extent
        plain = read_any(sources, extent.digest)
        # A multiple of 16 bytes has whole elements of any dtype.
        length = min(extent.length, max(max_bytes - len(sampled), 0) // 16 * 16)
        sampled += plain[extent.offset : extent.offset + length]
    return bytes(sampled)
