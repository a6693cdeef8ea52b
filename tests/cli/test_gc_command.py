"""Test ``asymcheck gc`` with retention: deletions and reasons are listed, and a dry run deletes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import asymcheck
from asymcheck.cli import exit_status
from asymcheck.cli.maintenance import _summary
from asymcheck.gc.collect import Collected
from tests.cli.conftest import Outcome

Call = Callable[..., Outcome]


def steps(store: Path, run: str = "default") -> list[tuple[int, int]]:
    """Return the existing steps with their generations."""
    with asymcheck.Store.open(store, read_only=True) as opened:
        return [(item.step, item.generation) for item in opened.checkpoints(run)]


def lines(outcome: Outcome) -> list[str]:
    """Return the output without save ids and without the sentence about packs."""
    assert (outcome.status, outcome.err) == (exit_status.OK, "")
    return [line.partition(", save ")[0] + line.partition(")")[2] for line in outcome.out.splitlines()[:-1]]


def test_dry_run_lists_deletions_and_reasons(call: Call, store: Path) -> None:
    """Test also the bytes to be freed; the real run reports the same in the past tense."""
    before = steps(store)
    outcome = call("gc", store, "--keep-last", 1, "--dry-run")
    assert lines(outcome) == [
        "would delete run default, step 10 (generation 1, 50.8 KiB",
        "would delete run default, step 20 (generation 1, 50.8 KiB",
        "would keep run default, step 30 (generation 1: abandoned",
        "would keep run default, step 25 (generation 2: newest consistent, newest, keep last 1",
    ]
    assert "would free " in outcome.out
    assert steps(store) == before
    outcome = call("gc", store, "--keep-last", 1)
    assert lines(outcome)[::3] == [
        "deleted run default, step 10 (generation 1, 50.8 KiB",
        "kept run default, step 25 (generation 2: newest consistent, newest, keep last 1",
    ]
    assert steps(store) == [(30, 1), (25, 2)]
    assert steps(store, "other") == [(1, 1)]
    assert call("verify", store).status == exit_status.OK


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--keep-every", 20], [20, 30, 25]),
        (["--keep-best", "loss:1"], [20, 30, 25]),
        (["--keep-best", "loss:1:max"], [10, 30, 25]),
        (["--keep-for", "2w"], [10, 20, 30, 25]),
        (["--keep-for", "0s"], [30, 25]),
        (["--keep-last", 2, "--drop-abandoned"], [20, 25]),
        (["--keep-for", "1h", "--drop-abandoned"], [10, 20, 30, 25]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_each_rule_is_an_option(call: Call, store: Path, words: list[object], left: list[int]) -> None:
    """Test that each option has the meaning of the Python argument."""
    assert call("gc", store, *words).status == exit_status.OK
    assert [step for step, _ in steps(store)] == left


def test_another_run_is_named(call: Call, store: Path) -> None:
    """Test a named run, and the default run, but never all runs."""
    with asymcheck.Store.open(store, create=True) as opened:
        opened.save({"x": 1}, step=2, run="other")
    assert call("gc", store, "--keep-last", 1, "--run", "other").status == exit_status.OK
    assert (len(steps(store)), steps(store, "other")) == (4, [(2, 1)])
    outcome = call("gc", store, "--keep-last", 1, "--run", "othr")
    assert outcome.status == exit_status.NOT_FOUND
    assert "has no run 'othr'; it has runs default, other" in outcome.err


def test_copied_partitions_are_reported(call: Call, store_path: Path) -> None:
    """Test packs that were mostly garbage."""
    shared = torch.arange(1 << 18)
    with asymcheck.Store.open(store_path, create=True) as opened:
        for step in range(2):
            opened.save({"shared": shared, "own": torch.full((1 << 20,), step)}, step=step)
    outcome = call("gc", store_path, "--keep-last", 1, "--dry-run")
    assert "(1 pack after copying 2.0 MiB of live data)" in outcome.out
    outcome = call("gc", store_path, "--keep-last", 1)
    assert "(1 pack after copying 2.0 MiB of live data)" in outcome.out


def test_packs_in_use_are_counted() -> None:
    """Test the singular."""
    words = [_summary(Collected(busy_packs=count), dry_run=False).partition("needed; ")[2] for count in (0, 1, 2)]
    assert words == ["", "skipped 1 pack in use", "skipped 2 packs in use"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--drop-abandoned"], "requires a --keep rule"),
        (["--run", "default"], "requires a --keep rule"),
        (["--keep-last", 0], "x>=1"),
        (["--keep-best", "loss"], "give a metric and a count"),
        (["--keep-best", "loss:0"], "give a metric and a count"),
        (["--keep-best", "loss:1:most"], "give a metric and a count"),
        (["--keep-for", "7"], "is not a duration"),
        (["--keep-for", "-7d"], "is not a duration"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_wrong_words_delete_nothing(call: Call, store: Path, words: list[object], message: str) -> None:
    """Test that the message says what to pass."""
    before = steps(store)
    outcome = call("gc", store, *words)
    assert outcome.status == exit_status.USAGE
    assert message in " ".join(outcome.err.split())
    assert steps(store) == before
