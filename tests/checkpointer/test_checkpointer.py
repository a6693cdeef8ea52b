"""Test saves, restores and the line of a Checkpointer in a training loop."""

import logging
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asymcheck import CaptureConfig, Checkpointer, Store, StoreConfig
from asymcheck.capture.background_saver import BackgroundSaver
from asymcheck.errors import (
    AbandonedCheckpointsWarning,
    CheckpointNotFoundError,
    InvalidInputError,
    NotFoundError,
    OutOfSpaceError,
    RunInUseError,
    SkippedCheckpointWarning,
    StateDifferenceWarning,
    StateMismatchError,
    StepOrderWarning,
    UnsupportedValueError,
)
from asymcheck.storage.local_files import Files
from asymcheck.storage.nvme import NvmeTier


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    """Return a new store without encoding, because encoding depends on the speed of the drive."""
    with Store.open(store_path, config=StoreConfig(compression="off"), create=True) as opened:
        yield opened


def _state(value: float = 0.0) -> dict[str, Any]:
    return {"x": torch.full((2000,), value), "epoch": int(value), "nested": {"count": int(value)}}


def _train(store: Store, steps: Sequence[int], **options: Any) -> list[int]:  # noqa: ANN401 - passed on
    """Run a loop whose state is its step number; return the saved steps."""
    state = _state()
    saved = []
    with Checkpointer(store, state, **{"every": 1, "keep": None, **options}) as checkpointer:
        for step in steps:
            state["x"].fill_(step)
            state["epoch"] = state["nested"]["count"] = step
            if checkpointer.step(step, metrics={"loss": 1.0 / (step + 1)}):
                saved.append(step)
    return saved


def test_a_first_start_restores_nothing(store: Store) -> None:
    """Test that the first restore returns None without a warning, and does not change the state."""
    state = _state(5)
    checkpointer = Checkpointer(store, state, every=1, keep=None)
    assert checkpointer.restore() is None
    assert checkpointer.latest_step is None
    assert state["x"][0] == 5


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 2, 3, 4, 5, 6, 7]), (3, [0, 3, 6]), (8, [0]), (100, [0])])
def test_saves_at_multiples_of_every(store: Store, every: int, expected: list[int]) -> None:
    """Test the saved steps and their metrics."""
    assert _train(store, range(8), every=every) == expected
    assert [checkpoint.step for checkpoint in store.checkpoints()] == expected
    assert store.checkpoints()[-1].metrics == {"loss": 1.0 / (expected[-1] + 1)}


def test_steps_in_strides_are_saved_as_often(store: Store) -> None:
    """Test that a step beyond a multiple is saved, also as the first step after a restore."""
    assert _train(store, [1, 3, 5, 7, 9, 11, 13, 20, 21], every=4) == [5, 9, 13, 20]
    state = _state()
    with Checkpointer(store, state, every=4, keep=None) as checkpointer:
        checkpointer.restore(13)
        begun = []
        for step in (15, 17, 19, 21):
            state["x"].fill_(step)
            begun += [step] * checkpointer.step(step)
    assert begun == [17, 21]


@pytest.mark.parametrize("every", [0, -1])
def test_never_saving_is_refused(store: Store, every: int) -> None:
    """Test that the interval must be a positive number of steps."""
    with pytest.raises(InvalidInputError, match="every"):
        Checkpointer(store, {}, every=every, keep=None)


def test_a_save_can_be_asked_for_at_any_step(store: Store) -> None:
    """Test a save at the end of a training, independent of ``every``."""
    checkpointer = Checkpointer(store, _state(), every=100, keep=None)
    assert not checkpointer.step(7)
    assert checkpointer.latest_step is None
    saved = checkpointer.save(7, {"loss": 2.0})
    assert (saved.step, saved.metrics, saved.on_line) == (7, {"loss": 2.0}, True)
    assert checkpointer.latest_step == 7


@pytest.mark.parametrize("how", ["save", "step"])
def test_lower_step_warns(store: Store, how: str) -> None:
    """Test a lower step, also right after a restore, and the same step again, which does not warn."""
    _train(store, range(4))
    state = _state()
    with Checkpointer(store, state, every=1, keep=None) as checkpointer:
        checkpointer.restore()
        state["x"].fill_(4)
        with warnings.catch_warnings():
            warnings.simplefilter("error", StepOrderWarning)
            getattr(checkpointer, how)(3)
        state["x"].fill_(5)
        with pytest.warns(StepOrderWarning, match="step 2 is saved after step 3") as caught:
            getattr(checkpointer, how)(2)
        assert [one.filename for one in caught if one.category is StepOrderWarning] == [__file__]
    with Checkpointer(store, state, every=1, keep=None) as checkpointer:
        checkpointer.restore(3)
        state["x"].fill_(6)
        with pytest.warns(StepOrderWarning, match="step 1 is saved after step 3.*keep_last deletes step 1 first"):
            getattr(checkpointer, how)(1)


def test_everything_comes_back_into_the_given_state(store: Store) -> None:
    """Test that tensors are filled in place, and plain values in the given mapping and its nested mappings."""
    _train(store, range(4))
    state = _state()
    tensor, nested = state["x"], state["nested"]
    checkpointer = Checkpointer(store, state, every=1, keep=None)
    restored = checkpointer.restore()
    assert restored is not None
    assert (restored.step, restored.generation, checkpointer.latest_step) == (3, 1, 3)
    assert state["x"] is tensor
    assert state["nested"] is nested
    assert tensor.tolist() == [3.0] * 2000
    assert (state["epoch"], nested["count"]) == (3, 3)


def test_a_value_that_changes_in_the_given_mapping_is_saved(store: Store) -> None:
    """Test that the mapping is read at each save, and not copied at the start."""
    state = _state()
    checkpointer = Checkpointer(store, state, every=1, keep=None)
    state["epoch"] = 17
    checkpointer.save(0)
    loaded = store.load()
    assert isinstance(loaded, dict)
    assert loaded["epoch"] == 17


def test_each_restore_opens_a_new_generation(store: Store) -> None:
    """Test that checkpoints after the restored step are abandoned before the restore returns."""
    _train(store, range(6))
    for generation in (2, 3):
        checkpointer = Checkpointer(store, _state(), every=1, keep=None)
        assert checkpointer.restore(2) is not None
        assert {c.step for c in store.checkpoints() if not c.on_line} == {3, 4, 5}
        assert checkpointer.save(9).generation == generation
        store.delete(9)
    assert [path.name for path in sorted((store.path / "heads" / "default").iterdir())] == [
        "00000001.head",
        "00000002.head",
        "00000003.head",
    ]


def test_a_restart_after_going_back_goes_on_from_the_new_branch(store: Store) -> None:
    """Test that the newest step of the new branch is restored, although the abandoned branch has a higher step."""
    _train(store, range(10))
    state = _state()
    checkpointer = Checkpointer(store, state, every=1, keep=None)
    checkpointer.restore(3)
    checkpointer.step(4)
    restored = Checkpointer(store, state, every=1, keep=None).restore()
    assert restored is not None
    assert (restored.step, restored.generation) == (4, 2)


def test_return_to_an_abandoned_save_of_a_step(store: Store) -> None:
    """Test the return from a fork to the first training by a save id, because both have the step."""
    _train(store, range(4))
    abandoned = store.checkpoints()[-1]
    state = _state()
    checkpointer = Checkpointer(store, state, every=1, keep=None)
    checkpointer.restore(1)
    checkpointer.save(3)
    restored = checkpointer.restore(f"save:{abandoned.save_id}")
    assert restored is not None
    assert (restored.step, restored.save_id) == (3, abandoned.save_id)
    assert [c.save_id for c in store.checkpoints() if c.on_line][-1] == abandoned.save_id


def test_a_start_without_a_restore_is_a_new_line(store: Store) -> None:
    """Test that a start without a restore warns, keeps the old checkpoints, and saves the newest checkpoint."""
    _train(store, range(10))
    with pytest.warns(AbandonedCheckpointsWarning, match="10 checkpoints up to step 9") as caught:
        _train(store, range(2))
    assert caught[0].filename == __file__
    assert [(c.generation, c.step) for c in store.checkpoints() if c.on_line] == [(2, 0), (2, 1)]
    restored = store.restore()
    assert (restored.checkpoint.step, restored.checkpoint.generation) == (1, 2)


def test_a_run_of_another_name_is_no_reason_for_a_warning(store: Store) -> None:
    """Test that each run has its own line."""
    _train(store, range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _train(store, range(2), run="other")
    assert [(c.run, c.step) for c in store.checkpoints() if c.on_line] == [
        *(("default", step) for step in range(3)),
        *(("other", step) for step in range(2)),
    ]


def test_requested_step_must_exist(store: Store) -> None:
    """Test that a missing step raises an error and begins no generation, unlike a first start."""
    _train(store, range(3))
    checkpointer = Checkpointer(store, _state(), every=1, keep=None)
    with pytest.raises(CheckpointNotFoundError, match="step 7"):
        checkpointer.restore(7)
    assert checkpointer.latest_step is None
    assert len(list((store.path / "heads" / "default").iterdir())) == 1


def test_a_state_that_does_not_fit_opens_no_generation(store: Store) -> None:
    """Test that a failed restore does not change the line."""
    _train(store, range(3))
    with pytest.raises(StateMismatchError):
        Checkpointer(store, {"x": torch.zeros(3)}, every=1, keep=None).restore()
    assert len(list((store.path / "heads" / "default").iterdir())) == 1
    assert {c.on_line for c in store.checkpoints()} == {True}


def test_a_part_of_the_state_can_be_restored(store: Store) -> None:
    """Test that a training can continue with fewer entries, for instance without the optimizer."""
    _train(store, range(3))
    state = {"x": torch.zeros(2000)}
    with pytest.warns(StateDifferenceWarning, match="not in the given state"):
        assert Checkpointer(store, state, every=1, keep=None).restore() is not None
    assert state["x"][0] == 2


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(store: Store) -> None:
    """Test that the next older checkpoint is restored, and that training continues on a new line."""
    _train(store, range(3))
    newest = max((store.path / "manifests").rglob("*.manifest"))
    newest.write_bytes(newest.read_bytes()[:-1])
    checkpointer = Checkpointer(store, _state(), every=1, keep=None)
    with pytest.warns(SkippedCheckpointWarning, match="step 2") as caught:
        restored = checkpointer.restore()
    assert caught[0].filename == __file__
    assert restored is not None
    assert restored.step == 1
    assert [c.step for c in store.checkpoints() if c.on_line] == [0, 1]


def test_warning_as_error_abandons_nothing(store: Store) -> None:
    """Test that the damaged checkpoint stays the newest, because it may be repaired."""
    _train(store, range(3))
    newest = max((store.path / "manifests").rglob("*.manifest"))
    newest.write_bytes(newest.read_bytes()[:-1])
    with warnings.catch_warnings():
        warnings.simplefilter("error", SkippedCheckpointWarning)
        with pytest.raises(SkippedCheckpointWarning, match="step 2"):
            Checkpointer(store, _state(), every=1, keep=None).restore()
    assert len(list((store.path / "heads" / "default").iterdir())) == 1


def test_closing_leaves_the_store_open(store: Store) -> None:
    """Test that the caller's store stays open, and that closing twice is allowed."""
    with Checkpointer(store, _state(), every=1, keep=None) as checkpointer:
        checkpointer.save(1)
    checkpointer.close()
    assert store.load(1) is not None


def test_an_error_in_the_loop_comes_through(store: Store) -> None:
    """Test that leaving the ``with`` block by an exception propagates the exception."""

    def loop() -> None:
        with Checkpointer(store, _state(), every=1, keep=None) as checkpointer:
            checkpointer.save(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1]


def test_a_save_that_is_refused_can_be_repeated(store: Store) -> None:
    """Test a second save after the invalid value was removed from the state."""
    state: dict[str, Any] = {**_state(), "culprit": object()}
    checkpointer = Checkpointer(store, state, every=1, keep=None)
    with pytest.raises(UnsupportedValueError, match="culprit"):
        checkpointer.save(1)
    assert checkpointer.latest_step is None
    del state["culprit"]
    assert checkpointer.save(1).on_line


def test_a_state_that_is_refused_abandons_nothing(store: Store) -> None:
    """Test that a start without a restore begins a new line only if its state can be stored."""
    _train(store, range(3))
    with pytest.raises(UnsupportedValueError, match="culprit"):
        Checkpointer(store, {"culprit": object()}, every=1, keep=None).save(1)
    assert {checkpoint.on_line for checkpoint in store.checkpoints()} == {True}
    assert len(list((store.path / "heads" / "default").iterdir())) == 1


def test_repr_names_run_step_interval_and_store(store: Store) -> None:
    """Test the text before and after the first checkpoint."""
    checkpointer = Checkpointer(store, _state(), every=10, run="gpt2")
    assert repr(checkpointer) == f"<Checkpointer of run 'gpt2' in {store.location}: no step yet, every 10 steps>"
    checkpointer.save(3)
    assert "latest step 3" in repr(checkpointer)
    assert "interval not chosen yet" in repr(Checkpointer(store, _state()))


def test_newer_checkpointer_of_a_run_owns_the_line(store: Store) -> None:
    """Test that the older checkpointer cannot add checkpoints, not even abandoned ones."""
    old = Checkpointer(store, _state(), every=1, keep=None)
    old.save(1)
    new = Checkpointer(store, _state(), every=1, keep=None)
    new.restore()
    new.save(2)
    with pytest.raises(RunInUseError):
        old.save(5)
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1, 2]


@pytest.mark.parametrize(
    "bad",
    [{"step": -1}, {"step": "4"}, {"step": 1.5}, {"step": 4, "metrics": {"loss": "x"}}, {"step": 4, "metrics": 3.0}],
)
def test_a_refused_argument_abandons_nothing(store: Store, bad: dict[str, Any]) -> None:
    """Test that a wrong argument does not begin a new line."""
    _train(store, range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InvalidInputError):
            Checkpointer(store, _state(), every=1, keep=None).save(**bad)
    assert {checkpoint.on_line for checkpoint in store.checkpoints()} == {True}


def test_a_full_disk_abandons_nothing(store_path: Path) -> None:
    """Test that a failed first save does not begin a new line, and that the next successful save does."""
    with Store.open(store_path, create=True) as store:
        _train(store, range(3))

    class Full(Files):
        """A disk that is full for frames."""

        full = True

        def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
            if self.full:
                raise OutOfSpaceError("no room")
            super().pwrite(descriptor, buffers, offset, path)

    files = Full()
    with Store(NvmeTier(store_path, StoreConfig(), files=files)) as store:
        checkpointer = Checkpointer(store, _state(7.0), every=1, keep=None)
        with pytest.raises(OutOfSpaceError):
            checkpointer.save(5)
        assert [c.on_line for c in store.checkpoints()] == [True, True, True]
        files.full = False
        with pytest.warns(AbandonedCheckpointsWarning, match="3 checkpoints up to step 2"):
            checkpointer.save(5)
        assert [c.on_line for c in store.checkpoints()] == [False, False, False, True]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"store": "somewhere"}, "Store.open"),
        ({"state": torch.nn.Linear(1, 1)}, "state"),
        ({"every": 10.0}, "every"),
        ({"every": True}, "every"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_at_once(store: Store, arguments: dict[str, Any], named: str) -> None:
    """Test that the constructor raises the error, not the first save hours later."""
    with pytest.raises(InvalidInputError, match=named):
        Checkpointer(**{"store": store, "state": _state(), **arguments})


def test_a_step_may_be_a_numpy_integer(store: Store) -> None:
    """Test that steps from numpy arrays are accepted."""
    assert Checkpointer(store, _state(), every=1, keep=None).save(np.int64(7)).step == 7
    assert store.restore(np.int64(7)).checkpoint.step == 7


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"proof": "Full"}, "proof 'Full': give 'full', 'sampled' or 'off'"),
        ({"schedule": "even"}, "schedule 'even': give 'immediate', 'asymmetric', 'symmetric' or 'eager'"),
        ({"ring_bytes": "2G"}, "ring_bytes '2G': give an integer"),
        ({"ring_bytes": 0}, "ring_bytes 0: give an integer"),
        ({"ring_bytes": 1 << 63}, f"ring_bytes {1 << 63}: give an integer from 1 to {1 << 46}, or None"),
        ({"staging_bytes": -1}, "staging_bytes -1: give an integer"),
        ({"ring_folder": 3}, "ring_folder 3: give the path"),
        ({"deferred": ["average.*"]}, "give a tuple of globs"),
        ({"deferred": (1,)}, "give a tuple of globs"),
    ],
    ids=str,
)
def test_a_configuration_of_captures_that_cannot_work_is_refused(fields: dict[str, Any], problem: str) -> None:
    """Test that the error names the field when the configuration is created: a mistyped proof would check nothing."""
    with pytest.raises(InvalidInputError, match=problem):
        CaptureConfig(**fields)


def test_captures_without_a_configuration_or_a_folder_are_refused(store: Store) -> None:
    """Test that the Checkpointer raises the error at once."""
    with pytest.raises(InvalidInputError, match=r"capture=3: give asymcheck.CaptureConfig"):
        Checkpointer(store, _state(), capture=3, every=1, keep=None)  # type: ignore[arg-type]  # as users do
    with pytest.raises(NotFoundError, match="ring_folder 'nowhere' is not a directory"):
        Checkpointer(store, _state(), capture=CaptureConfig(ring_folder="nowhere"), every=1, keep=None)


@pytest.mark.parametrize("step", ["x", None, 1.0, -1])
def test_invalid_step_is_refused(store: Store, step: Any) -> None:  # noqa: ANN401 - whatever users pass
    """Test that an invalid step is refused even if no checkpoint is due."""
    with pytest.raises(InvalidInputError, match="give an integer from 0"):
        Checkpointer(store, _state(), every=7, keep=None).step(step)


def test_invalid_run_or_path_is_refused(store: Store) -> None:
    """Test that the error is an error of this package."""
    with pytest.raises(InvalidInputError, match="run name 3: use"):
        store.save({"a": 1}, step=1, run=3)  # type: ignore[arg-type]  # as users do
    with pytest.raises(InvalidInputError, match="give the path of a directory"):
        Store.open("a\0b", create=True)


def test_by_default_few_checkpoints_are_kept_and_the_interval_is_measured(store: Store) -> None:
    """Test that a loop without ``every`` and ``keep`` does not fill the drive."""
    state = _state()
    with Checkpointer(store, state) as checkpointer:
        assert checkpointer.interval.steps == 0  # No interval is chosen before measurements exist.
        for step in range(6):
            checkpointer.save(step)
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [3, 4, 5]


@pytest.mark.parametrize("every", [1, 4, 100])
def test_the_last_step_is_saved_on_exit(store: Store, every: int) -> None:
    """Test that the store ends with the last step and its metrics, saved once, for any interval."""
    saved = _train(store, range(6), every=every, save_on_exit=True)
    checkpoints = store.checkpoints()
    assert [checkpoint.step for checkpoint in checkpoints] == sorted({*saved, 5})
    assert checkpoints[-1].metrics == {"loss": 1 / 6}
    state: Any = store.load()
    assert state["epoch"] == 5


def test_the_step_that_an_interrupt_ends_is_saved_on_exit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a program that catches Ctrl-C in the block: the number of the saved step fits its state."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    state = _state()
    with Checkpointer(store, state, every=2, save_on_exit=True) as checkpointer:
        for step in range(2):
            state["epoch"] = step
            checkpointer.step(step)
        monkeypatch.setattr(BackgroundSaver, "begin", interrupt)
        state["epoch"] = 2
        with pytest.raises(KeyboardInterrupt):
            checkpointer.step(2)
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [0, 2]
    assert store.load(2)["epoch"] == 2


def test_nothing_is_saved_on_exit_after_an_error_or_a_restore(store: Store) -> None:
    """Test that a failed step, whose state may be incomplete, and a restored state are not saved."""

    def train_and_fail() -> None:
        with Checkpointer(store, _state(), every=9, save_on_exit=True) as checkpointer:
            checkpointer.step(0)
            checkpointer.step(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_and_fail()
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [0]
    with Checkpointer(store, _state(), every=9, save_on_exit=True) as checkpointer:
        checkpointer.restore()
        checkpointer.step(1)
        checkpointer.restore()
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [0]


def test_saves_and_restores_are_logged(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Test that the logger ``asymcheck`` gets a line for each checkpoint, and one for a restore."""
    with caplog.at_level(logging.INFO, logger="asymcheck"):
        _train(store, [0, 1])
        Checkpointer(store, _state()).restore()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert sum("step 0" in line for line in lines) == 1
    assert sum("step 1" in line for line in lines) == 2


def test_start_from_scratch_is_logged(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Test that a mistyped run or path shows in the log of the training."""
    with caplog.at_level(logging.INFO, logger="asymcheck"), Checkpointer(store, _state(), run="new") as checkpointer:
        assert checkpointer.restore() is None
    lines = [record.getMessage() for record in caplog.records]
    assert f"no checkpoint of run new in {store.location}: starting from scratch" in lines


def test_a_new_run_beside_others_is_logged_as_a_warning(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Test that a mistyped run name shows with the default log level, with the runs that exist."""
    _train(store, [0])
    with Checkpointer(store, _state(), run="defualt") as checkpointer:
        assert checkpointer.restore() is None
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "no checkpoint of run defualt" in line
    assert "other runs: default:" in line


def test_lost_directory_of_a_run_is_logged_as_a_warning(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Test that a run whose manifests were removed by hand is not taken for a new run in silence."""
    _train(store, [0, 1])
    shutil.rmtree(store.path / "manifests" / "default")
    with Checkpointer(store, _state()) as checkpointer:
        assert checkpointer.restore() is None
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "no checkpoint of run default" in line
    assert "directory manifests/default was lost" in line


def test_warnings_are_logged_too(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Test that a log file of the training contains the warnings."""
    _train(store, [5])
    with pytest.warns(AbandonedCheckpointsWarning), Checkpointer(store, _state(), every=1) as checkpointer:
        checkpointer.step(1)
    assert any(record.levelno == logging.WARNING and "step 5" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("target", ["dram", "disk", None])
def test_an_unknown_target_of_wait_is_refused(store: Store, target: Any) -> None:  # noqa: ANN401 - wrong on purpose
    """Test that the error lists the valid targets."""
    with pytest.raises(InvalidInputError, match="'memory', 'local' or 'remote'"):
        Checkpointer(store, _state()).wait(target)
