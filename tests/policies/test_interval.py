"""Test the interval with invented measurements: it is the greatest of its bounds."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.errors import InvalidInputError
from asymcheck.policies.interval import AutoInterval, ChosenInterval, TrainingPace, choose_interval, span

THREE_HOURS = 3 * 3600.0

facts = st.builds(
    TrainingPace,
    step_s=st.floats(1e-4, 100),
    stall_s=st.floats(1e-5, 50),
    durable_s=st.floats(0, 1000),
)
aims = st.builds(
    AutoInterval,
    overhead=st.floats(1e-3, 0.5),
    mtbf=st.integers(1, 10**6).map(lambda seconds: timedelta(seconds=seconds)),
)


def bounds(aim: AutoInterval, measured: TrainingPace) -> list[float]:
    """Return the seconds that Young's interval, the store and the budget require."""
    return [
        math.sqrt(2 * measured.stall_s * aim.mtbf.total_seconds()),
        measured.durable_s,
        measured.stall_s / aim.overhead,
    ]


@given(aims, facts)
def test_interval_is_the_greatest_of_three_bounds(aim: AutoInterval, measured: TrainingPace) -> None:
    """Test whole steps, rounded up, at least one."""
    steps = choose_interval(aim, measured).steps
    seconds = max(bounds(aim, measured))
    assert steps >= 1
    assert steps * measured.step_s >= seconds * (1 - 1e-6)
    assert steps == 1 or (steps - 1) * measured.step_s < seconds * (1 + 1e-6)


@given(aims, facts, facts)
def test_interval_stays_within_a_quarter(aim: AutoInterval, before: TrainingPace, after: TrainingPace) -> None:
    """Test that a larger change gives the interval of the new measurements alone."""
    old, new = choose_interval(aim, before), choose_interval(aim, after)
    chosen = choose_interval(aim, after, old)
    near = old.steps / 1.25 <= new.steps <= old.steps * 1.25
    assert chosen == (old if near else new)


@pytest.mark.parametrize(
    ("measured", "aim", "steps", "words"),
    [
        (TrainingPace(0.5, 0.02, 2.0), AutoInterval(), 42, "20.8 s at 500 ms a step, for Young's interval for 20 ms"),
        (TrainingPace(0.5, 0.02, 90.0), AutoInterval(), 180, "1.5 min at 500 ms a step, for the store takes so long"),
        (TrainingPace(0.5, 2.0, 2.0), AutoInterval(0.001), 4000, "2 s of stall may take 0.001 of the time"),
        (TrainingPace(500.0, 0.02, 2.0), AutoInterval(), 1, "a failure every 3 h"),
        (TrainingPace(0.5, 0.02, 2.0), AutoInterval(mtbf=timedelta(days=30)), 644, "a failure every 720 h"),
    ],
)
def test_interval_has_a_reason(measured: TrainingPace, aim: AutoInterval, steps: int, words: str) -> None:
    """Test one sentence with the decisive figures."""
    chosen = choose_interval(aim, measured)
    assert chosen.steps == steps
    assert words in str(chosen)
    assert str(chosen).startswith("every step:" if steps == 1 else f"every {steps} steps:")


def test_unchosen_interval_is_reported() -> None:
    """Test that a missing measurement blocks nothing."""
    early = ChosenInterval(0, "1 of 3 checkpoints were measured")
    assert str(early) == "not chosen yet: 1 of 3 checkpoints were measured"
    assert choose_interval(AutoInterval(), TrainingPace(1.0, 0.5, 1.0), early).steps == math.ceil(
        math.sqrt(THREE_HOURS)
    )


def test_steps_of_no_time_are_no_division_by_zero() -> None:
    """Test a loop that does nothing, which also gets an interval."""
    assert choose_interval(AutoInterval(), TrainingPace(0.0, 0.0, 0.0)).steps == 1
    assert choose_interval(AutoInterval(), TrainingPace(0.0, 0.1, 0.0)).steps > 10**6


@pytest.mark.parametrize(
    "wrong",
    [
        {"overhead": 0},
        {"overhead": 1.5},
        {"overhead": True},
        {"overhead": "1%"},
        {"overhead": math.nan},
        {"mtbf": 3},
        {"mtbf": timedelta()},
    ],
    ids=str,
)
def test_an_aim_that_means_nothing_is_refused(wrong: dict[str, object]) -> None:
    """Test that the error lists alternatives."""
    with pytest.raises(InvalidInputError, match="give"):
        AutoInterval(**wrong)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.00123, "1.23 ms"), (1.0, "1 s"), (59.4, "59.4 s"), (90.0, "1.5 min"), (10_800.0, "3 h")]
)
def test_spans_are_for_people(seconds: float, text: str) -> None:
    """Test three digits, and a suitable unit."""
    assert span(seconds) == text
