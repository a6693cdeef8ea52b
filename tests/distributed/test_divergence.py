"""Divergence: replicas on two machines that become different are reported, but not values equal by chance."""

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
"""Of four ranks."""
State = Sequence[Sequence[int]]
"""Of each rank, what is in each partition; all have the same partitions."""


def looked(parity: DivergenceDetector, state: State, step: int) -> list[list[DivergedPartition]]:
    """Report a state in which partition n of each rank lies in place n."""
    places = [np.arange(len(rank), dtype=np.uint64) for rank in state]
    keys = [np.array([1000 * number + one for number, one in enumerate(rank)], dtype=np.uint64) for rank in state]
    return parity.diverged(places, keys, STORES, step)


def expected(states: Sequence[State]) -> list[set[int]]:
    """Return the places that are told at each round, found in another way."""
    told = []
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
                # Within the machine of the first rank its own ranks find it out.
                if place in copies and any(value != first for value in values[2:]):
                    lost.add(place)
                copies.discard(place)
        # What was not equal the last time is no copy of that.
        copies &= now.keys()
        told.append(lost)
        were = now
    return told


ROUND = st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=3), min_size=4, max_size=4)
EQUAL = st.lists(st.integers(0, 3), min_size=3, max_size=3).map(lambda one: [one] * 4)


@given(st.lists(st.one_of(EQUAL, ROUND), min_size=1, max_size=8))
def test_diverged_replicas_are_found(states: list[State]) -> None:
    """As by a plain search through all rounds."""
    parity = DivergenceDetector()
    for step, (state, places) in enumerate(zip(states, expected(states), strict=True)):
        told = looked(parity, state, step)
        assert {one.number for rank in told for one in rank} == places
        for rank, ones in enumerate(told):
            for one in ones:
                assert STORES[rank] != STORES[one.other]
                assert state[rank][one.number] != state[one.other][one.number]


def test_divergence_names_ranks_and_last_equal_step() -> None:
    """On rank 3 alone."""
    parity = DivergenceDetector()
    assert looked(parity, [[1, 1]] * 4, 10) == [[]] * 4
    assert looked(parity, [[2, 1]] * 4, 20) == [[]] * 4
    state = [[3, 2], [3, 2], [3, 2], [4, 9]]
    # The second has never changed: it may have been equal by chance.
    assert looked(parity, state, 30) == [[], [], [], [DivergedPartition(0, 0, 20)]]
    assert looked(parity, state, 40) == [[]] * 4


def test_common_partitions_are_stored_everywhere_and_pushed_once() -> None:
    """Partitions of one store only are never pushed by another one."""
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
