"""Manifests and head records of a location: found by listings, committed by renames."""

from __future__ import annotations

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
    """The manifests and head records there; a listing of all is one operation, which ends by one deadline."""

    _files: RemoteFiles
    _root: PurePosixPath

    def __init__(self, files: RemoteFiles) -> None:
        super().__init__(files, files.top)

    def runs(self) -> list[str]:
        """Return the names of all runs that have a folder; a file between them is none."""
        found = [entry for name in (layout.MANIFESTS, layout.HEADS) for entry in self._files.walk(self._root / name)]
        return sorted({one.path.name for one in found if not one.is_file and layout.is_run(one.path.name)})

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
        found = [listed(run, ref, names[folder]) for folder, ref in refs.items() if ref is not None]
        return sorted((listing for listing in found if listing.manifests), key=lambda listing: listing.ref)

    def stage(self, run: str, ref: CheckpointRef, name: ManifestName, data: bytes) -> PurePosixPath:
        """Write a manifest under a temporary name, and return that: :meth:`publish` is then but a rename."""
        return self._files.stage_small(self.directory(run, ref) / str(name), data)

    def unstage(self, staged: PurePosixPath) -> None:
        """Remove what was staged and is not to be published."""
        self._files.delete(staged)
        self._files.delete_empty(staged.parent)

    def publish(
        self, run: str, ref: CheckpointRef, name: ManifestName, data: bytes, staged: PurePosixPath | None = None
    ) -> None:
        """Commit a manifest: when this returns, the rank's part of the checkpoint is visible there.

        Args:
            run: the run.
            ref: the checkpoint.
            name: rank and digest.
            data: its bytes.
            staged: what :meth:`stage` returned; when that is gone, or cannot be renamed, it is written again.
        """
        path = self.directory(run, ref) / str(name)
        # One that is there already has the same bytes: their digest is in the name.
        try:
            if staged is not None:
                self._files.publish(staged, path)
        except (StorageError, FileNotFoundError):
            staged = None
        if staged is None:
            self._files.put_small(path, data)
        emit("remote.manifest_renamed", str(name), len(data))

    def publish_heads(self, heads: Sequence[HeadRecord]) -> None:
        """Publish those head records of a run that are not there.

        Raises:
            InvalidInputError: one that is there is another one: two trainings have the same run name.
        """
        if not heads:
            return
        run = heads[0].run
        present = set(self.heads(run))
        common = [head for head in heads if head.generation in present]
        for head in common[-1:]:
            # The last one names its parent by a random id, so that all before it are the same, too; of those that
            # began from nothing, the time tells them apart.
            self._check_head(head)
        for head in heads:
            if head.generation not in present:
                self._publish_head(head)

    def _publish_head(self, head: HeadRecord) -> None:
        path = self._root / layout.HEADS / head.run / layout.head_name(head.generation)
        if not self._files.put_small(path, encode_head(head)):
            self._check_head(head)
        emit("remote.head_renamed", f"{head.run} generation {head.generation}")

    def _check_head(self, head: HeadRecord) -> None:
        there = self.read_head(head.run, head.generation)
        if there is None or not there[0].is_same(head):
            raise InvalidInputError(
                f"{self._files.location} has another generation {head.generation} of run {head.run!r}: another "
                "training of this name was pushed there; push to another location, or give runs different names"
            )

    def remove_left(self, run: str, ref: CheckpointRef, before_ns: int) -> bool:
        """Delete the files of an incomplete checkpoint, unless some are newer than that; return whether it was done."""
        found = [entry for entry in self._files.walk(self.directory(run, ref)) if entry.is_file]
        if not all(entry.is_older(before_ns) for entry in found):
            return False
        # These and no others: what comes now is somebody's who brings the rest.
        self._remove(run, ref, found)
        return True

    def remove(self, run: str, ref: CheckpointRef) -> None:
        """Delete a checkpoint: its manifests, then its folder."""
        found = self._files.walk(self.directory(run, ref))
        self._remove(run, ref, [entry for entry in found if layout.parse_manifest_name(entry.path.name) is not None])

    def _remove(self, run: str, ref: CheckpointRef, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._files.delete(entry.path)
        self._files.delete_empty(self.directory(run, ref))
