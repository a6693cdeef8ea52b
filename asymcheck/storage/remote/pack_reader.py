"""Reading of remote packs by few large range requests, with prefetch."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import PurePosixPath

from asymcheck.errors import MissingPartitionError, TruncatedError
from asymcheck.format.pack import entry_length
from asymcheck.storage.interfaces import OpenPack
from asymcheck.storage.pack_index import PackIndex, find_frames
from asymcheck.storage.remote.ranges import OpenedFile, RangeMemory
from asymcheck.storage.remote.remote_files import RemoteFiles
from asymcheck.storage.slots import Slot
from asymcheck.types import PackId


def read_pack_index(files: RemoteFiles, path: PurePosixPath, pack_id: PackId) -> PackIndex:
    """Read header and index of a pack.

    Raises:
        MissingPartitionError: there is no such pack.
        FormatError: header or index is damaged and no frame was found, or the pack needs a newer program.
        RemoteUnreachableError: the location does not answer.
    """
    kept = OpenedFile()
    try:
        return find_frames(lambda offset, length: files.read_range(path, offset, length, kept), path.name, pack_id)
    except FileNotFoundError as error:
        if files.stat(path) is None:
            raise MissingPartitionError(f"pack {path.name} does not exist in {files.location}") from error
        raise MissingPartitionError(f"pack {path.name} was replaced during the read in {files.location}") from error


@dataclasses.dataclass(eq=False)
class _Piece:
    """Adjacent frames that are read by one request."""

    start: int
    end: int
    frames: set[int]
    loading: Future[memoryview] | None = None


class ReadAhead:
    """Prefetch of pieces, continuing at the end of a pack with the pack that is expected next."""

    def __init__(self, files: RemoteFiles) -> None:
        """Read with the threads of ``files``."""
        self.threads = files.readers
        self.memory = RangeMemory(files.config.piece_bytes, files.config.reads)
        self._last: RemotePack | None = None
        self._lock = threading.Lock()

    def follow(self, pack: RemotePack) -> None:
        """Queue ``pack`` after the packs that were announced before."""
        with self._lock:
            last, self._last = self._last, pack
        # Clear the link first, so that no cycle arises if a pack is expected again.
        pack.next = None
        if last is not None and last is not pack:
            last.next = pack

    def close(self) -> None:
        """Stop the prefetch and release its memory."""
        self.threads.shutdown(cancel_futures=True)
        self.memory.let_go()


class RemotePack(OpenPack):
    """Complete remote pack that is open for reading. Thread-safe."""

    def __init__(
        self, files: RemoteFiles, paths: Callable[[], Iterator[PurePosixPath]], index: PackIndex, reading: ReadAhead
    ) -> None:
        """Read the pack with this index from the first of ``paths`` that exists; ``reading`` prefetches."""
        super().__init__(index, next(paths()))
        self.next: RemotePack | None = None
        """Pack that is expected next."""
        self._paths = paths
        self._files = files
        self._reading = reading
        self._kept = OpenedFile()
        self._pieces: list[_Piece] = []
        self._piece_of: dict[int, int] = {}
        self._lock = threading.Lock()

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
                pieces.append(_Piece(start, end, {sequence}))
        with self._lock:
            self._pieces = pieces
            self._piece_of = {sequence: number for number, piece in enumerate(pieces) for sequence in piece.frames}
        self._reading.follow(self)

    def read_frame(self, sequence: int, slot: Slot) -> memoryview:  # noqa: ARG002 - used by other tiers
        """Return frame ``sequence`` in the prefetch memory, not in ``slot``; see :meth:`OpenPack.read_frame`."""
        start, end = self._span(sequence)
        with self._lock:
            number = self._piece_of.pop(sequence, None)
            piece = None if number is None else self._pieces[number]
        if number is not None:
            self._load_from(number)
        if piece is None or piece.loading is None:
            data, base = self._read(start, end), start
        else:
            data, base = piece.loading.result(), piece.start
        frame = data[start - base : end - base]
        if len(frame) < end - start:
            name = f"frame {sequence} of pack {self.path.name}"
            raise TruncatedError(f"{name}: the file ends after {len(frame)} of {end - start} bytes")
        if piece is not None:
            with self._lock:
                piece.frames.discard(sequence)
                if not piece.frames:
                    piece.loading = None
        return frame

    def _load_from(self, number: int) -> None:
        """Start to read a piece and the following pieces, also in the following packs."""
        pack, count = self, self._files.config.reads
        while count:
            count = pack._load(number, count)
            if pack.next is None:
                return
            pack, number = pack.next, 0

    def _load(self, number: int, count: int) -> int:
        """Start to read up to ``count`` pieces from ``number`` on; return how many more may be started."""
        with self._lock:
            pieces = self._pieces[number : number + count]
            for piece in pieces:
                if piece.loading is None and piece.frames:
                    piece.loading = self._reading.threads.submit(self._read, piece.start, piece.end)
        return count - len(pieces)

    def _read(self, start: int, end: int) -> memoryview:
        # The pack may have been renamed since it was opened.
        for path in self._paths():
            with contextlib.suppress(FileNotFoundError):
                return self._files.read_range(path, start, end - start, self._kept, self._reading.memory)[0]
        raise MissingPartitionError(f"pack {self.path.name} was removed while it was being read")

    def close(self) -> None:
        """Discard the prefetched pieces."""
        with self._lock:
            self._pieces, self._piece_of = [], {}
