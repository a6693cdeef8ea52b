"""Reading of remote packs by few large range requests, with prefetch."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import PurePosixPath

from asymcheck.errors import MissingPartitionError, TruncatedError
from asymcheck.format.pack import entry_length
from asymcheck.storage.interfaces import OpenPack
from asymcheck.storage.pack_index import PackIndex, find_frames
from asymcheck.storage.remote.client_interface import OpenedFile
from asymcheck.storage.remote.remote_files import RemoteFiles
from asymcheck.storage.slots import Slot, SlotPool
from asymcheck.types import PackId


def read_pack_index(files: RemoteFiles, path: PurePosixPath, pack_id: PackId) -> PackIndex:
    """Read header and index of a pack.

    Raises:
        FileNotFoundError: there is no such pack.
        FormatError: header or index is damaged and no frame was found, or the pack needs a newer program.
        RemoteUnreachableError: the location does not answer.
    """
    kept = OpenedFile()
    return find_frames(lambda offset, length: files.read_range(path, offset, length, kept), path.name, pack_id)


@dataclasses.dataclass(eq=False)
class _Piece:
    """Adjacent frames of a pack that are read by one request."""

    pack: RemotePack
    start: int
    end: int
    frames: set[int]
    loading: Future[memoryview] | None = None
    next: _Piece | None = None  # piece that is expected next, also of another pack


class ReadAhead:
    """Prefetch of pieces, in the order in which they are expected."""

    def __init__(self, files: RemoteFiles) -> None:
        """Read with the threads of ``files``."""
        self.threads = files.readers
        self.memory = SlotPool(files.config.reads, files.config.piece_bytes)
        self.lock = threading.Lock()
        """Guards all pieces."""
        self._reads = files.config.reads
        self._last: _Piece | None = None

    def expect(self, pieces: Iterable[_Piece]) -> None:
        """Queue ``pieces`` after those that were expected before."""
        with self.lock:
            for piece in pieces:
                if self._last is not None:
                    self._last.next = piece
                self._last = piece

    def load_from(self, piece: _Piece | None) -> None:
        """Begin to read a piece and the following ones."""
        with self.lock:
            for _ in range(self._reads):
                if piece is None:
                    return
                if piece.loading is None and piece.frames:
                    piece.loading = self.threads.submit(piece.pack.read, piece.start, piece.end)
                piece = piece.next

    def close(self) -> None:
        """Stop the prefetch and release its memory."""
        self.threads.close()
        self.memory.let_go()


class RemotePack(OpenPack):
    """Complete remote pack that is open for reading. Thread-safe."""

    def __init__(
        self, files: RemoteFiles, paths: Callable[[], Iterator[PurePosixPath]], index: PackIndex, reading: ReadAhead
    ) -> None:
        """Read the pack with this index from the first of ``paths`` that exists; ``reading`` prefetches."""
        super().__init__(index, next(paths()))
        self._paths = paths
        self._files = files
        self._reading = reading
        self._kept = OpenedFile()
        # Pieces of the frames that were not read yet.
        self._pieces: dict[int, _Piece] = {}

    def _span(self, sequence: int) -> tuple[int, int]:
        entry = self.entries[sequence]
        offset = int(entry["offset"])
        return offset, offset + entry_length(entry)

    def expect(self, frames: Sequence[int]) -> None:
        """Announce the frames to be read. Adjacent frames are prefetched together."""
        config = self._files.config
        pieces: list[_Piece] = []
        for sequence in sorted(set(frames)):
            start, end = self._span(sequence)
            last = pieces[-1] if pieces else None
            if last is not None and start - last.end <= config.gap_bytes and end - last.start <= config.piece_bytes:
                last.end = end
                last.frames.add(sequence)
            else:
                pieces.append(_Piece(self, start, end, {sequence}))
        self.close()
        self._pieces = {sequence: piece for piece in pieces for sequence in piece.frames}
        self._reading.expect(pieces)

    def read_frame(self, sequence: int, slot: Slot) -> memoryview:  # noqa: ARG002 - used by other tiers
        """Return frame ``sequence`` in the prefetch memory, not in ``slot``; see :meth:`OpenPack.read_frame`."""
        start, end = self._span(sequence)
        piece = self._pieces.pop(sequence, None)
        self._reading.load_from(piece)
        if piece is None or (loading := piece.loading) is None:
            data, base = self.read(start, end), start
        else:
            data, base = loading.result(), piece.start
        frame = data[start - base : end - base]
        if len(frame) < end - start:
            name = f"frame {sequence} of pack {self.path.name}"
            raise TruncatedError(f"{name}: the file ends after {len(frame)} of {end - start} bytes")
        if piece is not None:
            with self._reading.lock:
                piece.frames.discard(sequence)
                if not piece.frames:
                    piece.loading = None
        return frame

    def read(self, start: int, end: int) -> memoryview:
        """Return the bytes between two positions, fewer at the end of the file."""
        # The pack may have been renamed since it was opened.
        for path in self._paths():
            with contextlib.suppress(FileNotFoundError):
                return self._files.read_range(path, start, end - start, self._kept, self._reading.memory)[0]
        raise MissingPartitionError(f"pack {self.path.name} was removed while it was being read")

    def close(self) -> None:
        """Discard the prefetched pieces."""
        with self._reading.lock:
            for piece in self._pieces.values():
                piece.frames, piece.loading = set(), None
            self._pieces = {}
