"""Manifests and head records of a remote location, published by create-only puts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import PurePosixPath

from asymcheck.errors import InvalidInputError, StorageError
from asymcheck.events import emit
from asymcheck.format import layout
from asymcheck.format.layout import ManifestName
from asymcheck.format.record import HeadRecord, encode_head
from asymcheck.storage.manifests import CheckpointFiles, ManifestReader, listed
from asymcheck.storage.remote.client_interface import Entry
from asymcheck.storage.remote.remote_files import RemoteFiles
from asymcheck.types import CheckpointRef


class RemoteManifests(ManifestReader):
    """Manifests and head records of a remote location. Each listing is one operation."""

    _files: RemoteFiles
    _root: PurePosixPath

    def __init__(self, files: RemoteFiles) -> None:
        super().__init__(files, files.top)

    def runs(self) -> list[str]:
        """Return the names of all runs that have a folder."""
        entries = [entry for name in (layout.MANIFESTS, layout.HEADS) for entry in self._files.walk(self._root / name)]
        return sorted({entry.path.name for entry in entries if not entry.is_file and layout.is_run(entry.path.name)})

    def directory(self, run: str, ref: CheckpointRef) -> PurePosixPath:
        """Return the folder of a checkpoint."""
        return self._root / layout.MANIFESTS / run / layout.checkpoint_name(ref)

    def checkpoints(self, run: str) -> list[CheckpointFiles]:
        """Return all checkpoints of a run that have at least one manifest, oldest first."""
        names: dict[str, list[str]] = {}
        for entry in self._files.walk(self._root / layout.MANIFESTS / run, recursive=True):
            if entry.is_file:
                names.setdefault(entry.path.parent.name, []).append(entry.path.name)
        refs = {folder: layout.parse_checkpoint_name(folder) for folder in names}
        listings = [listed(run, ref, names[folder]) for folder, ref in refs.items() if ref is not None]
        return sorted((listing for listing in listings if listing.manifests), key=lambda listing: listing.ref)

    def stage(self, run: str, ref: CheckpointRef, data: bytes) -> PurePosixPath:
        """Write a manifest under a temporary name and return the path, so that :meth:`publish` only renames."""
        staged = self.directory(run, ref) / f"{os.urandom(16).hex()}{layout.TEMPORARY}"
        self._files.put_small(staged, data)
        return staged

    def unstage(self, staged: PurePosixPath) -> None:
        """Remove a staged manifest that will not be published."""
        self._files.delete(staged)
        self._files.delete_empty(staged.parent)

    def publish(
        self, run: str, ref: CheckpointRef, name: ManifestName, data: bytes, staged: PurePosixPath | None = None
    ) -> None:
        """Commit a manifest. The rank's part of the checkpoint is then visible at the remote location.

        ``staged`` is the result of :meth:`stage`. If it cannot be renamed, the manifest is written again.
        """
        path = self.directory(run, ref) / str(name)
        # An existing manifest has the same bytes, because the digest is part of the name.
        try:
            if staged is not None:
                self._files.publish(staged, path)
        except (StorageError, FileNotFoundError):
            staged = None
        if staged is None:
            self._files.put_small(path, data)
        emit("remote.manifest_renamed", str(name), len(data))

    def publish_head(self, head: HeadRecord) -> None:
        """Publish a head record, unless another process has published it; see :meth:`check_head`."""
        path = self._root / layout.HEADS / head.run / layout.head_name(head.generation)
        if not self._files.put_small(path, encode_head(head)):
            self.check_head(head)
        emit("remote.head_renamed", f"{head.run} generation {head.generation}")

    def check_head(self, head: HeadRecord) -> None:
        """Compare a head record with that of the location.

        Raises:
            InvalidInputError: they differ, because two trainings have the same run name.
        """
        published = self.read_head(head.run, head.generation)
        if published is None or not published[0].is_same(head):
            raise InvalidInputError(
                f"{self._files.location} has another generation {head.generation} of run {head.run!r}: another "
                "training of this name was pushed there. To continue that training, stop this one, and pull its "
                f"checkpoints into a new store: asymcheck pull {self._files.location} NEW --run {head.run}. To keep "
                "both trainings, push to another location, or give the runs different names"
            )

    def remove_left(self, run: str, ref: CheckpointRef, before_ns: int) -> bool:
        """Delete an incomplete checkpoint unless a file is newer than ``before_ns``; return whether it was deleted."""
        files = [entry for entry in self._files.walk(self.directory(run, ref)) if entry.is_file]
        if not all(entry.is_older(before_ns) for entry in files):
            return False
        # Delete only the listed files. Newer files belong to a process that completes the checkpoint.
        self._remove(run, ref, files)
        return True

    def remove(self, run: str, ref: CheckpointRef) -> None:
        """Delete a checkpoint: its manifests, then its folder."""
        entries = self._files.walk(self.directory(run, ref))
        self._remove(run, ref, [entry for entry in entries if layout.parse_manifest_name(entry.path.name) is not None])

    def _remove(self, run: str, ref: CheckpointRef, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._files.delete(entry.path)
        self._files.delete_empty(self.directory(run, ref))
