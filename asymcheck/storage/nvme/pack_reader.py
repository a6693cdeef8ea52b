"""Reading of packs under a shared lock, with direct I/O (SPEC.md §A7)."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from asymcheck.errors import FormatError, LockTimeoutError, MissingPartitionError, StorageError, TruncatedError
from asymcheck.format import layout
from asymcheck.format.pack import entry_length
from asymcheck.format.registry import ALIGNED_PAYLOAD_MIN_BYTES, BLOCK_BYTES, CODEC_IDENTITY
from asymcheck.storage.interfaces import FrameParts, OpenPack
from asymcheck.storage.local_files import DESCRIPTORS, Files, OpenFile, is_same_file, refuses_direct, try_lock
from asymcheck.storage.nvme.drives import needs_slot
from asymcheck.storage.pack_index import PackIndex, find_frames
from asymcheck.storage.slots import Slot
from asymcheck.types import PackId

_POLL_S = 0.01


class PackFile(OpenPack):
    """Complete pack that is open for reading. A shared lock prevents that the file is recycled.

    If this process has too many packs open, the file is closed, and opened again for the next read.
    """

    def __init__(self, file: OpenFile, index: PackIndex, timeout_s: float) -> None:
        """Take over an open, locked file; use :func:`open_pack`."""
        super().__init__(index, file.path)
        self._file = file
        file.use_direct()
        self._device = os.fstat(file.descriptor).st_dev
        self._timeout_s = timeout_s
        self._readers = 0
        self._is_closed = False
        # Guards the descriptor of the file while nobody reads.
        self._opening = threading.Lock()
        _recent.add(self)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[OpenFile]:
        """Keep the file open for the ``with`` block. Open it again if it was closed."""
        with self._opening:
            if self._file.descriptor < 0:
                self._open_again()
            self._readers += 1
        _recent.add(self)
        try:
            yield self._file
        finally:
            with self._opening:
                self._readers -= 1

    def _open_again(self) -> None:
        file = self._file
        if self._is_closed:
            raise StorageError(f"read {file.path}: the pack was closed")
        try:
            file.descriptor = _opened_and_locked(file.files, file.path, self._timeout_s).descriptor
        except MissingPartitionError as error:
            raise StorageError(f"pack {file.path.name} was removed or repacked during the read") from error
        if file.is_direct:
            file.use_direct()

    def close_if_idle(self) -> bool:
        """Close the file until the next read; return False if a thread uses it."""
        if not self._opening.acquire(blocking=False):
            return False
        try:
            if not self._readers:
                self._file.close()
            return not self._readers
        finally:
            self._opening.release()

    def read_frame(self, sequence: int, slot: Slot) -> memoryview:
        """Read frame ``sequence`` into ``slot``; see :meth:`OpenPack.read_frame`."""
        frame = slot.memory[: entry_length(self.entries[sequence])]
        with self._reading() as file:
            count = file.read([frame], self._offset(sequence))
        self._check_count(sequence, [frame], count)
        return frame

    def direct_shift(self, sequence: int) -> int | None:
        """Return the offset of the payload in the file modulo a block, if the payload is large and not encoded.

        Direct I/O requires a memory address that is congruent to this offset.
        """
        entry = self.entries[sequence]
        is_plain = entry["codec"] == CODEC_IDENTITY and entry["stored_length"] >= ALIGNED_PAYLOAD_MIN_BYTES
        return int(entry["payload_shift"]) if self._file.is_direct and is_plain else None

    def read_payload(self, sequence: int, payload: memoryview, slot: Slot) -> FrameParts | None:
        """Read a frame with its payload directly in ``payload``; see :meth:`OpenPack.read_payload`.

        Header, padding, and the payload bytes in the same blocks are copied through ``slot``.
        """
        if needs_slot(self._device, payload):
            return None
        block, length, shift = BLOCK_BYTES, len(payload), int(self.entries[sequence]["payload_shift"])
        first = -shift % block
        last = (length - first) % block
        head = slot.memory[: block + shift + first]
        tail = slot.memory[2 * block : 3 * block if last else 2 * block]
        buffers = [head, payload[first : length - last], tail]
        try:
            with self._reading() as file:
                count = file.files.pread(file.descriptor, buffers, self._offset(sequence), self.path)
        except StorageError as error:
            if not refuses_direct(error):
                raise
            return None
        self._check_count(sequence, buffers, count)
        payload[:first], payload[length - last :] = head[block + shift :], tail[:last]
        return head[: block + shift], payload, tail[last:]

    def _offset(self, sequence: int) -> int:
        return int(self.entries[sequence]["offset"])

    def _check_count(self, sequence: int, buffers: Sequence[memoryview], count: int) -> None:
        length = sum(map(len, buffers))
        if count < length:
            raise TruncatedError(
                f"frame {sequence} of pack {self.path.name}: the file ends after {count} of {length} bytes"
            )

    def close(self) -> None:
        """Release the lock. Closing twice is allowed."""
        _recent.discard(self)
        with self._opening:
            self._is_closed = True
            self._file.close()


class _RecentPacks:
    """Packs with an open file, least recently used first. A checkpoint may have more packs than a process may open."""

    def __init__(self) -> None:
        self._reset()
        # A child has no descriptors of packs; their numbers may be those of other files.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._packs: dict[PackFile, None] = {}
        self._lock = threading.Lock()

    def add(self, pack: PackFile) -> None:
        """Note the use of a pack. Close idle packs if more than a quarter of the allowed files are packs."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        with self._lock:
            self._packs.pop(pack, None)
            self._packs[pack] = None
            for old in list(itertools.islice(self._packs, max(len(self._packs) - limit, 0))):
                if old.close_if_idle():
                    del self._packs[old]

    def discard(self, pack: PackFile) -> None:
        """Forget a pack."""
        with self._lock:
            self._packs.pop(pack, None)


_recent = _RecentPacks()


def open_pack(files: Files, directory: Path, pack_id: PackId, timeout_s: float, *, thorough: bool = False) -> PackFile:
    """Open a complete pack for reading under a shared lock, and check its header and index.

    If header or index is damaged, find the frames by scanning and set ``damage`` of the result. A ``thorough`` scan
    continues after damaged frames, and may find no frame.

    Raises:
        MissingPartitionError: there is no such pack (it was never complete, or was recycled).
        LockTimeoutError: a collection or a writer held the lock for ``timeout_s`` seconds.
        FormatError: header or index is damaged and no frame was found, or the pack needs a newer program.
    """
    path = directory / layout.pack_name(pack_id)
    while True:
        file = _opened_and_locked(files, path, timeout_s)
        try:
            index = find_frames(file.read_range, path.name, pack_id, thorough=thorough)
            if index.damage is None or is_same_file(file.descriptor, path):
                return PackFile(file, index, timeout_s)
        except BaseException as error:
            # On a file system without locks, the file may have been recycled meanwhile.
            is_recycled = isinstance(error, FormatError) and not is_same_file(file.descriptor, path)
            file.close()
            if not is_recycled:
                raise
        file.close()
        time.sleep(_POLL_S)


def _opened_and_locked(files: Files, path: Path, timeout_s: float) -> OpenFile:
    """Open the present file of a pack under a shared lock; see :func:`open_pack`."""
    deadline = time.monotonic() + timeout_s
    while True:
        file = _opened(files, path)
        try:
            if try_lock(file.descriptor, exclusive=False) and is_same_file(file.descriptor, path):
                return file
            if time.monotonic() > deadline:
                raise LockTimeoutError(
                    f"pack {path.name} was locked by a writer or a collection for {timeout_s:g} s; try again later"
                )
        except BaseException:
            file.close()
            raise
        file.close()
        time.sleep(_POLL_S)


def peek(files: Files, directory: Path, pack_id: PackId) -> PackIndex:
    """Find all frames of a complete pack by a thorough scan, without taking its lock.

    The file does not change while it has this name. A file that is recycled during the scan seems damaged.

    Raises:
        MissingPartitionError: there is no such pack.
        FormatError: all frames belong to another pack, or a frame needs a newer program.
    """
    with contextlib.closing(_opened(files, directory / layout.pack_name(pack_id))) as file:
        return find_frames(file.read_range, file.path.name, pack_id, thorough=True)


def _opened(files: Files, path: Path) -> OpenFile:
    try:
        return OpenFile(files, path, DESCRIPTORS.open(files.open_read, path))
    except FileNotFoundError as error:
        raise MissingPartitionError(f"pack {path.name} does not exist") from error
