"""Test divergence: different replicas on two machines are reported, values equal by chance are not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.distributed.replica_assignment import (
    NOBODY,
    DivergedPartition,
    DivergenceDetector,
    ReplicaAssigner,
    decode_shares,
    encode_rows,
)
from asymcheck.format.spans import spans_of

STORES = (0, 0, 1, 1)
"""Stores of four ranks."""
State = Sequence[Sequence[int]]
"""Content of each partition, for each rank; all ranks have the same partitions."""


def looked(parity: DivergenceDetector, state: State, step: int) -> list[list[DivergedPartition]]:
    """Report a state in which partition n of each rank is at index n."""
    places = [np.arange(len(rank), dtype=np.uint64) for rank in state]
    keys = [np.array([1000 * number + one for number, one in enumerate(rank)], dtype=np.uint64) for rank in state]
    return parity.diverged(places, keys, STORES, step)


def expected(states: Sequence[State]) -> list[set[int]]:
    """Return the expected reports of each round, computed in another way."""
    reports = []
    were, copies = dict[int, int](), set[int]()
    for state in states:
        lost = set()
        now = dict[int, int]()
        for place in range(len(state[0])):
            values = [rank[place] for rank in state]
            if len(set(values)) == 1:
                now[place] = values[0]
                if place in were and were[place] != values[0]:
                    copies.add(place)
            else:
                first = values[0]
                # The ranks of the first machine detect it themselves.
                if place in copies and any(value != first for value in values[2:]):
                    lost.add(place)
                copies.discard(place)
        # A partition that was not equal last time is not a replica.
        copies &= now.keys()
        reports.append(lost)
        were = now
    return reports


ROUND = st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=3), min_size=4, max_size=4)
EQUAL = st.lists(st.integers(0, 3), min_size=3, max_size=3).map(lambda one: [one] * 4)


@given(st.lists(st.one_of(EQUAL, ROUND), min_size=1, max_size=8))
def test_diverged_replicas_are_found(states: list[State]) -> None:
    """Test against a plain search through all rounds."""
    parity = DivergenceDetector()
    for step, (state, places) in enumerate(zip(states, expected(states), strict=True)):
        reports = looked(parity, state, step)
        assert {one.number for rank in reports for one in rank} == places
        for rank, ones in enumerate(reports):
            for one in ones:
                assert STORES[rank] != STORES[one.other]
                assert state[rank][one.number] != state[one.other][one.number]


def test_divergence_names_ranks_and_last_equal_step() -> None:
    """Test a divergence on rank 3 only."""
    parity = DivergenceDetector()
    assert looked(parity, [[1, 1]] * 4, 10) == [[]] * 4
    assert looked(parity, [[2, 1]] * 4, 20) == [[]] * 4
    state = [[3, 2], [3, 2], [3, 2], [4, 9]]
    # The second partition has never changed, so it may have been equal by chance.
    assert looked(parity, state, 30) == [[], [], [], [DivergedPartition(0, 0, 20)]]
    assert looked(parity, state, 40) == [[]] * 4


def test_common_partitions_are_stored_everywhere_and_pushed_once() -> None:
    """Test that partitions of only one store are never pushed by another store."""
    keys = [[1, 2, 10], [1, 2, 11], [1, 2, 12], [1, 2, 12]]
    reports = [
        encode_rows([key.to_bytes(8, "little") for key in one], [100] * 3, [bytes([n] * 8) for n in range(3)])
        for one in keys
    ]
    verdicts = ReplicaAssigner([spans_of([0, 1]), spans_of([2, 3])])(reports, 0)
    shares = [decode_shares(verdict, 3) for verdict in verdicts]
    assert [set(shares[0].owners[:2]), set(shares[1].owners[:2])] == [{0, 1}] * 2
    assert [set(shares[2].owners[:2]), set(shares[3].owners[:2])] == [{2, 3}] * 2
    assert [one.owners[2] for one in shares] == [NOBODY, NOBODY, *([shares[2].owners[2]] * 2)]
    for number in range(2):
        assert shares[0].elsewhere[number] == shares[1].elsewhere[number] != shares[2].elsewhere[number]
    assert [one.elsewhere[2] for one in shares] == [False] * 4
    assert [one.differences for one in shares] == [[]] * 4
