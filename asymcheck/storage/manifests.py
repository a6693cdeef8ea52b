"""Listing and reading of manifests and head records, on any tier (SPEC.md §A3)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shlex
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Protocol

from asymcheck.errors import ChecksumError, LimitError, MissingPartitionError, StructureError
from asymcheck.format import layout, registry
from asymcheck.format.digest import digest
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Manifest
from asymcheck.format.manifest_reader import ManifestCache, decode_manifest, decode_manifests
from asymcheck.format.record import RECORD_BYTES, HeadRecord, decode_head
from asymcheck.format.spans import Spans, first_of, ranks_in
from asymcheck.types import CheckpointRef, SaveId

_BATCH_FILES, _BATCH_BYTES = 64, 16 << 20
"""Maximum number and bytes of the manifests that are decoded together."""
_GENERATIONS = 1000
"""Maximum number of generations without a head record."""


@dataclasses.dataclass(frozen=True)
class CheckpointFiles:
    """Manifests of one checkpoint, from a directory listing."""

    run: str
    ref: CheckpointRef
    manifests: tuple[ManifestName, ...]
    """Manifest files in the folder, sorted by rank."""
    store_ranks: Spans | None = None
    """Ranks that save into this store, if the job has several stores; None for all ranks."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the checkpoint; 0 if there is no manifest or the manifests disagree."""
        sizes = {name.world_size for name in self.manifests}
        return sizes.pop() if len(sizes) == 1 else 0

    @property
    def deletion(self) -> str:
        """Command that deletes this checkpoint; the generation spares other checkpoints of the step."""
        step, generation = self.ref.step, self.ref.generation
        return f"asymcheck delete STORE {step} --run {shlex.quote(self.run)} --generation {generation}"

    @property
    def is_whole(self) -> bool:
        """Whether there is exactly one manifest for each rank."""
        return self.world_size > 0 and [name.rank for name in self.manifests] == list(range(self.world_size))

    @property
    def is_complete(self) -> bool:
        """Whether there is exactly one manifest for each rank that saves into this store."""
        is_unambiguous = len({name.rank for name in self.manifests}) == len(self.manifests)
        return self.world_size > 0 and is_unambiguous and not self.missing_ranks

    @property
    def first_rank(self) -> int:
        """Lowest rank that saves into this store."""
        return first_of(self.store_ranks)

    def of_ranks(self, spans: Spans | None) -> CheckpointFiles:
        """Return only the manifests of the given ranks, as in a store of these ranks; None for all ranks."""
        if spans is None:
            return self
        ranks = set(ranks_in(spans))
        names = tuple(name for name in self.manifests if name.rank in ranks)
        return dataclasses.replace(self, manifests=names, store_ranks=spans)

    def has(self, rank: int) -> bool:
        """Tell whether ``rank`` has a manifest."""
        return any(name.rank == rank for name in self.manifests)

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of this store that have no manifest."""
        expected = range(self.world_size) if self.store_ranks is None else ranks_in(self.store_ranks)
        return sorted(set(expected) - {name.rank for name in self.manifests})


class SmallFiles(Protocol):
    """File operations needed to read manifests."""

    def list(self, path: PurePath) -> list[str]:
        """Return the sorted names in a directory; an empty list if the directory does not exist."""

    def read_small(self, path: PurePath, limit: int) -> bytes | None:
        """Return the content of a file, at most ``limit`` + 1 bytes; None if the file does not exist."""

    def reading_ahead(self, paths: Iterable[PurePath], limit: int) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which small files are read ahead if that is faster."""


class ManifestReader:
    """Reader of the folders ``manifests`` and ``heads`` of a store or remote location."""

    def __init__(self, files: SmallFiles, root: PurePath) -> None:
        self._files = files
        self._root = root

    def _names(self, path: PurePath) -> list[str]:
        return self._files.list(path)

    def runs(self) -> list[str]:
        """Return the names of all runs that have a folder."""
        names = {*self._names(self._root / layout.MANIFESTS), *self._names(self._root / layout.HEADS)}
        return sorted(name for name in names if layout.is_run(name))

    def checkpoints(self, run: str) -> list[CheckpointFiles]:
        """Return all checkpoints of a run that have at least one manifest, oldest first."""
        listings = (self.listing(run, ref) for ref in self.refs(run))
        return [listing for listing in listings if listing.manifests]

    def refs(self, run: str) -> list[CheckpointRef]:
        """Return the checkpoints of a run that have a folder, oldest first. Lists one directory."""
        refs = map(layout.parse_checkpoint_name, self._names(self._root / layout.MANIFESTS / run))
        return sorted(ref for ref in refs if ref is not None)

    def newest(self, run: str, generation: int, before: SaveId | None = None) -> CheckpointRef | None:
        """Return the checkpoint of a generation with the greatest (step, save id) that has a manifest.

        With ``before``, consider only checkpoints with a smaller save id.
        """
        # Names sort like checkpoints, so the names of a long run need not all be parsed.
        for name in reversed(self._names(self._root / layout.MANIFESTS / run)):
            ref = layout.parse_checkpoint_name(name) if name.startswith(f"{generation:08d}-") else None
            if ref is None or (before is not None and ref.save_id >= before):
                continue
            if self.listing(run, ref).manifests:
                return ref
        return None

    def listing(self, run: str, ref: CheckpointRef) -> CheckpointFiles:
        """Return the manifests in the folder of one checkpoint."""
        return listed(run, ref, self._names(self.directory(run, ref)))

    def is_deleted(self, listing: CheckpointFiles) -> bool:
        """Tell whether a manifest of a checkpoint was deleted since the listing."""
        return not set(listing.manifests) <= set(self.listing(listing.run, listing.ref).manifests)

    def directory(self, run: str, ref: CheckpointRef) -> PurePath:
        """Return the folder of a checkpoint."""
        return self._root / layout.MANIFESTS / run / layout.checkpoint_name(ref)

    def read(self, run: str, ref: CheckpointRef, name: ManifestName) -> Manifest:
        """Read one manifest and check it against its path.

        Raises:
            MissingPartitionError: the file is gone.
            ChecksumError: the content does not match the digest in the name.
            FormatError: the content breaks another rule of the format.
        """
        manifest = decode_manifest(self.read_bytes(run, ref, name), _where(run, ref, name))
        _check_path(manifest, run, ref, name)
        return manifest

    def read_all(self, listing: CheckpointFiles) -> list[Manifest]:
        """Read the manifests of all ranks and check each against its path, as :meth:`read` does."""
        run, ref, cache = listing.run, listing.ref, ManifestCache()
        if len(listing.manifests) == 1:
            # Half as expensive: nothing is shared, and a run may have 10,000 checkpoints.
            return [self.read(run, ref, listing.manifests[0])]
        manifests: list[Manifest] = []
        files: list[tuple[bytes, str]] = []
        for name in self.each_name(listing):
            files.append((self.read_bytes(run, ref, name), _where(run, ref, name)))
            if len(files) == _BATCH_FILES or sum(len(data) for data, _ in files) > _BATCH_BYTES:
                manifests += decode_manifests(files, cache)
                files = []
        manifests += decode_manifests(files, cache) if files else []
        for manifest, name in zip(manifests, listing.manifests, strict=True):
            _check_path(manifest, run, ref, name)
        return manifests

    def each(self, listings: Iterable[CheckpointFiles]) -> Iterator[CheckpointFiles]:
        """Yield checkpoints whose manifests are read one after the other, and read the next ones ahead."""
        for batch in batches(listings):
            # The files of one checkpoint may be many, and each_name() reads them ahead.
            with self.reading(batch if len(batch) > 1 else ()):
                yield from batch

    def each_name(self, listing: CheckpointFiles) -> Iterator[ManifestName]:
        """Yield the manifests of a checkpoint, to be read one after the other, and read the next ones ahead."""
        for start in range(0, len(listing.manifests), _BATCH_FILES):
            part = dataclasses.replace(listing, manifests=listing.manifests[start : start + _BATCH_FILES])
            with self.reading([part]):
                yield from part.manifests

    def reading(self, listings: Iterable[CheckpointFiles]) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for calls of :meth:`read` and :meth:`read_bytes` for manifests of checkpoints."""
        paths = [self.directory(files.run, files.ref) / str(name) for files in listings for name in files.manifests]
        return self._files.reading_ahead(paths, registry.MANIFEST_BYTES_MAX)

    def read_bytes(self, run: str, ref: CheckpointRef, name: ManifestName) -> bytes:
        """Return the content of a manifest, checked against the digest in its name; see :meth:`read`."""
        where = _where(run, ref, name)
        data = self._files.read_small(self.directory(run, ref) / str(name), registry.MANIFEST_BYTES_MAX)
        if data is None:
            raise MissingPartitionError(f"{where} was deleted")
        check_size(len(data), run, ref, name)
        if digest(data) != name.digest:
            raise ChecksumError(f"{where}: the content does not have the digest in the name")
        return data

    def heads(self, run: str) -> list[int]:
        """Return the generations that have a head record, in order."""
        numbers = map(layout.parse_head_name, self._names(self._root / layout.HEADS / run))
        return sorted(number for number in numbers if number is not None)

    def reading_heads(self, run: str, generations: Iterable[int]) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for calls of :meth:`read_head` for these generations."""
        folder = self._root / layout.HEADS / run
        return self._files.reading_ahead([folder / layout.head_name(number) for number in generations], RECORD_BYTES)

    def read_head(self, run: str, generation: int) -> tuple[HeadRecord, int] | None:
        """Return a head record and the number of its damaged copies; None if the record does not exist.

        Raises:
            FormatError: both copies are damaged, or the record contradicts its path.
        """
        path = self._root / layout.HEADS / run / layout.head_name(generation)
        data = self._files.read_small(path, RECORD_BYTES)
        if data is None:
            return None
        return decode_head_of(run, generation, data)


def check_size(nbytes: int, run: str, ref: CheckpointRef, name: ManifestName) -> None:
    """Raise LimitError if a manifest has more bytes than the format allows."""
    if nbytes > registry.MANIFEST_BYTES_MAX:
        raise LimitError(f"{_where(run, ref, name)}: the file has more than {registry.MANIFEST_BYTES_MAX} bytes")


def decode_head_of(run: str, generation: int, data: bytes) -> tuple[HeadRecord, int]:
    """Decode the head record of a generation and check it against its path; see :func:`decode_head`."""
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
    """Return the generations of a run in order: those named by files, and earlier ones without a file.

    At most 1,000 generations without a file are included, because a file name may contain any number.
    """
    numbers = {1, *named}
    unnamed = (generation for generation in range(1, max(numbers)) if generation not in numbers)
    return sorted([*numbers, *itertools.islice(unnamed, _GENERATIONS)])


def batches(listings: Iterable[CheckpointFiles]) -> Iterator[list[CheckpointFiles]]:
    """Group checkpoints by at most 64 manifests; one checkpoint may have more."""
    batch: list[CheckpointFiles] = []
    count = 0
    for listing in listings:
        if batch and count + len(listing.manifests) > _BATCH_FILES:
            yield batch
            batch, count = [], 0
        batch.append(listing)
        count += len(listing.manifests)
    if batch:
        yield batch


def listed(run: str, ref: CheckpointRef, names: list[str]) -> CheckpointFiles:
    """Return the manifests of a checkpoint, given the names in its folder."""
    parsed = map(layout.parse_manifest_name, names)
    present = sorted((name for name in parsed if name is not None), key=lambda name: (name.rank, name.digest))
    return CheckpointFiles(run, ref, tuple(present))


def _where(run: str, ref: CheckpointRef, name: ManifestName) -> str:
    return f"manifest {run}/{layout.checkpoint_name(ref)}/{name}"
