"""Test replica assignment: the writer of each common partition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.distributed.replica_assignment import NOBODY, decode_shares, encode_rows, share_out

Held = Sequence[Sequence[tuple[int, int]]]
"""Key and length of the partitions, for each rank."""


def shared(held: Held) -> list[list[int]]:
    """Return the owners of all partitions of all ranks."""
    reports = [encode_rows([key.to_bytes(8, "little") for key, _ in one], [size for _, size in one]) for one in held]
    return [decode_shares(owners, len(owners) // 4).owners for owners in share_out(reports)]


KEYS = st.lists(st.integers(0, 12), max_size=8, unique=True)


@given(st.lists(KEYS, min_size=1, max_size=6))
def test_each_common_partition_has_one_owner(keys: list[list[int]]) -> None:
    """Test that partitions of only one rank have no owner."""
    owners = shared([[(key, 100 + key) for key in one] for one in keys])
    for key in range(13):
        having = {rank for rank, one in enumerate(keys) if key in one}
        found = {owners[rank][keys[rank].index(key)] for rank in having}
        assert len(found) <= 1
        assert found <= (having if len(having) > 1 else {NOBODY})


@pytest.mark.parametrize(("ranks", "group"), [(2, 2), (8, 8), (8, 2), (12, 4)])
def test_all_write_about_as_much(ranks: int, group: int) -> None:
    """Test groups of equal ranks with partitions of many lengths: shares differ by a part of one partition."""
    sizes = np.random.default_rng(5).integers(1, 1000, 160).tolist()
    held = [[(1000 * (rank // group) + number, size) for number, size in enumerate(sizes)] for rank in range(ranks)]
    owners = shared(held)
    loads = [sum(size for (_, size), owner in zip(held[r], owners[r], strict=True) if owner == r) for r in range(ranks)]
    assert sum(loads) == sum(sizes) * ranks // group
    assert max(loads) - min(loads) <= max(sizes) / 4


def test_partitions_that_others_have_in_other_company_do_not_all_go_to_the_first() -> None:
    """Test a common partition of each pair of sixteen ranks."""
    pairs = [(one, other) for one in range(16) for other in range(one + 1, 16)]
    held = [[(number, 10) for number, pair in enumerate(pairs) if rank in pair] for rank in range(16)]
    owners = shared(held)
    loads = [sum(owner == rank for owner in owners[rank]) for rank in range(16)]
    assert sum(loads) == len(pairs)
    assert max(loads) <= 13
