"""Upload of packs to a remote location in large pieces (SPEC.md §C2)."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import PurePosixPath
from typing import TypeVar

import numpy as np

from asymcheck.config import WRITER
from asymcheck.errors import FormatError, MissingPartitionError, StorageError
from asymcheck.events import emit
from asymcheck.executor import begin
from asymcheck.format import layout, registry
from asymcheck.format.frame import FrameDescriptor, check_frame
from asymcheck.format.pack import (
    ENTRY_DTYPE,
    Entries,
    PackHeader,
    encode_index,
    encode_pack_header,
    entry_length,
    frame_lengths,
)
from asymcheck.storage.pack_index import PackIndex
from asymcheck.storage.remote.pack_reader import read_pack_index
from asymcheck.storage.remote.remote_files import Content, RemoteFiles
from asymcheck.storage.slots import Slot
from asymcheck.storage.throughput import RateLimit
from asymcheck.types import PackId

_T = TypeVar("_T")

ReadFrame = Callable[[int, Slot], FrameDescriptor]
"""Function that reads and checks the frame at an index of the plan, and fills a slot with payload and padding."""


def plan_pack(frames: Sequence[np.void]) -> Entries:
    """Lay out frames, given by their index entries in other packs, in a new pack.

    Header and index are thus known before the first byte is sent.
    """
    entries: Entries = np.array(frames, dtype=ENTRY_DTYPE)
    entries["offset"] = np.cumsum([registry.BLOCK_BYTES, *frame_lengths(entries)[:-1].tolist()])
    return entries


def cut(lengths: Sequence[int], size: int, used: int = 0) -> list[range]:
    """Cut frames into groups of at most ``size`` bytes, or of one frame. The first group has ``used`` bytes before."""
    groups: list[range] = []
    begin = 0
    for number, length in enumerate(lengths):
        if number > begin and used + length > size:
            groups.append(range(begin, number))
            begin, used = number, 0
        used += length
    return [*groups, range(begin, len(lengths))]


class PackUpload:
    """Uploader of packs to one remote location. Its rate limit applies to all uploads together."""

    def __init__(self, files: RemoteFiles, packs: PurePosixPath, uploaded: Callable[[PackIndex], None]) -> None:
        self._files = files
        self._packs = packs
        self._uploaded = uploaded
        self._rate = RateLimit(files.config.bytes_per_s)
        self._streams = threading.Semaphore(files.config.uploads)

    def upload(
        self, entries: Entries, read: ReadFrame, sent: Callable[[int], None], written: Callable[[], None]
    ) -> PackId:
        """Write, check and publish one pack; return its id.

        At most ``uploads`` packs are written at the same time. The next upload starts after the last write of a pack,
        because HDFS needs half a second to complete a file.

        Args:
            entries: frames of the pack, from :func:`plan_pack`.
            read: reads a frame.
            sent: called with the number of payload bytes sent, also in failed attempts.
            written: called after the last write of each attempt, also after a failure.

        Raises:
            StorageError: all attempts failed.
            FormatError, MissingPartitionError: a frame could not be read.
        """
        end = int(entries[-1]["offset"]) + entry_length(entries[-1])
        header = PackHeader(PackId(os.urandom(16)), len(entries), end, time.time_ns(), WRITER)
        final = self._packs / layout.pack_name(header.pack_id)

        @contextlib.contextmanager
        def content(path: PurePosixPath) -> Iterator[Content]:
            emit("remote.pack_begun", path.name)
            with contextlib.ExitStack() as turn:
                turn.enter_context(self._streams)
                turn.callback(written)
                # Read ahead, so that the drive and the location work at the same time.
                with contextlib.closing(ahead(self._pieces(header, entries, read, sent))) as pieces:
                    yield pieces, turn.close

        # An existing file with this random name is this pack, put by an attempt whose answer was lost.
        self._files.put(final, content, partial(self._check, header, entries))
        emit("remote.pack_renamed", final.name, end)
        # The next push need not read it.
        self._uploaded(PackIndex(header, entries, None))
        return header.pack_id

    def _pieces(
        self, header: PackHeader, entries: Entries, read: ReadFrame, sent: Callable[[int], None]
    ) -> Iterator[bytes]:
        """Yield the bytes of a pack in pieces. Frames are read into the buffer of a piece, which is copied once."""
        index = encode_index(header.pack_id, entries)
        lengths: list[int] = frame_lengths(entries).tolist()
        groups = cut(lengths, self._files.config.piece_bytes, registry.BLOCK_BYTES)
        # The first piece includes the header. The index follows the last piece.
        memory = Slot(registry.BLOCK_BYTES + max(sum(lengths[group.start : group.stop]) for group in groups)).memory
        memory[: registry.BLOCK_BYTES] = encode_pack_header(header)
        offset = registry.BLOCK_BYTES
        for sequences in groups:
            for sequence in sequences:
                stored = int(entries[sequence]["stored_length"])
                slot = Slot.inside(memory[offset : offset + lengths[sequence]], stored)
                slot.stamp_header(read(sequence, slot), header.pack_id, sequence)
                offset += lengths[sequence]
                sent(stored)
            is_last = sequences.stop == len(entries)
            piece = b"".join((memory[:offset], index)) if is_last else bytes(memory[:offset])
            self._rate.wait(len(piece))
            yield piece
            offset = 0

    def _check(self, header: PackHeader, entries: Entries, path: PurePosixPath, written: int) -> None:
        """Check length, header and index of an uploaded pack; with ``read_back``, also every frame."""
        emit("remote.pack_closed", path.name, written)
        where = self._files.url(path)
        entry = self._files.stat(path)
        size = None if entry is None else entry.size
        if size != written or written != header.pack_length:
            raise StorageError(f"{where}: the file has {size} of {header.pack_length} bytes after the upload")
        try:
            stored = read_pack_index(self._files, path, header.pack_id)
            if stored.damage or stored.header != header or stored.entries.tobytes() != entries.tobytes():
                raise StorageError(f"{where}: header and index read back differ from those written")
            for sequence, frame in enumerate(entries if self._files.config.read_back else ()):
                data, _ = self._files.read_range(path, int(frame["offset"]), entry_length(frame))
                check_frame(data, header.pack_id, sequence, f"frame {sequence} of {where}")
        except (FormatError, MissingPartitionError) as error:
            raise StorageError(f"{where}: the uploaded pack is damaged: {error}") from error
        emit("remote.pack_checked", path.name)


def ahead(items: Iterator[_T]) -> Generator[_T, None, None]:
    """Yield the items of ``items``, each prefetched by a thread. Close the generator to stop the thread.

    Raises:
        AsymcheckError: ``items`` raised this error.
    """
    item_future = begin(partial(next, items, None), "push-read")
    try:
        while (item := item_future.result()) is not None:
            item_future = begin(partial(next, items, None), "push-read")
            yield item
    finally:
        wait([item_future])
