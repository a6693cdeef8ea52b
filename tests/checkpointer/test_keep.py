"""Test retention during training: checkpoints are deleted after each commit, and kept ones never."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from asymcheck import AutoInterval, Checkpointer, Retention, Store, events
from asymcheck.config import CaptureConfig
from asymcheck.errors import AbandonedCheckpointsWarning, InvalidInputError, PruneError, PruneWarning
from asymcheck.events import Event
from asymcheck.gc.retention_runner import Pruner
from tests.checkpointer.disks import Disk, open_on
from tests.checkpointer.loops import assert_stored, copy_of, linear_loop, sized


def _steps(store: Store) -> list[int]:
    return [checkpoint.step for checkpoint in store.checkpoints()]


def _disk_bytes(store: Store) -> int:
    usage = store.resources.usage()
    return usage.pack_bytes + usage.pooled_bytes


def _wait_for_pruning(store: Store, checkpointer: Checkpointer) -> None:
    """Return when two checkpoints are left and the packs of the others are freed."""
    while len(_steps(store)) > 2:
        time.sleep(0.005)
    assert checkpointer._maintenance is not None
    with checkpointer._maintenance.still():
        pass


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True], ids=["all-new", "half-frozen"])
@pytest.mark.parametrize("waits", [True, False], ids=["calm", "busy"])
def test_the_disk_stays_bounded(store: Store, config: CaptureConfig, *, waits: bool, frozen: bool) -> None:
    """Test fifty saved steps with two kept: the disk has those, the one in progress, and one pack to overwrite."""
    _, _, loop = linear_loop(160)
    if frozen:
        loop.state["frozen"] = torch.randn(160 * 160 * 3)
    expected: dict[int, object] = {}
    each = most = 0
    # Space for two captures, the default for states that are larger than these.
    capture = sized(config, 2_200_000 if frozen else 1_100_000)
    with Checkpointer(store, loop.state, keep=Retention(keep_last=2), capture=capture, every=1) as checkpointer:
        for step in range(50):
            loop.iterate(step)
            checkpointer.step(step)
            expected[step] = copy_of(loop.state)
            if waits or not step:
                checkpointer.wait()
                _wait_for_pruning(store, checkpointer)
            each = each or _disk_bytes(store)
            most = max(most, _disk_bytes(store))
        assert checkpointer.statistics().written_bytes > 10 * each
    # Two checkpoints are kept, and a third until it is pruned. Both captures in the ring may be written by then.
    assert most < each * (3.5 if waits else 5.5)
    assert_stored(store, {step: expected[step] for step in (48, 49)})
    usage = store.disk_usage()
    # A pack is repacked when more than half of it is garbage.
    assert usage.locked_bytes <= usage.live_bytes * frozen
    assert store.verify() == []


def test_everything_is_kept_unless_asked(store: Store, config: CaptureConfig) -> None:
    """Test that ``keep=None`` deletes nothing."""
    _, _, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        for step in range(5):
            loop.iterate(step)
            checkpointer.step(step)
    assert _steps(store) == [0, 1, 2, 3, 4]


def test_rules_and_metrics_go_together(store: Store, config: CaptureConfig) -> None:
    """Test the best by the metric of ``step()``, every n-th step, and the last checkpoints."""
    _, _, loop = linear_loop()
    keep = Retention(keep_last=1, keep_every=4, keep_best=("loss", 1))
    with Checkpointer(store, loop.state, keep=keep, capture=config, every=1) as checkpointer:
        for step in range(10):
            loop.iterate(step)
            checkpointer.step(step, metrics={"loss": abs(step - 5)})
    assert _steps(store) == [0, 4, 5, 8, 9]


def test_pruning_runs_on_its_own_thread(store: Store, config: CaptureConfig) -> None:
    """Test that neither the training thread nor the commit thread deletes checkpoints."""
    seen: dict[str, set[str]] = {}

    def observer(event: Event) -> None:
        seen.setdefault(event.name, set()).add(threading.current_thread().name)

    _, _, loop = linear_loop()
    with (
        events.observe(observer),
        Checkpointer(store, loop.state, keep=Retention(keep_last=1), capture=config, every=1) as checkpointer,
    ):
        for step in range(4):
            loop.iterate(step)
            checkpointer.step(step)
            checkpointer.wait()
    assert seen["gc.retired"] == {"asymcheck-upkeep"}


def test_training_does_not_wait_for_pruning(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that steps are captured and become durable while pruning hangs."""
    _, _, loop = linear_loop()
    go_on, hanging = threading.Event(), threading.Event()
    prune = Pruner.prune

    def hang(self: Pruner, now_ns: int, *, always_collect: bool) -> object:
        hanging.set()
        assert go_on.wait(60)
        return prune(self, now_ns, always_collect=always_collect)

    monkeypatch.setattr(Pruner, "prune", hang)
    with Checkpointer(store, loop.state, keep=Retention(keep_last=1), capture=config, every=1) as checkpointer:
        loop.iterate(0)
        checkpointer.step(0)
        checkpointer.wait()
        assert hanging.wait(60)
        loop.iterate(1)
        assert checkpointer.step(1)
        checkpointer.wait("memory")
        assert _steps(store) == [0]
        go_on.set()
    assert _steps(store) == [1]


class Fire:
    """A pruning that fails until the fault is removed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.burns = True
        self.called = threading.Semaphore(0)
        prune = Pruner.prune

        def burn(pruner: Pruner, now_ns: int, *, always_collect: bool) -> object:
            self.called.release()
            if self.burns:
                raise OSError("the drive is on fire")
            return prune(pruner, now_ns, always_collect=always_collect)

        monkeypatch.setattr(Pruner, "prune", burn)

    def wait(self, checkpointer: Checkpointer) -> None:
        """Wait until the pruning was tried again."""
        assert self.called.acquire(timeout=60)
        assert checkpointer._maintenance is not None
        with checkpointer._maintenance.still():
            pass


def test_a_failure_reaches_the_loop_once_and_costs_no_checkpoint(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that one error is raised until the fault ends, and that the pending checkpoints are then deleted."""
    _, _, loop = linear_loop()
    fire = Fire(monkeypatch)
    with Checkpointer(store, loop.state, keep=Retention(keep_last=1), capture=config, every=1) as checkpointer:
        checkpointer.step(0)
        fire.wait(checkpointer)
        loop.iterate(1)
        with pytest.raises(PruneError, match="old checkpoints of run 'default': the drive is on"):
            checkpointer.step(1)
        fire.wait(checkpointer)
        for step in (2, 3):
            loop.iterate(step)
            checkpointer.step(step)
            fire.wait(checkpointer)
        assert _steps(store) == [0, 1, 2, 3]
        fire.burns = False
        loop.iterate(4)
        checkpointer.step(4)
        fire.wait(checkpointer)
        assert _steps(store) == [4]
        fire.burns = True
        with pytest.raises(PruneError):
            checkpointer.save(5)
        assert _steps(store) == [4, 5]


def test_a_failure_is_a_warning_where_errors_are(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that ``close()`` warns of a failure that was not reported before."""
    _, _, loop = linear_loop()
    Fire(monkeypatch)
    checkpointer = Checkpointer(
        store, loop.state, keep=Retention(keep_last=1), capture=config, on_error="warn", every=1
    )
    checkpointer.step(0)
    with pytest.warns(PruneWarning, match="on fire"):
        checkpointer.close()
    assert _steps(store) == [0]


def test_a_save_that_is_waited_for_prunes_too(store: Store, config: CaptureConfig) -> None:
    """Test that ``save()`` prunes before it returns, without background work."""
    _, _, loop = linear_loop()
    with Checkpointer(store, loop.state, keep=Retention(keep_last=2), capture=config, every=1) as checkpointer:
        for step in range(4):
            loop.iterate(step)
            checkpointer.save(step)
            assert _steps(store) == list(range(max(step - 1, 0), step + 1))


def test_a_resumed_training_goes_on_keeping(store: Store, config: CaptureConfig) -> None:
    """Test that checkpoints of the previous training are pruned, but not the one that is being restored."""
    for first in (0, 5, 10):
        _, _, loop = linear_loop()
        with Checkpointer(store, loop.state, keep=Retention(keep_last=2), capture=config, every=1) as checkpointer:
            restored = checkpointer.restore()
            assert (restored.step if restored else -1) == first - 1
            for step in range(first, first + 5):
                loop.iterate(step)
                checkpointer.step(step)
    assert _steps(store) == [13, 14]
    assert {checkpoint.on_line for checkpoint in store.checkpoints()} == {True}


def test_abandoned_checkpoints_are_kept(store: Store, config: CaptureConfig) -> None:
    """Test that a forgotten restore deletes no checkpoint of the earlier training."""
    _, _, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        for step in range(3):
            loop.iterate(step)
            checkpointer.step(step)
    with Checkpointer(store, loop.state, keep=Retention(keep_last=1), capture=config, every=1) as checkpointer:
        with pytest.warns(AbandonedCheckpointsWarning):
            checkpointer.step(0)
        for step in (1, 2):
            loop.iterate(step)
            checkpointer.step(step)
    assert [(one.step, one.on_line) for one in store.checkpoints()] == [(0, False), (1, False), (2, False), (2, True)]


def test_other_runs_are_left_alone(store: Store, config: CaptureConfig) -> None:
    """Test that retention only applies to the run of its checkpointer."""
    _, _, loop = linear_loop()
    for step in range(3):
        store.save({"x": torch.full((3000,), float(step))}, step=step, run="other")
    with Checkpointer(store, loop.state, keep=Retention(keep_last=1), capture=config, every=1) as checkpointer:
        for step in range(3):
            loop.iterate(step)
            checkpointer.step(step)
    assert [one.step for one in store.checkpoints("other")] == [0, 1, 2]
    assert [one.step for one in store.checkpoints("default")] == [2]


def test_a_full_disk_is_no_reason_to_delete_more(disk: Disk, store_path: Path, config: CaptureConfig) -> None:
    """Test that a checkpoint that could not be stored does not replace another."""
    _, _, loop = linear_loop()
    with open_on(disk, store_path) as store:
        with Checkpointer(
            store, loop.state, keep=Retention(keep_last=2), capture=config, on_error="warn", every=1
        ) as checkpointer:
            for step in range(6):
                disk.full = "packs" if step == 4 else None
                loop.iterate(step)
                checkpointer.step(step)
                if step == 4:
                    with pytest.warns(UserWarning, match="no room"):
                        checkpointer.wait()
                checkpointer.wait()
        assert _steps(store) == [3, 5]


def test_the_interval_is_chosen_and_kept_to(store: Store, config: CaptureConfig) -> None:
    """Test three measured checkpoints, the reported choice and its reason, and the interval after a restore."""
    _, _, loop = linear_loop()
    with Checkpointer(store, loop.state, every="auto", capture=config, keep=None) as checkpointer:
        assert checkpointer.restore() is None
        assert (checkpointer.interval.steps, str(checkpointer.interval)[:15]) == (0, "not chosen yet:")
        begun = []
        for step in range(60):
            loop.iterate(step)
            if checkpointer.step(step):
                begun.append(step)
                checkpointer.wait()
        assert begun[:3] == [1, 3, 5]
        assert checkpointer.interval.steps > 60, "a failure every 3 h is rare beside steps of a millisecond"
        assert "a failure every 3 h" in str(checkpointer.interval)
        chosen = checkpointer.interval
        checkpointer.restore(step=3)
        assert not checkpointer.step(4)
        assert checkpointer.interval is chosen
    assert _steps(store) == begun


def test_the_aim_of_the_interval_can_be_given(store: Store, config: CaptureConfig) -> None:
    """Test that with a failure every hundredth of a second, the store or the overhead limits the interval."""
    _, _, loop = linear_loop()
    aim = AutoInterval(overhead=1.0, mtbf=timedelta(milliseconds=10))
    with Checkpointer(store, loop.state, every=aim, capture=config, keep=None) as checkpointer:
        for step in range(40):
            loop.iterate(step)
            if checkpointer.step(step):
                checkpointer.wait()
        assert checkpointer.interval.steps > 0
        assert "3 h" not in str(checkpointer.interval)
        assert checkpointer.statistics().captures >= 3


def test_fixed_interval_is_reported(store: Store) -> None:
    """Test that a fixed interval is reported without a measurement."""
    assert str(Checkpointer(store, {}, every=7, keep=None).interval) == "every 7 steps: set by the user"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": "often"}, "or 'auto'"),
        ({"every": 0}, "1 or more"),
        ({"every": True}, "1 or more"),
        ({"keep": 2}, "Retention"),
    ],
)
def test_invalid_interval_is_refused(store: Store, options: dict[str, object], words: str) -> None:
    """Test that the error lists valid alternatives."""
    with pytest.raises(InvalidInputError, match=words):
        Checkpointer(store, {}, **options)  # type: ignore[arg-type]  # that is the point
