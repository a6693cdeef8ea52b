"""Writing of packs, and the pool of freed packs to overwrite (SPEC.md §A7, §B5)."""

from __future__ import annotations

import contextlib
import math
import mmap
import operator
import os
import stat
import threading
from pathlib import Path

from asymcheck.errors import StorageError
from asymcheck.events import emit, timed
from asymcheck.format import layout, registry
from asymcheck.format.frame import FrameDescriptor
from asymcheck.format.pack import PackHeader, encode_index, encode_pack_header, entries_of, location_of, round_up
from asymcheck.storage.local_files import DESCRIPTORS, Files, OpenFile, create_locked, is_same_file, try_lock
from asymcheck.storage.nvme.manifests import removed_store
from asymcheck.storage.slots import Slot
from asymcheck.types import Digest, Location, PackId

_INDEX_BYTES = 1 << 20


class PackWriter:
    """Pack that is being written. Only :meth:`write` and :meth:`write_in_place` are thread-safe.

    The exclusive lock on the file lasts from creation until :meth:`close`. It protects the pack from collection until
    the pack is entered and pinned in the catalog.
    """

    def __init__(self, files: Files, directory: Path, pack_id: PackId, descriptor: int, *, recycled: bool) -> None:
        """Write to ``<pack id>.tmp`` in ``directory``, which is open and locked; use :meth:`Pool.writer`."""
        self.pack_id = pack_id
        self._files = files
        self._directory = directory
        self._path = directory / layout.pack_temporary_name(pack_id)
        self._lock = threading.Lock()
        self.length = registry.BLOCK_BYTES
        """Bytes of the header and of all frames so far."""
        self._frames: list[tuple[FrameDescriptor, int]] = []
        self._recycled = recycled
        self._file = OpenFile(files, self._path, descriptor)
        self._file.use_direct()
        emit("pack.created", self._path.name)

    def write(self, slot: Slot, descriptor: FrameDescriptor) -> None:
        """Append a frame whose payload is in ``slot``."""
        sequence, offset = self._append(descriptor)
        frame = slot.stamp(descriptor, self.pack_id, sequence)
        self._file.write([frame], offset)
        emit("frame.written", self._path.name, len(frame))

    def write_in_place(self, payload: memoryview, descriptor: FrameDescriptor, slot: Slot) -> None:
        """Append a frame directly from the memory of its payload, which is not changed.

        The address of ``payload`` is congruent to the offset of the payload in the frame modulo a block, unless the
        frame is small. ``slot`` holds the blocks that payload and header or padding share, or a whole small frame.
        """
        start = descriptor.payload_offset
        if start < registry.BLOCK_BYTES:
            slot.payload(len(payload))[:] = payload
            self.write(slot, descriptor)
            return
        sequence, offset = self._append(descriptor)
        block = registry.BLOCK_BYTES
        first = -descriptor.payload_shift % block
        last = (len(payload) - first) % block
        head = slot.stamp_header(descriptor, self.pack_id, sequence, first)
        head[start:] = payload[:first]
        tail = slot.memory[2 * block : 3 * block if last else 2 * block]
        tail[:last], tail[last:] = payload[len(payload) - last :], bytes(len(tail) - last)
        self._file.write([head, payload[first : len(payload) - last], tail], offset)
        emit("frame.written", self._path.name, descriptor.frame_length)

    def _append(self, descriptor: FrameDescriptor) -> tuple[int, int]:
        with self._lock:
            sequence, offset = len(self._frames), self.length
            self.length += descriptor.frame_length
            self._frames.append((descriptor, offset))
        return sequence, offset

    def seal(self, created_ns: int, writer: str) -> tuple[PackHeader, list[tuple[Digest, Location]]]:
        """Write index and header, sync, and rename the pack to its final name; keep the lock.

        Returns:
            The header, and the digests and locations of all frames.
        """
        entries = entries_of(self._frames)
        header = PackHeader(self.pack_id, len(entries), self.length, created_ns, writer)
        index = encode_index(self.pack_id, entries)
        self._pwrite_aligned(index, self.length)
        self._pwrite_aligned(encode_pack_header(header), 0)
        if self._recycled and os.fstat(self._file.descriptor).st_size > 2 * header.pack_length:
            # A recycled file keeps its old tail for the next pack in the same file, unless the tail is too long.
            self._files.truncate(self._file.descriptor, header.pack_length, self._path)
        emit("pack.index_written", self._path.name)
        with timed("sync", self.length, lambda: {"pack": self._path.name}):
            self._file.sync()
        emit("pack.synced", self._path.name)
        final = self._directory / layout.pack_name(self.pack_id)
        try:
            self._files.rename(self._path, final)
        except FileNotFoundError as error:
            raise removed_store(self._directory.parent) from error
        emit("pack.renamed", final.name)
        self._files.sync_directory(self._directory)
        emit("pack.sealed", final.name, header.pack_length)
        numbered = enumerate(self._frames)
        return header, [(frame.digest, location_of(self.pack_id, entries, number)) for number, (frame, _) in numbered]

    def _pwrite_aligned(self, data: bytes, offset: int) -> None:
        # Do not use a slot, because its huge pages would be zeroed for a few bytes.
        memory = memoryview(mmap.mmap(-1, round_up(len(data))))[: len(data)]
        memory[:] = data
        self._file.write([memory], offset)

    def close(self) -> None:
        """Release the lock. From then on, only manifests and pins protect the pack. Closing twice is allowed."""
        self._file.close()

    def abandon(self) -> None:
        """Remove the temporary file, if it exists, and release the lock."""
        try:
            self._files.unlink(self._path)
        finally:
            self.close()


class Pool:
    """Pool of freed packs. Overwriting a freed pack is 1.5 to 2.5 times as fast as writing a new file."""

    def __init__(self, files: Files, directory: Path) -> None:
        """Keep freed packs in ``directory``."""
        self._files = files
        self._directory = directory
        self._durable: frozenset[Path] = frozenset()
        self.capacity_bytes: float = math.inf
        """Maximum size of the pool; each collection sets it."""

    def sizes(self) -> dict[Path, int]:
        """Return the freed packs with their sizes in bytes, smallest first, ignoring folders and links."""
        sizes: dict[Path, int] = {}
        for name in filter(layout.parse_pack_name, self._files.list(self._directory)):
            with contextlib.suppress(FileNotFoundError):
                status = (self._directory / name).lstat()
                if stat.S_ISREG(status.st_mode):
                    sizes[self._directory / name] = status.st_size
        return dict(sorted(sizes.items(), key=operator.itemgetter(1)))

    def nbytes(self) -> int:
        """Return the size of the pool in bytes."""
        return sum(self.sizes().values())

    def candidates(self, needed_bytes: int) -> list[Path]:
        """Return freed packs in order of preference: large enough ones by size, then the largest of the others."""
        sizes = self.sizes()
        fitting = [path for path, size in sizes.items() if size >= needed_bytes]
        return fitting + [path for path in reversed(sizes) if sizes[path] < needed_bytes]

    def writer(self, packs: Path, pack_id: PackId, needed_bytes: int) -> PackWriter:
        """Start a pack in a freed file, or in a new file if the pool is empty."""
        target, length = packs / layout.pack_temporary_name(pack_id), needed_bytes + _INDEX_BYTES
        for path in self.candidates(length):
            descriptor = self._claim(path)
            if descriptor is not None:
                writer = self._start(packs, pack_id, descriptor, pooled=path)
                with contextlib.suppress(StorageError):
                    self._make_room(length - os.fstat(descriptor).st_size)
                return writer
        return self._start(packs, pack_id, create_locked(self._files, target), pooled=None)

    def _make_room(self, length: int) -> None:
        """Unlink freed packs, smallest first, until ``length`` bytes are free on the drive."""
        free = self._files.free_bytes(self._directory)
        for path, size in self.sizes().items():
            if free >= length:
                return
            descriptor = self._claim(path)
            if descriptor is not None:
                self._files.unlink(path)
                DESCRIPTORS.close(descriptor)
                free += size

    def _start(self, packs: Path, pack_id: PackId, descriptor: int, pooled: Path | None) -> PackWriter:
        target = packs / layout.pack_temporary_name(pack_id)
        try:
            if pooled is not None:
                # The collection that freed the pack may have been killed before its sync. After a power loss, the
                # file would then have its old name again, with the frames of the new pack.
                if pooled not in self._durable:
                    self.sync(packs)
                self._files.rename(pooled, target)
            return PackWriter(self._files, packs, pack_id, descriptor, recycled=pooled is not None)
        except BaseException:
            with contextlib.suppress(StorageError):
                self._files.unlink(target)
            DESCRIPTORS.close(descriptor)
            raise

    def _claim(self, path: Path) -> int | None:
        """Open and lock a freed pack; None if it is in use, is a folder or a link, or has a second hard link."""
        try:
            descriptor = DESCRIPTORS.open(self._files.open_existing, path)
        except (FileNotFoundError, StorageError):
            return None
        is_locked = try_lock(descriptor, exclusive=True) and is_same_file(descriptor, path)
        if is_locked and os.fstat(descriptor).st_nlink == 1:
            return descriptor
        DESCRIPTORS.close(descriptor)
        return None

    def room(self) -> float:
        """Return the remaining capacity in bytes, which is negative if the pool holds too much.

        The pool never uses more bytes than are free on the drive.
        """
        limit = min(self.capacity_bytes, self._files.free_bytes(self._directory))
        return limit - self.nbytes()

    def surplus(self) -> dict[Path, int]:
        """Return freed packs to unlink, with sizes, because the pool is too large for its limit or the drive."""
        sizes = self.sizes()
        held, free = sum(sizes.values()), self._files.free_bytes(self._directory)
        surplus = {}
        for path, size in sizes.items():
            if held <= min(self.capacity_bytes, free):
                break
            surplus[path] = size
            held, free = held - size, free + size
        return surplus

    def would_keep(self, path: Path, room: float) -> bool:
        """Tell whether :meth:`put` would keep a freed pack if the pool had ``room`` bytes left."""
        status = path.lstat()
        return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size <= room

    def put(self, path: Path) -> bool:
        """Move a freed pack, locked by the caller, into the pool.

        Return False if the pack was unlinked instead. This happens if the pool is full, or if the file has a second
        hard link, for instance in a copy of the store.
        """
        if not self.would_keep(path, self.room()):
            self._files.unlink(path)
            return False
        self._files.rename(path, self._directory / path.name)
        return True

    def sync(self, packs: Path) -> None:
        """Make moves from ``packs`` into the pool durable."""
        present = frozenset(self.sizes())
        self._files.sync_directory(self._directory)
        self._files.sync_directory(packs)
        self._durable = present
