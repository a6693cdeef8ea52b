"""Test that skipped checkpoints are reported with reasons, at a bounded cost."""

from __future__ import annotations

from asymcheck.restore.resolve import SkippedCheckpoints
from asymcheck.types import CheckpointRef, SaveId


def test_neighbours_that_are_passed_over_for_one_reason_are_one_entry() -> None:
    """Test that entries of other reasons in between stay in order."""
    skipped: list[str] = []
    skips = SkippedCheckpoints(skipped)
    refs = [CheckpointRef(1, step, SaveId(bytes(16))) for step in range(9)]
    for ref in refs[8:5:-1]:
        skips.add(ref, "not here")
    skips.add(refs[5], "damaged")
    skipped.append("of another")
    for ref in refs[4:2:-1]:
        skips.add(ref, "damaged")
    assert skipped == [
        f"{refs[8]} and 2 older ones: not here",
        f"{refs[5]}: damaged",
        "of another",
        f"{refs[4]} and 1 older one: damaged",
    ]
