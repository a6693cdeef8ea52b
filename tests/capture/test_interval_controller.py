"""Test the interval controller with a simulated training: it measures early, keeps its choice, and adapts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from asymcheck.capture.background_saver import Statistics
from asymcheck.policies.interval import AutoInterval, TrainingPace
from asymcheck.training.interval_controller import IntervalController


class Training:
    """A training with a simulated clock and simulated costs."""

    def __init__(self, pacer: IntervalController, *, step_s: float, stall_s: float, durable_s: float = 0.5) -> None:
        self.pacer, self.step_s, self.stall_s, self.durable_s = pacer, step_s, stall_s, durable_s
        self.spent = Statistics(ring_bytes=2_100)
        self.now_s = 1_000.0
        self.durable_at: list[float] = []
        self.first_stall_s = 3.0

    def run(self, first: int, count: int) -> list[int]:
        """Run steps; return the steps at which a checkpoint began."""
        begun = []
        for step in range(first, first + count):
            self.now_s += self.step_s
            done = [at for at in self.durable_at if at <= self.now_s]
            self.durable_at = [at for at in self.durable_at if at > self.now_s]
            self.spent.durable += len(done)
            self.spent.durable_s += [self.durable_s] * len(done)
            if self.pacer.is_due(step, self.now_s, self.spent):
                self.pacer.began(step)
                begun.append(step)
                stall_s = self.stall_s + (0 if self.spent.captures else self.first_stall_s)
                self.spent.captures += 1
                self.spent.captured_bytes += 1_000
                # One half of the stall is in step(), one half at the fence of the next iteration.
                self.spent.step_s += stall_s / 2
                self.spent.fence_s += stall_s / 2
                self.now_s += stall_s
                self.durable_at.append(self.now_s + self.durable_s)
        return begun


def test_measures_early_then_keeps_the_interval() -> None:
    """Test three checkpoints, not at the first step, and Young's interval without the first stall."""
    pacer = IntervalController(AutoInterval(mtbf=timedelta(seconds=2000)))
    training = Training(pacer, step_s=1.0, stall_s=0.1)
    assert pacer.chosen.steps == 0
    begun = training.run(0, 200)
    assert begun[:3] == [1, 3, 5]
    assert pacer.chosen.steps == 20
    assert [later - earlier for earlier, later in itertools.pairwise(begun[2:])] == [20] * 9
    assert "Young's interval for 100 ms of stall and a failure every 33.3 min" in str(pacer.chosen)


def test_waits_for_durability_before_the_next_measurement() -> None:
    """Test that a checkpoint that is not durable has no duration yet."""
    pacer = IntervalController(AutoInterval(mtbf=timedelta(seconds=1)))
    training = Training(pacer, step_s=1.0, stall_s=0.001, durable_s=9.5)
    begun = training.run(0, 60)
    assert begun[:5] == [1, 11, 21, 31, 41]
    assert pacer.chosen.steps == 10
    assert "the store takes so long until one is durable" in str(pacer.chosen)


class OneDrive(Training):
    """A drive that writes one checkpoint at a time; training waits when two are pending."""

    def run(self, first: int, count: int) -> list[int]:
        """Run steps; return the steps at which a checkpoint began."""
        begun = []
        for step in range(first, first + count):
            self.now_s += self.step_s
            done = [at for at in self.durable_at if at <= self.now_s]
            self.durable_at = self.durable_at[len(done) :]
            self.spent.durable += len(done)
            if self.pacer.is_due(step, self.now_s, self.spent):
                self.pacer.began(step)
                begun.append(step)
                self.spent.captures += 1
                waited_s = max(self.durable_at[-2] - self.now_s, 0.0) if len(self.durable_at) > 1 else 0.0
                self.spent.step_s += self.stall_s + waited_s
                self.now_s += self.stall_s + waited_s
                self.durable_at.append(max(self.now_s, *self.durable_at[-1:], 0.0) + self.durable_s)
                # Report the ended checkpoints together, because no call reads them earlier.
                self.spent.durable_s.append(self.durable_at[-1] - self.now_s)
        return begun


def test_a_slow_drive_does_not_hold_the_training() -> None:
    """Test that the interval is not shorter than the write time, although the ring has space for two captures."""
    pacer = IntervalController(AutoInterval())
    training = OneDrive(pacer, step_s=0.5, stall_s=0.005, durable_s=28.0)
    began_s = training.now_s
    begun = training.run(0, 20_000)
    assert training.spent.step_s < 0.01 * (training.now_s - began_s)
    assert {later - earlier for earlier, later in itertools.pairwise(begun[3:])} == {pacer.chosen.steps}
    assert 56 <= pacer.chosen.steps <= 70


def test_follows_changes_but_not_noise() -> None:
    """Test that a stall that is 10 % longer changes nothing, and that a 100-fold stall makes checkpoints rarer."""
    pacer = IntervalController(AutoInterval(mtbf=timedelta(seconds=2000)))
    training = Training(pacer, step_s=1.0, stall_s=0.1)
    training.run(0, 100)
    calm = pacer.chosen
    training.stall_s = 0.11
    training.run(100, 800)
    assert pacer.chosen is calm
    training.stall_s = 10.0
    training.run(900, 5000)
    assert pacer.chosen.steps == 1000


def test_slower_steps_are_counted_by_their_median() -> None:
    """Test that one step of an hour has no effect."""
    pacer = IntervalController(AutoInterval(mtbf=timedelta(seconds=2000)))
    training = Training(pacer, step_s=1.0, stall_s=0.1)
    training.run(0, 50)
    training.now_s += 3600
    training.run(50, 50)
    assert pacer.chosen.steps == 20
    training.step_s = 4.0
    training.run(100, 200)
    assert pacer.chosen.steps == 5


def test_a_restore_begins_the_interval_again() -> None:
    """Test that steps count from the restored step, and that the time of the restore does not count as a step."""
    pacer = IntervalController(AutoInterval(mtbf=timedelta(seconds=2000)))
    training = Training(pacer, step_s=1.0, stall_s=0.1)
    training.run(0, 100)
    pacer.restart(45)
    training.now_s += 500
    before = max(pacer._step_s)
    assert training.run(46, 60)[:2] == [65, 85]
    pacer.restart(106)
    training.now_s += 500
    training.run(107, 3)
    assert max(pacer._step_s) == before
    assert pacer.chosen.steps == 20


def test_a_resumed_training_measures_again() -> None:
    """Test a new process that begins at any step."""
    pacer = IntervalController(AutoInterval(mtbf=timedelta(seconds=2000)))
    pacer.restart(700)
    begun = Training(pacer, step_s=1.0, stall_s=0.1).run(701, 60)
    assert begun[:4] == [702, 704, 706, 726]


class Channel:
    """Simulated announcements of rank 0, with the number of requests of another rank."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def say(self, _step: int, make: Callable[[], object]) -> Any:  # noqa: ANN401 - as Told has it
        """Announce as rank 0."""
        self.said.append(make())
        return self.said[-1]

    def listener(self) -> Callable[[int, Callable[[], object]], Any]:
        """Listen as another rank."""
        said = iter(self.said)
        return lambda _step, _make: next(said)


def test_ranks_follow_rank_0_with_few_requests() -> None:
    """Test that other ranks only ask at announced steps, also after a restore, and ignore their own measurements."""
    channel, aim = Channel(), AutoInterval(mtbf=timedelta(seconds=2000))
    first, other = IntervalController(aim, channel.say), IntervalController(aim, channel.listener())
    runs: list[list[list[int]]] = []
    for pacer, step_s in ((first, 1.0), (other, 0.05)):
        training = Training(pacer, step_s=step_s, stall_s=0.1, durable_s=9.5)
        begun = [training.run(0, 150)]
        for back_to in (45, 110):
            pacer.restart(back_to)
            begun.append(training.run(back_to + 1, 60))
        runs.append(begun)
    assert runs[0] == runs[1]
    begun, back, on = runs[0]
    # While a checkpoint is not durable, the number of steps between two requests doubles.
    assert begun[:3] == [1, 17, 33]
    assert [later - earlier for earlier, later in itertools.pairwise(begun[2:])] == [20] * 5
    assert (back, on) == ([65, 85, 105], [130, 150, 170])
    assert other.chosen == first.chosen
    assert len(channel.said) < 30


def test_rank_that_missed_an_announcement_gets_the_next_one() -> None:
    """Test that this rank asks as often as other ranks."""
    channel = Channel()
    first = IntervalController(AutoInterval(mtbf=timedelta(seconds=2000)), channel.say)
    begun = Training(first, step_s=1.0, stall_s=0.1).run(0, 60)
    late = IntervalController(AutoInterval(), channel.listener())
    steps = {said["step"]: said["next"] for said in channel.said}
    missed = begun[-2]
    channel.said[:] = [said for said in channel.said if said["step"] >= missed]
    assert [late.is_due(step, 0.0, Statistics()) for step in range(missed + 1, steps[missed] + 1)] == [
        *([False] * (steps[missed] - missed - 1)),
        True,
    ]


def test_the_slowest_rank_counts() -> None:
    """Test that measurements of other ranks are used, if known."""
    pacer = IntervalController(AutoInterval(mtbf=timedelta(seconds=2000)), Channel().say)
    training = Training(pacer, step_s=1.0, stall_s=0.1)
    training.run(0, 50)
    assert pacer.chosen.steps == 20
    training.spent.paces = [TrainingPace(step_s=1.0, stall_s=2.5, durable_s=0.5)]
    training.run(50, 50)
    assert pacer.chosen.steps == 250
