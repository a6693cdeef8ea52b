"""Test the clock of save ids while the clock of the machine is set."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from asymcheck.policies.push_selection import Push, due
from asymcheck.storage import clock
from asymcheck.types import Checkpoint, CheckpointRef, SaveId

_S = 1_000_000_000
_HOUR_NS = 3600 * _S


def test_intervals_remain_when_the_clock_of_the_machine_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that time stamps grow with the time, that a push rule in seconds selects, and that the clocks meet again."""
    wall, ticks = [10 * _HOUR_NS], [0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(time_ns=lambda: wall[0], monotonic_ns=lambda: ticks[0]))
    tested = clock._Clock()

    def saved(step: int) -> Checkpoint:
        wall[0] += 60 * _S
        ticks[0] += 60 * _S
        ref = CheckpointRef(1, step, SaveId(tested.now_ns().to_bytes(8, "big") + bytes(8)))
        return Checkpoint.of("default", ref, 1, {}, 0)

    first = saved(0)
    assert first.created_ns == wall[0]
    wall[0] -= _HOUR_NS
    during = [saved(step) for step in range(1, 60)]
    assert sorted(one.created_ns for one in during) == [one.created_ns for one in during]
    pushed = due(Push("file:///x", every_s=600), [first, *during], [], wall[0])
    assert [one.step for one in pushed] == [0, 20, 40]
    assert during[-1].created_ns > wall[0]
    later = [saved(step) for step in range(60, 130)]
    assert later[-1].created_ns == wall[0]
    assert tested.now_ns() == wall[0] + 1
