"""Test node topology: ranks that share a store are grouped, and invalid topologies are refused."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from asymcheck.distributed import Session
from asymcheck.distributed.rendezvous import RankLocation, refusal_of
from asymcheck.errors import RankFailedError
from tests.distributed.test_coordinator import each, ranks_of


def joined(homes: list[RankLocation]) -> list[Session]:
    """Return the sessions of ranks with these stores."""
    ranks = ranks_of(dist.HashStore(), len(homes))
    return each(len(homes), lambda rank: Session.join(ranks[rank], "run", homes[rank]))


def test_each_rank_knows_those_of_its_store_and_the_first_all() -> None:
    """Test rank numbers that are not consecutive."""
    a, b = RankLocation("a", "one", "boot 1"), RankLocation("b", "two", "boot 2")
    sessions = joined([a, b, b, a, b])
    assert sessions[0].groups == (((0, 0), (3, 3)), ((1, 2), (4, 4)))
    assert [one.store_ranks for one in sessions] == [
        ((0, 0), (3, 3)) if rank in (0, 3) else ((1, 2), (4, 4)) for rank in range(5)
    ]
    assert [one.is_first_here for one in sessions] == [True, True, False, False, False]


def test_ranks_of_one_store_are_unaffected() -> None:
    """Test also containers with two names for one machine."""
    sessions = joined([RankLocation("a", "one", "boot 1"), RankLocation("a", "two", "boot 1")])
    assert [one.store_ranks for one in sessions] == [None, None]
    assert [one.is_first_here for one in sessions] == [True, False]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            RankLocation("b", "one", "boot 1"),
            "ranks on one machine must save into one store, but rank 0 has a, rank 1 has b",
        ),
        (RankLocation("a", "two", "boot 2"), "or both are one directory of a shared file system"),
        (RankLocation("a", "one", "boot 2"), "one is a copy of the other"),
    ],
)
def test_invalid_topology_is_refused_on_all_ranks(other: RankLocation, reason: str) -> None:
    """Test one machine with two stores, and two machines whose stores have the same id."""
    homes = [RankLocation("a", "one", "boot 1"), other]
    assert reason in refusal_of(homes)
    ranks = ranks_of(dist.HashStore(), 2)

    def work(rank: int) -> str:
        with pytest.raises(RankFailedError) as caught:
            Session.join(ranks[rank], "run", homes[rank])
        return str(caught.value)

    first, second = each(2, work)
    assert first == second == refusal_of(homes)
