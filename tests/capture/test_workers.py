"""Test workers: priorities, order of tasks, and failures."""

from __future__ import annotations

import os
import threading

import pytest

from asymcheck.executor import Workers, share, together


def _nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize("count", [1, 3])
def test_threads_stand_back_unless_work_piles_up(count: int) -> None:
    """Test that low-priority threads take over again afterwards; a thread cannot regain its priority."""
    seen: list[int] = []
    done = threading.Semaphore(0)

    def work(_item: int) -> None:
        seen.append(_nice())
        done.release()

    workers = Workers("test", count)
    for is_behind in (False, True, False):
        workers.hurry(is_behind=is_behind)
        for item in range(4):
            workers.submit(work, item)
        for _ in range(4):
            assert done.acquire(timeout=30)
    workers.close()
    assert seen == [19] * 4 + [_nice()] * 4 + [19] * 4


def test_one_worker_keeps_the_order_whoever_takes_over() -> None:
    """Test a change of threads in the middle of a task: the next task waits for its end."""
    order: list[int] = []
    running = threading.Semaphore(1)

    def work(item: int) -> None:
        assert running.acquire(blocking=False)
        workers.hurry(is_behind=item % 3 == 0)
        order.append(item)
        running.release()

    workers = Workers("test")
    for item in range(2000):
        workers.submit(work, item)
    workers.close()
    assert order == list(range(2000))


def test_close_waits_for_everything() -> None:
    """Test any thread and any change of priority meanwhile."""
    done: list[int] = []
    workers = Workers("test", 2)
    for item in range(1000):
        workers.submit(done.append, item)
        workers.hurry(is_behind=item % 2 == 0)
    workers.close()
    assert sorted(done) == list(range(1000))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test")]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_failed_task_informs_its_waiter_and_ends_no_thread(count: int, error: BaseException) -> None:
    """Test that all later tasks run, and that close() returns."""

    def fail() -> None:
        raise error

    workers = Workers("test", count)
    failed = [workers.submit(fail) for _ in range(8)]
    done = [workers.submit(os.getpid) for _ in range(8)]
    closing = threading.Thread(target=workers.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert all(one.exception() is error for one in failed)
    assert all(one.result() == os.getpid() for one in done)


def test_first_failure_stops_parallel_work() -> None:
    """Test that the error is raised after all threads have ended."""
    stopped, ended = threading.Event(), list[None]()
    numbers = iter(range(3))

    def work() -> None:
        if next(numbers) == 2:
            raise RuntimeError("broken")
        assert stopped.wait(30)
        ended.append(None)

    with pytest.raises(RuntimeError, match="broken"):
        together(work, 3, "test", stopped.set)
    assert len(ended) == 2


def test_parallel_work_needs_no_new_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test an interpreter that starts no thread, as Python does while it exits."""

    def refuse(_self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    done: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    share(range(100), done.extend, 3, "test")
    assert done == [*range(100)]
