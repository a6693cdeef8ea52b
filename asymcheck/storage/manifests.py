"""Manifests and head records as files, as far as they are read: the same on every tier (SPEC.md §4)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import PurePath
from typing import Protocol

from asymcheck.errors import ChecksumError, LimitError, MissingPartitionError, StructureError
from asymcheck.format import layout, registry
from asymcheck.format.digest import digest
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Manifest
from asymcheck.format.manifest_reader import ManifestCache, decode_manifest, decode_manifests
from asymcheck.format.record import RECORD_BYTES, HeadRecord, decode_head
from asymcheck.format.spans import Spans, ranks_in
from asymcheck.types import CheckpointRef, SaveId

_AT_ONCE, _BYTES_AT_ONCE = 64, 16 << 20
"""Manifests, and bytes of them, that are checked at once."""
_GENERATIONS = 1000
"""Missing generations that are looked for, at most."""


@dataclasses.dataclass(frozen=True)
class CheckpointFiles:
    """The manifests of one checkpoint as a directory listing shows them."""

    run: str
    ref: CheckpointRef
    manifests: tuple[ManifestName, ...]
    """The files in the folder, by rank."""
    store_ranks: Spans | None = None
    """The ranks that save into this store, where a job has several; None for all."""

    @property
    def world_size(self) -> int:
        """How many ranks the checkpoint should have; 0 when there is no manifest or they disagree."""
        sizes = {name.world_size for name in self.manifests}
        return sizes.pop() if len(sizes) == 1 else 0

    @property
    def is_whole(self) -> bool:
        """Whether there is exactly one manifest for each rank."""
        return self.world_size > 0 and [name.rank for name in self.manifests] == list(range(self.world_size))

    @property
    def is_complete(self) -> bool:
        """Whether there is exactly one manifest for each rank that saves into this store."""
        if self.store_ranks is None:
            return self.is_whole
        ranks = [name.rank for name in self.manifests]
        return self.world_size > 0 and len(ranks) == len(set(ranks)) and set(ranks) >= set(ranks_in(self.store_ranks))

    def of_ranks(self, spans: Spans | None) -> CheckpointFiles:
        """Return that of these ranks alone, as a store has it into which only they save; None for all ranks."""
        if spans is None:
            return self
        ranks = set(ranks_in(spans))
        names = tuple(name for name in self.manifests if name.rank in ranks)
        return dataclasses.replace(self, manifests=names, store_ranks=spans)

    def has(self, rank: int) -> bool:
        """Tell whether there is a manifest of a rank."""
        return any(name.rank == rank for name in self.manifests)

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks of this store without a manifest."""
        wanted = range(self.world_size) if self.store_ranks is None else ranks_in(self.store_ranks)
        return sorted(set(wanted) - {name.rank for name in self.manifests})


class SmallFiles(Protocol):
    """The file operations that reading manifests needs."""

    def list(self, path: PurePath) -> list[str]:
        """Return the names in a directory, sorted; none when there is no such directory."""

    def read_small(self, path: PurePath, limit: int) -> bytes | None:
        """Return a file's content, at most ``limit`` + 1 bytes of it; None when there is no such file."""


class ManifestReader:
    """The folders ``manifests`` and ``heads`` below ``root``, a store or a location."""

    def __init__(self, files: SmallFiles, root: PurePath) -> None:
        self._files = files
        self._root = root

    def _names(self, path: PurePath) -> list[str]:
        """Return the names in a folder of the store."""
        return self._files.list(path)

    def runs(self) -> list[str]:
        """Return the names of all runs that have a folder."""
        names = {*self._names(self._root / layout.MANIFESTS), *self._names(self._root / layout.HEADS)}
        return sorted(name for name in names if layout.is_run(name))

    def checkpoints(self, run: str) -> list[CheckpointFiles]:
        """Return all checkpoints of a run that have at least one manifest, oldest first."""
        listings = (self.listing(run, ref) for ref in self.refs(run))
        return [listing for listing in listings if listing.manifests]

    def empty(self, run: str) -> list[CheckpointRef]:
        """Return the checkpoints whose folder holds no manifest."""
        return [ref for ref in self.refs(run) if not self.listing(run, ref).manifests]

    def refs(self, run: str) -> list[CheckpointRef]:
        """Return the checkpoints of a run that have a folder, oldest first, by one listing."""
        found = map(layout.parse_checkpoint_name, self._names(self._root / layout.MANIFESTS / run))
        return sorted(ref for ref in found if ref is not None)

    def newest(self, run: str, generation: int, before: SaveId | None = None) -> CheckpointRef | None:
        """Return the greatest (step, save id) of a generation that has a manifest; looks into one folder as a rule.

        With ``before`` only those whose save was begun before that one.
        """
        # Their names sort as they do, so that a save does not take every name of a long run apart.
        for name in reversed(self._names(self._root / layout.MANIFESTS / run)):
            ref = layout.parse_checkpoint_name(name) if name.startswith(f"{generation:08d}-") else None
            if ref is None or (before is not None and ref.save_id >= before):
                continue
            if self.listing(run, ref).manifests:
                return ref
        return None

    def listing(self, run: str, ref: CheckpointRef) -> CheckpointFiles:
        """Return the files in the folder of one checkpoint."""
        return listed(run, ref, self._names(self.directory(run, ref)))

    def directory(self, run: str, ref: CheckpointRef) -> PurePath:
        """Return the folder of a checkpoint."""
        return self._root / layout.MANIFESTS / run / layout.checkpoint_name(ref)

    def read(self, run: str, ref: CheckpointRef, name: ManifestName) -> Manifest:
        """Read one manifest and check it against its path.

        Raises:
            MissingPartitionError: the file is gone.
            ChecksumError: the content is not what the name says.
            FormatError: it breaks another rule of the format.
        """
        manifest = decode_manifest(self.read_bytes(run, ref, name), _where(run, ref, name))
        _check_path(manifest, run, ref, name)
        return manifest

    def read_all(self, listing: CheckpointFiles) -> list[Manifest]:
        """Read the manifests of all ranks and check each against its path, as :meth:`read` does."""
        run, ref, alike = listing.run, listing.ref, ManifestCache()
        found: list[Manifest] = []
        files: list[tuple[bytes, str]] = []
        for name in listing.manifests:
            files.append((self.read_bytes(run, ref, name), _where(run, ref, name)))
            if len(files) == _AT_ONCE or sum(len(data) for data, _ in files) > _BYTES_AT_ONCE:
                found += decode_manifests(files, alike)
                files = []
        found += decode_manifests(files, alike) if files else []
        for manifest, name in zip(found, listing.manifests, strict=True):
            _check_path(manifest, run, ref, name)
        return found

    def read_bytes(self, run: str, ref: CheckpointRef, name: ManifestName) -> bytes:
        """Return the content of a manifest, which has the digest in its name; see :meth:`read`."""
        where = _where(run, ref, name)
        data = self._files.read_small(self.directory(run, ref) / str(name), registry.MANIFEST_BYTES_MAX)
        if data is None:
            raise MissingPartitionError(f"{where} is gone")
        if len(data) > registry.MANIFEST_BYTES_MAX:
            raise LimitError(f"{where}: more than {registry.MANIFEST_BYTES_MAX} bytes")
        if digest(data) != name.digest:
            raise ChecksumError(f"{where}: the content does not have the digest in the name")
        return data

    def heads(self, run: str) -> list[int]:
        """Return the generations that have a head record, in order."""
        numbers = map(layout.parse_head_name, self._names(self._root / layout.HEADS / run))
        return sorted(number for number in numbers if number is not None)

    def read_head(self, run: str, generation: int) -> tuple[HeadRecord, int] | None:
        """Return a head record and how many of its copies are damaged; None when there is none.

        Raises:
            FormatError: both copies are damaged, or it contradicts its path.
        """
        path = self._root / layout.HEADS / run / layout.head_name(generation)
        data = self._files.read_small(path, RECORD_BYTES)
        if data is None:
            return None
        return decode_head_of(run, generation, data)


def decode_head_of(run: str, generation: int, data: bytes) -> tuple[HeadRecord, int]:
    """Read the head record of a generation, and check it against its path; see :func:`decode_head`."""
    where = f"head record {run}/{layout.head_name(generation)}"
    head, damaged = decode_head(data, where)
    if (head.run, head.generation) != (run, generation):
        raise StructureError(f"{where}: the record disagrees with its path")
    return head, damaged


def _check_path(manifest: Manifest, run: str, ref: CheckpointRef, name: ManifestName) -> None:
    header = manifest.header
    if (header.run, header.ref, header.rank, header.world_size) != (run, ref, name.rank, name.world_size):
        raise StructureError(f"{_where(run, ref, name)}: the header disagrees with the path")


def generations(named: Iterable[int]) -> list[int]:
    """Return the generations of a run, in order: those that files name, and those that were before them.

    At most 1,000 of the latter: the name of one file must not make a hundred million.
    """
    there = {1, *named}
    before = (generation for generation in range(1, max(there)) if generation not in there)
    return sorted([*there, *itertools.islice(before, _GENERATIONS)])


def listed(run: str, ref: CheckpointRef, names: list[str]) -> CheckpointFiles:
    """Return a checkpoint by the names in its folder."""
    parsed = map(layout.parse_manifest_name, names)
    present = sorted((name for name in parsed if name is not None), key=lambda name: (name.rank, name.digest))
    return CheckpointFiles(run, ref, tuple(present))


def _where(run: str, ref: CheckpointRef, name: ManifestName) -> str:
    return f"manifest {run}/{layout.checkpoint_name(ref)}/{name}"
