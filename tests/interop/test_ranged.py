"""A file made of reads by position does what a file with the same bytes does."""

from __future__ import annotations

import io
import random

import pytest

from asymcheck.interop.ranged import RangedFile

DATA = bytes(range(256)) * 3


def ranged(data: bytes = DATA) -> RangedFile:
    """A file that fails when more is asked for than there is, or nothing."""

    def read_at(offset: int, count: int) -> bytes:
        assert count > 0
        assert offset + count <= len(data)
        return data[offset : offset + count]

    return RangedFile(len(data), read_at)


@pytest.mark.parametrize("seed", range(20))
def test_it_reads_as_another_file_does(seed: int) -> None:
    """Whatever is done in whatever order, also past the end."""
    chosen = random.Random(seed)
    ours, theirs = ranged(), io.BytesIO(DATA)
    for _ in range(50):
        action = chosen.choice(("read", "readinto", "rest", "set", "current", "end"))
        count = chosen.randint(0, 400)
        if action == "read":
            assert ours.read(count) == theirs.read(count)
        elif action == "readinto":
            mine, other = bytearray(count), bytearray(count)
            assert ours.readinto(memoryview(mine)) == theirs.readinto(other)
            assert mine == other
        elif action == "rest":
            assert ours.read() == theirs.read()
        elif action == "set":
            assert ours.seek(count) == theirs.seek(count)
        elif action == "current":
            assert ours.seek(count, io.SEEK_CUR) == theirs.seek(count, io.SEEK_CUR)
        else:
            assert ours.seek(-count, io.SEEK_END) == theirs.seek(-count, io.SEEK_END)
        assert ours.tell() == theirs.tell()


def test_what_it_says_of_itself() -> None:
    """Libraries ask before they read."""
    assert (ranged().readable(), ranged().seekable(), ranged().writable()) == (True, True, False)
    assert ranged(b"").read() == b""
