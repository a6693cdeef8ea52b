"""Test the protocol of SPEC.md in a model: no interleaving breaks an invariant, and each rule is needed."""

import re
import subprocess
import sys

import pytest

from tests.spec import spec_text
from tools.protocol import RULES, SCENARIOS, explore, model

SMALL = [name for name in SCENARIOS if name != "all"]
NEEDED_IN = {
    "lock-until-pinned": "recycle",
    "sync-pack": "recycle",
    "sync-packs": "unsynced",
    "check-reused": "reuse",
    "pin": "reuse",
    "pin-bases": "bases",
    "pin-then-commit": "reuse",
    "sync-manifest": "unsynced",
    "sync-head": "heads",
    "exclusive-head": "heads",
    "sync-deletion": "recycle",
    "sync-kept": "unsynced",
    "dead-pins-first": "reuse",
    "live-bases": "bases",
    "sync-found-deletions": "recycle",
    "lock-garbage": "reuse",
    "see-manifests": "reuse",
    "enter-unpinned": "two-collections",
    "skip-pinned": "reuse",
    "sync-pool": "recycle",
    "repack-copies-live": "repack",
    "relied-is-live": "repacks",
    "replace-skips-pinned": "repack",
    "reader-locks": "readers",
    "reader-checks-name": "readers",
    "reader-lists-again": "readers",
    "rebuild-syncs": "unsynced",
    "push-checks-again": "pushes",
    "push-reprieves": "pushes",
    "present-lists-last": "pushes",
    "announce": "pushes",
    "read-again": "pushes",
    "own-name": "push",
}
"""For each rule, a scenario in which leaving it out breaks an invariant."""
LONG = {
    "exclusive-head",
    "lock-garbage",
    "repack-copies-live",
    "relied-is-live",
    "replace-skips-pinned",
    "reader-locks",
    "reader-checks-name",
    "reader-lists-again",
    "present-lists-last",
    "own-name",
    "enter-unpinned",
}
"""Rules whose counterexample takes more than a second."""


@pytest.mark.parametrize("name", SMALL)
def test_no_invariant_breaks(name: str) -> None:
    """Test interleavings up to a number of states."""
    result = explore(model(name), 2_500)
    assert result.trace == []
    assert result.is_complete or result.states >= 2_500


@pytest.mark.slow(quick=["pin", "sync-pool", "lock-until-pinned", "see-manifests"])
@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=pytest.mark.long) if rule in LONG else rule for rule in NEEDED_IN]
)
def test_protocol_without_a_rule_breaks(rule: str) -> None:
    """Test that the explorer finds a trace, so that the test above can fail."""
    result = explore(model(NEEDED_IN[rule], [rule]), 60_000)
    assert len(result.trace) > 2, RULES[rule]


def test_early_unlock_needs_a_synced_pool() -> None:
    """Test the one rule that another rule covers: a lock on a freed pack is held until both folders are synced."""
    assert explore(model("recycle", ["sync-pool"], kill=-1), 60_000).trace == []
    result = explore(model("recycle", ["sync-pool", "lock-until-synced"], kill=-1), 60_000)
    assert result.trace[-1].startswith("I1")
    assert set(RULES) == {*NEEDED_IN, "lock-until-synced"}


def test_rules_name_their_sections() -> None:
    """Test that each section exists in SPEC.md."""
    for rule in RULES.values():
        sections = re.findall(r"§([A-C]\d+(?:\.\d+)?)", rule.partition(":")[0])
        assert sections
        assert set(sections) <= spec_text.sections()


def test_trace_is_printed() -> None:
    """Test the command: numbered steps, the broken invariant, and the number of states."""
    command = [sys.executable, "-m", "tools.protocol", "reuse", "--without", "pin"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    assert run.returncode == 1
    assert re.match(r"  1\. P\d begins to save checkpoint 2|  1\. P\d keeps", lines[0])
    assert "I2: checkpoint 2 may lack partition" in lines[-2]
    assert re.fullmatch(r"[\d,]+ states, depth \d+", lines[-1])


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_invariant_breaks_after_a_second_kill(name: str) -> None:
    """Test most interleavings of each scenario, with a further kill, and the widest scenario to a depth."""
    result = explore(model(name, kill=name != "readers"), 100_000)
    assert result.trace == []
    assert result.is_complete or result.states >= 100_000
