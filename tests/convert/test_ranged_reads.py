"""Test that a ranged file behaves like a file with the same bytes."""

from __future__ import annotations

import io
import random

import pytest

from asymcheck.convert.torch_file import _RangedFile

DATA = bytes(range(256)) * 3
START = 50


class Source:
    """A file that fails on reads beyond the range, and on empty reads."""

    size = START + len(DATA) + 100

    def __init__(self, length: int) -> None:
        self.length = length

    def read(self, start: int, target: memoryview) -> None:
        """Fill the target."""
        assert START <= start < start + len(target) <= START + self.length
        target[:] = DATA[start - START : start - START + len(target)]


def ranged(length: int = len(DATA)) -> _RangedFile:
    """Return the first bytes of the data, as a range in the middle of a file."""
    return _RangedFile(Source(length), START, length)  # type: ignore[arg-type]  # does what the test needs


@pytest.mark.parametrize("seed", range(20))
def test_ranged_file_reads_like_a_file(seed: int) -> None:
    """Test any sequence of operations, also beyond the end."""
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


def test_ranged_file_capabilities() -> None:
    """Test the properties that libraries check before a read."""
    assert (ranged().readable(), ranged().seekable(), ranged().writable()) == (True, True, False)
    assert ranged(0).read() == b""
