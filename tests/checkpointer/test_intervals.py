"""Test trace intervals: watchers see the duration of each part, and cannot break a training."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Store, events
from asymcheck.config import CaptureConfig, StoreConfig
from asymcheck.errors import LostCheckpointWarning
from asymcheck.events import INTERVALS, Interval
from tests.checkpointer.disks import Disk
from tests.checkpointer.loops import assert_every_step_is_right, linear_loop, sized


def test_no_intervals_are_created_without_watchers(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that a training without watchers creates no interval, clock reading or description."""
    made: list[str] = []

    def counted(name: str) -> None:
        kind = getattr(events, name)

        def make(*arguments: object) -> object:
            made.append(name)
            return kind(*arguments)

        monkeypatch.setattr(events, name, make)

    counted("Interval")
    counted("_timed")
    assert_every_step_is_right(store, linear_loop()[2], 3, config)
    assert made == []
    with (
        events.watch(lambda _interval: None),
        Checkpointer(store, linear_loop()[2].state, run="b", every=1, keep=None) as checkpointer,
    ):
        checkpointer.step(0)
    assert set(made) == {"Interval", "_timed"}


def test_every_name_is_listed_and_every_listed_name_occurs(
    store: Store, disk: Disk, config: CaptureConfig, tmp_path: Path
) -> None:
    """Test a session with a full ring, a save, a restore, a push, a pull, and leftovers of a kill."""
    seen: list[Interval] = []
    # Only measured windows are reported.
    config = dataclasses.replace(config, schedule="asymmetric")
    _, _, loop = linear_loop()
    # Large enough to be digested before it is copied.
    loop.state["constant"] = torch.ones(2000)
    disk.delay_s = 0.002
    with (
        events.watch(seen.append),
        Checkpointer(store, loop.state, capture=sized(config, 90_000), every=1, keep=None) as checkpointer,
    ):
        for step in range(5):
            loop.iterate(step)
            checkpointer.step(step)
        checkpointer.wait()
        checkpointer.save(5)
        checkpointer.restore()
        with Store.open(tmp_path / "small", config=StoreConfig(compression="smallest"), create=True) as small:
            small.save({"w": torch.randn(20_000)}, step=0)
            small.load()
            small.push((tmp_path / "there").as_uri())
        with Store.open(tmp_path / "pulled", create=True) as pulled:
            pulled.pull((tmp_path / "there").as_uri())
    assert {interval.name for interval in seen} == set(INTERVALS)
    assert all(interval.seconds >= 0 and interval.start_s > 0 for interval in seen)


def test_a_watcher_that_raises_is_reported_and_left_out(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that training continues and every step is stored, and that other watchers get all intervals."""
    reported: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda found: reported.append(found.exc_value))
    failed = {name: ZeroDivisionError(name) for name in ("step", "copy", "write", "commit")}
    other_names: list[str] = []

    def watcher_of(name: str) -> events.Watcher:
        def watcher(interval: Interval) -> None:
            if interval.name == name:
                raise failed[name]

        return watcher

    with contextlib.ExitStack() as watched:
        for name in failed:
            watched.enter_context(events.watch(watcher_of(name)))
        watched.enter_context(events.watch(lambda interval: other_names.append(interval.name)))
        assert_every_step_is_right(store, linear_loop()[2], 4, config)
    assert sorted(map(str, reported)) == sorted(failed)
    assert other_names.count("commit") == 4
    assert not events.is_watched()


def test_failed_block_is_reported_as_failed() -> None:
    """Test that the interval has the class of the error, and that the error is raised."""
    seen: list[Interval] = []

    def fail() -> None:
        with events.timed("mine", 7, lambda: {"a": 1}):
            raise ZeroDivisionError

    with events.watch(seen.append), pytest.raises(ZeroDivisionError):
        fail()
    (interval,) = seen
    assert (interval.name, interval.bytes, interval.detail) == ("mine", 7, {"a": 1, "failed": "ZeroDivisionError"})
    assert (interval.thread, interval.thread_name) == (threading.get_ident(), threading.current_thread().name)


def test_lost_checkpoint_is_reported_as_failed(store: Store, disk: Disk, config: CaptureConfig) -> None:
    """Test that the write or the commit of the checkpoint is reported as failed, too."""
    seen: list[Interval] = []
    _, _, loop = linear_loop()
    with (
        events.watch(seen.append),
        Checkpointer(store, loop.state, capture=config, on_error="warn", every=1, keep=None) as checkpointer,
    ):
        disk.full = "packs"
        loop.iterate(0)
        checkpointer.step(0)
        with pytest.warns(LostCheckpointWarning):
            checkpointer.wait()
        disk.full = None
        loop.iterate(1)
        checkpointer.step(1)
    ended = {
        interval.detail["step"]: interval.detail.get("failed") for interval in seen if interval.name == "checkpoint"
    }
    assert ended == {0: "OutOfSpaceError", 1: None}


def test_bytes_that_the_store_has_are_known_and_not_written(store: Store, config: CaptureConfig) -> None:
    """Test that the interval of each partition is either known or written, in a save and in the background."""
    seen: list[Interval] = []
    # The first captures have the partitions of a synchronous save.
    config = dataclasses.replace(config, schedule="asymmetric")
    _, _, loop = linear_loop()
    loop.iterate(0)
    with events.watch(seen.append):
        store.save(loop.state, step=0)
        store.save(loop.state, step=1)
        with Checkpointer(store, loop.state, capture=config, run="other", every=1, keep=None) as checkpointer:
            checkpointer.step(2)
    known = [bool(interval.detail["known"]) for interval in seen if interval.name == "write"]
    each = len(known) // 3
    assert each > 1
    assert known == [False] * each + [True] * 2 * each


def test_writers_stand_back_until_checkpoints_come_too_fast(store: Store, disk: Disk, config: CaptureConfig) -> None:
    """Test that writers have low priority if each step is waited for, and normal priority with a slow drive."""
    seen: list[int] = []

    def watcher(interval: Interval) -> None:
        if interval.name in ("write", "commit"):
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    normal_priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    _, _, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer, events.watch(watcher):
        for step in range(4):
            loop.iterate(step)
            checkpointer.step(step)
            checkpointer.wait()
        assert set(seen) == {19}
        seen.clear()
        disk.delay_s = 0.01
        for step in range(4, 10):
            loop.iterate(step)
            checkpointer.step(step)
        checkpointer.wait()
    assert seen.count(normal_priority) > len(seen) / 2
