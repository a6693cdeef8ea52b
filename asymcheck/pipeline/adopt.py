"""Adopt: what a killed process left complete in its ring becomes checkpoints of the store (SPEC.md §8.5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from asymcheck.errors import FormatError, InvalidInputError, MissingPartitionError, StructureError
from asymcheck.format.digest import digest
from asymcheck.format.frame import frame_length
from asymcheck.format.manifest import Manifest, ManifestHeader
from asymcheck.format.manifest_reader import decode_manifest
from asymcheck.format.ring import COMPLETE, CaptureEntry
from asymcheck.pipeline.drain import Drain
from asymcheck.pipeline.request import Place
from asymcheck.tiers.dram_ring import RingReader, left_rings, remove_unmade
from asymcheck.tiers.nvme import Catalog, NvmeTier
from asymcheck.types import CheckpointRef, Digest


@dataclasses.dataclass(frozen=True)
class Adopted:
    """What became of one capture."""

    run: str | None
    """The run; None when it cannot be known."""
    step: int | None
    """The training step; None when it cannot be known."""
    ref: CheckpointRef | None
    """The checkpoint; None when it could not be committed."""
    problem: str
    """Why not."""


def adopt(tier: NvmeTier, catalog: Catalog, folder: Path, placing: Callable[[ManifestHeader], Place]) -> list[Adopted]:
    """Commit what lies complete in the rings of this store that nobody uses any more, and remove these rings.

    Raises:
        StorageError: the device refused. The ring stays, and may be adopted again.
    """
    adopted: list[Adopted] = []
    for path in left_rings(folder, tier.descriptor.store_id):
        try:
            reader = RingReader(path)
        except FileNotFoundError:
            continue
        except FormatError as error:
            if not remove_unmade(path):
                adopted.append(Adopted(None, None, None, f"{error}; it stays there, and takes memory until removed"))
            continue
        with reader:
            if not reader.is_owned:
                adopted += _adopt_ring(tier, catalog, reader, placing)
                reader.unlink()
    return adopted


def _adopt_ring(
    tier: NvmeTier, catalog: Catalog, reader: RingReader, placing: Callable[[ManifestHeader], Place]
) -> list[Adopted]:
    adopted: list[Adopted] = []
    found: list[tuple[Manifest, bytes]] = []
    for entry in reader.captures:
        if entry.state != COMPLETE:
            continue
        try:
            found.append(_manifest(reader, entry))
        except FormatError as error:
            adopted.append(Adopted(reader.header.run, None, None, str(error)))
    offsets = reader.offsets()
    for manifest, data in sorted(found, key=lambda one: one[0].header.ref):
        header = manifest.header
        if tier.manifests.listing(header.run, header.ref).manifests:
            # Its process was killed between the commit and the note of it.
            continue
        drain = Drain(tier, catalog, tier.slots, header.ref.save_id, header.rank)
        try:
            _add_all(drain, reader, manifest, offsets)
            ref = drain.commit(data, placing)
        except (MissingPartitionError, FormatError, InvalidInputError) as error:
            drain.abandon()
            adopted.append(Adopted(header.run, header.ref.step, None, str(error)))
        except BaseException:
            drain.abandon()
            raise
        else:
            adopted.append(Adopted(header.run, header.ref.step, ref, ""))
    return adopted


def _manifest(reader: RingReader, entry: CaptureEntry) -> tuple[Manifest, bytes]:
    """Read the manifest of a capture.

    Raises:
        FormatError: it is damaged, or not the one that the entry and the ring are of.
    """
    where = f"manifest in ring {reader.path.name}"
    data = bytes(reader.payload_at(entry.offset))
    manifest = decode_manifest(data, where)
    header = manifest.header
    named = (entry.save_id, reader.header.run, reader.header.rank)
    if (header.ref.save_id, header.run, header.rank) != named:
        raise StructureError(f"{where}: it is of another capture than its entry")
    return manifest, data


def _add_all(drain: Drain, reader: RingReader, manifest: Manifest, offsets: dict[Digest, list[int]]) -> None:
    lengths = manifest.partitions()
    drain.expect(sum(frame_length(length) for length in lengths.values()))
    for name, length in lengths.items():
        frame = _intact_frame(reader, offsets.get(name, []), name, length)
        if frame is not None:
            drain.add(name, length, frame)
        else:
            drain.reuse(name, length)


def _intact_frame(reader: RingReader, offsets: list[int], name: Digest, length: int) -> memoryview | None:
    for offset in offsets:
        try:
            payload = reader.payload_at(offset)
        except FormatError:
            continue
        if len(payload) == length and digest(payload) == name:
            return reader.frame(offset, length)
    return None
