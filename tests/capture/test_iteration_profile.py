"""Test the iteration profile: medians of the iterations that agree."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.capture.schedule import Iteration, profile_of
from asymcheck.state.partition_plan import Phase, Windows

FFBB: tuple[Phase, ...] = ("forward", "forward", "backward", "backward")


def _iteration(seconds: Sequence[float], phases: Sequence[Phase] = FFBB, begin: float = 100.0) -> Iteration:
    """Return an iteration with windows of the given lengths; the first mark is in the middle of window 0."""
    ends = [begin + sum(seconds[: count + 1]) for count in range(len(seconds))]
    times = [begin + seconds[0] / 2, *ends[:-1]]
    return Iteration(begin, tuple(zip(phases, times, strict=True)), ends[-1])


def _seconds(profile: Windows | None) -> list[float]:
    assert profile is not None
    return [seconds for _, seconds in profile]


def test_each_window_is_the_median_of_its_own() -> None:
    """Test that windows are measured separately, because slow iterations are slow in different windows."""
    seen = [_iteration([1, 2, 3, 9]), _iteration([9, 2, 4, 4]), _iteration([2, 7, 9, 5])]
    profile = profile_of(seen)
    assert _seconds(profile) == pytest.approx([2, 2, 4, 5])
    assert profile is not None
    assert [phase for phase, _ in profile] == list(FFBB)


def test_the_time_before_the_first_mark_belongs_to_the_first_window() -> None:
    """Test that this time, in which the loop fetches its batch, is available for copies."""
    seen = [Iteration(10.0, (("forward", 13.0), ("backward", 14.0)), 16.0)] * 3
    assert _seconds(profile_of(seen)) == [4.0, 2.0]


def test_two_iterations_are_not_enough() -> None:
    """Test two iterations, and three of which one differs."""
    one, other = _iteration([1, 1, 1, 1]), _iteration([1, 1, 1], FFBB[:3])
    assert profile_of([]) is None
    assert profile_of([one, one]) is None
    assert profile_of([one, other, one]) is None
    assert profile_of([one, other, one, one]) is not None


def test_iterations_of_another_sequence_are_left_out() -> None:
    """Test another length, and another order of the same length."""
    usual = [_iteration([1, 2, 3, 4])] * 4
    longer = [_iteration([50] * 5, (*FFBB, "backward"))] * 3
    reordered = [_iteration([50] * 4, ("forward", "backward", "forward", "backward"))] * 3
    reversed_ = [_iteration([50] * 4, FFBB[::-1])] * 3
    assert _seconds(profile_of([*longer, *usual, *reordered, *reversed_])) == pytest.approx([1, 2, 3, 4])


def test_latest_of_equally_frequent_sequences_counts() -> None:
    """Test that the latest sequence counts."""
    early, late = [_iteration([1, 1, 1, 1])] * 3, [_iteration([5, 5], FFBB[1:3])] * 3
    assert _seconds(profile_of([*early, *late])) == [5, 5]
    assert _seconds(profile_of([*late, *early])) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "useless",
    [
        Iteration(0.0, (), 1.0),
        Iteration(0.0, (("forward", 0.5), ("backward", 3.0)), 2.0),
        Iteration(0.0, (("forward", 0.5), ("backward", math.nan)), 2.0),
        Iteration(0.0, (("forward", 0.5), ("backward", 1.0)), math.inf),
    ],
    ids=["no marks", "clock ran backwards", "nan", "no end"],
)
def test_an_iteration_that_cannot_be_measured_is_left_out(useless: Iteration) -> None:
    """Test that such an iteration does not count and raises no error."""
    good = Iteration(0.0, (("forward", 0.5), ("backward", 1.0)), 2.0)
    assert profile_of([useless] * 5) is None
    assert profile_of([good, good, useless]) is None
    assert _seconds(profile_of([good, useless, good, useless, useless, useless, good])) == [1.0, 1.0]


@given(st.lists(st.lists(st.floats(0, 1e3), min_size=4, max_size=4), min_size=3, max_size=9))
def test_median_is_within_the_observed_range(seen: list[list[float]]) -> None:
    """Test each window."""
    profile = profile_of([_iteration(seconds, begin=0.0) for seconds in seen])
    for window, found in enumerate(_seconds(profile)):
        column = [seconds[window] for seconds in seen]
        assert min(column) - 1e-6 <= found <= max(column) + 1e-6
