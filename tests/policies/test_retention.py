"""Test retention: every rule against a plain implementation."""

from __future__ import annotations

import dataclasses
import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.errors import InvalidInputError
from asymcheck.policies.retention import Best, Retention, Verdict, choose_kept
from asymcheck.types import Checkpoint

NOW_NS = 1_800_000_000 * 10**9
HOUR_NS = 3600 * 10**9


def described(
    step: int,
    *,
    generation: int = 1,
    number: int = 0,
    hours_old: float = 0.0,
    complete: bool = True,
    on_line: bool | None = True,
    **metrics: float,
) -> Checkpoint:
    """Return a checkpoint as a store describes it."""
    return Checkpoint(
        run="default",
        step=step,
        generation=generation,
        save_id=f"{generation:08x}{step:016x}{number:08x}",
        world_size=1,
        complete=complete,
        on_line=on_line,
        created_ns=NOW_NS - round(hours_old * HOUR_NS),
        metrics=metrics,
    )


def staying(verdicts: list[Verdict]) -> list[int]:
    """Return the steps that stay."""
    return [verdict.checkpoint.step for verdict in verdicts if verdict.stays]


checkpoints = st.lists(
    st.builds(
        described,
        st.integers(0, 30),
        generation=st.integers(1, 3),
        number=st.integers(0, 1),
        hours_old=st.integers(0, 10),
        complete=st.booleans() | st.just(True),
        on_line=st.sampled_from([True, True, True, False, None]),
        loss=st.floats(-2, 2) | st.just(math.nan),
    ),
    max_size=12,
    unique_by=lambda one: one.save_id,
)
bests: st.SearchStrategy[Best] = st.tuples(
    st.sampled_from(["loss", "other"]), st.integers(1, 4), st.sampled_from(["min", "max"])
)
rules = st.builds(
    dict,
    keep_last=st.none() | st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 7),
    keep_best=st.none() | bests,
    keep_for=st.none() | st.integers(0, 10).map(lambda hours: timedelta(hours=hours)),
).filter(lambda given_rules: any(value is not None for value in given_rules.values()))


def kept_by(retention: Retention, one: Checkpoint, whole: list[Checkpoint]) -> bool:
    """Return whether a rule keeps a checkpoint, by a plain implementation; ``whole`` are complete ones on the line."""
    newer = [other for other in whole if other.ref > one.ref]
    if retention.keep_for is not None and NOW_NS - one.created_ns <= retention.keep_for / timedelta(hours=1) * HOUR_NS:
        return True
    if retention.keep_every is not None and one.on_line and one.step % retention.keep_every == 0:
        return True
    if one not in whole:
        return False
    if retention.keep_last is not None and len(newer) < retention.keep_last:
        return True
    if retention.keep_best is None:
        return False
    if not any(retention.keep_best[0] in other.metrics for other in whole):
        return True
    if math.isnan(one.metrics.get(retention.keep_best[0], math.nan)):
        return False
    name, count, direction = (*retention.keep_best, "min")[:3]
    sign = 1 if direction == "min" else -1

    def key(other: Checkpoint) -> tuple[object, ...]:
        return (sign * other.metrics[name], other.ref)

    rivals = [other for other in whole if not math.isnan(other.metrics.get(name, math.nan))]
    return sum(key(other) < key(one) for other in rivals) < count


@given(checkpoints, rules, st.booleans())
def test_kept_checkpoints_have_a_rule_or_are_protected(
    found: list[Checkpoint], given_rules: dict[str, object], keep_abandoned: bool
) -> None:
    """Test that nothing else stays or is deleted, for any order of checkpoints."""
    retention = Retention(**given_rules, keep_abandoned=keep_abandoned)  # type: ignore[arg-type]  # as drawn
    whole = sorted((one for one in found if one.on_line and one.complete), key=lambda one: one.ref)
    verdicts = choose_kept(retention, found, NOW_NS)
    assert [verdict.checkpoint for verdict in verdicts] == sorted(found, key=lambda one: one.ref)
    assert choose_kept(retention, found[::-1], NOW_NS) == verdicts
    for verdict in verdicts:
        one = verdict.checkpoint
        always = (
            one.on_line is None
            or (one.on_line is False and keep_abandoned)
            or (one in whole and one == whole[-1])
            or (bool(one.on_line) and not one.complete and all(other.ref < one.ref for other in whole))
        )
        assert verdict.stays == (always or kept_by(retention, one, whole)), one


@given(checkpoints, rules, rules)
def test_a_further_rule_keeps_no_less(
    found: list[Checkpoint], one: dict[str, object], other: dict[str, object]
) -> None:
    """Test that a checkpoint kept by some rules is kept by more rules."""
    both = {name: value if value is not None else other[name] for name, value in one.items()}
    fewer = choose_kept(Retention(**one), found, NOW_NS)  # type: ignore[arg-type]  # as drawn
    more = choose_kept(Retention(**both), found, NOW_NS)  # type: ignore[arg-type]  # as drawn
    assert {v.checkpoint.save_id for v in fewer if v.stays} <= {v.checkpoint.save_id for v in more if v.stays}


@pytest.mark.slow
@given(checkpoints, rules, st.data())
def test_held_checkpoints_stay_without_other_effects(
    found: list[Checkpoint], given_rules: dict[str, object], data: st.DataObject
) -> None:
    """Test that the given reason is first."""
    retention = Retention(**given_rules, keep_abandoned=False)  # type: ignore[arg-type]  # as drawn
    held = data.draw(st.sets(st.sampled_from([one.save_id for one in found]))) if found else set()
    before = choose_kept(retention, found, NOW_NS)
    after = choose_kept(retention, found, NOW_NS, dict.fromkeys(held, "being read"))
    for old, new in zip(before, after, strict=True):
        added = ("being read",) if old.checkpoint.save_id in held else ()
        assert new.reasons == added + old.reasons


def test_the_reasons_are_sentences_that_name_the_rule() -> None:
    """Test that all applicable reasons are listed in the order of the rules."""
    retention = Retention(keep_last=2, keep_every=100, keep_best=("loss", 1), keep_for=timedelta(hours=2))
    found = [described(step, hours_old=5 - step / 100, loss=2 - step / 1000) for step in (0, 50, 100, 400, 500)]
    reasons = {verdict.checkpoint.step: verdict.reasons for verdict in choose_kept(retention, found, NOW_NS)}
    assert reasons == {
        0: ("keep every 100",),
        50: (),
        100: ("keep every 100",),
        400: ("keep last 2", "keep every 100", "keep for 2:00:00"),
        500: ("newest", "keep last 2", "keep every 100", "keep best 1 by loss: 1.5, number 1", "keep for 2:00:00"),
    }


def test_best_may_be_the_greatest_and_ties_prefer_the_older() -> None:
    """Test that checkpoints without the metric, or with NaN, are excluded."""
    found = [
        described(0, acc=0.5),
        described(1, acc=0.9),
        described(2, acc=0.9),
        described(3, acc=math.nan),
        described(4),
        described(5, acc=0.1),
    ]
    assert staying(choose_kept(Retention(keep_best=("acc", 1, "max")), found, NOW_NS)) == [1, 5]
    assert staying(choose_kept(Retention(keep_best=("acc", 2, "max")), found, NOW_NS)) == [1, 2, 5]
    assert staying(choose_kept(Retention(keep_best=("acc", 2)), found, NOW_NS)) == [0, 5]


def test_incomplete_checkpoint_takes_no_place() -> None:
    """Test that two consistent checkpoints stay, besides newer incomplete ones, which may become complete."""
    found = [described(0), described(1), described(2, complete=False), described(3), described(4, complete=False)]
    assert staying(choose_kept(Retention(keep_last=2), found, NOW_NS)) == [1, 3, 4]


def test_newest_is_by_the_line_and_not_by_the_step() -> None:
    """Test a restore of step 5: step 6 of the new generation is newer than step 9 of the old one."""
    found = [described(5), described(9, on_line=False), described(6, generation=2)]
    assert staying(choose_kept(Retention(keep_last=1, keep_abandoned=False), found, NOW_NS)) == [6]
    assert staying(choose_kept(Retention(keep_last=1), found, NOW_NS)) == [9, 6]


def test_the_age_is_exact() -> None:
    """Test the limit in nanoseconds, at which a checkpoint stays."""
    old = described(0, hours_old=2)
    found = [old, dataclasses.replace(described(1), created_ns=old.created_ns - 1), described(2)]
    assert staying(choose_kept(Retention(keep_for=timedelta(hours=2)), found, NOW_NS)) == [0, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"keep_abandoned": False},
        {"keep_last": 0},
        {"keep_last": True},
        {"keep_every": -1},
        {"keep_every": 2.0},
        {"keep_best": "loss"},
        {"keep_best": ("loss",)},
        {"keep_best": ("loss", 0)},
        {"keep_best": ("", 1)},
        {"keep_best": ("loss", 1, "most")},
        {"keep_for": 7},
        {"keep_for": timedelta(seconds=-1)},
        {"keep_last": 1, "keep_abandoned": None},
    ],
    ids=str,
)
def test_rules_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    """Test that the error lists alternatives; without a rule, nothing would be kept."""
    with pytest.raises(InvalidInputError, match="give"):
        Retention(**wrong)  # type: ignore[arg-type]  # that is the point
