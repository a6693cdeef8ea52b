"""Test that vectorised sets of digests behave like dicts, for any prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.format.digest_set import DigestSet, as_column, has_two_values
from asymcheck.types import Digest

# Use few first and second halves, so that equal prefixes and duplicates are common.
_HALVES = st.sampled_from([bytes(8), b"\0" * 7 + b"\1", b"a" * 8, b"\xff" * 8, b"a" * 7 + b"\0"])
_ONE = st.builds(lambda first, second: Digest(first + second), _HALVES, _HALVES)
_FEW = st.lists(_ONE, max_size=12)
_MANY = st.lists(st.binary(min_size=16, max_size=16).map(Digest), max_size=40)


@pytest.mark.slow(quick=["3"])
@pytest.mark.parametrize("repeated", [1, 3])
@given(digests=_FEW | _MANY, sought=_FEW | _MANY)
def test_members_are_found_and_nothing_else(repeated: int, digests: list[Digest], sought: list[Digest]) -> None:
    """Test that every member has one number, which returns the digest, and that others have none."""
    given_digests = digests * repeated
    numbers = DigestSet(as_column(given_digests))
    assert len(numbers) == len(set(digests))
    for digest, number in zip(sought + digests, numbers.numbers(as_column(sought + digests)).tolist(), strict=True):
        assert (number >= 0) == (digest in digests)
        assert numbers.number(digest) == number
        if number >= 0:
            assert numbers[number] == digest
            assert numbers.first[number] == given_digests.index(digest)


@given(pairs=st.lists(st.tuples(_ONE, st.integers(0, 2)), max_size=12))
def test_two_values_of_one_digest_are_seen(pairs: list[tuple[Digest, int]]) -> None:
    """Test any order, and any number of digests with equal prefixes."""
    expected = len(set(pairs)) > len({digest for digest, _ in pairs})
    digests = as_column([digest for digest, _ in pairs])
    assert has_two_values(digests, np.array([value for _, value in pairs], dtype=np.int64)) == expected
