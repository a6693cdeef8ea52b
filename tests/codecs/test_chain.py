"""Test that missing bases are searched once, for any number of copies of their dependents."""

import itertools

import pytest

from asymcheck.codecs.container import Segment
from asymcheck.codecs.decode import FrameReader, base_reader, decode_checked
from asymcheck.codecs.encode import encode_delta
from asymcheck.errors import BaseDamagedError, ChecksumError
from asymcheck.format import registry
from asymcheck.format.digest import digest
from asymcheck.types import Digest

COPIES = 5


def test_copies_of_frames_do_not_multiply_where_the_last_base_is_damaged() -> None:
    """Test five copies in each of eight packs, which are forty frames and not five to the power of eight."""
    plain = [bytes([step]) * 64 for step in range(registry.DELTA_DEPTH_MAX + 1)]
    names = [digest(one) for one in plain]
    deltas = {
        digest(one): encode_delta(digest(one), memoryview(one), [Segment(64, 4)], digest(base), memoryview(base))
        for one, base in itertools.pairwise(plain)
    }
    read: list[Digest] = []

    def copies_of(name: Digest) -> list[FrameReader]:
        def copy() -> tuple:  # type: ignore[type-arg]  # of one frame, as FrameReader has it
            read.append(name)
            if name == names[-1]:
                raise ChecksumError("payload checksum mismatch")
            return deltas[name].descriptor, memoryview(b"".join(deltas[name].parts)), "frame"

        return [copy] * COPIES

    wanted = deltas[names[0]]
    with pytest.raises(BaseDamagedError, match="payload checksum mismatch"):
        decode_checked(names[0], wanted.descriptor, memoryview(b"".join(wanted.parts)), "frame", base_reader(copies_of))
    assert len(read) == COPIES * registry.DELTA_DEPTH_MAX
