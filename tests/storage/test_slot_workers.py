"""Test worker threads: every item once, the first failure stops them, and none outlives the call."""

import signal
import threading
import time

import pytest

from asymcheck.storage.nvme import Slot, SlotPool, run_with_slots


def _names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("asymcheck-")]


@pytest.mark.parametrize("threads", [1, 2, 7, 100])
def test_every_item_is_worked_on_once(threads: int) -> None:
    """Test any distribution over threads, with at most as many threads as items and as requested."""
    done: list[int] = []
    seen: set[str] = set()

    def work(item: int, slot: Slot) -> None:
        assert slot.payload_bytes >= 5000
        seen.update(_names())
        done.append(item)

    run_with_slots(range(50), work, slots=SlotPool(4, 1 << 20), payload_bytes=5000, threads=threads, name="test")
    assert sorted(done) == list(range(50))
    assert seen <= {f"asymcheck-test-{i}" for i in range(min(threads, 50))}
    assert _names() == []


@pytest.mark.parametrize(("payload_mib", "most"), [(4, 8), (32, 4), (1024, 2)])
def test_frames_in_flight_have_limited_memory(payload_mib: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that large partitions use fewer threads, but never only one."""
    counts: list[int] = []
    monkeypatch.setattr("asymcheck.storage.slots.share", lambda _items, _work, count, _name: counts.append(count))
    run_with_slots(
        range(50),
        lambda _item, _slot: None,
        slots=SlotPool(8, 1),
        payload_bytes=payload_mib << 20,
        threads=8,
        name="test",
    )
    assert counts == [most]


def test_no_item_needs_no_thread() -> None:
    """Test that a call without items returns immediately."""
    run_with_slots(
        [], lambda _item, _slot: pytest.fail("called"), slots=SlotPool(1, 1), payload_bytes=0, threads=4, name="x"
    )


def test_threads_that_work_together_have_slots_of_their_own() -> None:
    """Test that no two threads write into the same memory."""
    start = threading.Barrier(4)
    slots: list[int] = []

    def work(item: int, slot: Slot) -> None:
        start.wait(60)
        slots.append(id(slot))
        start.wait(60)

    run_with_slots(range(4), work, slots=SlotPool(2, 1 << 20), payload_bytes=10, threads=4, name="test")
    assert len(set(slots)) == 4


def test_the_first_failure_stops_the_others_and_is_raised() -> None:
    """Test that queued items are not begun after a failure."""
    done: list[int] = []

    def work(item: int, slot: Slot) -> None:
        if item == 3:
            raise ZeroDivisionError
        done.append(item)

    with pytest.raises(ZeroDivisionError):
        run_with_slots(range(10_000), work, slots=SlotPool(1, 1), payload_bytes=10, threads=1, name="test")
    assert done == [0, 1, 2]
    assert _names() == []


def test_an_interrupt_waits_for_the_threads() -> None:
    """Test that Ctrl-C is raised once the threads have ended, because their descriptors are closed next."""
    begun: list[int] = []
    finished: list[int] = []
    main = threading.main_thread().ident
    assert main is not None

    def work(item: int, slot: Slot) -> None:
        begun.append(item)
        if item == 0:
            for _ in range(2):
                time.sleep(0.1)
                signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.1)
        finished.append(item)

    with pytest.raises(KeyboardInterrupt):
        run_with_slots(range(1000), work, slots=SlotPool(2, 1 << 20), payload_bytes=10, threads=2, name="test")
    assert sorted(finished) == sorted(begun)
    time.sleep(0.15)
    assert sorted(finished) == sorted(begun) == list(range(len(begun)))
    assert len(begun) < 10


def test_a_thread_that_cannot_be_started_leaves_its_work_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a limit of threads: two threads work on every item."""
    done: list[int] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "asymcheck-test-2":
            message = "can't start new thread"
            raise RuntimeError(message)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    run_with_slots(
        range(50), lambda item, _slot: done.append(item), slots=SlotPool(1, 1), payload_bytes=1, threads=4, name="test"
    )
    assert sorted(done) == [*range(50)]
    assert _names() == []
