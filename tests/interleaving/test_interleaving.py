"""Test the store under chosen interleavings of writers, collections, repairs and readers, with kills and power losses.

``tools/protocol_store.py`` explores a model of the protocol. These tests run the code itself: each process stops before
each file operation, lock and transaction, and a scheduler chooses which one goes on. After each schedule, every
durable checkpoint is restored bit for bit, no reader got wrong bytes or took an intact checkpoint for a damaged one,
verify finds nothing, and a collection removes all leftovers. Random schedules also lose power.

A failed schedule prints its steps, and an order with which ``python -m tests.interleaving`` repeats it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interleaving import jobs
from tests.interleaving.breaks import BREAKS
from tests.interleaving.scenarios import SCENARIOS
from tests.zygote import Zygote


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Return a process in which sets have the same order in each run, so that seeds give the same schedules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        zygote = Zygote(tmp_path_factory.mktemp("zygote"), "tests.interleaving.jobs")
    yield zygote
    zygote.close()


SHORT = {
    "reuse": ["save", "gc"],
    "recycle": ["save", "gc"],
    "repack": ["gc", "read"],
    "collections": ["one", "other"],
    "generations": ["one", "other"],
    "repair": ["repair", "gc"],
}
"""Pairs of processes for the search of all schedules with few switches."""


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 3), pytest.param(3, 17, marks=pytest.mark.slow), pytest.param(20, 1_000, marks=pytest.mark.long)],
)
def test_random_schedules(zygote: Zygote, scenario: str, first: int, count: int) -> None:
    """Test schedules with random switches, kills, timeouts of locks and power losses."""
    zygote.start(jobs.at_random, scenario=scenario, first=first, count=count).finish()


@pytest.mark.parametrize("scenario", SHORT)
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param([2, 4], id="few"),
        pytest.param([2, 40], id="some", marks=pytest.mark.slow),
        pytest.param([2, 1_000, 2_000], id="most", marks=pytest.mark.long),
    ],
)
def test_few_switches(zygote: Zygote, scenario: str, limits: list[int]) -> None:
    """Test schedules with at most two switches or kills, where the order of operations matters."""
    zygote.start(jobs.in_turn, scenario=scenario, processes=SHORT[scenario], limits=limits).finish()


RANDOM = {
    "pins": "reuse",
    "locks-of-collections": "recycle",
    "list-again": "repack",
    "sync-packs": "reuse",
    "sync-folder-of-packs": "reuse",
    "sync-manifests": "reuse",
    "sync-pool": "recycle",
}
"""Broken rules that random schedules show, with a scenario."""
SEARCHED = {
    "freed": ("reuse", ["save", "gc"]),
    "pin": ("reuse", ["save", "gc"]),
    "new-manifests": ("reuse", ["save", "gc"]),
}
"""Broken rules that a search shows, with a scenario and processes."""


@pytest.mark.slow(quick=["sync-manifests", "pins"])
@pytest.mark.parametrize("rule", RANDOM)
def test_random_schedules_show_a_broken_rule(zygote: Zygote, rule: str) -> None:
    """Test that a schedule fails if the code breaks a rule, so that the tests above can fail."""
    child = zygote.start(jobs.at_random, scenario=RANDOM[rule], first=0, count=500, breaks=[rule])
    assert child.wait() == 1
    assert "--order '" in child.output.read_text()


@pytest.mark.slow(quick=["freed"])
@pytest.mark.parametrize("rule", SEARCHED)
def test_few_switches_show_a_broken_rule(zygote: Zygote, rule: str) -> None:
    """Test the same for the search."""
    scenario, processes = SEARCHED[rule]
    child = zygote.start(jobs.in_turn, scenario=scenario, processes=processes, limits=[2, 500, 500], breaks=[rule])
    assert child.wait() == 1
    assert "--order '" in child.output.read_text()


def test_each_broken_rule_is_shown() -> None:
    """Test that the tables have all rules."""
    assert {*RANDOM, *SEARCHED} == BREAKS.keys()


def test_a_schedule_can_be_repeated(zygote: Zygote) -> None:
    """Test that a seed, and a printed order, give the same steps again."""
    for seed in range(3):
        zygote.start(jobs.twice, scenario="restart", seed=seed).finish()
