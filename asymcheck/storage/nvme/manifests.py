"""Manifests and head records of a store: publishing and removing them (SPEC.md §8)."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path, PurePath

from asymcheck.errors import (
    UNKNOWING,
    FormatError,
    HeadRecordError,
    MissingPartitionError,
    StorageError,
    UnsupportedFormatError,
)
from asymcheck.events import emit
from asymcheck.format import layout
from asymcheck.format.digest import digest
from asymcheck.format.layout import ManifestName
from asymcheck.format.record import RECORD_BYTES, HeadRecord, encode_head, repaired_record
from asymcheck.format.spans import Spans, ranks_in
from asymcheck.storage.local_files import Files, translated
from asymcheck.storage.manifests import CheckpointFiles, ManifestReader, decode_head_of
from asymcheck.types import CheckpointRef


class ManifestFiles(ManifestReader):
    """The folders ``manifests`` and ``heads`` of a store, to be written as well."""

    _files: Files
    _root: Path

    def __init__(self, files: Files, root: Path) -> None:
        super().__init__(files, root)
        self._manifests = root / layout.MANIFESTS
        self._heads = root / layout.HEADS
        self._lasting: set[Path] = set()
        self._spans: dict[bytes, Spans | None] = {}

    def _names(self, path: PurePath) -> list[str]:
        # A drive that was unmounted, or a store that was moved while it is open, has no folders at all.
        names = super()._names(path)
        if not names:
            with translated("look at", self._root):
                is_there = (self._root / layout.DESCRIPTOR_NAME).exists()
            if not is_there:
                raise StorageError(
                    f"store {self._root} is not there any more: was it moved, removed, or its drive unmounted? Put it "
                    "back, then open it again"
                )
        return names

    def listing(self, run: str, ref: CheckpointRef) -> CheckpointFiles:
        """Return the files in the folder of one checkpoint, and the ranks whose manifests belong there."""
        found = super().listing(run, ref)
        return found if found.is_whole else dataclasses.replace(found, store_ranks=self._store_ranks(found))

    def _store_ranks(self, listing: CheckpointFiles) -> Spans | None:
        """Return which ranks save into this store, as their manifests say; None when all do, or none can be read."""
        present = {name.rank for name in listing.manifests}
        for name in listing.manifests:
            if name.digest not in self._spans:
                try:
                    self._spans[name.digest] = self.read(listing.run, listing.ref, name).header.store_ranks
                except UNKNOWING:
                    raise
                except (FormatError, MissingPartitionError, StorageError):
                    continue
            spans = self._spans[name.digest]
            # One that was copied here from another place may name other ranks.
            if spans is None or present.issuperset(ranks_in(spans)):
                return spans
        return next((self._spans.get(name.digest) for name in listing.manifests if name.digest in self._spans), None)

    def directory(self, run: str, ref: CheckpointRef) -> Path:
        """Return the folder of a checkpoint."""
        return self._manifests / run / layout.checkpoint_name(ref)

    def publish(self, run: str, ref: CheckpointRef, rank: int, world_size: int, data: bytes) -> ManifestName:
        """Commit a manifest: when this returns, the rank's part of the checkpoint is durable.

        Raises:
            StorageError: the device refused; or somebody removed the folder of the checkpoint meanwhile.
        """
        name = ManifestName(rank, world_size, digest(data))
        directory = self.directory(run, ref)
        temporary = directory / f"{rank:05d}-{os.urandom(8).hex()}{layout.TEMPORARY}"
        try:
            self._make_run(self._manifests, run)
            self._make_head_last(run, ref.generation)
            self._files.make_directory(directory)
            # Also when another rank made it: that rank may not have synced it yet.
            self._files.sync_directory(directory.parent)
            emit("manifest.directory_created", directory.name)
            try:
                self._files.write_small(temporary, data)
                emit("manifest.written", temporary.name)
                emit("manifest.synced", temporary.name)
                self._files.rename(temporary, directory / str(name))
            except BaseException:
                self._files.unlink(temporary)
                raise
            emit("manifest.renamed", str(name))
            self._files.sync_directory(directory)
        except FileNotFoundError as error:
            raise StorageError(f"{directory} was removed while the manifest was being written") from error
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

    def temporary_heads(self) -> list[Path]:
        """Return the files of head records that are being written, or were when a process was killed."""
        runs = [self._heads / run for run in self._files.list(self._heads) if layout.is_run(run)]
        return [run / name for run in runs for name in self._files.list(run) if layout.is_record_temporary(name)]

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
        # Without an intact copy this raises.
        decode_head_of(run, generation, whole or data)
        self._files.replace_record(path, whole or data)
        return True

    def publish_head(self, head: HeadRecord) -> bool:
        """Write a head record durably; return False when its generation is taken."""
        self._make_run(self._heads, head.run)
        path = self._heads / head.run / layout.head_name(head.generation)
        published = self._files.publish_record(path, encode_head(head))
        self._files.sync_directory(path.parent)
        emit("head.published", f"{head.run} generation {head.generation}")
        return published

    def take_head(self, head: HeadRecord) -> None:
        """Have a head record that another store of the job has, durably.

        Raises:
            HeadRecordError: the generation has another one here: this store is of another training.
        """
        try:
            found = self.read_head(head.run, head.generation)
        except UnsupportedFormatError:
            raise
        except FormatError:
            self.replace_head(head)
            return
        while found is None:
            self.publish_head(head)
            found = self.read_head(head.run, head.generation)
        if not found[0].is_same(head):
            raise HeadRecordError(
                f"store {self._root} has another generation {head.generation} of run {head.run!r} than the stores of "
                "the other machines: it was part of an attempt of which they know nothing. Remove it, or the run there"
            )

    def replace_head(self, head: HeadRecord) -> None:
        """Write a head record durably in the place of one of which no copy is intact."""
        self._files.replace_record(self._heads / head.run / layout.head_name(head.generation), encode_head(head))

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
