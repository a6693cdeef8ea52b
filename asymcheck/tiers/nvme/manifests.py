"""Manifests and head records as files: listing, reading, publishing, removing (SPEC.md §4, §8)."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from asymcheck.errors import ChecksumError, LimitError, MissingPartitionError, StorageError, StructureError
from asymcheck.events import emit
from asymcheck.format import layout, registry
from asymcheck.format.digest import digest
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Manifest
from asymcheck.format.manifest_reader import decode_manifest
from asymcheck.format.record import RECORD_BYTES, HeadRecord, decode_head, encode_head, repaired_record
from asymcheck.tiers.files import Files
from asymcheck.types import CheckpointRef


@dataclasses.dataclass(frozen=True)
class CheckpointFiles:
    """The manifests of one checkpoint as a directory listing shows them."""

    run: str
    """The run."""
    ref: CheckpointRef
    """Generation, step and save id."""
    manifests: tuple[ManifestName, ...]
    """What lies there, by rank."""

    @property
    def world_size(self) -> int:
        """How many ranks the checkpoint should have; 0 when there is no manifest or they disagree."""
        sizes = {name.world_size for name in self.manifests}
        return sizes.pop() if len(sizes) == 1 else 0

    @property
    def is_complete(self) -> bool:
        """Whether there is exactly one manifest for each rank."""
        return self.world_size > 0 and [name.rank for name in self.manifests] == list(range(self.world_size))

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks without a manifest."""
        return sorted(set(range(self.world_size)) - {name.rank for name in self.manifests})


class ManifestFiles:
    """The folders ``manifests`` and ``heads`` of a store."""

    def __init__(self, files: Files, root: Path) -> None:
        """Work below ``root``, the store."""
        self._files = files
        self._manifests = root / layout.MANIFESTS
        self._heads = root / layout.HEADS
        self._lasting: set[Path] = set()

    def runs(self) -> list[str]:
        """Return the names of all runs that have a folder."""
        names = {*self._files.list(self._manifests), *self._files.list(self._heads)}
        return sorted(name for name in names if layout.is_run(name))

    def directory(self, run: str, ref: CheckpointRef) -> Path:
        """Return the folder of a checkpoint."""
        return self._manifests / run / layout.checkpoint_name(ref)

    def checkpoints(self, run: str) -> list[CheckpointFiles]:
        """Return all checkpoints of a run that have at least one manifest, oldest first."""
        found = []
        for directory in self._files.list(self._manifests / run):
            ref = layout.parse_checkpoint_name(directory)
            if ref is not None:
                listing = self.listing(run, ref)
                if listing.manifests:
                    found.append(listing)
        return sorted(found, key=lambda listing: listing.ref)

    def newest(self, run: str, generation: int) -> CheckpointRef | None:
        """Return the greatest (step, save id) of a generation that has a manifest; looks into one folder as a rule."""
        # Their names sort as they do, so that a save does not take every name of a long run apart.
        for name in reversed(self._files.list(self._manifests / run)):
            ref = layout.parse_checkpoint_name(name) if name.startswith(f"{generation:08d}-") else None
            if ref is not None and self.listing(run, ref).manifests:
                return ref
        return None

    def listing(self, run: str, ref: CheckpointRef) -> CheckpointFiles:
        """Return what lies in the folder of one checkpoint."""
        names = [layout.parse_manifest_name(name) for name in self._files.list(self.directory(run, ref))]
        present = sorted((name for name in names if name is not None), key=lambda name: (name.rank, name.digest))
        return CheckpointFiles(run, ref, tuple(present))

    def read(self, run: str, ref: CheckpointRef, name: ManifestName) -> Manifest:
        """Read one manifest and check it against its path.

        Raises:
            MissingPartitionError: the file is gone.
            ChecksumError: the content is not what the name says.
            FormatError: it breaks another rule of the format.
        """
        path = self.directory(run, ref) / str(name)
        where = f"manifest {run}/{path.parent.name}/{path.name}"
        data = self._files.read_small(path, registry.MANIFEST_BYTES_MAX)
        if data is None:
            raise MissingPartitionError(f"{where} is gone")
        if len(data) > registry.MANIFEST_BYTES_MAX:
            raise LimitError(f"{where}: more than {registry.MANIFEST_BYTES_MAX} bytes")
        if digest(data) != name.digest:
            raise ChecksumError(f"{where}: the content does not have the digest in the name")
        manifest = decode_manifest(data, where)
        header = manifest.header
        if (header.run, header.ref, header.rank, header.world_size) != (run, ref, name.rank, name.world_size):
            raise StructureError(f"{where}: the header disagrees with the path")
        return manifest

    def publish(self, run: str, ref: CheckpointRef, rank: int, world_size: int, data: bytes) -> ManifestName:
        """Commit a manifest: when this returns, the rank's part of the checkpoint is durable."""
        name = ManifestName(rank, world_size, digest(data))
        directory = self.directory(run, ref)
        self._make_run(self._manifests, run)
        self._make_head_last(run, ref.generation)
        self._files.make_directory(directory)
        # Also when another rank made it: that rank may not have synced it yet.
        self._files.sync_directory(directory.parent)
        emit("manifest.directory_created", directory.name)
        temporary = directory / f"{rank:05d}-{os.urandom(8).hex()}{layout.TEMPORARY}"
        try:
            self._files.write_small(temporary, data)
            emit("manifest.written", temporary.name)
            emit("manifest.synced", temporary.name)
            self._files.rename(temporary, directory / str(name))
        except FileNotFoundError as error:
            raise StorageError(f"{directory} was removed while the manifest was being written") from error
        except BaseException:
            self._files.unlink(temporary)
            raise
        emit("manifest.renamed", str(name))
        self._files.sync_directory(directory)
        emit("manifest.committed", str(name), len(data))
        return name

    def withdraw(self, run: str, ref: CheckpointRef, rank: int) -> None:
        """Take back what a save that failed has published of one rank, durably, with its temporary files."""
        directory = self.directory(run, ref)
        names = [name for name in self._files.list(directory) if name.startswith(f"{rank:05d}-")]
        for name in names:
            self._files.unlink(directory / name)
        if names:
            self._files.sync_directory(directory)
        if self._files.remove_directory(directory):
            self._files.sync_directory(directory.parent)

    def remove(self, run: str, ref: CheckpointRef) -> None:
        """Delete a checkpoint: its manifests first of all, durably, then its folder."""
        directory = self.directory(run, ref)
        for name in self._files.list(directory):
            if layout.parse_manifest_name(name) is not None:
                self._files.unlink(directory / name)
        try:
            self._files.sync_directory(directory)
        except FileNotFoundError:
            # Collection, or another deletion, has removed the folder by now: then it is its absence that must last.
            self._files.sync_directory(directory.parent)
        self.remove_empty(run, ref)

    def remove_empty(self, run: str, ref: CheckpointRef) -> None:
        """Remove the folder of a checkpoint that has no manifest, with temporary files that a crash left."""
        directory = self.directory(run, ref)
        names = self._files.list(directory)
        if all(name.endswith(layout.TEMPORARY) for name in names):
            for name in names:
                self._files.unlink(directory / name)
            if self._files.remove_directory(directory):
                self._files.sync_directory(directory.parent)

    def empty(self, run: str) -> list[CheckpointRef]:
        """Return the checkpoints whose folder holds no manifest."""
        refs = map(layout.parse_checkpoint_name, self._files.list(self._manifests / run))
        return [ref for ref in refs if ref is not None and not self.listing(run, ref).manifests]

    def heads(self, run: str) -> list[int]:
        """Return the generations that have a head record, in order."""
        numbers = map(layout.parse_head_name, self._files.list(self._heads / run))
        return sorted(number for number in numbers if number is not None)

    def temporary_heads(self) -> list[Path]:
        """Return the files of head records that are being written, or were when a process was killed."""
        runs = [self._heads / run for run in self._files.list(self._heads) if layout.is_run(run)]
        return [run / name for run in runs for name in self._files.list(run) if layout.is_record_temporary(name)]

    def read_head(self, run: str, generation: int) -> tuple[HeadRecord, int] | None:
        """Return a head record and how many of its copies are damaged; None when there is none.

        Raises:
            FormatError: both copies are damaged, or it contradicts its path.
        """
        path = self._heads / run / layout.head_name(generation)
        data = self._files.read_small(path, RECORD_BYTES)
        if data is None:
            return None
        where = f"head record {run}/{path.name}"
        head, damaged = decode_head(data, where)
        if (head.run, head.generation) != (run, generation):
            raise StructureError(f"{where}: the record disagrees with its path")
        return head, damaged

    def repair_head(self, run: str, generation: int) -> bool:
        """Write a head record again when one of its copies is damaged or cut off; return whether it was.

        Raises:
            FormatError: no copy is intact, or it contradicts its path.
        """
        path = self._heads / run / layout.head_name(generation)
        data = self._files.read_small(path, RECORD_BYTES) or b""
        whole = repaired_record(data)
        if whole == data:
            return False
        where = f"head record {run}/{path.name}"
        head, _ = decode_head(data if whole is None else whole, where)
        if whole is None or (head.run, head.generation) != (run, generation):
            raise StructureError(f"{where}: the record disagrees with its path")
        self._files.replace_record(path, whole)
        return True

    def publish_head(self, head: HeadRecord) -> bool:
        """Write a head record durably; return False when its generation is taken."""
        self._make_run(self._heads, head.run)
        directory = self._heads / head.run
        temporary = directory / f"{os.urandom(8).hex()}{layout.TEMPORARY}"
        with self._files.temporary(temporary, encode_head(head)):
            try:
                published = self._files.link(temporary, directory / layout.head_name(head.generation))
            except FileNotFoundError:
                # Collection saw the file before it was locked, and removed it.
                return False
        self._files.sync_directory(directory)
        emit("head.published", f"{head.run} generation {head.generation}")
        return published

    def _make_head_last(self, run: str, generation: int) -> None:
        # A checkpoint must not outlast its generation's head record, whose writer may have been killed before this.
        path = self._heads / run / layout.head_name(generation)
        if path not in self._lasting and path.exists():
            self._files.sync_directory(path.parent)
            self._lasting.add(path)

    def _make_run(self, parent: Path, run: str) -> None:
        self._files.make_directory(parent / run)
        if parent / run not in self._lasting:
            # Also when it was there: whoever made it may have been killed before this.
            self._files.sync_directory(parent)
            self._lasting.add(parent / run)
