"""Test random captures with random calls and delays: none is torn, and no mutation is missed."""

from __future__ import annotations

import random
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from asymcheck import Checkpointer, Store
from asymcheck.capture import engine
from asymcheck.capture.device_copy import Transfers
from asymcheck.capture.inflight import CheckpointReport
from asymcheck.commit.transaction import RingTransaction
from asymcheck.config import CaptureConfig
from asymcheck.errors import (
    CaptureWarning,
    CheckpointNotFoundError,
    LostCheckpointWarning,
    StaleStateWarning,
    StateMismatchError,
    TornCaptureError,
)
from asymcheck.storage.shm.ring_writer import Ring
from tests.checkpointer.loops import CONFIG, copy_of, folder_for_rings
from tests.checkpointer.random_loops import RandomLoop, mutate
from tests.store.equality import assert_same

CAPTURES = 25
"""Number of captures of one training."""
EPISODES, EPISODES_LONG = 4, 400
_LARGE_RINGS = 0.5


class Delays:
    """Delays background threads at random, and copies of the capture thread until :attr:`open` is set."""

    def __init__(self, chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        """Insert delays into the background work, until ``monkeypatch`` is undone."""
        self._chance = chance
        self.often, self.most_s = 0.0, 0.0
        self.open = threading.Event()
        self.open.set()
        for owner, name in (
            (Transfers, "copy"),
            (Ring, "complete"),
            (RingTransaction, "add_frame"),
            (RingTransaction, "commit_capture"),
        ):
            monkeypatch.setattr(owner, name, self._late(getattr(owner, name)))
        monkeypatch.setattr(engine, "copy_partition", self._late(engine.copy_partition))

    def _late(self, function: Callable[..., object]) -> Callable[..., object]:
        def late(*arguments: object, **options: object) -> object:
            if threading.current_thread().name == "asymcheck-capture" and function.__name__ == "copy":
                assert self.open.wait(60)
            if self._chance.random() < self.often:
                time.sleep(self._chance.random() * self.most_s)
            return function(*arguments, **options)

        return late


class Training:
    """A random training, and the expected content of its checkpoints."""

    def __init__(self, store: Store, seed: int, folder: Path, delays: Delays) -> None:
        """Choose the loop, the ring and the delays."""
        self.loop = RandomLoop(seed)
        self.chance = chance = self.loop.chance
        self.delays = delays
        delays.often, delays.most_s = chance.choice(((0.0, 0.0), (0.02, 0.004), (0.2, 0.0005)))
        size = None if chance.random() < _LARGE_RINGS else chance.randint(256 << 10, 2 << 20)
        schedule = chance.choice(("immediate", "immediate", "asymmetric", "symmetric", "eager"))
        config = CaptureConfig(ring_bytes=size, ring_folder=str(folder), proof="full", schedule=schedule)
        self.store = store
        self.reports: list[CheckpointReport] = []
        self.checkpointer = Checkpointer(
            store,
            self.loop.state,
            capture=config,
            on_error="warn",
            on_checkpoint=self.reports.append,
            every=1,
            keep=None,
        )
        self.step = -1
        self.expected: dict[int, object] = {}
        self.mutated: set[int] = set()
        """Steps during which a deferred tensor was changed."""
        self.torn: dict[int, str] = {}
        """Steps in which the tensor was certainly not copied before the change, with its name."""
        self.known: dict[int, object] = {}
        """Expected state of each step, also after the comparison."""
        self.structured = -1
        """First step after the last change of structure."""

    def capture(self) -> None:
        """Train, capture, and take a random action before the training continues."""
        self.step += 1
        self.loop.iterate()
        held = self.chance.random() < 0.1
        if held:
            self.checkpointer.fence()
            self.delays.open.clear()
        self.checkpointer.step(self.step)
        self.expected[self.step] = copy_of(self.loop.state)
        if held:
            self._mutate(certain=True)
            self.delays.open.set()
        for _ in range(self.chance.randint(0, 2)):
            self.chance.choice(
                (
                    self.loop.forward,
                    self.loop.change_what_may_change,
                    self.loop.change_what_may_change,
                    self.checkpointer.fence,
                    self._mutate,
                    self._mutate_after_the_fence,
                    lambda: self.checkpointer.wait("memory"),
                    self.checkpointer.wait,
                    self._change_structure,
                    self._go_back,
                    self._save,
                )
            )()

    def _mutate(self, *, certain: bool = False) -> None:
        if self.step in self.torn:
            # A second change may undo the first, and then the capture is not torn.
            return
        names = self._deferred_now()
        tensors = {name: tensor for name, tensor in self.loop.deferrable().items() if name in names}
        if tensors:
            name = self.chance.choice(sorted(tensors))
            mutate(tensors[name], self.chance)
            self.mutated.add(self.step)
            # The proof has copied a tensor that is not contiguous, and the capture is taken from this copy.
            if certain and tensors[name].is_contiguous():
                self.torn[self.step] = name

    def _deferred_now(self) -> set[str]:
        """Return the names of tensors that the newest capture copies after ``step()``."""
        background = self.checkpointer._background
        if background is None or background._unfenced is None:
            return set()
        capture = background._unfenced
        later = zip(capture.partitions, capture.plan.release, strict=True)
        return {capture.names[piece.row] for partition, window in later if window >= 0 for piece in partition.pieces}

    def _mutate_after_the_fence(self) -> None:
        self.checkpointer.fence()
        tensors = self.loop.deferrable()
        if tensors:
            mutate(tensors[self.chance.choice(sorted(tensors))], self.chance)

    def _change_structure(self) -> None:
        self.loop.change_structure()
        self.structured = self.step + 1

    def _save(self) -> None:
        self.step += 1
        self.checkpointer.save(self.step)
        self.expected[self.step] = copy_of(self.loop.state)

    def _go_back(self) -> None:
        self.check()
        newest = max(self.expected, default=-1)
        if self.structured > newest:
            return
        try:
            back = self.checkpointer.rollback()
        except CheckpointNotFoundError:
            return
        except StateMismatchError:
            # Captures in memory may be older than the change of structure.
            if self.structured < 0:
                raise
            return
        if back.step >= self.structured:
            assert_same(copy_of(self.loop.state), self.known[back.step], f"back at step {back.step}")
        self.expected.clear()

    def check(self) -> None:
        """Compare stored states with the expected states, and lost steps with changes; forget the compared ones."""
        self.checkpointer.wait()
        for report in self.reports:
            if report.error is not None:
                assert isinstance(report.error, TornCaptureError), f"step {report.step}: {report.error}"
                assert report.step in self.mutated, f"step {report.step} is called torn: {report.error}"
                del self.expected[report.step]
            if report.step in self.torn:
                assert report.error is not None, f"step {report.step}: {self.torn[report.step]} changed unseen"
        self.reports.clear()
        stored = {checkpoint.step for checkpoint in self.store.checkpoints() if checkpoint.on_line}
        assert set(self.expected) <= stored
        assert not self.torn.keys() & {checkpoint.step for checkpoint in self.store.checkpoints()}
        for step, state in self.expected.items():
            assert_same(self.store.load(step), state, f"step {step}")
        self.known |= self.expected


def _run(folder: Path, seed: int, delays: Delays) -> tuple[int, int, int]:
    """Run one training; return the number of captures, of torn captures, and of warnings about them."""
    rings = folder_for_rings(folder)
    with (
        warnings.catch_warnings(record=True) as caught,
        Store.open(folder / "store", config=CONFIG, create=True) as store,
    ):
        warnings.simplefilter("always", LostCheckpointWarning)
        warnings.simplefilter("ignore", StaleStateWarning)
        warnings.simplefilter("ignore", CaptureWarning)
        training = Training(store, seed, rings, delays)
        with training.checkpointer:
            while training.checkpointer.statistics().captures < CAPTURES:
                training.capture()
            training.check()
        assert store.verify() == []
    assert list(rings.iterdir()) == []
    found = training.checkpointer.statistics()
    assert found.captures == found.durable + found.lost
    warned = [str(warning.message) for warning in caught if warning.category is LostCheckpointWarning]
    assert len(warned) == found.lost
    for step in training.torn:
        assert any(f"step {step} " in message for message in warned)
    return found.captures, found.lost, len(training.torn)


def _run_all(folder: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    delays = Delays(random.Random(0), monkeypatch)
    captures = lost = torn = 0
    for seed in seeds:
        path = folder / str(seed)
        path.mkdir()
        try:
            found = _run(path, seed, delays)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            delays.open.set()
        captures, lost, torn = captures + found[0], lost + found[1], torn + found[2]
        shutil.rmtree(path)
    assert captures >= CAPTURES * len(seeds)
    # Enough captures are discarded to test the proof, and few enough that most comparisons use stored states.
    assert 0 < torn <= lost < captures // 2


@pytest.mark.slow
def test_no_random_capture_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that stored states are exact bit for bit, and that early changes are reported and never stored."""
    _run_all(tmp_path, range(EPISODES), monkeypatch)


@pytest.mark.long
def test_none_of_ten_thousand_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test ten thousand captures of other states."""
    _run_all(tmp_path, range(1000, 1000 + EPISODES_LONG), monkeypatch)
