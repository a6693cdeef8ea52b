"""Test digests: known answers fix the hash, its seed and its byte order."""

import pytest
import xxhash

from asymcheck.format.digest import ZERO_DIGEST, digest, sum8

KNOWN = {
    b"": "99aa06d3014798d86001c324468d497f",
    b"abc": "06b05ab6733a618578af5f94892f3950",
}
"""Answers from the documentation of the reference implementation: xxh3-128, seed 0, canonical form."""


@pytest.mark.parametrize(("data", "expected"), KNOWN.items())
def test_known_answers(data: bytes, expected: str) -> None:
    """Test that the digest is xxh3-128 with seed 0 in canonical order."""
    assert digest(data).hex() == expected


@pytest.mark.parametrize("length", [0, 1, 16, 17, 128, 129, 240, 241, 1 << 20])
def test_digest_is_big_endian_for_every_length(length: int) -> None:
    """Test each length class of the hash: the most significant byte comes first."""
    data = bytes(range(256)) * (length // 256 + 1)
    expected = xxhash.xxh3_128_intdigest(data[:length], seed=0).to_bytes(16, "big")
    assert digest(data[:length]) == expected
    assert sum8(data[:length]) == expected[8:]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_all_kinds_of_buffers_give_the_same(kind: type) -> None:
    """Test bytes, a bytearray and a memoryview."""
    assert digest(kind(b"abc" * 100)) == digest(b"abc" * 100)


def test_the_zero_digest_has_the_size_of_a_digest() -> None:
    """Test that the digest of no base has 16 zero bytes."""
    assert bytes(len(digest(b""))) == ZERO_DIGEST
