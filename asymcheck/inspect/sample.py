"""Measure a store for the policies, with codecs on tensors of its newest checkpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path

from asymcheck.errors import FormatError, NotFoundError, RecoveryError, StorageError
from asymcheck.format import registry
from asymcheck.format.manifest import Manifest, TensorRow
from asymcheck.measurement import measure
from asymcheck.policies.advice import Facts
from asymcheck.restore.frame_reader import read_any
from asymcheck.restore.partition_locator import Hints, PartitionLocator, PartitionSet
from asymcheck.restore.resolve import candidates, read_manifests
from asymcheck.storage.nvme import CheckpointFiles, NvmeTier
from asymcheck.types import Sample

_SAMPLE_BYTES = 8 << 20
_QUICK_SAMPLE_BYTES = 1 << 20
_TENSORS = 8
"""Maximum number of tensors in a sample, so that one unusual tensor does not dominate."""


def measure_store(tier: NvmeTier, ring_folder: Path, *, quick: bool = False) -> Facts:
    """Measure memory, codecs and the drive in about ten seconds, or with ``quick`` less precisely in one.

    Measures codecs on tensors of the newest checkpoint, and no codecs without a checkpoint. Writes some hundred MB into
    a temporary file inside the store and removes it; after a kill, garbage collection removes it. Does not change
    checkpoints.

    Raises:
        OutOfSpaceError: the drive has too little free space for the measurement.
        ReadOnlyStoreError, StorageError: the store cannot be written.
    """
    tier.check_writable()
    nbytes = _QUICK_SAMPLE_BYTES if quick else _SAMPLE_BYTES
    return measure(tier, *sample(tier, nbytes), ring_folder, quick=quick)


def sample(tier: NvmeTier, bytes_each: int) -> tuple[tuple[Sample, ...], str, int | None]:
    """Return up to ``bytes_each`` bytes of each role and dtype, the name of the checkpoint, and the size of its state.

    The run with the newest save is sampled. If no checkpoint is readable, the result has no samples and no size.
    Damaged partitions are skipped; ``verify`` reports them.
    """
    line = _newest(tier)
    while line:
        newest, *line = line
        with contextlib.suppress(FormatError, RecoveryError, StorageError):
            manifests = read_manifests(tier, newest)
            samples = _samples(tier, manifests, _older(tier, line), bytes_each)
            described = f"step {newest.ref.step} of run {newest.run}"
            return samples, described, sum(manifest.total_bytes for manifest in manifests)
    return (), "", None


def _newest(tier: NvmeTier) -> list[CheckpointFiles]:
    """Return the complete checkpoints on the line of the run with the newest save, newest first."""
    lines: list[list[CheckpointFiles]] = []
    for run in tier.manifests.runs():
        with contextlib.suppress(NotFoundError, FormatError, RecoveryError):
            lines.append([listing for listing in candidates(tier, run, None) if listing.is_complete])
    return max(filter(None, lines), key=lambda line: line[0].ref.save_id, default=[])


def _older(tier: NvmeTier, listings: list[CheckpointFiles]) -> list[Manifest]:
    with contextlib.suppress(FormatError, RecoveryError, StorageError):
        return read_manifests(tier, listings[0]) if listings else []
    return []


def _samples(tier: NvmeTier, manifests: list[Manifest], older: list[Manifest], bytes_each: int) -> tuple[Sample, ...]:
    """Sample the beginnings of the largest tensors of each role and dtype."""
    by_kind: dict[tuple[str, str], list[TensorRow]] = {}
    for row in sorted((row for manifest in manifests for row in manifest.rows()), key=lambda row: -row.nbytes):
        if row.dtype.startswith(("float", "bfloat")) and registry.DTYPE_BYTES[row.dtype] > 1 and row.extents:
            by_kind.setdefault((row.role, row.dtype), []).append(row)
    before = {row.name: row for manifest in older for row in manifest.rows()}
    samples = []
    for (role, dtype), tensors in by_kind.items():
        rows = tensors[:_TENSORS]
        # A multiple of 16 bytes has whole elements of any dtype.
        length = bytes_each // len(rows) // 16 * 16
        plain = _read(tier, manifests, rows, length)
        base = _read(tier, older, [before[row.name] for row in rows if row.name in before], length)
        if plain:
            samples.append(Sample(role, dtype, plain, base if len(base) == len(plain) else None))
    return tuple(samples)


def _read(tier: NvmeTier, manifests: list[Manifest], rows: list[TensorRow], length: int) -> bytes:
    """Read the first bytes of tensors from verified partitions. Return nothing if a partition is unreadable."""
    lengths = {extent.digest: extent.partition_length for row in rows for extent in row.extents}
    sampled = bytearray()
    with (
        contextlib.suppress(FormatError, RecoveryError, StorageError),
        PartitionLocator(tier, PartitionSet.of_lengths(lengths), Hints.of_manifests(manifests)) as sources,
    ):
        for row in rows:
            first = bytearray()
            for extent in row.extents:
                if len(first) < length:
                    first += read_any(sources, extent.digest)[extent.offset : extent.offset + extent.length]
            sampled += first[:length]
        return bytes(sampled)
    return b""
