"""Packs opened for reading, under a shared lock (SPEC.md §7.2)."""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path

from asymcheck.errors import LockTimeoutError, MissingPartitionError, StorageError, TruncatedError
from asymcheck.format import layout
from asymcheck.format.pack import entry_length
from asymcheck.format.registry import ALIGNED_PAYLOAD_MIN_BYTES, BLOCK_BYTES, CODEC_IDENTITY
from asymcheck.tiers.files import DESCRIPTORS, Files, clear_direct, is_same_file, set_direct, try_lock
from asymcheck.tiers.nvme.drives import needs_slot
from asymcheck.tiers.pack_index import PackIndex, find_frames
from asymcheck.tiers.reading import OpenPack
from asymcheck.tiers.slots import Slot
from asymcheck.types import PackId

_POLL_S = 0.01


@dataclasses.dataclass(frozen=True)
class _OnDisk:
    """A file as :func:`find_frames` reads it."""

    files: Files
    descriptor: int
    path: Path

    def size(self) -> int:
        """Return its bytes."""
        return os.fstat(self.descriptor).st_size

    def pread(self, buffer: memoryview, offset: int) -> int:
        """Fill ``buffer`` from ``offset``."""
        return self.files.pread(self.descriptor, [buffer], offset, self.path)


class PackFile(OpenPack):
    """A complete pack open for reading, with a shared lock that keeps it from being recycled."""

    def __init__(self, files: Files, path: Path, descriptor: int, index: PackIndex) -> None:
        """Wrap an open descriptor; use :func:`open_pack`."""
        super().__init__(index, path)
        self._files = files
        self._descriptor = descriptor
        self._direct = set_direct(descriptor)
        self._device = os.fstat(descriptor).st_dev

    def read_frame(self, sequence: int, slot: Slot) -> memoryview:
        """Read frame ``sequence`` into ``slot`` as it lies on disk, unchecked, and return it.

        Raises:
            TruncatedError: the file ends before the frame does.
        """
        frame = slot.memory[: entry_length(self.entries[sequence])]
        direct = self._direct
        try:
            self._read(sequence, [frame])
        except StorageError as error:
            if not direct or getattr(error.__cause__, "errno", None) != errno.EINVAL:
                raise
            # In this order: another thread that finds it cleared may take any refusal for an error.
            clear_direct(self._descriptor)
            self._direct = False
            self._read(sequence, [frame])
        return frame

    def direct_shift(self, sequence: int) -> int | None:
        """Return the payload's offset in the file modulo a block, if the payload is large and not encoded.

        Direct I/O asks for an address in memory that is congruent to it.
        """
        entry = self.entries[sequence]
        is_plain = entry["codec"] == CODEC_IDENTITY and entry["stored_length"] >= ALIGNED_PAYLOAD_MIN_BYTES
        return int(entry["payload_shift"]) if self._direct and is_plain else None

    def read_payload(
        self, sequence: int, payload: memoryview, slot: Slot
    ) -> tuple[memoryview, memoryview, memoryview] | None:
        """Read a frame with its payload into ``payload``, with no copy but of the payload's first and last block.

        Header, padding, and what of the payload shares a block with either, go through ``slot``. Return None if that
        is slow on this drive, or refused.

        Raises:
            TruncatedError: the file ends before the frame does.
        """
        if needs_slot(self._device, payload):
            return None
        block, length, shift = BLOCK_BYTES, len(payload), int(self.entries[sequence]["payload_shift"])
        first = -shift % block
        last = (length - first) % block
        head = slot.memory[: block + shift + first]
        tail = slot.memory[2 * block : 3 * block if last else 2 * block]
        try:
            self._read(sequence, [head, payload[first : length - last], tail])
        except StorageError as error:
            # The file system refuses direct reads after all, or those into memory that a driver maps.
            if getattr(error.__cause__, "errno", None) not in (errno.EINVAL, errno.EFAULT):
                raise
            return None
        payload[:first], payload[length - last :] = head[block + shift :], tail[:last]
        return head[: block + shift], payload, tail[last:]

    def _read(self, sequence: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers``, one after another, with all of a frame."""
        count = self._files.pread(self._descriptor, buffers, int(self.entries[sequence]["offset"]), self.path)
        length = sum(map(len, buffers))
        if count < length:
            raise TruncatedError(
                f"frame {sequence} of pack {self.path.name}: the file ends after {count} of {length} bytes"
            )

    def close(self) -> None:
        """Release the lock. Closing twice is no error."""
        # Taken out first: by a second close, or a late read, the number may be that of another thread's file.
        descriptor, self._descriptor = self._descriptor, -1
        DESCRIPTORS.close(descriptor)


def open_pack(files: Files, directory: Path, pack_id: PackId, timeout_s: float, *, thorough: bool = False) -> PackFile:
    """Open a complete pack for reading under a shared lock, and check its header and index.

    When these are damaged, the frames are found by scanning, and ``damage`` of the result says what was wrong. A
    ``thorough`` scan goes on behind damaged frames, and may find none.

    Raises:
        MissingPartitionError: there is no such pack (it was never complete, or was recycled).
        LockTimeoutError: collection or a writer held it for ``timeout_s`` seconds.
        FormatError: header or index are damaged and no frame was found, or they need a newer program.
    """
    path = directory / layout.pack_name(pack_id)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            descriptor = DESCRIPTORS.open(files.open_read, path)
        except FileNotFoundError as error:
            raise MissingPartitionError(f"pack {path.name} does not exist") from error
        try:
            if try_lock(descriptor, exclusive=False):
                if is_same_file(descriptor, path):
                    index = find_frames(_OnDisk(files, descriptor, path), path.name, pack_id, thorough=thorough)
                    return PackFile(files, path, descriptor, index)
            elif time.monotonic() > deadline:
                raise LockTimeoutError(f"pack {path.name} was locked by a writer or by collection for {timeout_s:g} s")
        except BaseException:
            DESCRIPTORS.close(descriptor)
            raise
        DESCRIPTORS.close(descriptor)
        time.sleep(_POLL_S)


def peek(files: Files, directory: Path, pack_id: PackId) -> PackIndex:
    """Find every frame that can be found in a complete pack, without its lock.

    Nobody changes it while the file has this name; one that is recycled meanwhile is damaged, or another one.

    Raises:
        MissingPartitionError: there is no such pack.
        FormatError: what is in it is of another pack, or needs a newer program.
    """
    path = directory / layout.pack_name(pack_id)
    try:
        descriptor = DESCRIPTORS.open(files.open_read, path)
    except FileNotFoundError as error:
        raise MissingPartitionError(f"pack {path.name} does not exist") from error
    try:
        return find_frames(_OnDisk(files, descriptor, path), path.name, pack_id, thorough=True)
    finally:
        DESCRIPTORS.close(descriptor)
