"""Flip bits on disk, or in read data, which is equivalent and faster."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from asymcheck.format.pack import decode_pack_header
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.storage.nvme import Files


class FlippingFiles(Files):
    """Files that read as if one bit of one file were flipped; the file itself does not change."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.bit = 0

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> int:
        """Read, then flip the bit."""
        count = super().pread(descriptor, buffers, offset, path)
        place = self.bit // 8 - offset
        if path == self.path and 0 <= place < count:
            for buffer in buffers:
                if place < len(buffer):
                    buffer[place] ^= 1 << self.bit % 8
                    break
                place -= len(buffer)
        return count


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file on disk, counted from the end if negative; the same call undoes the flip."""
    offset, bit = divmod(bit, 8)
    with path.open("r+b") as file:
        place = file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


@contextlib.contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """Flip one bit on disk for the ``with`` block."""
    flip(path, bit)
    try:
        yield
    finally:
        flip(path, bit)


@contextlib.contextmanager
def content(path: Path, data: bytes) -> Iterator[None]:
    """Replace the content of a file for the ``with`` block."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


def covered_bits(path: Path) -> range:
    """Return the bits of a file that the format covers: all except for bytes after a pack in its file."""
    if path.suffix != ".pack":
        return range(path.stat().st_size * 8)
    with path.open("rb") as file:
        return range(decode_pack_header(file.read(BLOCK_BYTES), path.name).pack_length * 8)
