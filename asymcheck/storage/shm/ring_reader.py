"""A ring that another process left, or this one's own, read as it lies."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asymcheck.errors import DigestMismatchError, FormatError, StructureError, TruncatedError
from asymcheck.format import registry
from asymcheck.format.digest import digest as digest_of
from asymcheck.format.frame import HEADER_BYTES, check_frame, decode_header, frame_length
from asymcheck.format.layout import parse_ring_name, ring_name
from asymcheck.format.manifest import Manifest
from asymcheck.format.manifest_reader import decode_manifest
from asymcheck.format.pack import ENTRY_DTYPE, Entries, PackHeader, entry_of
from asymcheck.format.record import RECORD_BYTES
from asymcheck.format.registry import BLOCK_BYTES
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
from asymcheck.storage.local_files import DESCRIPTORS, translated, try_lock, unlock
from asymcheck.storage.pack_index import PackIndex
from asymcheck.storage.pages import map_file
from asymcheck.storage.slots import Slot
from asymcheck.types import Digest, PackId


class RingReader:
    """The frames and captures of a ring, found when it is opened. Close it, or use it in a ``with`` block."""

    def __init__(self, path: Path, *, hold: bool = True) -> None:
        """Open a ring for reading; :attr:`is_owned` says whether a process still uses it.

        With ``hold`` nobody else takes it up or removes it until :meth:`close`. Without, nobody is kept from that; who
        reads on sees the ring as it was, for nobody writes into one whose process is dead.

        Raises:
            FileNotFoundError: it is gone.
            StorageError, FormatError: it cannot be read, or is no ring.
        """
        self.path = path
        with translated("open", path):
            # A pipe of that name must not hold who looks at it.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            self._descriptor = DESCRIPTORS.open(os.open, path, flags)
        try:
            self.is_owned = not try_lock(self._descriptor, exclusive=hold)
            if not hold:
                unlock(self._descriptor)
            with translated("read", path):
                # The last holder of the lock may have moved every capture to the store, and removed the file.
                if not os.path.samestat(os.fstat(self._descriptor), path.lstat()):
                    raise StructureError(f"ring {path}: another file has taken its name")
                self.header = self._read_header()
                self._map = map_file(self._descriptor, DATA_OFFSET + self.header.data_bytes, writable=False)
            self._memory = memoryview(self._map)
            self.captures = [entry for number in range(CAPTURES_MAX) if (entry := self._entry(number)) is not None]
            """The captures that are complete or durable."""
            self._places: dict[Digest, list[int]] | None = None
            self._places_lock = threading.Lock()
        except BaseException:
            DESCRIPTORS.close(self._descriptor)
            raise

    def _read_header(self) -> RingHeader:
        where = f"ring {self.path}"
        header = decode_ring_header(os.pread(self._descriptor, RECORD_BYTES, 0), where)
        if parse_ring_name(self.path.name) != (header.store_id, header.ring_id):
            raise StructureError(f"{where}: its header is that of {ring_name(header.store_id, header.ring_id)}")
        size, there = DATA_OFFSET + header.data_bytes, os.fstat(self._descriptor).st_size
        if there < size:
            raise TruncatedError(f"{where}: {there} of {size} bytes")
        return header

    def _entry(self, number: int) -> CaptureEntry | None:
        start = CAPTURES_OFFSET + number * ENTRY_BYTES
        return decode_entry(self._memory[start : start + ENTRY_BYTES], self.header.data_bytes)

    @functools.cached_property
    def entries(self) -> Entries:
        """One row for each frame that is found by its header, at the first call; ``offset`` is in the file."""
        magic = np.frombuffer(registry.FRAME_MAGIC, dtype=np.uint64)[0]
        blocks: list[int] = []
        for start, end in _written(self._descriptor, len(self._memory)):
            words: npt.NDArray[np.uint64] = np.frombuffer(self._memory[start:end], dtype=np.uint64)
            first = start // registry.BLOCK_BYTES
            blocks += (np.flatnonzero(words[:: registry.BLOCK_BYTES // 8] == magic) + first).tolist()
        found = []
        for block in blocks:
            offset = block * registry.BLOCK_BYTES
            with contextlib.suppress(FormatError):
                header = decode_header(self._memory[offset : offset + HEADER_BYTES], "ring")
                fits = offset + header.descriptor.frame_length <= len(self._memory)
                stamped = (header.place_id, header.sequence) == (self.header.ring_id, offset // registry.BLOCK_BYTES)
                if fits and stamped and not header.descriptor.payload_shift:
                    found.append(entry_of(header.descriptor, offset))
        return np.array(found, dtype=ENTRY_DTYPE)

    def frame(self, offset: int, stored_length: int) -> memoryview:
        """Return a whole frame as it lies."""
        return self._memory[offset : offset + frame_length(stored_length)]

    def payload_at(self, offset: int, name: Digest | None = None) -> memoryview:
        """Return the checked payload of the frame at ``offset``.

        Raises:
            FormatError: no intact frame lies there, or none of partition ``name``.
        """
        where = f"frame at byte {offset} of ring {self.path.name}"
        header = decode_header(self._memory[offset : offset + HEADER_BYTES], where)
        frame = self.frame(offset, header.descriptor.stored_length)
        sequence = offset // registry.BLOCK_BYTES
        descriptor, payload = check_frame(frame, PackId(self.header.ring_id), sequence, where)
        if descriptor.codec != registry.CODEC_IDENTITY:
            raise StructureError(f"{where}: an encoded frame in a ring")
        if name not in (None, descriptor.digest) or digest_of(payload) != descriptor.digest:
            raise DigestMismatchError(f"digest mismatch in {where}")
        return payload

    def offsets(self) -> dict[Digest, list[int]]:
        """Return where frames of each digest lie; their payloads are not checked. Threads may call it together."""
        with self._places_lock:
            if self._places is None:
                self._places = {}
                for name, offset in zip(self.entries["digest"], self.entries["offset"].tolist(), strict=True):
                    self._places.setdefault(Digest(name.tobytes()), []).append(offset)
            return self._places

    def intact(self, name: Digest, length: int) -> tuple[int, memoryview] | None:
        """Return offset and payload of the first intact frame of this partition; None without one."""
        for offset in self.offsets().get(name, []):
            with contextlib.suppress(FormatError):
                payload = self.payload_at(offset, name)
                if len(payload) == length:
                    return offset, payload
        return None

    def manifest(self, entry: CaptureEntry) -> Manifest:
        """Read the manifest of a capture.

        Raises:
            FormatError: it is damaged, or not the one that the entry and the ring are of.
        """
        where = f"manifest in ring {self.path.name}"
        data = bytes(self.payload_at(entry.offset))
        manifest = decode_manifest(data, where)
        header = manifest.header
        if (header.ref.save_id, header.run, header.rank) != (entry.save_id, self.header.run, self.header.rank):
            raise StructureError(f"{where}: it is of another capture than its entry")
        return manifest

    def unlink(self) -> None:
        """Remove the file."""
        with translated("remove", self.path):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give the memory and the lock back. Closing twice is no error."""
        self._memory.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        # Taken out first: by a second close the number may be that of another thread's file.
        descriptor, self._descriptor = self._descriptor, -1
        DESCRIPTORS.close(descriptor)

    def __enter__(self) -> RingReader:
        """Return itself."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close it."""
        self.close()


def _written(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches of the data in which something was written, in whole blocks.

    To look at the others would take memory for them, of which there may be none (SIGBUS).
    """
    end = DATA_OFFSET
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                yield end, size
            # Nothing was written behind this, or the file system does not tell.
            return
        start -= start % registry.BLOCK_BYTES
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        end = min(end + -end % registry.BLOCK_BYTES, size)
        if start < end:
            yield start, end


class RingPack(OpenPack):
    """The ring of a dead process, read as if it were a pack of frames in memory; the reader belongs to its owner."""

    def __init__(self, reader: RingReader) -> None:
        ring, entries = reader.header, reader.entries
        header = PackHeader(PackId(ring.ring_id), len(entries), ring.data_bytes, ring.created_ns, ring.writer)
        super().__init__(PackIndex(header, entries, None), reader.path)
        self._reader = reader

    def stamped(self, sequence: int) -> int:
        """Return what the header of a frame says of its place: in a ring, the number of its block."""
        return int(self.entries["offset"][sequence]) // BLOCK_BYTES

    def read_frame(self, sequence: int, slot: Slot) -> memoryview:  # noqa: ARG002 - as another tier takes it
        """Return frame ``sequence`` where it lies, unchecked."""
        entry = self.entries[sequence]
        return self._reader.frame(int(entry["offset"]), int(entry["stored_length"]))

    def close(self) -> None:
        """Do nothing: it is read again by the next attempt."""
