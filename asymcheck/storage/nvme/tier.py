"""NVMe tier: a store directory on a local drive (SPEC.md §A3)."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from asymcheck.config import WRITER, StoreConfig
from asymcheck.errors import (
    AsymcheckError,
    InvalidInputError,
    MissingPartitionError,
    ReadOnlyStoreError,
    StorageError,
    StoreNotFoundError,
    StructureError,
)
from asymcheck.format import layout
from asymcheck.format.frame import FrameDescriptor
from asymcheck.format.pack import PackHeader
from asymcheck.format.record import (
    RECORD_BYTES,
    REMOTE_LAYOUT,
    STORE_LAYOUT,
    Descriptor,
    decode_descriptor,
    encode_descriptor,
)
from asymcheck.format.registry import BLOCK_BYTES, SHIFTED_PAYLOAD, missing_writer_features
from asymcheck.storage.interfaces import StoreTier
from asymcheck.storage.local_files import Files, OpenFile, create_locked, locked, translated
from asymcheck.storage.nvme.catalog import Catalog, CatalogUsers, Populate, open_catalog, release_catalog
from asymcheck.storage.nvme.drives import needs_slot, refuse_network
from asymcheck.storage.nvme.manifests import ManifestFiles, removed_store, repair_record
from asymcheck.storage.nvme.pack_reader import PackFile, open_pack, peek
from asymcheck.storage.nvme.pack_writer import PackWriter, Pool
from asymcheck.storage.pack_index import PackIndex
from asymcheck.storage.slots import Slot
from asymcheck.types import Digest, Location, Owner, PackId

_logger = logging.getLogger(__name__)
_INDEX_BYTES = 64 << 20
"""Maximum size of the cached indexes: those of a million frames.

A limit of packs would be too low for a save that reuses partitions of more packs, which each save then reads again.
"""
_CachedIndex = tuple[tuple[int, ...], PackIndex]
"""State of the file of a pack, and its index."""
_FOLDERS = (layout.HEADS, layout.MANIFESTS, layout.PACKS, layout.POOL)


class NvmeTier(StoreTier):
    """Open store directory."""

    root: Path
    manifests: ManifestFiles

    def __init__(
        self,
        root: Path,
        config: StoreConfig,
        *,
        create: bool = True,
        read_only: bool = False,
        files: Files | None = None,
    ) -> None:
        """Open the store at ``root``; if ``create``, create it in a missing or empty directory, unless ``read_only``.

        Raises:
            StoreNotFoundError: ``root`` is not a store, or is missing and ``read_only``.
            UnsupportedFileSystemError: the store is writable and on a network file system.
            FormatError: the descriptor is damaged or of another version.
            ReadOnlyStoreError: the store has a writer feature that this program lacks.
        """
        super().__init__(config)
        self.root = root
        self.files = files or Files()
        self.read_only = read_only
        self.packs = root / layout.PACKS
        self._catalog: Catalog | None = None
        self._catalog_lock = threading.Lock()
        self._indexes: OrderedDict[PackId, _CachedIndex] = OrderedDict()
        self._index_bytes = 0
        self._indexes_lock = threading.Lock()
        if not read_only:
            with translated("access", root):
                refuse_network(root)
                if create:
                    self._create_if_missing()
        self.descriptor, self.damaged_descriptor_copies = self._read_descriptor()
        if self.descriptor.layout == REMOTE_LAYOUT:
            # A store ignores doomed packs, and its collection relies on locks that uploads do not take.
            raise InvalidInputError(
                f"{root} is a remote location, not a local store. Open it as {root.absolute().as_uri()}"
            )
        if not read_only:
            # Also for an existing store: the process that created it may have been killed before its sync.
            self.files.sync_directory(root)
        missing = missing_writer_features(self.descriptor.writer_features)
        if missing and not read_only:
            raise ReadOnlyStoreError(
                f"store {root} needs writer feature(s) {', '.join(missing)}: open it with read_only=True"
            )
        self.refuse_lost_manifests()
        if not read_only:
            self._make_missing_folders()
        self.manifests = ManifestFiles(self.files, root)
        self.pool = Pool(self.files, root / layout.POOL)

    def _read_descriptor(self) -> tuple[Descriptor, int]:
        path = self.root / layout.DESCRIPTOR_NAME
        with translated("access", self.root):
            if self.root.is_file():
                raise StoreNotFoundError(f"{self.root} is a file, but a store is a directory; check the path")
        data = self.files.read_small(path, RECORD_BYTES)
        if data is None:
            self._refuse_lost_descriptor()
            is_there = self.root.exists()
            what = "it is not an asymcheck store (no asymcheck.store file)" if is_there else "it does not exist"
            hint = "" if self.read_only else ", or pass create=True"
            raise StoreNotFoundError(f"cannot open store {self.root}: {what}. Check the path{hint}")
        return decode_descriptor(data, f"store descriptor {path}")

    def _names(self) -> list[str]:
        # Only the directory of a store may be a link, nothing below it.
        return self.files.list(self.root.resolve())

    def _create_if_missing(self) -> None:
        if (self.root / layout.DESCRIPTOR_NAME).exists():
            return
        # An interrupted creation leaves empty folders and temporary files. Other files may belong to a store that has
        # lost its descriptor. A new descriptor would hide that loss.
        foreign = [name for name in self._names() if not self._is_creation_leftover(name)]
        if foreign and not (self.root / layout.DESCRIPTOR_NAME).exists():
            self._refuse_lost_descriptor()
            raise StoreNotFoundError(
                f"{self.root} is not a store and contains other files; choose an empty or a new directory"
            )
        missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
        parent = next(path for path in (self.root, *self.root.parents) if path.exists())
        if not parent.is_dir():
            raise InvalidInputError(f"cannot create store {self.root}: {parent} is a file; choose another path")
        for path in reversed(missing):
            try:
                self.files.make_directory(path)
            except FileNotFoundError as error:
                # Another process has removed the parent, or it is a file system such as /proc.
                raise StorageError(f"cannot create store {self.root}: {error}; choose another path") from error
        for name in _FOLDERS:
            self.files.make_directory(self.root / name)
        # Make all parent directories durable before the descriptor. An existing one may have been created by a process
        # that was killed before its sync. A parent directory that cannot be opened was not created by asymcheck.
        for path in (self.root, *self.root.absolute().parents):
            with contextlib.suppress(ReadOnlyStoreError):
                self.files.sync_directory(path)
        descriptor = Descriptor(os.urandom(16), time.time_ns(), WRITER, (SHIFTED_PAYLOAD,), layout=STORE_LAYOUT)
        if self.files.publish_record(self.root / layout.DESCRIPTOR_NAME, encode_descriptor(descriptor)):
            _logger.info("created new store at %s", self.root)

    def _refuse_lost_descriptor(self) -> None:
        kept = [name for name in (layout.MANIFESTS, layout.PACKS) if self.files.list(self.root / name)]
        if kept:
            raise StoreNotFoundError(
                f"store {self.root} has lost its {layout.DESCRIPTOR_NAME}, but it has {' and '.join(kept)}. Copy that "
                "file from a backup, or from a new store that the same version of asymcheck creates elsewhere"
            )

    def _is_creation_leftover(self, name: str) -> bool:
        path = self.root / name
        return name.endswith(layout.TEMPORARY) or (name in _FOLDERS and path.is_dir() and not self.files.list(path))

    def refuse_lost_manifests(self) -> None:
        """Raise if the manifests are missing, because a collection would then free all packs."""
        folder = self.root / layout.MANIFESTS
        with translated("access", folder):
            if folder.exists() or not self.pack_ids():
                return
        raise StructureError(
            f"store {self.root} has packs, but its folder {layout.MANIFESTS} is missing. Restore the folder "
            "from its new location or from a copy. Only if every checkpoint was deleted, create an empty folder"
        )

    def _make_missing_folders(self) -> None:
        # A copy by a tool that only keeps files, such as git, has no empty folders.
        made = [name for name in _FOLDERS if self.files.make_directory(self.root / name)]
        if made:
            self.files.sync_directory(self.root)

    def was_pushed_to(self, location: str) -> bool:
        """Tell whether this store was pushed to the location with this URI."""
        return self.files.read_small(self._note_of(location), 0) is not None

    def note_push_to(self, location: str) -> None:
        """Note durably that this store is pushed to a location. A store that cannot be written gets no note."""
        path = self._note_of(location)
        with contextlib.suppress(StorageError, FileNotFoundError):
            if self.files.make_directory(path.parent):
                self.files.sync_directory(self.root)
            if self.files.publish_record(path, location.encode()):
                self.files.sync_directory(path.parent)

    def _note_of(self, location: str) -> Path:
        return self.root / layout.LOCKS / layout.location_name(location)

    def make_pool(self) -> None:
        """Create the pool again if it was removed, for example to free space.

        Raises:
            StorageError: the directory of the store is gone.
        """
        try:
            if self.files.make_directory(self.root / layout.POOL):
                self.files.sync_directory(self.root)
        except FileNotFoundError as error:
            raise removed_store(self.root) from error

    def check_writable(self) -> None:
        """Raise if the store is closed, inherited from a parent process, or read-only."""
        self.check_usable()
        if self.read_only:
            raise ReadOnlyStoreError(
                f"cannot write to store {self.root}, which was opened with read_only=True: open it without read_only"
            )

    def open_catalog(self, populate: Populate, *, rebuild: bool = False) -> Catalog:
        """Open the catalog on first use. ``populate`` rebuilds a missing or damaged catalog from the packs.

        With ``rebuild``, rebuild the catalog unless a process has it open.
        """
        self.check_writable()
        with self._catalog_lock:
            if self._catalog is None:
                with translated("open catalog of store", self.root):
                    path = self.root / layout.CATALOG
                    store_id = self.descriptor.store_id
                    self._catalog = open_catalog(self.files, path, store_id, self.config, populate, rebuild=rebuild)
            return self._catalog

    def is_dead(self, owner: Owner) -> bool:
        """Tell whether a process that had opened the catalog is dead or has closed the catalog."""
        return CatalogUsers(self.files, self.root / layout.CATALOG / "open").is_dead(owner)

    def repair_descriptor(self) -> bool:
        """Rewrite the store descriptor if one of its copies is damaged; return whether it was."""
        path = self.root / layout.DESCRIPTOR_NAME
        is_repaired = repair_record(self.files, path, partial(decode_descriptor, where=f"store descriptor {path}"))
        self.damaged_descriptor_copies = 0
        return is_repaired

    def open_pack_to_repair(self, pack_id: PackId) -> PackFile:
        """Open a complete pack with a thorough scan for frames; see :func:`open_pack`."""
        return open_pack(self.files, self.packs, pack_id, self.config.read_lock_timeout_s, thorough=True)

    @property
    def may_shift(self) -> bool:
        """Whether packs of this store may have shifted payloads for direct I/O without a copy (SPEC.md §A6)."""
        return SHIFTED_PAYLOAD in self.descriptor.reader_features

    def needs_slot(self, memory: memoryview) -> bool:
        """Tell whether writing ``memory`` through a slot is faster than writing it directly."""
        return needs_slot(self._device, memory)

    @functools.cached_property
    def _device(self) -> int:
        with translated("access", self.packs):
            return self.packs.stat().st_dev

    def start_pack(self, needed_bytes: int) -> PackWriter:
        """Start a pack of about ``needed_bytes``, in a freed file if possible.

        Raises:
            StorageError: the drive is full or failed, or the directory of the store is gone.
        """
        try:
            return self.pool.writer(self.packs, PackId(os.urandom(16)), needed_bytes)
        except FileNotFoundError as error:
            raise removed_store(self.root) from error

    @contextlib.contextmanager
    def provisional_pack(
        self, nbytes: int, frames: Iterable[tuple[Slot, FrameDescriptor]], is_entered: Callable[[], bool]
    ) -> Iterator[tuple[PackHeader | None, dict[tuple[Digest, bytes], Location]]]:
        """Write frames of ``nbytes`` bytes into a complete pack, which is locked for the ``with`` block.

        Yields its header, None without frames, and the locations of the frames by their digest and that of their base.
        The pack is removed at the end of the block unless ``is_entered()``.
        """
        if not nbytes:
            yield None, {}
            return
        writer = self.start_pack(nbytes)
        try:
            for slot, descriptor in frames:
                writer.write(slot, descriptor)
            if writer.length > BLOCK_BYTES:
                header, locations = writer.seal(time.time_ns(), WRITER)
                yield header, {(name, location.base_digest): location for name, location in locations}
            else:
                writer.abandon()
                yield None, {}
        finally:
            if not is_entered():
                # No other process could open the pack yet. If the removal fails, a harmless second copy stays.
                with contextlib.suppress(AsymcheckError):
                    self.files.unlink(self.pack_path(writer.pack_id))
                with contextlib.suppress(AsymcheckError):
                    writer.abandon()
            writer.close()

    def pack_ids(self) -> list[PackId]:
        """Return the ids of all complete packs."""
        ids = map(layout.parse_pack_name, self.files.list(self.packs))
        return [pack_id for pack_id in ids if pack_id is not None]

    def pack_path(self, pack_id: PackId) -> Path:
        """Return the path of a complete pack."""
        return self.packs / layout.pack_name(pack_id)

    def pack_bytes(self, pack_id: PackId) -> int:
        """Return the size of the file of a pack; 0 if the file does not exist."""
        with contextlib.suppress(FileNotFoundError):
            return self.pack_path(pack_id).stat().st_size
        return 0

    def usage(self) -> tuple[int, int, int, int]:
        """Return number and bytes of the packs in use, then number and bytes of the pooled packs."""
        # A pack may be recycled after the listing.
        sizes = [size for pack_id in self.pack_ids() if (size := self.pack_bytes(pack_id))]
        pooled = self.pool.sizes().values()
        return len(sizes), sum(sizes), len(pooled), sum(pooled)

    def open_pack(self, pack_id: PackId, *, wait: bool = True) -> PackFile:
        """Open a complete pack for reading; see :func:`asymcheck.storage.nvme.pack_reader.open_pack`."""
        return open_pack(self.files, self.packs, pack_id, self.config.read_lock_timeout_s if wait else 0)

    def index_of(self, pack_id: PackId) -> PackIndex:
        """Return the index of a complete pack, cached while the file is unchanged; see :meth:`open_pack`."""
        path = self.pack_path(pack_id)
        try:
            with translated("access", path):
                status = path.stat()
        except FileNotFoundError as error:
            raise MissingPartitionError(f"pack {path.name} does not exist") from error
        file = (status.st_ino, status.st_size, status.st_ctime_ns)
        with self._indexes_lock:
            cached = self._indexes.get(pack_id)
        if cached is None or cached[0] != file:
            # Not with the lock, because this waits while another process holds the pack.
            with contextlib.closing(self.open_pack(pack_id)) as pack:
                cached = file, PackIndex(pack.header, pack.entries, pack.damage)
        with self._indexes_lock:
            before = self._indexes.pop(pack_id, None)
            # The least recently used pack comes first.
            self._indexes[pack_id] = cached
            self._index_bytes += cached[1].entries.nbytes - (0 if before is None else before[1].entries.nbytes)
            while self._index_bytes > _INDEX_BYTES and len(self._indexes) > 1:
                _, dropped = self._indexes.popitem(last=False)
                self._index_bytes -= dropped[1].entries.nbytes
        return cached[1]

    def peek(self, pack_id: PackId) -> PackIndex:
        """Find the frames of a locked or damaged pack; see :func:`asymcheck.storage.nvme.pack_reader.peek`."""
        return peek(self.files, self.packs, pack_id)

    def leftovers(self) -> list[str]:
        """Return the temporary files of packs and records whose writer is dead, as paths relative to the store."""
        stale = []
        for path in self._temporaries():
            with self.locked(path, exclusive=False) as is_locked:
                if is_locked:
                    stale.append(str(path.relative_to(self.root)))
        return stale

    def foreign(self) -> list[str]:
        """Return the paths, relative to the store, of files that do not belong to the store."""
        names = self._names()
        known = (layout.TOP_LEVEL.__contains__, layout.is_record_temporary, layout.is_catalog_set_aside)
        foreign = [name for name in names if not any(is_known(name) for is_known in known)]
        runs = self.manifests.runs()
        foreign += [
            f"{folder}/{name}"
            for folder in (layout.HEADS, layout.MANIFESTS)
            for name in self.files.list(self.root / folder)
            if name not in runs
        ]
        return foreign + [
            f"{layout.PACKS}/{name}"
            for name in self.files.list(self.packs)
            if layout.parse_pack_name(name) is None and not layout.is_pack_temporary(name)
        ]

    def remove_stale_temporaries(self) -> int:
        """Remove stale temporary files and damaged catalogs; return how many were removed."""
        removed = 0
        for path in self._temporaries():
            with self.locked(path) as is_locked:
                if is_locked:
                    self.files.unlink(path)
                    removed += 1
        for name in filter(layout.is_catalog_set_aside, self._names()):
            for part in self.files.list(self.root / name):
                self.files.unlink(self.root / name / part)
            removed += self.files.remove_directory(self.root / name)
        return removed

    def _temporaries(self) -> list[Path]:
        packs = [self.packs / name for name in self.files.list(self.packs) if layout.is_pack_temporary(name)]
        records = [self.root / name for name in self._names() if layout.is_record_temporary(name)]
        folder = self.root / layout.LOCKS
        locks = [folder / name for name in self.files.list(folder) if layout.is_record_temporary(name)]
        return [*packs, *records, *locks, *self.manifests.temporary_heads()]

    @contextlib.contextmanager
    def locked(self, path: Path, *, exclusive: bool = True) -> Iterator[bool]:
        """Try to lock a file for the ``with`` block; yield whether the lock was acquired."""
        with contextlib.ExitStack() as stack:
            is_locked = False
            with contextlib.suppress(FileNotFoundError):
                is_locked = stack.enter_context(locked(self.files.open_read, path, exclusive=exclusive)) is not None
            yield is_locked

    def close(self) -> None:
        """Close the catalog. Closing twice is allowed."""
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            with self._catalog_lock:
                if self._catalog is not None:
                    release_catalog(self._catalog)


@contextlib.contextmanager
def scratch(tier: NvmeTier) -> Iterator[OpenFile]:
    """Provide a scratch file among the packs of a writable store, and remove it at the end of the block.

    The name is that of an unfinished pack, so that collection removes the file after a kill.
    """
    path = tier.packs / layout.pack_temporary_name(PackId(os.urandom(16)))
    with contextlib.closing(OpenFile(tier.files, path, create_locked(tier.files, path))) as file:
        try:
            file.use_direct()
            yield file
        finally:
            tier.files.unlink(path)


def seal_scratch_pack(tier: NvmeTier, slot: Slot, descriptor: FrameDescriptor) -> float:
    """Write, sync and remove a pack with the frame in ``slot``; return the seconds for write and sync.

    Collection frees the pack after a kill, because no checkpoint names it.
    """
    pack_id = PackId(os.urandom(16))
    began = time.perf_counter()
    target = tier.packs / layout.pack_temporary_name(pack_id)
    writer = PackWriter(tier.files, tier.packs, pack_id, create_locked(tier.files, target), recycled=False)
    try:
        writer.write(slot, descriptor)
        writer.seal(time.time_ns(), WRITER)
        took = time.perf_counter() - began
        tier.files.unlink(tier.pack_path(pack_id))
    finally:
        writer.abandon()
    return took
