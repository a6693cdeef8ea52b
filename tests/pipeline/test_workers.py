"""Workers: who stands back and who takes over, and that nothing is lost or mixed up meanwhile."""

from __future__ import annotations

import os
import threading

import pytest

from asymcheck.pipeline.workers import Workers


def _nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize("count", [1, 3])
def test_threads_stand_back_unless_work_piles_up(count: int) -> None:
    """And do so again afterwards: these are others, for a priority that was given up does not come back."""
    seen: list[int] = []
    done = threading.Semaphore(0)

    def work(_item: int) -> None:
        seen.append(_nice())
        done.release()

    workers = Workers(work, "test", count)
    for is_behind in (False, True, False):
        workers.hurry(is_behind=is_behind)
        for item in range(4):
            workers.put(item)
        for _ in range(4):
            assert done.acquire(timeout=30)
    workers.close()
    assert seen == [19] * 4 + [_nice()] * 4 + [19] * 4


def test_one_worker_keeps_the_order_whoever_takes_over() -> None:
    """Also when it changes in the middle of an item: the next one waits for its end."""
    order: list[int] = []
    running = threading.Semaphore(1)

    def work(item: int) -> None:
        assert running.acquire(blocking=False)
        workers.hurry(is_behind=item % 3 == 0)
        order.append(item)
        running.release()

    workers = Workers(work, "test", 1)
    for item in range(2000):
        workers.put(item)
    workers.close()
    assert order == list(range(2000))


def test_close_waits_for_everything() -> None:
    """Whoever is to do it, and whatever is said meanwhile."""
    done: list[int] = []
    workers = Workers(done.append, "test", 2)
    for item in range(1000):
        workers.put(item)
        workers.hurry(is_behind=item % 2 == 0)
    workers.close()
    assert sorted(done) == list(range(1000))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test")]
