"""Test the store under chosen interleavings of writers, collections, repairs and readers, with kills and power losses.

``tools/protocol_store.py`` explores a model of the protocol. These tests run the code itself: each thread stops before
each file operation, lock, transaction and access to a ring, and a scheduler chooses which one goes on. After each
schedule, every durable checkpoint is restored bit for bit, no reader got wrong bytes or took an intact checkpoint for a
damaged one, verify finds nothing, and a collection removes all leftovers. A training continues from the newest capture
that was complete in memory when its process was killed. Random schedules also lose power.

A failed schedule prints its steps, and an order with which ``python -m tests.interleaving`` repeats it.
"""

from __future__ import annotations

import pytest

from tests.interleaving import jobs
from tests.interleaving.scenarios import SCENARIOS
from tests.zygote import Zygote

SHORT = {
    "reuse": ["save", "gc"],
    "reuse-all": ["save", "gc"],
    "recycle": ["save", "gc"],
    "repack": ["gc", "read"],
    "collections": ["one", "other"],
    "generations": ["one", "other"],
    "repair": ["repair", "gc"],
    "pull": ["pull", "gc"],
    "capture": ["train", "restart"],
    "ranks": ["one", "other"],
}
"""Pairs of processes for the search of all schedules with few switches."""


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 2), pytest.param(2, 14, marks=pytest.mark.slow), pytest.param(16, 1_000, marks=pytest.mark.long)],
)
def test_random_schedules(zygote: Zygote, scenario: str, first: int, count: int) -> None:
    """Test schedules with random switches, kills, timeouts of locks and power losses."""
    zygote.start(jobs.at_random, scenario=scenario, first=first, count=count).finish()


@pytest.mark.parametrize("scenario", SHORT)
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param([2, 2], id="few"),
        pytest.param([2, 30], id="some", marks=pytest.mark.slow),
        pytest.param([2, 1_000, 2_000], id="most", marks=pytest.mark.long),
    ],
)
def test_few_switches(zygote: Zygote, scenario: str, limits: list[int]) -> None:
    """Test schedules with at most two switches or kills, where the order of operations matters."""
    zygote.start(jobs.in_turn, scenario=scenario, processes=SHORT[scenario], limits=limits).finish()


@pytest.mark.slow
def test_a_schedule_can_be_repeated(zygote: Zygote) -> None:
    """Test that a seed, and a printed order, give the same steps again."""
    for seed in range(3):
        zygote.start(jobs.twice, scenario="restart", seed=seed).finish()
