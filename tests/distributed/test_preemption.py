"""Test notices to one rank: how often rank 0 looks for them, and several Checkpointers in one process."""

from __future__ import annotations

import itertools
import math
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from asymcheck.config import Grace
from asymcheck.errors import Preempted, PreemptionWarning, StorageError
from asymcheck.training.preemption import Preemption


@pytest.mark.parametrize(("step_s", "launch_s", "synced_every"), [(0.3, 0.001, 10), (0.001, 0.001, 1), (2.0, 2.0, 1)])
def test_rank_0_looks_often_enough(
    monkeypatch: pytest.MonkeyPatch, step_s: float, launch_s: float, synced_every: int
) -> None:
    """Test programs that wait for their device after each step, or run ahead of it and wait at the tenth step."""
    now_s, checked_s = 0.0, [0.0]

    def broadcast(_step: int, decide: Callable[[], object], *, why: str) -> object:
        assert why == "ends at"
        checked_s.append(now_s)
        return decide()

    session = SimpleNamespace(noted=lambda _name: None)
    coordinator = SimpleNamespace(is_first=True, broadcast=broadcast, session=lambda: session)
    monkeypatch.setattr("asymcheck.training.preemption.time", SimpleNamespace(monotonic=lambda: now_s))
    preemption = Preemption("run", Grace(signals=()), coordinator)  # type: ignore[arg-type]  # what it needs
    for step in range(1, 2001):
        now_s = step_s * step if step % synced_every == 0 else now_s + launch_s
        assert not preemption.ends_at(step)
    preemption.close()
    gaps = [later - sooner for sooner, later in itertools.pairwise(checked_s)]
    assert max(gaps) <= max(2 * step_s * synced_every, 0.26)
    assert len(gaps) <= 2000 * step_s / 0.25 + 10


def test_notice_to_another_rank_ends_all_checkpointers() -> None:
    """Test that a process with two Checkpointers ends after the last step of both."""
    session = SimpleNamespace(note=lambda _name, _value: None)
    verdict = {"step": 1, "left_s": 20.0, "next": 2}
    coordinator = SimpleNamespace(is_first=False, broadcast=lambda *_, **__: verdict, session=lambda: session)
    first, second = (Preemption("run", Grace(signals=()), coordinator) for _ in range(2))  # type: ignore[arg-type]  # as above
    assert first.ends_at(1)
    first.close()
    first.finish(waits=True)
    assert second.ends_at(1)
    second.close()
    with pytest.raises(Preempted):
        second.finish(waits=True)


def test_a_limit_of_threads_leaves_the_signals_to_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a Checkpointer that could not be created swallows no SIGTERM."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(StorageError, match="cannot start thread asymcheck-preemption"):
        Preemption("run", Grace(), None)
    assert signal.getsignal(signal.SIGTERM) == before


def test_notice_that_is_no_time_does_not_end_the_training() -> None:
    """Test NaN, which is reported, and a time that is over, which ends the training."""
    preemption = Preemption("run", Grace(signals=()), None)
    with pytest.warns(PreemptionWarning, match=r"no notice of the machine .*notice\(\) nan: give a number"):
        assert preemption._ask(lambda: math.nan, is_failing=False)
    assert not preemption.ends_at(1)
    assert not preemption._ask(lambda: -1.0, is_failing=True)
    assert preemption.ends_at(2)
    preemption.close()
