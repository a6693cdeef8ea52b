"""The Trainer of Hugging Face transformers: checkpoints in the background, and an exact resume.

A checkpoint of step N is taken where the Trainer begins step N + 1, or the next epoch, so that it includes the logs
and evaluations after step N. A resume restores the random numbers at the same place, after the Trainer has drawn some
to skip batches.

The Trainer can skip batches and restore its own state, but only from a folder. It gets a folder that holds nothing but
its ``trainer_state.json``, and meanwhile the method that would look for weights there is replaced.

With several ranks, each has its own callback, random numbers, sums and folder. They share the rest.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from asymcheck.checkpointer import Checkpointer
from asymcheck.convert.export_target import make_temporary_folder
from asymcheck.distributed.ranks import is_initialised
from asymcheck.errors import InvalidInputError
from asymcheck.integrations.trainer_callback import Deferred, Groups, SavingCallback, State, groups_of, set_groups
from asymcheck.state.rng import RngState

_LOADS_WEIGHTS = "_load_from_checkpoint"
# What the Trainer adds up between two of its logs. Releases before 5 keep the first in a local variable.
_LOSS, _LOGGED, _TOTAL = "_tr_loss", "_globalstep_last_logged", "_total_loss_scalar"
_NO_METRICS = ("step", "epoch")
_FOLDER = "asymcheck-resume"
_RESUME = "trainer.train(resume_from_checkpoint=callback.resume(trainer))"


class AsymcheckCallback(SavingCallback, TrainerCallback):
    """Saves the whole state of a Trainer every so many optimizer steps, and resumes from the newest checkpoint.

    Use it so::

        callback = AsymcheckCallback(store, every=50, keep=asymcheck.Retention(keep_last=3))
        trainer = Trainer(..., callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume(trainer))

    A checkpoint holds ``model``, ``optimizer``, ``scheduler``, ``scaler``, ``rng`` and ``trainer``; its step is the
    Trainer's ``global_step``, the number of steps done. With several ranks (DDP), every rank uses the
    callback.
    """

    _training: _Training | None = None

    def resume(self, trainer: Trainer, step: int | None = None) -> str | None:
        """Bring the trainer's state back from the newest consistent checkpoint, or from that of ``step``.

        Returns what ``trainer.train(resume_from_checkpoint=…)`` takes: the path of a folder that is gone when training
        has begun, or None when there is no checkpoint yet. Call it before each ``train()``, on the first start too.

        Raises:
            InvalidInputError: the trainer is one that cannot be resumed so; the message says why.
            CheckpointNotFoundError: ``step`` was given and is not there.
            InconsistentCheckpointError, StateMismatchError, PartialRestoreError, HeadRecordError: see
                :meth:`asymcheck.Store.load`.
        """
        _check(trainer)
        self._end()
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        # Exists in train() only, unless it is made here; what is there already is left alone.
        trainer.create_optimizer()
        training = _Training(trainer)
        training.checkpointer = self._checkpointer(training.state())
        restored = training.checkpointer.restore(step)
        self._training = training
        return None if restored is None else training.prepare(restored.step)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Restore the objects that the Trainer has just made.

        Raises:
            InvalidInputError: :meth:`resume` was not called, or what it returned was not given to ``train()``.
        """
        training = self._training
        if training is None or training.trainer.state is not state or training.step != state.global_step:
            raise InvalidInputError(f"the Trainer does not go on from what the store has: call {_RESUME}")
        training.begin()

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the Trainer's way
        """Take the checkpoint of the last step of the epoch before."""
        self._began().reach("epoch")

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the Trainer's way
        """Take the checkpoint of the step before."""
        self._began().reach("step")

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the Trainer's way
        """Note that a step is done."""
        self._began().is_due = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Take the last checkpoint here if the Trainer is about to replace the last model by the best one."""
        is_last = control.should_training_stop or state.global_step >= state.max_steps
        if is_last and args.load_best_model_at_end:
            self._began().finish()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Save the last step, unless it was saved, and wait until everything is durable."""
        if not args.load_best_model_at_end:
            self._began().finish()
        self._end()

    def _began(self) -> _Training:
        if self._training is None:
            raise InvalidInputError(f"training has begun without the store: call {_RESUME}")
        return self._training

    def _end(self) -> None:
        if self._training is not None:
            training, self._training = self._training, None
            training.close()


def _check(trainer: Trainer) -> None:
    """Refuse a Trainer that could not be resumed exactly."""
    refused = {
        "its processes are none of torch.distributed": trainer.args.world_size > 1 and not is_initialised(),
        "it shards the model (FSDP, DeepSpeed)": trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled,
        "it makes its model in train() (model_init); give it the model": trainer.model_init is not None,
        "it may begin again with smaller batches (auto_find_batch_size)": trainer.args.auto_find_batch_size,
        "it does not skip the batches that are done (ignore_data_skip)": trainer.args.ignore_data_skip,
    }
    for reason, holds in refused.items():
        if holds:
            raise InvalidInputError(f"the Trainer cannot be resumed from a store: {reason}")


class _Training:
    """One call of ``train()``: the parts of its state, and where it is."""

    checkpointer: Checkpointer

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._optimizer: Any = trainer.optimizer
        self.step = 0  # which training continues from
        self.is_due = False  # whether a step was done whose checkpoint was not considered yet
        self._rng = Deferred.of(RngState)
        self._scheduler = Deferred.of(lambda: trainer.lr_scheduler)
        self._scaler = Deferred.of(lambda: trainer.accelerator.scaler)
        self._own = Deferred(self._own_state, self._put_own)
        self._place = "step"
        self._log: list[str] = []
        self._folder: Path | None = None
        self._groups: Groups = []

    def state(self) -> dict[str, object]:
        return {
            "model": self.trainer.model,
            # Accelerate wraps it in train(); the copy beside the training watches the one that steps.
            "optimizer": getattr(self._optimizer, "optimizer", self._optimizer),
            "scheduler": self._scheduler,
            "scaler": self._scaler,
            "rng": self._rng,
            "trainer": self._own,
        }

    def prepare(self, step: int) -> str:
        """Write the folder that the Trainer reads; return its path."""
        self.step = step
        own: Any = self._own.restored
        self._place = own["place"]
        known = {field.name for field in dataclasses.fields(TrainerState)}
        values = {name: value for name, value in own["state"].items() if name in known}
        history = [json.loads(line) for line in own["log_history"].splitlines()]
        self._folder = make_temporary_folder(_FOLDER)
        TrainerState(**values, log_history=history).save_to_json(str(self._folder / TRAINER_STATE_NAME))
        setattr(self.trainer, _LOADS_WEIGHTS, _nothing)
        self._groups = groups_of(self._optimizer)
        return str(self._folder)

    def begin(self) -> None:
        """Restore the objects that the Trainer has made, and store them from now on."""
        self._leave_folder()
        for part in (self._scheduler, self._scaler, self._own, self._rng):
            part.is_live = True
        for part in (self._scheduler, self._scaler, self._own):
            part.put_back()
        # To make a scheduler sets the learning rate of the first step.
        set_groups(self._optimizer, self._groups)

    def reach(self, place: Literal["epoch", "step"]) -> None:
        """Take a checkpoint if a step was done; restore the random numbers if training continues from this place."""
        if self.is_due:
            self.is_due, self._place = False, place
            step = self.trainer.state.global_step
            self.checkpointer.step(step, metrics=_metrics(self.trainer.state))
        elif place == self._place:
            self._rng.put_back()

    def finish(self) -> None:
        """Save the step that is done."""
        step = self.trainer.state.global_step
        self.is_due, self._place = False, "epoch"
        if step and self.checkpointer.latest_step != step:
            self.checkpointer.save(step, metrics=_metrics(self.trainer.state))
        # From here on, the Trainer may change the model without its optimizer.
        self.checkpointer.fence()

    def close(self) -> None:
        self._leave_folder()
        self.checkpointer.close()

    def _leave_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            delattr(self.trainer, _LOADS_WEIGHTS)

    def _own_state(self) -> State:
        """Return the Trainer's own state as its ``trainer_state.json`` has it; of the log one line an entry."""
        trainer = self.trainer
        trainer.store_flos()
        state = trainer.state
        values = {
            field.name: getattr(state, field.name) for field in dataclasses.fields(state) if field.name != "log_history"
        }
        values["stateful_callbacks"] = _callback_states([*trainer.callback_handler.callbacks, trainer.control])
        # Only what is new is encoded: the whole log grows with every step.
        if len(self._log) > len(state.log_history):
            self._log.clear()
        self._log.extend(json.dumps(entry) for entry in state.log_history[len(self._log) :])
        sums = {"loss": getattr(trainer, _LOSS), "logged": getattr(trainer, _LOGGED)} if hasattr(trainer, _LOSS) else {}
        return {
            "state": json.loads(json.dumps(values)),
            "log_history": "\n".join(self._log),
            "place": self._place,
            "sums": sums,
        }

    def _put_own(self, state: State) -> None:
        sums: Any = state["sums"]
        trainer = self.trainer
        if sums and hasattr(trainer, _LOSS):
            loss: torch.Tensor = sums["loss"].to(getattr(trainer, _LOSS).device)
            setattr(trainer, _LOSS, loss)
            setattr(trainer, _LOGGED, sums["logged"])
            # The loss that train() returns is that of the steps of this call alone.
            setattr(trainer, _TOTAL, -loss.item())


def _nothing(*_args: object, **_kwargs: object) -> None:
    """Stand for the method that loads weights from a folder: they are there already."""


def _callback_states(callbacks: list[object]) -> dict[str, object]:
    """Return the states of callbacks by class, a list where there are several, as the Trainer takes them back."""
    states: dict[str, list[object]] = {}
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: found[0] if len(found) == 1 else found for name, found in states.items()}


def _metrics(state: TrainerState) -> Mapping[str, float]:
    """Return the numbers that were logged after the newest step."""
    metrics: dict[str, float] = {}
    log: Any = state.log_history
    for entry in reversed(log):
        if entry.get("step") != state.global_step:
            break
        metrics = {name: value for name, value in entry.items() if isinstance(value, (int, float))} | metrics
    return {name: value for name, value in metrics.items() if name not in _NO_METRICS}
