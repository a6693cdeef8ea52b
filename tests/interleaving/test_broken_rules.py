"""Test that schedules show a problem if the code breaks a rule of the protocol, so that other tests can fail."""

from __future__ import annotations

import pytest

from tests.interleaving import jobs
from tests.interleaving.breaks import BREAKS
from tests.zygote import Zygote

RANDOM = {
    "pins": ("reuse", 7),
    "locks-of-collections": ("recycle", 1),
    "list-again": ("repack", 4),
    "sync-packs": ("reuse", 27),
    "sync-folder-of-packs": ("reuse", 27),
    "sync-manifests": ("reuse", 5),
    "sync-pool": ("recycle", 76),
    "rings-last": ("capture", 3),
    "durable-last": ("capture", 0),
    "locks-of-rings": ("capture", 1),
    "first-phase": ("ranks", 18),
}
"""Broken rules that random schedules show, with a scenario and the first seed."""
SEARCHED = {
    "freed": ("reuse", ["save", "gc"]),
    "pin": ("reuse", ["save", "gc"]),
    "new-manifests": ("reuse", ["gc", "save"]),
    "mark": ("reuse-all", ["gc", "save"]),
    "lock-until-pin": ("recycle", ["gc", "save"]),
    "packs-of-pushes": ("push", ["far", "one"]),
    "read-again": ("push", ["far", "one"]),
}
"""Broken rules that a search shows, with a scenario, and processes in the order that shows most of them soonest."""


@pytest.mark.slow(quick=["sync-manifests"])
@pytest.mark.parametrize("rule", RANDOM)
def test_random_schedules_show_a_broken_rule(zygote: Zygote, rule: str) -> None:
    """Test schedules with random switches, kills and power losses."""
    scenario, first = RANDOM[rule]
    child = zygote.start(jobs.at_random, scenario=scenario, first=first, count=500, breaks=[rule])
    assert child.wait() == 1
    assert "--order '" in child.output.read_text()


@pytest.mark.slow(quick=["freed"])
@pytest.mark.parametrize("rule", SEARCHED)
def test_few_switches_show_a_broken_rule(zygote: Zygote, rule: str) -> None:
    """Test schedules with at most two switches or kills."""
    scenario, processes = SEARCHED[rule]
    limits = [2, 1_000, 4_000]
    child = zygote.start(jobs.in_turn, scenario=scenario, processes=processes, limits=limits, breaks=[rule])
    assert child.wait() == 1
    assert "--order '" in child.output.read_text()


def test_each_broken_rule_is_shown() -> None:
    """Test that the tables have all rules."""
    assert {*RANDOM, *SEARCHED} == BREAKS.keys()
