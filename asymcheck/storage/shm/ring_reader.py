"""Reading of a ring in shared memory, of a dead process or of this one."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asymcheck.errors import DigestMismatchError, FormatError, StructureError, TruncatedError
from asymcheck.executor import share
from asymcheck.format import registry
from asymcheck.format.digest import digest as digest_of
from asymcheck.format.frame import HEADER_BYTES, check_frame, decode_header, frame_length
from asymcheck.format.layout import parse_ring_name, ring_name
from asymcheck.format.manifest import Manifest
from asymcheck.format.manifest_reader import decode_manifest
from asymcheck.format.pack import Entries, PackHeader, entries_of
from asymcheck.format.record import RECORD_BYTES
from asymcheck.format.ring_records import (
    CAPTURES_MAX,
    CAPTURES_OFFSET,
    DATA_OFFSET,
    ENTRY_BYTES,
    CaptureEntry,
    RingHeader,
    decode_entry,
    decode_ring_header,
)
from asymcheck.storage.interfaces import OpenPack
from asymcheck.storage.local_files import DESCRIPTORS, Files, translated, try_lock, unlock
from asymcheck.storage.pack_index import PackIndex, digests_of
from asymcheck.storage.pages import map_file
from asymcheck.storage.slots import Slot
from asymcheck.types import Digest, PackId

_THREADS = 8
"""Maximum number of threads that scan a ring."""
_PART_BYTES = 64 << 20
"""Bytes that a thread scans at a time."""


class RingReader(contextlib.AbstractContextManager["RingReader"]):
    """Frames and captures of a ring. Close the reader, or use it in a ``with`` block."""

    def __init__(self, path: Path, *, hold: bool = True) -> None:
        """Open a ring for reading; :attr:`is_owned` says whether a process still uses it.

        With ``hold``, lock the ring against adoption and removal until :meth:`close`. Without ``hold``, the content of
        an open orphaned ring still does not change, because only its owner writes into a ring.

        Raises:
            FileNotFoundError: the ring was removed.
            StorageError, FormatError: the file cannot be read, or is not a ring.
        """
        self.path = path
        self._descriptor = DESCRIPTORS.open(Files().open_read, path)
        try:
            self.is_owned = not try_lock(self._descriptor, exclusive=hold)
            if not hold:
                unlock(self._descriptor)
            with translated("read", path):
                # The previous holder of the lock may have adopted the ring and removed the file.
                if not os.path.samestat(os.fstat(self._descriptor), path.lstat()):
                    raise StructureError(f"ring {path}: the file was replaced by another file")
                self.header = self._read_header()
                self._map = map_file(self._descriptor, DATA_OFFSET + self.header.data_bytes, writable=False)
            self._memory = memoryview(self._map)
            self.captures = [entry for number in range(CAPTURES_MAX) if (entry := self._entry(number)) is not None]
            """Complete and durable captures."""
        except BaseException:
            DESCRIPTORS.close(self._descriptor)
            raise

    def _read_header(self) -> RingHeader:
        where = f"ring {self.path}"
        header = decode_ring_header(os.pread(self._descriptor, RECORD_BYTES, 0), where)
        if parse_ring_name(self.path.name) != (header.store_id, header.ring_id):
            raise StructureError(f"{where}: the header is that of {ring_name(header.store_id, header.ring_id)}")
        size, file_size = DATA_OFFSET + header.data_bytes, os.fstat(self._descriptor).st_size
        if file_size < size:
            raise TruncatedError(f"{where}: the file has {file_size} of {size} bytes")
        return header

    def _entry(self, number: int) -> CaptureEntry | None:
        start = CAPTURES_OFFSET + number * ENTRY_BYTES
        return decode_entry(self._memory[start : start + ENTRY_BYTES], self.header.data_bytes)

    @functools.cached_property
    def entries(self) -> Entries:
        """Entries of all frames, found by a scan at the first access. ``offset`` is the offset in the file."""
        magic = np.frombuffer(registry.FRAME_MAGIC, dtype=np.uint64)[0]
        found: dict[int, list[int]] = {}

        def scan(taken: Iterable[tuple[int, int]]) -> None:
            for start, end in taken:
                words: npt.NDArray[np.uint64] = np.frombuffer(self._memory[start:end], dtype=np.uint64)
                blocks = np.flatnonzero(words[:: registry.BLOCK_BYTES // 8] == magic)
                found[start] = (blocks + start // registry.BLOCK_BYTES).tolist()

        # Each page is touched for the first time, which takes 0.1 s for each GB on one thread.
        parts = list(_written(self._descriptor, len(self._memory)))
        share(parts, scan, min(len(parts), _THREADS, len(os.sched_getaffinity(0))), "scan")
        blocks = [block for _, part in sorted(found.items()) for block in part]
        frames = []
        for block in blocks:
            offset = block * registry.BLOCK_BYTES
            with contextlib.suppress(FormatError):
                header = decode_header(self._memory[offset : offset + HEADER_BYTES], "ring")
                fits = offset + header.descriptor.frame_length <= len(self._memory)
                stamped = (header.place_id, header.sequence) == (self.header.ring_id, block)
                if fits and stamped and not header.descriptor.payload_shift:
                    frames.append((header.descriptor, offset))
        return entries_of(frames)

    def frame(self, offset: int, stored_length: int) -> memoryview:
        """Return a whole frame, without checks."""
        return self._memory[offset : offset + frame_length(stored_length)]

    def payload_at(self, offset: int, name: Digest | None = None) -> memoryview:
        """Return the checked payload of the frame at ``offset``.

        Raises:
            FormatError: there is no intact frame at ``offset``, or its digest is not ``name``.
        """
        where = f"frame at byte {offset} of ring {self.path.name}"
        header = decode_header(self._memory[offset : offset + HEADER_BYTES], where)
        frame = self.frame(offset, header.descriptor.stored_length)
        sequence = offset // registry.BLOCK_BYTES
        descriptor, payload = check_frame(frame, PackId(self.header.ring_id), sequence, where)
        if descriptor.codec != registry.CODEC_IDENTITY:
            raise StructureError(f"{where}: the frame is encoded, but frames in a ring must not be")
        if name not in (None, descriptor.digest) or digest_of(payload) != descriptor.digest:
            raise DigestMismatchError(f"digest mismatch in {where}")
        return payload

    @functools.cached_property
    def offsets(self) -> dict[Digest, list[int]]:
        """Offsets of the frames of each digest, without checks of the payloads."""
        offsets: dict[Digest, list[int]] = {}
        for name, offset in zip(digests_of(self.entries), self.entries["offset"].tolist(), strict=True):
            offsets.setdefault(name, []).append(offset)
        return offsets

    def intact(self, name: Digest, length: int) -> tuple[int, memoryview] | None:
        """Return offset and payload of the first intact frame of a partition; None if there is none."""
        for offset in self.offsets.get(name, []):
            with contextlib.suppress(FormatError):
                payload = self.payload_at(offset, name)
                if len(payload) == length:
                    return offset, payload
        return None

    def manifest(self, entry: CaptureEntry) -> Manifest:
        """Read the manifest of a capture.

        Raises:
            FormatError: the manifest is damaged, or does not match the entry and the ring.
        """
        where = f"manifest in ring {self.path.name}"
        data = bytes(self.payload_at(entry.offset))
        manifest = decode_manifest(data, where)
        header = manifest.header
        if (header.ref.save_id, header.run, header.rank) != (entry.save_id, self.header.run, self.header.rank):
            raise StructureError(f"{where}: the manifest belongs to another capture than its entry")
        return manifest

    def unlink(self) -> None:
        """Remove the file."""
        with translated("remove", self.path):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the mapping and the lock. Closing twice is allowed."""
        self._memory.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        # Forget the descriptor first: a second close might hit a file that reuses the number.
        descriptor, self._descriptor = self._descriptor, -1
        DESCRIPTORS.close(descriptor)

    def __exit__(self, *_error: object) -> None:
        """Close the reader."""
        self.close()


def _written(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the written ranges of the data, in whole blocks, at most ``_PART_BYTES`` each.

    Reading an unwritten range would allocate memory, and kill the process if there is none (SIGBUS).
    """
    end = DATA_OFFSET
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                yield from _parts(end, size)
            # ENXIO: no data follows. Otherwise the file system does not support SEEK_DATA.
            return
        start -= start % registry.BLOCK_BYTES
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        end = min(end + -end % registry.BLOCK_BYTES, size)
        yield from _parts(start, end)


def _parts(start: int, end: int) -> Iterator[tuple[int, int]]:
    yield from ((first, min(first + _PART_BYTES, end)) for first in range(start, end, _PART_BYTES))


class RingPack(OpenPack):
    """Orphaned ring in the form of a pack. The caller closes the reader."""

    def __init__(self, reader: RingReader) -> None:
        ring, entries = reader.header, reader.entries
        header = PackHeader(PackId(ring.ring_id), len(entries), ring.data_bytes, ring.created_ns, ring.writer)
        # A frame in a ring is numbered by its block.
        blocks = tuple((entries["offset"] // registry.BLOCK_BYTES).tolist())
        super().__init__(PackIndex(header, entries, None, blocks), reader.path)
        self._reader = reader

    def read_frame(self, sequence: int, slot: Slot) -> memoryview:  # noqa: ARG002 - used by other tiers
        """Return frame ``sequence`` in the memory of the ring, without checks."""
        entry = self.entries[sequence]
        return self._reader.frame(int(entry["offset"]), int(entry["stored_length"]))

    def close(self) -> None:
        """Do nothing, because a later attempt may read the ring again."""
