"""Packs opened for reading, under a shared lock (SPEC.md §7.2)."""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from pathlib import Path

import numpy as np

from asymcheck.errors import (
    FormatError,
    LockTimeoutError,
    MissingPartitionError,
    StorageError,
    StructureError,
    TruncatedError,
    UnsupportedFormatError,
)
from asymcheck.format import layout, registry
from asymcheck.format.frame import HEADER_BYTES, FrameHeader, decode_header, frame_length
from asymcheck.format.pack import ENTRY_DTYPE, Entries, PackHeader, decode_index, decode_pack_header, round_up
from asymcheck.tiers.files import DESCRIPTORS, Files, clear_direct, is_same_file, set_direct, try_lock
from asymcheck.tiers.nvme.slots import Slot
from asymcheck.types import Digest, PackId

_POLL_S = 0.01


@dataclasses.dataclass(frozen=True)
class _Index:
    header: PackHeader
    entries: Entries
    damage: FormatError | None


class PackFile:
    """A complete pack open for reading, with a shared lock that keeps it from being recycled."""

    def __init__(self, files: Files, path: Path, descriptor: int, index: _Index) -> None:
        """Wrap an open descriptor; use :func:`open_pack`."""
        self.header = index.header
        self.entries = index.entries
        self.damage = index.damage
        """What is wrong with the header or the index, when the frames were found by scanning; else None."""
        self.path = path
        self._files = files
        self._descriptor = descriptor
        self._direct = set_direct(descriptor)

    def digests(self) -> list[Digest]:
        """Return the digests of all frames, in order."""
        raw = self.entries["digest"].tobytes()
        return [Digest(raw[i : i + registry.DIGEST_BYTES]) for i in range(0, len(raw), registry.DIGEST_BYTES)]

    def read_frame(self, sequence: int, slot: Slot) -> memoryview:
        """Read frame ``sequence`` into ``slot`` as it lies on disk, unchecked, and return it.

        Raises:
            TruncatedError: the file ends before the frame does.
        """
        entry = self.entries[sequence]
        frame = slot.frame(int(entry["stored_length"]))
        direct = self._direct
        try:
            count = self._files.pread(self._descriptor, frame, int(entry["offset"]), self.path)
        except StorageError as error:
            if not direct or getattr(error.__cause__, "errno", None) != errno.EINVAL:
                raise
            self._direct = False
            clear_direct(self._descriptor)
            count = self._files.pread(self._descriptor, frame, int(entry["offset"]), self.path)
        if count < len(frame):
            raise TruncatedError(
                f"frame {sequence} of pack {self.path.name}: the file ends after {count} of {len(frame)} bytes"
            )
        return frame

    def close(self) -> None:
        """Release the lock."""
        DESCRIPTORS.close(self._descriptor)


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
            descriptor = DESCRIPTORS.add(files.open_read(path))
        except FileNotFoundError as error:
            raise MissingPartitionError(f"pack {path.name} does not exist") from error
        try:
            if try_lock(descriptor, exclusive=False):
                if is_same_file(descriptor, path):
                    index = _find_frames(files, descriptor, path, pack_id, thorough=thorough)
                    return PackFile(files, path, descriptor, index)
            elif time.monotonic() > deadline:
                raise LockTimeoutError(f"pack {path.name} was locked by a writer or by collection for {timeout_s:g} s")
        except BaseException:
            DESCRIPTORS.close(descriptor)
            raise
        DESCRIPTORS.close(descriptor)
        time.sleep(_POLL_S)


def _find_frames(files: Files, descriptor: int, path: Path, pack_id: PackId, *, thorough: bool) -> _Index:
    try:
        header, entries = _read_index(files, descriptor, path, pack_id)
    except UnsupportedFormatError:
        raise
    except FormatError as error:
        entries = _scan(files, descriptor, path, pack_id, thorough=thorough)
        if not len(entries):
            if not thorough:
                raise
            return _Index(PackHeader(pack_id, 0, 0, 0, ""), entries, error)
        end = int(entries["offset"][-1]) + frame_length(int(entries["stored_length"][-1]))
        return _Index(PackHeader(pack_id, len(entries), end, 0, ""), entries, error)
    return _Index(header, entries, None)


def _read_index(files: Files, descriptor: int, path: Path, pack_id: PackId) -> tuple[PackHeader, Entries]:
    where = f"pack {path.name}"
    block = bytearray(registry.BLOCK_BYTES)
    count = files.pread(descriptor, memoryview(block), 0, path)
    header = decode_pack_header(memoryview(block)[:count], where)
    if header.pack_id != pack_id:
        raise StructureError(f"{where}: the header names pack {header.pack_id.hex()}")
    size = os.fstat(descriptor).st_size
    if size < header.pack_length:
        # Before memory is taken for the index, or a place is read that no file reaches.
        raise TruncatedError(f"{where}: the file has {size} of {header.pack_length} bytes")
    index = bytearray(round_up(header.index_length))
    count = files.pread(descriptor, memoryview(index), header.index_offset, path)
    return header, decode_index(memoryview(index)[:count], header, where)


def _scan(files: Files, descriptor: int, path: Path, pack_id: PackId, *, thorough: bool) -> Entries:
    """Find the frames of a pack by their own headers, as SPEC.md §7.2 allows when header or index are damaged.

    A thorough scan looks at every block behind a place where no frame is found, and leaves gaps in the sequence.

    Raises:
        UnsupportedFormatError: a frame needs a newer program, and the scan was to find all.
        StructureError: all frames found belong to another pack, so the file has a wrong name.
    """
    found: list[tuple[object, ...]] = []
    offset, others = registry.BLOCK_BYTES, 0
    block = bytearray(HEADER_BYTES)
    while files.pread(descriptor, memoryview(block), offset, path) == HEADER_BYTES:
        header = _frame_header(memoryview(block), f"frame {len(found)} of pack {path.name}", thorough=thorough)
        # A frame of an earlier life of the file has another pack's id.
        if header is not None and header.place_id == pack_id and (thorough or header.sequence == len(found)):
            frame = header.descriptor
            sizes = (offset, frame.stored_length, frame.plain_length)
            numbers = (frame.kind, frame.codec, frame.digest_algorithm)
            found.append((frame.digest, frame.base_digest, *sizes, *numbers, bytes(5)))
            offset += frame_length(frame.stored_length)
        elif thorough:
            others += header is not None
            offset += registry.BLOCK_BYTES
        else:
            break
    if others and not found:
        raise StructureError(f"pack {path.name} is damaged, and has only frames of another pack in it")
    return np.array(found, dtype=ENTRY_DTYPE)


def _frame_header(data: memoryview, where: str, *, thorough: bool) -> FrameHeader | None:
    try:
        return decode_header(data, where)
    except UnsupportedFormatError:
        if thorough:
            raise
    except FormatError:
        pass
    return None
