"""Test that a killed and resumed transformers Trainer has the same numbers as an uninterrupted one."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerControl, TrainerState

from asymcheck import Push, Store
from asymcheck.convert.export_target import make_temporary_folder
from asymcheck.errors import CheckpointNotFoundError, InvalidInputError
from asymcheck.integrations.transformers import AsymcheckCallback
from tests.integrations import launch_ranks, small_trainer
from tests.integrations.small_trainer import STEPS, STEPS_IN_EPOCH, Begun, log_of, make_trainer, outcome
from tests.store.equality import assert_same
from tests.zygote import Zygote

transformers.utils.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the outcome of a Trainer without the callback."""
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
    """Test SIGKILL in the second epoch, after a checkpoint, between two logs: every log and every bit is equal."""
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
    """Return a store with checkpoints of all steps of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("full")
    resumed(folder, every=1)
    return folder


@pytest.mark.slow(long=["10", "12"])
@pytest.mark.parametrize("step", [1, STEPS_IN_EPOCH, 10, 12, 30, STEPS - 1])
def test_resumed_at_any_place(step: int, full_store: Path, never_killed: dict[str, Any]) -> None:
    """Test positions within and at the end of an epoch, after a log, after an evaluation, and after both."""
    trainer, begun = resumed(full_store, step=step, every=1)
    assert begun == step
    assert_same(outcome(trainer), never_killed)


@pytest.mark.slow
def test_resumed_when_all_is_done(full_store: Path, never_killed: dict[str, Any]) -> None:
    """Test that nothing is trained, and that the model is the trained one."""
    trainer, _ = resumed(full_store, step=STEPS)
    assert_same(dict(trainer.model.state_dict()), never_killed["model"])
    assert trainer.state.global_step == STEPS


class _Stop(TrainerCallback):
    def on_step_end(self, _args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        control.should_training_stop = state.global_step == STEPS_IN_EPOCH + 2


def test_resumed_after_a_stop_within_an_epoch(tmp_path: Path, never_killed: dict[str, Any]) -> None:
    """Test a training that another callback has ended, and that goes on later: every bit of the weights is equal.

    The last step is pushed, although no rule selects it.
    """
    location = (tmp_path / "remote").as_uri()
    with Store.open(tmp_path / "store", create=True) as store:
        callback = AsymcheckCallback(store, every=100, push=Push(location, every=1000))
        trainer = make_trainer(tmp_path)
        trainer.add_callback(callback)
        trainer.add_callback(_Stop())
        trainer.train(resume_from_checkpoint=callback.resume(trainer))
    with Store.open(location, read_only=True) as remote:
        assert [item.step for item in remote.checkpoints()] == [STEPS_IN_EPOCH + 2]
    again, begun = resumed(tmp_path, every=100)
    assert begun == STEPS_IN_EPOCH + 2
    for name in ("model", "optimizer", "scheduler", "random"):
        assert_same(outcome(again)[name], never_killed[name])


class _LogsEachTask(TrainerCallback):
    def on_evaluate(self, _args: object, state: TrainerState, *_: object, **__: object) -> None:
        state.log_history.append({f"task_{number}": 0.5 for number in range(1000)} | {"step": state.global_step})


def test_a_thousand_metrics_do_not_end_the_training(tmp_path: Path) -> None:
    """Test that a checkpoint has as many metrics as the format allows."""
    with Store.open(tmp_path / "store", create=True) as store:
        callback = AsymcheckCallback(store, every=6)
        trainer = make_trainer(tmp_path, max_steps=6)
        trainer.add_callback(_LogsEachTask())
        trainer.train(resume_from_checkpoint=callback.resume(trainer))
        assert len(store.checkpoints()[-1].metrics) == 256


def test_a_save_uses_no_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that floating-point operations are not added up over all ranks, but are restored."""
    calls: list[int] = []
    store_flos = Trainer.store_flos

    def noting(trainer: Trainer) -> None:
        calls.append(trainer.state.global_step)
        store_flos(trainer)

    monkeypatch.setattr(Trainer, "store_flos", noting)
    with Store.open(tmp_path / "store", create=True) as store:
        callback = AsymcheckCallback(store, every=1, keep=None)
        trainer = make_trainer(tmp_path, max_steps=3)
        trainer.train(resume_from_checkpoint=callback.resume(trainer))
        again = make_trainer(tmp_path, max_steps=3)
        again.train(resume_from_checkpoint=callback.resume(again, step=2))
    assert calls == [3, 3]
    assert again.state.total_flos == trainer.state.total_flos


@pytest.mark.slow
def test_the_best_model_at_the_end(tmp_path: Path) -> None:
    """Test that the last checkpoint is the last step, although the Trainer then loads the best model."""
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


def test_the_last_step_of_a_training_that_stops_early(tmp_path: Path) -> None:
    """Test that the step is saved with its weights if the evaluation at the end of an epoch ends the training."""
    # The loss falls, so the second evaluation is worse than the first one.
    options = {"metric_for_best_model": "eval_loss", "greater_is_better": True, "load_best_model_at_end": True}
    with Store.open(tmp_path / "store", create=True) as store:
        callback = AsymcheckCallback(store, every=100, keep=None)
        trainer = make_trainer(tmp_path, **options, eval_strategy="epoch", save_strategy="epoch", learning_rate=0.5)
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=1))
        trainer.train(resume_from_checkpoint=callback.resume(trainer))
        (last,) = store.checkpoints()
        stored: Any = store.load()
    assert last.step == trainer.state.global_step == 2 * STEPS_IN_EPOCH
    assert "eval_loss" in last.metrics
    weight = "transformer.wte.weight"
    assert not torch.equal(stored["model"][weight], trainer.model.state_dict()[weight])


@pytest.mark.slow
def test_states_of_other_callbacks(tmp_path: Path) -> None:
    """Test that a callback for early stopping continues its count."""
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


class _Averages(TrainerCallback):
    def __init__(self, average: AveragedModel) -> None:
        self.average = average

    def on_step_end(self, *_: object, model: torch.nn.Module, **__: object) -> None:
        self.average.update_parameters(model)


@pytest.mark.slow
def test_averaged_weights_are_restored(tmp_path: Path) -> None:
    """Test further objects in the state, which the callback of the user updates after each step."""
    averages: list[Any] = []
    with Store.open(tmp_path / "store", create=True) as store:
        for step in (None, 9):
            trainer = make_trainer(tmp_path, max_steps=12)
            average = AveragedModel(trainer.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            callback = AsymcheckCallback(store, every=1, keep=None, state={"average": average})
            trainer.add_callback(_Averages(average))
            trainer.train(resume_from_checkpoint=callback.resume(trainer, step))
            averages.append(average.state_dict())
        with pytest.raises(InvalidInputError, match="state has model, a name of"):
            AsymcheckCallback(store, state={"model": average}).resume(trainer)
    assert_same(*averages)


@pytest.mark.slow
def test_trainer_is_restored_after_the_resume(tmp_path: Path, full_store: Path) -> None:
    """Test that the temporary folder is deleted, and that the Trainer can load weights from folders again."""
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
    """Test a call without resume(), and a result of resume() that is not passed to train()."""
    with Store.open(full_store / "store", create=True) as store:
        callback = AsymcheckCallback(store, keep=None)
        trainer = make_trainer(tmp_path)
        trainer.add_callback(callback)
        with pytest.raises(InvalidInputError, match="call trainer"):
            trainer.train()
        assert callback.resume(trainer, step=5) is not None
        with pytest.raises(InvalidInputError, match="call trainer"):
            trainer.train()


class _Fail(TrainerCallback):
    def on_step_begin(self, _args: object, state: TrainerState, *_: object, **__: object) -> None:
        if state.global_step == 2:
            raise ZeroDivisionError


def test_second_attempt_after_a_failure_needs_another_resume(tmp_path: Path) -> None:
    """Test that train() does not begin at step 0 with the weights of the failed attempt."""
    with Store.open(tmp_path / "store", create=True) as store:
        callback, fail, begun = AsymcheckCallback(store, every=1), _Fail(), Begun()
        trainer = make_trainer(tmp_path, max_steps=4)
        trainer.add_callback(fail)
        with pytest.raises(ZeroDivisionError):
            trainer.train(resume_from_checkpoint=callback.resume(trainer))
        trainer.remove_callback(fail)
        with pytest.raises(InvalidInputError, match="call trainer"):
            trainer.train()
        trainer.add_callback(begun)
        trainer.train(resume_from_checkpoint=callback.resume(trainer))
        assert (begun.step, trainer.state.global_step) == (1, 4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"auto_find_batch_size": True}, "smaller batches"), ({"ignore_data_skip": True}, "ignore_data_skip")],
)
def test_trainers_that_cannot_be_resumed(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Test that the error is raised before anything is read."""
    with Store.open(tmp_path / "store", create=True) as store, pytest.raises(InvalidInputError, match=reason):
        AsymcheckCallback(store, keep=None).resume(make_trainer(tmp_path, **options))


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    """Test None on the first start, which train() accepts, and the error for a missing step, which leaves nothing."""
    before = signal.getsignal(signal.SIGTERM)
    with Store.open(tmp_path / "store", create=True) as store:
        callback = AsymcheckCallback(store, keep=None, save_on_signal=True)
        trainer = make_trainer(tmp_path)
        assert callback.resume(trainer) is None
        with pytest.raises(CheckpointNotFoundError):
            callback.resume(trainer, step=3)
        assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Start the parent of all ranks, so that they do not import transformers again."""
    imported = ("asymcheck", "tests.integrations.small_trainer", "tests.integrations.trainer_ranks")
    with contextlib.closing(Zygote(tmp_path_factory.mktemp("zygote"), *imported)) as parent:
        yield parent


@pytest.mark.slow
def test_ranks_are_killed_and_resume_as_never_killed(tmp_path: Path, zygote: Zygote) -> None:
    """Test DDP: one of two ranks is killed, both are started again, and every bit is equal."""
    launch_ranks.one_is_killed(zygote, tmp_path, ["transformers", "kill", tmp_path, 9])
    launch_ranks.compare(zygote, tmp_path, 7)
    reports = launch_ranks.reports(tmp_path)
    killed, *others = reports[0]["first"]
    # A capture in flight at the kill is restored if both ranks had it in memory.
    assert killed in (6, 8)
    assert others == [0, 7]
    assert reports[1]["first"] == reports[0]["first"]
    assert reports[1]["random"] != reports[0]["random"]
    assert launch_ranks.newest_pushed(tmp_path) == reports[0]["last"]


@pytest.mark.slow
def test_sharded_ranks_are_killed_and_resume_as_never_killed(tmp_path: Path, zygote: Zygote) -> None:
    """Test FSDP2: one of two ranks is killed, both are started again, and every bit of every shard is equal."""
    launch_ranks.one_is_killed(zygote, tmp_path, ["fsdp", "kill", tmp_path, 9])
    launch_ranks.compare(zygote, tmp_path, trainer="fsdp")
    reports = launch_ranks.reports(tmp_path)
    assert [report["first"] for report in reports] in ([[6], [6]], [[8], [8]])


def test_leftover_of_a_killed_resume_is_removed(tmp_path: Path) -> None:
    """Test that the next resume removes it; folders of running processes, and foreign ones, stay."""
    code = "import sys, pathlib, asymcheck.convert.export_target as t\n"
    code += "print(t.make_temporary_folder(pathlib.Path(sys.argv[1])))"
    made = [
        subprocess.run([sys.executable, "-c", code, tmp_path / kind], check=True, capture_output=True, text=True)
        for kind in ("mine", "others")
    ]
    left, other = (Path(one.stdout.strip()) for one in made)
    (left / "trainer_state.json").write_text("{}")
    (tmp_path / "mine_1_x").mkdir()
    mine = [make_temporary_folder(tmp_path / "mine"), make_temporary_folder(tmp_path / "mine")]
    assert {path.name for path in tmp_path.iterdir()} == {"mine_1_x", other.name, *(path.name for path in mine)}
