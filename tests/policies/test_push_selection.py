"""Test the selection of checkpoints for a remote location, with invented inventories."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from asymcheck import Checkpoint, Publish, Push, Retention
from asymcheck.errors import InvalidInputError
from asymcheck.policies.push_selection import due, held, mismatch

S = 1_000_000_000
WHERE = "hdfs://somewhere/x"
NAN = float("nan")


def made(step: int, **changes: object) -> Checkpoint:
    """Return a checkpoint of a step, begun so many seconds after the start, with the loss 100 - step."""
    fields: dict[str, object] = {
        "run": "r",
        "step": step,
        "generation": 1,
        "save_id": f"{step:032x}",
        "world_size": 1,
        "complete": True,
        "on_line": True,
        "created_ns": step * S,
        "metrics": {"loss": 100.0 - step},
    }
    return Checkpoint(**{**fields, **changes})  # type: ignore[arg-type]  # as the fields are named


def steps(push: Push, here: list[Checkpoint], there: list[Checkpoint] | None = None, now: int = 1000) -> list[int]:
    """Return the selected steps."""
    return [one.step for one in due(push, here, there or [], now * S)]


TEN = [made(step) for step in range(10)]


def test_without_a_rule_all_go() -> None:
    """Test that existing ones are left out, and that the newest is last, for any order of the facts."""
    assert steps(Push(WHERE), TEN[::-1], [TEN[3], TEN[9]]) == [0, 1, 2, 4, 5, 6, 7, 8]


def test_every_so_many_steps() -> None:
    """Test that the step counts, not the number of checkpoints."""
    assert steps(Push(WHERE, every=4), TEN[1:]) == [4, 8]


@pytest.mark.parametrize(
    ("rules", "every", "shown"),
    [
        ({"every": 10}, 5, None),
        ({"every": 10}, 20, None),
        ({"every": 1}, None, None),
        ({"every_s": 10}, None, None),
        ({"every": 10, "every_s": 60}, None, None),
        ({"every": 10, "best": ("loss", 1)}, 7, None),
        ({}, None, None),
        ({"every": 10}, 7, "Only every 70th step is pushed. Pass a multiple of 7"),
        ({"every": 10}, None, "few saved steps are. Most checkpoints stay on this drive only"),
    ],
    ids=str,
)
def test_rule_that_selects_few_saved_steps(rules: dict[str, Any], every: int | None, shown: str | None) -> None:
    """Test that the only rule is compared with the interval of the checkpoints."""
    message = mismatch(Push(WHERE, **rules), every)
    assert message is shown is None or (shown is not None and message is not None and shown in message)


def test_every_so_many_seconds() -> None:
    """Test the first, and each that began late enough after the last one at or for the location."""
    assert steps(Push(WHERE, every_s=4), TEN) == [0, 4, 8]
    assert steps(Push(WHERE, every_s=4), TEN, [TEN[3]]) == [0, 7]
    assert steps(Push(WHERE, every_s=4), TEN[4:], [TEN[3]]) == [7]
    assert steps(Push(WHERE, every_s=4.5), TEN) == [0, 5]
    assert steps(Push(WHERE, every_s=100.0), [made(7)], []) == [7]


def test_a_clock_that_ran_ahead_and_was_set_right_holds_nothing_up() -> None:
    """Test a clock that was set back: the next checkpoint goes, and the seconds count from it."""
    ahead = [made(step, created_ns=(step + 10_000) * S) for step in range(3)]
    after = [made(step) for step in range(3, 12)]
    assert steps(Push(WHERE, every_s=4), ahead + after) == [0, 3, 7, 11]
    assert steps(Push(WHERE, every_s=4), after, ahead) == [3, 7, 11]


def test_deleted_before_its_upload_has_a_successor() -> None:
    """Test that the next one counts from the last existing checkpoint."""
    assert steps(Push(WHERE, every_s=4), [one for one in TEN if one.step not in (0, 4)]) == [1, 5, 9]


def test_the_best() -> None:
    """Test that an overtaken checkpoint is not sent, and that of equal ones the older is."""
    bumpy = [made(step, metrics={"loss": loss}) for step, loss in enumerate((5.0, 3.0, 4.0, 3.0, NAN))]
    assert steps(Push(WHERE, best=("loss", 1)), bumpy[:1]) == [0]
    assert steps(Push(WHERE, best=("loss", 1)), bumpy) == [1]
    assert steps(Push(WHERE, best=("loss", 1, "max")), bumpy) == [0]
    assert steps(Push(WHERE, best=("loss", 3)), bumpy) == [1, 2, 3]
    assert steps(Push(WHERE, best=("loss", 2, "max")), bumpy) == [0, 2]
    assert steps(Push(WHERE, best=("loss", 1)), bumpy[3:], [bumpy[1]]) == []


def test_while_none_has_the_metric_the_newest_goes() -> None:
    """Test a mistyped metric; one checkpoint with the metric, also remote, is sufficient."""
    assert steps(Push(WHERE, best=("acuracy", 1)), TEN) == [9]
    assert steps(Push(WHERE, best=("acuracy", 1)), TEN, [TEN[9]]) == []
    assert steps(Push(WHERE, best=("acuracy", 1)), []) == []
    assert steps(Push(WHERE, every=4, best=("acuracy", 1, "max")), TEN) == [0, 4, 8, 9]
    evaluated = made(4, metrics={"acuracy": 0.5})
    assert steps(Push(WHERE, best=("acuracy", 1)), [*TEN[:4], evaluated, *TEN[5:]]) == [4]
    assert steps(Push(WHERE, best=("acuracy", 1)), TEN[5:], [evaluated]) == []
    assert steps(Push(WHERE, best=("acuracy", 1)), [made(4, metrics={"acuracy": NAN})]) == []


def test_any_rule_is_enough() -> None:
    """Test that a checkpoint selected by another rule counts for the seconds."""
    assert steps(Push(WHERE, every=5, best=("loss", 1)), TEN) == [0, 5, 9]
    assert steps(Push(WHERE, every=3, every_s=4), TEN) == [0, 3, 6, 9]
    assert steps(Push(WHERE, every=5, every_s=3), TEN) == [0, 3, 5, 8]


@pytest.mark.parametrize("change", [{"complete": False}, {"on_line": False}], ids=str)
def test_checkpoints_off_the_line_are_not_pushed(change: dict[str, object]) -> None:
    """Test that they do not count for others; with an unknown line, all are pushed."""
    lame = made(5, metrics={"loss": -1.0}, **change)
    assert steps(Push(WHERE, every=5), [lame]) == []
    assert steps(Push(WHERE, best=("loss", 1)), [made(1), lame]) == [1]
    assert steps(Push(WHERE, every_s=2), [made(4), lame, made(6)]) == [4, 6]
    assert steps(Push(WHERE, every=5), [made(5, on_line=None)]) == [5]


def test_checkpoints_beyond_remote_retention_are_not_pushed() -> None:
    """Test an outage of hours, after which these are most of the backlog."""
    assert steps(Push(WHERE, every=2, keep=Retention(keep_last=2)), TEN) == [6, 8]
    assert steps(Push(WHERE, every=2, keep=Retention(keep_last=2)), TEN, [TEN[8]]) == [6]
    assert steps(Push(WHERE, every=2, keep=Retention(keep_last=1, keep_every=4)), TEN) == [0, 4, 8]
    old = Retention(keep_for=timedelta(seconds=2))
    assert steps(Push(WHERE, keep=old), TEN, now=8) == [6, 7, 8, 9]


def test_checkpoints_deleted_remotely_are_not_pushed_again() -> None:
    """Test that the retention of the location has precedence."""
    push = Push(WHERE, every=2, keep=Retention(keep_last=1))
    assert steps(push, TEN, TEN[0:9:2]) == []


def test_newest_waiting_and_current_upload_are_held() -> None:
    """Test the limit, because an unreachable location must not fill the drive."""
    push = Push(WHERE, hold=2)
    ids = [one.save_id for one in TEN]
    assert held(push, ids, None) == {TEN[8].save_id: "to be pushed", TEN[9].save_id: "to be pushed"}
    assert held(push, ids, TEN[9].save_id)[TEN[9].save_id] == "being pushed"
    assert held(push, ids[:1], TEN[4].save_id) == {
        TEN[0].save_id: "to be pushed",
        TEN[4].save_id: "being pushed",
    }
    assert held(Push(WHERE, hold=0), ids, None) == {}
    assert held(Push(WHERE, hold=0), ids, None, ids[2]) == {ids[2]: "begun by another machine"}


def test_numbers_may_be_none_where_that_means_something() -> None:
    """Test rules without limits, also where the default is a number."""
    assert Push(WHERE, every=None, every_s=None, close_s=None).close_s is None
    assert Publish(WHERE, close_s=None).close_s is None
    with pytest.raises(InvalidInputError, match=r"hold None: give an integer of at least 0$"):
        Push(WHERE, hold=None)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    "rules",
    [
        {"every": 0},
        {"every": True},
        {"every_s": -1},
        {"every_s": NAN},
        {"best": ("loss", 0)},
        {"best": ("loss", "least")},
        {"best": ""},
        {"best": 3},
        {"hold": -1},
        {"hold": True},
        {"close_s": float("inf")},
        {"close_s": 1e10},
        {"close_s": "60"},
        {"keep": 3},
        {"remote": 3},
    ],
    ids=str,
)
def test_rules_that_mean_nothing_are_refused(rules: dict[str, object]) -> None:
    """Test that the error names the rule."""
    with pytest.raises(InvalidInputError, match=next(iter(rules))):
        Push(**{"remote": WHERE, **rules})  # type: ignore[arg-type]  # wrong on purpose
