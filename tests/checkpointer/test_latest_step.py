"""Test that ``latest_step`` is a step that is durable or in flight, and never a lost step."""

from types import SimpleNamespace
from typing import Any

from asymcheck.training.save_reporting import SaveReporting


def _capture(step: int, error: BaseException | None = None) -> Any:  # noqa: ANN401 - stands for a capture
    return SimpleNamespace(request=SimpleNamespace(step=step), error=error)


def test_a_lost_step_is_not_the_last() -> None:
    """Test that the newest durable step is the latest if all later steps were lost."""
    last = SaveReporting("store", "run", None, raises=True)
    assert last.latest_step is None
    for step in (6, 8, 10):
        last.latest_step = step
    last.note([_capture(6)])
    assert last.latest_step == 10
    last.note([_capture(8, OSError("full")), _capture(10, OSError("full"))])
    assert last.latest_step == 6
    last.latest_step = 12
    last.note([_capture(12)])
    assert last.latest_step == 12
    last.saved(3)
    last.latest_step = 4
    last.note([_capture(4, OSError("full"))])
    assert last.latest_step == 3
