"""Test stragglers: slow ranks get the full timeout, and dead ranks a fraction; with a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch.distributed as dist

from asymcheck.distributed import Session
from asymcheck.distributed.kv_store import KeyReader
from asymcheck.errors import RanksError, RanksMissingError
from tests.distributed.test_coordinator import joined, sessions_of

_PATIENCE_S = 10.0
_LATER_S = 3.0
"""Delay in seconds: too late for a tenth of the timeout, and in time for the full timeout."""


class Time:
    """A clock that advances during sleeps, and then runs pending actions."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        """Return the current time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance the time, and run actions of other ranks."""
        self.now += seconds
        due = [do for when, do in self._due if when <= self.now]
        self._due = [one for one in self._due if one[0] > self.now]
        for do in due:
            do()

    def after(self, seconds: float, do: Callable[[], object]) -> None:
        """Schedule an action of another rank."""
        self._due.append((self.now + seconds, do))


Meet = Callable[[int], tuple[Time, list[Session]]]


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Meet:
    """Return the ranks after a rendezvous with the simulated clock."""

    def met(world_size: int) -> tuple[Time, list[Session]]:
        time, sessions = Time(), sessions_of(dist.HashStore(), world_size, _PATIENCE_S)
        monkeypatch.setattr("asymcheck.distributed.kv_store.time", time)
        return time, sessions

    return met


def _missed(time: Time, wait: Callable[[], object]) -> float:
    """Return the duration of a wait for missing ranks."""
    began = time.now
    with pytest.raises(RanksMissingError):
        wait()
    return time.now - began


def _agree(session: Session, number: int) -> bytes:
    return session.agree((number, 1), b"0", joined, "test")


def test_a_rank_that_came_too_late_once_is_waited_for_as_before(meet: Meet) -> None:
    """Test a rank that is always later than the timeout of a dead rank."""
    time, (first, late) = meet(2)
    time.after(_PATIENCE_S + 2, lambda: late.report((1, 1), b"1"))
    assert _missed(time, lambda: _agree(first, 1)) >= _PATIENCE_S
    for number in range(2, 6):
        time.after(_LATER_S, lambda: late.report((number, 1), b"1"))  # noqa: B023 - done before the next
        # The rank answers the first round too late, while the second one waits.
        time.sleep(1.5 if number == 2 else 0)
        assert _agree(first, number) == b"0+1"


def test_a_rank_that_is_gone_costs_little(meet: Meet) -> None:
    """Test each wait after the first, also while another missing rank is alive."""
    time, (first, gone, late) = meet(3)
    assert _missed(time, lambda: _agree(first, 1)) >= _PATIENCE_S
    late.report((1, 1), b"2")
    for number in range(2, 5):
        assert 1 <= _missed(time, lambda: _agree(first, number)) < 1.5  # noqa: B023 - used at once
    # The rank was alive.
    gone.report((3, 1), b"1")
    gone.report((4, 1), b"1")
    late.report((4, 1), b"2")
    time.after(_LATER_S, lambda: [one.report((5, 1), b"x") for one in (gone, late)])
    assert _agree(first, 5) == b"0+x+x"
    # A rank that ends after that gets the full timeout once more.
    assert _missed(time, lambda: _agree(first, 6)) >= _PATIENCE_S
    assert _missed(time, lambda: _agree(first, 7)) < 1.5


@pytest.mark.parametrize("reported", [1, 5])
def test_any_late_response_shows_that_a_rank_lives(meet: Meet, reported: int) -> None:
    """Test a slow rank that never sets the first key in time, and sets the newest key too late."""
    time, (first, late) = meet(2)
    for number in range(1, 6):
        _missed(time, lambda: _agree(first, number))  # noqa: B023 - used at once
    late.report((reported, 1), b"1")
    time.after(_LATER_S, lambda: late.report((6, 1), b"1"))
    assert _agree(first, 6) == b"0+1"


def test_ranks_wait_briefly_for_a_missing_rank_0(meet: Meet) -> None:
    """Test that after a late response, they wait as long as before."""
    time, (first, other) = meet(2)
    assert _missed(time, lambda: other.agree((1, 1), b"1", joined, "test")) >= 2 * _PATIENCE_S
    assert _missed(time, lambda: other.agree((2, 1), b"1", joined, "test")) < 2.5
    first.post((1, 1), b"late")
    time.after(_LATER_S, lambda: first.post((3, 1), b"in time"))
    assert other.agree((3, 1), b"1", joined, "test") == b"in time"


@pytest.mark.parametrize("is_ending", [False, True])
def test_a_rank_that_does_not_leave_counts_as_missing_after_an_error(meet: Meet, is_ending: bool) -> None:
    """Test that otherwise, another rank may leave later."""
    _, (first, _) = meet(2)
    first.is_ending = lambda: is_ending
    first.leave()
    assert first.lacks_ranks == is_ending


def test_a_rank_that_fails_notices_that_the_key_value_store_has_ended(
    meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a store that accepts values without a response."""
    _, (_, other) = meet(2)

    def refused(_reader: KeyReader, _keys: Sequence[str]) -> bool:
        message = "the key-value store does not respond"
        raise RanksError(message)

    monkeypatch.setattr(KeyReader, "has", refused)
    other.leave()
    other.is_ending = lambda: True
    with pytest.raises(RanksError, match="does not respond"):
        other.leave()


def test_missing_ranks_are_shared_between_threads(meet: Meet) -> None:
    """Test that training waits briefly for a rank that commits miss, and normally after either has seen it."""
    time, (first, late) = meet(2)
    commits, late_commits = first.for_thread(), late.for_thread()
    assert _missed(time, lambda: _agree(commits, 1)) >= _PATIENCE_S
    assert _missed(time, lambda: _agree(first, 2)) < 1.5
    late_commits.report((1, 1), b"1")
    for session, other, number in ((first, late, 3), (commits, late_commits, 4)):
        time.after(_LATER_S, lambda: other.report((number, 1), b"1"))  # noqa: B023 - done before the next
        assert _agree(session, number) == b"0+1"
