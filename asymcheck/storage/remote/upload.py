"""A pack on its way to a remote location, frame by frame, in large pieces (SPEC.md §8.6)."""

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
from asymcheck.errors import FormatError, StorageError
from asymcheck.events import emit
from asymcheck.executor import begin
from asymcheck.format import layout, registry
from asymcheck.format.frame import FrameDescriptor, check_frame, frame_length
from asymcheck.format.pack import ENTRY_DTYPE, Entries, PackHeader, encode_index, encode_pack_header, entry_length
from asymcheck.storage.remote.pack_reader import read_pack_index
from asymcheck.storage.remote.remote_files import RemoteFiles
from asymcheck.storage.remote.throughput import RateLimit
from asymcheck.storage.slots import Slot
from asymcheck.types import PackId

_T = TypeVar("_T")

ReadFrame = Callable[[int, Slot], FrameDescriptor]
"""Puts payload and padding of the frame with that place in the plan where they belong, checked."""


def plan_pack(frames: Sequence[np.void]) -> Entries:
    """Lay out frames, given by their index entries in other packs, in a new pack.

    Header and index are then known before the first byte is sent.
    """
    entries: Entries = np.array(frames, dtype=ENTRY_DTYPE)
    lengths = [frame_length(int(stored)) for stored in entries["stored_length"]]
    entries["offset"] = np.cumsum([registry.BLOCK_BYTES, *lengths[:-1]])
    return entries


def _cut(entries: Entries, size: int) -> list[tuple[range, int]]:
    """Cut a pack into pieces of at most ``size`` bytes, or of one frame: which frames, and the bytes of each.

    The first begins with the header, and the index comes behind the last.
    """
    found: list[tuple[range, int]] = []
    begin, length = 0, registry.BLOCK_BYTES
    for sequence, stored in enumerate(entries["stored_length"].tolist()):
        more = frame_length(stored)
        if sequence > begin and length + more > size:
            found.append((range(begin, sequence), length))
            begin, length = sequence, 0
        length += more
    return [*found, (range(begin, len(entries)), length)]


class PackUpload:
    """Uploads packs to the folder ``packs`` of one location."""

    def __init__(self, files: RemoteFiles, packs: PurePosixPath, rate: RateLimit) -> None:
        self._files = files
        self._packs = packs
        self._rate = rate
        self._streams = threading.Semaphore(files.config.uploads)

    def upload(
        self, entries: Entries, read: ReadFrame, sent: Callable[[int], None], written: Callable[[], None]
    ) -> tuple[PackHeader, Entries]:
        """Write one pack, when it is its turn, and give it its name.

        At most ``uploads`` packs of all threads are written at the same time. A pack's turn ends with its last
        byte: to complete a file takes HDFS half a second, in which the next one is written.

        Args:
            entries: the frames of the pack, as :func:`plan_pack` lays them out.
            read: gives it the frames.
            sent: called with payload bytes, also after failed attempts.
            written: called when a turn has ended, also after a failure.

        Raises:
            StorageError: it failed as often as is allowed.
            FormatError, MissingPartitionError: a frame could not be read.
        """
        end = int(entries[-1]["offset"]) + entry_length(entries[-1])
        header = PackHeader(PackId(os.urandom(16)), len(entries), end, time.time_ns(), WRITER)
        final = self._packs / layout.pack_name(header.pack_id)

        def attempt(temporary: PurePosixPath) -> None:
            emit("remote.pack_begun", temporary.name)
            with contextlib.ExitStack() as turn:
                turn.enter_context(self._streams)
                turn.callback(written)
                # Read ahead: the device and the location are busy at the same time.
                with contextlib.closing(ahead(self._pieces(header, entries, read, sent))) as pieces:
                    count = self._files.write(temporary, pieces, turn.close)
            emit("remote.pack_closed", temporary.name, count)
            self._check(temporary, header, entries, count)
            emit("remote.pack_checked", temporary.name)
            # The name is random, so a file that has it is this pack, named by an attempt whose answer was lost.
            self._files.publish(temporary, final)
            emit("remote.pack_renamed", final.name, count)

        self._files.attempt(final, attempt, random_bytes=16)
        return header, entries

    def _pieces(
        self, header: PackHeader, entries: Entries, read: ReadFrame, sent: Callable[[int], None]
    ) -> Iterator[bytes]:
        """Yield the bytes of a pack in pieces; each frame is read into its place in a piece, which is copied once."""
        index = encode_index(header.pack_id, entries)
        groups = _cut(entries, self._files.config.piece_bytes)
        memory = Slot(max(length for _, length in groups)).memory
        memory[: registry.BLOCK_BYTES] = encode_pack_header(header)
        at = registry.BLOCK_BYTES
        for sequences, _ in groups:
            for sequence in sequences:
                stored = int(entries[sequence]["stored_length"])
                slot = Slot.inside(memory[at : at + frame_length(stored)], stored)
                slot.stamp_header(read(sequence, slot), header.pack_id, sequence)
                at += frame_length(stored)
                sent(stored)
            is_last = sequences.stop == len(entries)
            piece = b"".join((memory[:at], index)) if is_last else bytes(memory[:at])
            self._rate.wait(len(piece))
            yield piece
            at = 0

    def _check(self, temporary: PurePosixPath, header: PackHeader, entries: Entries, written: int) -> None:
        """Read back what decides whether the pack can be read: its length, header and index, or every byte."""
        where = self._files.url(temporary)
        found = self._files.stat(temporary)
        size = None if found is None else found.size
        if size != written or written != header.pack_length:
            raise StorageError(f"{where}: {header.pack_length} bytes were to be written, {size} are there")
        try:
            back = read_pack_index(self._files, temporary, header.pack_id)
            if back.damage or back.header != header or back.entries.tobytes() != entries.tobytes():
                raise StorageError(f"{where}: header and index were read back other than they were written")
            for sequence, entry in enumerate(entries if self._files.config.read_back else ()):
                data, _ = self._files.read_range(temporary, int(entry["offset"]), entry_length(entry))
                check_frame(data, header.pack_id, sequence, f"frame {sequence} of {where}")
        except FormatError as error:
            raise StorageError(f"{where}: it was read back with damage: {error}") from error


def ahead(items: Iterator[_T]) -> Generator[_T, None, None]:
    """Yield what ``items`` yields, made by threads, one ahead. Close it: then no thread makes anything any more.

    Raises:
        AsymcheckError: what ``items`` raised, in its place.
    """
    made = begin(partial(next, items, None), "push-read")
    try:
        while (item := made.result()) is not None:
            made = begin(partial(next, items, None), "push-read")
            yield item
    finally:
        wait([made])
