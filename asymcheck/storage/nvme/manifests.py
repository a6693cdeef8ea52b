"""Publication and removal of manifests and head records in a local store (SPEC.md §B2)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path, PurePath

from asymcheck.errors import (
    AsymcheckError,
    FormatError,
    HeadRecordError,
    StorageError,
    UnsupportedFormatError,
    result_or_error,
)
from asymcheck.events import emit
from asymcheck.format import layout
from asymcheck.format.digest import digest
from asymcheck.format.layout import ManifestName
from asymcheck.format.record import RECORD_BYTES, HeadRecord, encode_head, repaired_record
from asymcheck.format.spans import Spans, ranks_in
from asymcheck.storage.local_files import Files, translated
from asymcheck.storage.manifests import CheckpointFiles, ManifestReader, check_size, decode_head_of, listed
from asymcheck.types import CheckpointRef


def removed_store(root: Path) -> StorageError:
    """Return the error about a store whose directory is gone."""
    if not root.is_absolute():
        return StorageError(
            f"store {root} is not below the working directory any more: was it moved or removed, or did the program "
            "change that directory? Restore the store, or open it by an absolute path"
        )
    return StorageError(
        f"store {root} does not exist any more: was it moved, removed, or its drive unmounted? "
        "Restore the directory, then open the store again"
    )


def repair_record(files: Files, path: Path, decode: Callable[[bytes], object]) -> bool:
    """Rewrite a record if one of its copies is damaged or truncated; return whether it was.

    Raises:
        FormatError: no copy is intact, or ``decode`` refuses the intact copy.
    """
    data = files.read_small(path, RECORD_BYTES) or b""
    whole = repaired_record(data)
    if whole == data:
        return False
    # Raises if no copy is intact.
    decode(whole or data)
    files.replace_record(path, whole or data)
    return True


class ManifestFiles(ManifestReader):
    """Reader and writer of the folders ``manifests`` and ``heads`` of a store."""

    _files: Files
    _root: Path

    def __init__(self, files: Files, root: Path) -> None:
        super().__init__(files, root)
        self._manifests = root / layout.MANIFESTS
        self._heads = root / layout.HEADS
        self._synced: set[Path] = set()
        self._spans: dict[bytes, Spans | None] = {}

    def _names(self, path: PurePath) -> list[str]:
        # An unmounted drive, or a store that was moved while open, has no folders.
        names = super()._names(path)
        if not names:
            with translated("access", self._root):
                exists = (self._root / layout.DESCRIPTOR_NAME).exists()
            if not exists:
                raise removed_store(self._root)
        return names

    def runs(self) -> list[str]:
        """Return the names of all runs. A foreign file beside their folders is none."""
        folders = self._manifests, self._heads
        return [run for run in super().runs() if any((folder / run).is_dir() for folder in folders)]

    def listing(self, run: str, ref: CheckpointRef) -> CheckpointFiles:
        """Return the manifests in the folder of one checkpoint, and the ranks that save into this store."""
        listing = super().listing(run, ref)
        return listing if listing.is_whole else dataclasses.replace(listing, store_ranks=self._store_ranks(listing))

    def _store_ranks(self, listing: CheckpointFiles) -> Spans | None:
        """Return the ranks that save into this store, from their manifests; None for all ranks, or if unreadable."""
        present = {name.rank for name in listing.manifests}
        for name in listing.manifests:
            if name.digest not in self._spans:
                manifest = result_or_error(self.read, listing.run, listing.ref, name)
                if isinstance(manifest, AsymcheckError):
                    continue
                self._spans[name.digest] = manifest.header.store_ranks
            spans = self._spans[name.digest]
            # A manifest that was copied from another store may name other ranks.
            if spans is None or present.issuperset(ranks_in(spans)):
                return spans
        return next((self._spans.get(name.digest) for name in listing.manifests if name.digest in self._spans), None)

    def read_bytes(self, run: str, ref: CheckpointRef, name: ManifestName) -> bytes:
        """Return the content of a manifest. A sparse file beyond the limit is refused before memory is allocated."""
        path = self.directory(run, ref) / str(name)
        with translated("access", path), contextlib.suppress(FileNotFoundError):
            check_size(path.lstat().st_size, run, ref, name)
        return super().read_bytes(run, ref, name)

    def directory(self, run: str, ref: CheckpointRef) -> Path:
        """Return the folder of a checkpoint."""
        return self._manifests / run / layout.checkpoint_name(ref)

    def sizes(self, listing: CheckpointFiles) -> dict[ManifestName, int]:
        """Return the sizes in bytes of the manifests of a checkpoint, without deleted ones."""
        sizes = {}
        for name in listing.manifests:
            with contextlib.suppress(OSError):  # deleted since the listing, or a dangling link
                sizes[name] = (self.directory(listing.run, listing.ref) / str(name)).stat().st_size
        return sizes

    def publish(self, run: str, ref: CheckpointRef, rank: int, world_size: int, data: bytes) -> ManifestName:
        """Commit a manifest. The rank's part of the checkpoint is then durable.

        Raises:
            StorageError: a write failed, or another process removed the folder of the checkpoint.
        """
        name = ManifestName(rank, world_size, digest(data))
        directory = self.directory(run, ref)
        temporary = directory / f"{rank:05d}-{os.urandom(8).hex()}{layout.TEMPORARY}"
        try:
            self._make_run(self._manifests, run)
            self._sync_head(run, ref.generation)
            self._files.make_directory(directory)
            # Sync even if another rank created the directory, because that rank may not have synced yet.
            self._files.sync_directory(directory.parent)
            emit("manifest.directory_created", directory.name)
            with self._files.temporary(temporary, data):
                emit("manifest.written", temporary.name)
                emit("manifest.synced", temporary.name)
                self._files.rename(temporary, directory / str(name))
            emit("manifest.renamed", str(name))
            self._files.sync_directory(directory)
        except FileNotFoundError as error:
            raise StorageError(f"{directory} was removed while the manifest was being written; save again") from error
        emit("manifest.committed", str(name), len(data))
        return name

    def withdraw(self, run: str, ref: CheckpointRef, rank: int) -> None:
        """Remove the manifest and temporary files of one rank durably, after a failed save."""
        names = self._files.list(self.directory(run, ref))
        self.remove_files(run, ref, [name for name in names if name.startswith(f"{rank:05d}-")])

    def remove(self, run: str, ref: CheckpointRef) -> None:
        """Delete a checkpoint durably."""
        names = self._files.list(self.directory(run, ref))
        ours = [name for name in names if name.endswith(layout.TEMPORARY) or layout.parse_manifest_name(name)]
        self.remove_files(run, ref, ours)

    def _files_of(self, run: str, ref: CheckpointRef) -> tuple[CheckpointFiles, list[str]]:
        """Return the manifests and the temporary files in the folder of a checkpoint."""
        names = self._names(self.directory(run, ref))
        return listed(run, ref, names), [name for name in names if name.endswith(layout.TEMPORARY)]

    def unfinished(self, among: Iterable[tuple[str, CheckpointRef]]) -> list[tuple[str, CheckpointRef, list[str]]]:
        """Return the checkpoints whose folder has temporary files or no manifest, with these temporary files."""
        found = [(run, ref, *self._files_of(run, ref)) for run, ref in among]
        return [(run, ref, temporary) for run, ref, files, temporary in found if temporary or not files.manifests]

    def remove_files(self, run: str, ref: CheckpointRef, names: Iterable[str]) -> None:
        """Remove files in the folder of a checkpoint durably, and the folder if it is empty then."""
        directory = self.directory(run, ref)
        for name in names:
            self._files.unlink(directory / name)
        try:
            # A process may have been killed after it removed manifests. They must not return with the folder.
            self._files.sync_directory(directory)
            is_removed = self._files.remove_directory(directory)
        except FileNotFoundError:
            # A collection or another deletion has removed the folder. Make the removal durable.
            is_removed = True
        if is_removed:
            self._files.sync_directory(directory.parent)

    def sync_deletions(self) -> list[tuple[str, CheckpointRef]]:
        """Make deletions durable whose process was killed between the removal of a manifest and the sync.

        Return the checkpoints that may be deleted or unfinished: manifests are missing, or there are temporary files.
        """
        unsettled = []
        for run in self.runs():
            found = [(ref, *self._files_of(run, ref)) for ref in self.refs(run)]
            refs = [ref for ref, files, temporary in found if temporary or not files.is_whole]
            self.sync_checkpoints(run, refs)
            unsettled += [(run, ref) for ref in refs]
        return unsettled

    def sync_checkpoints(self, run: str, refs: Collection[CheckpointRef]) -> None:
        """Make the names of manifests durable whose process was killed between the rename and the sync."""
        for ref in refs:
            # Another process may remove the folder.
            with contextlib.suppress(FileNotFoundError):
                self._files.sync_directory(self.directory(run, ref))
        if refs:
            self._files.sync_directory(self._manifests / run)

    def temporary_heads(self) -> list[Path]:
        """Return the temporary files of head records, of running and of killed writers."""
        runs = [self._heads / run for run in self._files.list(self._heads) if layout.is_run(run)]
        return [run / name for run in runs for name in self._files.list(run) if layout.is_record_temporary(name)]

    def repair_head(self, run: str, generation: int) -> bool:
        """Rewrite a head record if one of its copies is damaged or truncated; return whether it was.

        Raises:
            FormatError: no copy is intact, or the record contradicts its path.
        """
        path = self._heads / run / layout.head_name(generation)
        return repair_record(self._files, path, partial(decode_head_of, run, generation))

    def publish_head(self, head: HeadRecord) -> bool:
        """Write a head record durably; return False if the generation has a head record."""
        self._make_run(self._heads, head.run)
        path = self._heads / head.run / layout.head_name(head.generation)
        published = self._files.publish_record(path, encode_head(head))
        self._files.sync_directory(path.parent)
        emit("head.published", f"{head.run} generation {head.generation}")
        return published

    def take_head(self, head: HeadRecord) -> None:
        """Copy a head record of another store of the job into this store, durably.

        Raises:
            HeadRecordError: this store has a different head record of the generation, from another training.
        """
        try:
            stored = self.read_head(head.run, head.generation)
        except UnsupportedFormatError:
            raise
        except FormatError:
            self.replace_head(head)
            return
        while stored is None:
            self.publish_head(head)
            stored = self.read_head(head.run, head.generation)
        if not stored[0].is_same(head):
            raise HeadRecordError(
                f"store {self._root} has another generation {head.generation} of run {head.run!r} than the stores of "
                "the other machines, which do not know this attempt. Remove the store, or the run in it"
            )

    def replace_head(self, head: HeadRecord) -> None:
        """Replace a head record without an intact copy, durably."""
        self._files.replace_record(self._heads / head.run / layout.head_name(head.generation), encode_head(head))

    def _sync_head(self, run: str, generation: int) -> None:
        # A checkpoint must not be durable before its head record, whose writer may have been killed before the sync.
        path = self._heads / run / layout.head_name(generation)
        if path not in self._synced and path.exists():
            self._files.sync_directory(path.parent)
            self._synced.add(path)

    def _make_run(self, parent: Path, run: str) -> None:
        self._files.make_directory(parent / run)
        if parent / run not in self._synced:
            # Sync even if the directory existed, because its creator may have been killed before the sync.
            self._files.sync_directory(parent)
            self._synced.add(parent / run)
