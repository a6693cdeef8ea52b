"""A killed and resumed transformers Trainer has the same numbers as an uninterrupted one."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import EarlyStoppingCallback, Trainer

from asymcheck import Store
from asymcheck.convert.export_target import make_temporary_folder
from asymcheck.errors import CheckpointNotFoundError, InvalidInputError
from asymcheck.integrations.transformers import AsymcheckCallback
from tests.integrations import launch_ranks, small_trainer
from tests.integrations.small_trainer import STEPS, STEPS_IN_EPOCH, Begun, log_of, make_trainer, outcome
from tests.store.equality import assert_same

# What they share takes longer than they do.
pytestmark = pytest.mark.xdist_group("transformers")

transformers.utils.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of a Trainer without the callback."""
    trainer = make_trainer(tmp_path_factory.mktemp("whole"))
    trainer.train()
    return outcome(trainer)


def resumed(folder: Path, *, step: int | None = None, every: int = 4) -> tuple[Trainer, int]:
    """Train to the end from the store; return the trainer and the step at which the training began."""
    with Store.open(folder / "store", create=True) as store:
        callback = AsymcheckCallback(store, every=every, keep=None)
        trainer, begun = make_trainer(folder), Begun()
        trainer.add_callback(begun)
        trainer.train(resume_from_checkpoint=callback.resume(trainer, step))
    return trainer, begun.step


@pytest.mark.slow
def test_killed_and_resumed_is_as_never_killed(tmp_path: Path, never_killed: dict[str, Any]) -> None:
    """SIGKILL in the second epoch, behind a checkpoint, between two logs; every log and every bit is the same."""
    script = str(Path(small_trainer.__file__).resolve())
    killed = subprocess.run([sys.executable, script, str(tmp_path), "4", "18"], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    trainer, begun = resumed(tmp_path)
    assert begun == 16
    assert_same(outcome(trainer), never_killed)
    logged = {entry["step"]: entry["loss"] for entry in log_of(trainer) if "loss" in entry}
    with Store.open(tmp_path / "store", read_only=True) as store:
        assert [item.step for item in store.checkpoints()] == [*range(4, STEPS + 1, 4), STEPS]
        assert store.checkpoints()[3].metrics == {}
        assert store.checkpoints()[4].metrics["loss"] == logged[20]


@pytest.fixture(scope="module")
def full_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the checkpoints of all steps of a run that was not stopped."""
    folder = tmp_path_factory.mktemp("full")
    resumed(folder, every=1)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, STEPS_IN_EPOCH, 10, 12, 30, STEPS - 1])
def test_resumed_at_any_place(step: int, full_store: Path, never_killed: dict[str, Any]) -> None:
    """In an epoch and at the end of one, behind a log, behind an evaluation, and behind both."""
    trainer, begun = resumed(full_store, step=step, every=1)
    assert begun == step
    assert_same(outcome(trainer), never_killed)


@pytest.mark.slow
def test_resumed_when_all_is_done(full_store: Path, never_killed: dict[str, Any]) -> None:
    """Nothing is trained, and the model is the trained one."""
    trainer, _ = resumed(full_store, step=STEPS)
    assert_same(dict(trainer.model.state_dict()), never_killed["model"])
    assert trainer.state.global_step == STEPS


@pytest.mark.slow
def test_the_best_model_at_the_end(tmp_path: Path) -> None:
    """The last checkpoint is the state of the last step, though the Trainer then puts the best model in its place."""
    options = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 6, "learning_rate": 0.5}
    with Store.open(tmp_path / "store", create=True) as store:
        callback = AsymcheckCallback(store, every=100, keep=None)
        trainer = make_trainer(tmp_path, **options)
        trainer.train(resume_from_checkpoint=callback.resume(trainer))
        stored: Any = store.load()
    assert trainer.state.best_global_step < STEPS
    assert stored["trainer"]["state"]["global_step"] == STEPS
    weight = "transformer.wte.weight"
    assert not torch.equal(stored["model"][weight], trainer.model.state_dict()[weight])


@pytest.mark.slow
def test_states_of_other_callbacks(tmp_path: Path) -> None:
    """A callback that stops when nothing gets better goes on counting where it was."""
    options = {"metric_for_best_model": "eval_loss", "greater_is_better": False, "learning_rate": 0.5}
    options["restore_callback_states_from_checkpoint"] = True

    def stopping(folder: Path) -> tuple[Trainer, EarlyStoppingCallback]:
        trainer = make_trainer(folder, **options)
        patience = EarlyStoppingCallback(early_stopping_patience=100)
        trainer.add_callback(patience)
        return trainer, patience

    with Store.open(tmp_path / "store", create=True) as store:
        callback = AsymcheckCallback(store, every=1, keep=None)
        trainer, patience = stopping(tmp_path)
        trainer.train(resume_from_checkpoint=callback.resume(trainer))
        trainer, _ = stopping(tmp_path)
        trainer.train(resume_from_checkpoint=callback.resume(trainer, step=20))
    again = next(item for item in trainer.callback_handler.callbacks if isinstance(item, EarlyStoppingCallback))
    assert again.early_stopping_patience_counter == patience.early_stopping_patience_counter > 1


@pytest.mark.slow
def test_trainer_is_restored_after_the_resume(tmp_path: Path, full_store: Path) -> None:
    """The temporary folder is gone, and the Trainer loads weights from folders again."""
    with Store.open(full_store / "store", create=True) as store:
        callback = AsymcheckCallback(store, every=100, keep=None)
        trainer = make_trainer(tmp_path)
        folder = callback.resume(trainer, step=STEPS - 1)
        assert folder is not None
        assert [path.name for path in Path(folder).iterdir()] == ["trainer_state.json"]
        trainer.train(resume_from_checkpoint=folder)
        assert not Path(folder).exists()
    assert "_load_from_checkpoint" not in vars(trainer)


@pytest.mark.slow
def test_a_start_that_would_not_be_exact_is_refused(tmp_path: Path, full_store: Path) -> None:
    """Without resume(), and without giving what it returned to train()."""
    with Store.open(full_store / "store", create=True) as store:
        callback = AsymcheckCallback(store, keep=None)
        trainer = make_trainer(tmp_path)
        trainer.add_callback(callback)
        with pytest.raises(InvalidInputError, match="call trainer"):
            trainer.train()
        assert callback.resume(trainer, step=5) is not None
        with pytest.raises(InvalidInputError, match="call trainer"):
            trainer.train()


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"auto_find_batch_size": True}, "smaller batches"), ({"ignore_data_skip": True}, "ignore_data_skip")],
)
def test_trainers_that_cannot_be_resumed(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """They are named before anything is read."""
    with Store.open(tmp_path / "store", create=True) as store, pytest.raises(InvalidInputError, match=reason):
        AsymcheckCallback(store, keep=None).resume(make_trainer(tmp_path, **options))


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    """On the first start there is None, which train() takes as well; a step that is not there is an error."""
    with Store.open(tmp_path / "store", create=True) as store:
        callback = AsymcheckCallback(store, keep=None)
        trainer = make_trainer(tmp_path)
        assert callback.resume(trainer) is None
        with pytest.raises(CheckpointNotFoundError):
            callback.resume(trainer, step=3)


@pytest.mark.slow
def test_ranks_are_killed_and_resume_as_never_killed(tmp_path: Path) -> None:
    """DDP: one of two is killed, the other taken down; started again by torchrun, on both every bit is the same."""
    launch_ranks.one_is_killed(tmp_path, 9)
    launch_ranks.by_torchrun(tmp_path, "compare", 1, 6, 7, 12, 17)
    told = launch_ranks.told(tmp_path)
    killed, *others = told[0]["first"]
    # What was in flight at the kill is resumed if both ranks had it in memory.
    assert killed in (6, 8)
    assert others == [0, 1, 6, 7, 12, 17]
    assert told[1]["first"] == told[0]["first"]
    assert told[1]["random"] != told[0]["random"]
    assert launch_ranks.newest_pushed(tmp_path) == told[0]["last"]


def test_leftover_of_a_killed_resume_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next one; folders of running processes, and foreign ones, stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import sys, asymcheck.convert.export_target as t; print(t.make_temporary_folder(sys.argv[1]))"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    made = [
        subprocess.run([sys.executable, "-c", code, kind], env=environment, check=True, capture_output=True, text=True)
        for kind in ("mine", "others")
    ]
    left, other = (Path(one.stdout.strip()) for one in made)
    (left / "trainer_state.json").write_text("{}")
    (tmp_path / "mine_1_x").mkdir()
    mine = [make_temporary_folder("mine"), make_temporary_folder("mine")]
    assert {path.name for path in tmp_path.iterdir()} == {"mine_1_x", other.name, *(path.name for path in mine)}
