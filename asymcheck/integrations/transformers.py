"""Callback for the Trainer of Hugging Face transformers: background checkpoints and exact resume.

The checkpoint of step N is captured at the start of step N + 1 or of the next epoch, so that it includes the logs and
evaluations after step N. A resume restores the random numbers at the same point, after the Trainer has drawn random
numbers to skip batches.

The Trainer skips batches and restores its own state only from a folder. Therefore a resume writes a folder with only
``trainer_state.json``, and replaces the method that would load weights from this folder.

With several ranks, each rank has its own callback, random numbers, loss sums and folder.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
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
from asymcheck.errors import InvalidInputError, listed
from asymcheck.integrations.trainer_callback import (
    Deferred,
    Groups,
    SavingCallback,
    State,
    first_metrics,
    groups_of,
    set_groups,
)
from asymcheck.state.rng import RngState
from asymcheck.store import Store

_LOAD_WEIGHTS_METHOD = "_load_from_checkpoint"
_LOAD_BEST_METHOD = "_load_best_model"
# Sum of the losses since the last log. Releases before 5 keep it in a local variable.
_LOSS = "_tr_loss"
_SUMS = {"logged": "_globalstep_last_logged", "total": "_total_loss_scalar", "begun": "_initial_global_step"}
_NO_METRICS = ("step", "epoch")
_FOLDER = "asymcheck-resume"
_RESUME = "trainer.train(resume_from_checkpoint=callback.resume(trainer))"


class AsymcheckCallback(SavingCallback, TrainerCallback):
    """Callback that saves the state of a Trainer at regular optimizer steps, and resumes from the newest checkpoint.

    Example::

        callback = AsymcheckCallback(store, every=50, keep=asymcheck.Retention(keep_last=3))
        trainer = Trainer(..., callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume(trainer))

    A checkpoint holds ``model``, ``optimizer``, ``scheduler``, ``scaler``, ``rng`` and ``trainer``. Its step is the
    Trainer's ``global_step``, the number of steps done. With several ranks, every rank uses the callback.
    """

    _training: _Training | None = None

    def __init__(self, store: Store, *, state: Mapping[str, object] | None = None, **options: Any) -> None:  # noqa: ANN401 - see below
        """Save to ``store``. The caller closes the store.

        Args:
            store: the store.
            state: further objects to save and restore, for instance ``{"average": averaged_model}``.
            options: other options of :class:`SavingCallback`.
        """
        super().__init__(store, **options)
        self._state = dict(state or {})

    def resume(self, trainer: Trainer, step: int | None = None) -> str | None:
        """Restore the trainer from the newest consistent checkpoint, or from the checkpoint of ``step``.

        Call this method before each ``train()``, also on the first start.

        Returns:
            The argument of ``trainer.train(resume_from_checkpoint=…)``: the path of a folder that is removed when
            training begins, or None if the store has no checkpoint yet.

        Raises:
            InvalidInputError: the trainer cannot be resumed exactly, or ``state`` is invalid; the message says why.
            CheckpointNotFoundError: the store has no checkpoint of ``step``.
            InconsistentCheckpointError, StateMismatchError, PartialRestoreError, HeadRecordError: see
                :meth:`asymcheck.Store.load`.
        """
        _check(trainer)
        self._end()
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        # Otherwise train() would create the optimizer. An existing optimizer is kept.
        trainer.create_optimizer()
        if trainer.is_fsdp_enabled:
            # Otherwise train() would shard the restored model. A sharded model is kept.
            model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
            trainer.model = trainer.model_wrapped = model
        training = _Training(trainer)
        state = training.state()
        if names := state.keys() & self._state.keys():
            raise InvalidInputError(
                f"state has {listed(sorted(names))}, a name of the Trainer's own state; rename the key"
            )
        training.checkpointer = self._checkpointer({**state, **self._state})
        try:
            restored = training.checkpointer.restore(step)
        except BaseException:
            # Otherwise it would keep the signals and the push of another attempt.
            training.close()
            raise
        self._training = training
        return None if restored is None else training.prepare(restored.step)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Restore the objects that the Trainer has just created.

        Raises:
            InvalidInputError: :meth:`resume` was not called before this ``train()``, or its result was not passed.
        """
        training = self._training
        if training is None or not training.may_begin(state):
            raise InvalidInputError(f"the Trainer does not resume from the store; call {_RESUME}")
        training.begin()

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - signature of the Trainer
        """Capture the checkpoint of the last step of the previous epoch."""
        self._current_training().reach("epoch")

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - signature of the Trainer
        """Capture the checkpoint of the previous step."""
        self._current_training().reach("step")

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - signature of the Trainer
        """Record that a step is done."""
        self._current_training().is_due = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Save the last step, unless it was saved, and wait until all checkpoints are durable."""
        self._current_training().finish()
        self._end()

    def _current_training(self) -> _Training:
        if self._training is None:
            raise InvalidInputError(f"training has started without the store; call {_RESUME}")
        return self._training

    def _end(self) -> None:
        if self._training is not None:
            training, self._training = self._training, None
            training.close()


def _check(trainer: Trainer) -> None:
    obstacles = {
        "its processes do not use torch.distributed; start them with torchrun": trainer.args.world_size > 1
        and not is_initialised(),
        "it uses DeepSpeed; use DDP or FSDP2": trainer.is_deepspeed_enabled,
        'it uses FSDP1; set fsdp_config={"fsdp_version": 2}': trainer.is_fsdp_enabled
        and not trainer.accelerator.is_fsdp2,
        "it creates its model in train() (model_init); pass model= instead": trainer.model_init is not None,
        "it may restart with smaller batches; set auto_find_batch_size=False": trainer.args.auto_find_batch_size,
        "it does not skip the batches of finished steps; set ignore_data_skip=False": trainer.args.ignore_data_skip,
    }
    for reason, applies in obstacles.items():
        if applies:
            raise InvalidInputError(f"the Trainer cannot be resumed exactly: {reason}")


class _Training:
    """State and progress of one call of ``train()``."""

    checkpointer: Checkpointer

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._optimizer: Any = trainer.optimizer
        self.step = 0  # step from which training continues
        self._has_begun = False
        self.is_due = False  # whether a step is done whose checkpoint may be captured
        self._is_finished = False  # whether the last step was saved
        self._rng = Deferred.of(RngState)
        self._scheduler = Deferred.of(lambda: trainer.lr_scheduler)
        self._scaler = Deferred.of(lambda: trainer.accelerator.scaler)
        self._trainer_part = Deferred(self._trainer_state, self._put_trainer_state)
        self._place = "step"
        self._log: list[str] = []
        self._folder: Path | None = None
        self._groups: Groups = []
        self._parameters = self._list_parameters()

    def _list_parameters(self) -> list[list[torch.Tensor]]:
        return [list(group["params"]) for group in self._optimizer.param_groups]

    def state(self) -> dict[str, object]:
        return {
            "model": self.trainer.model,
            # Accelerate wraps the optimizer in train(). The background copy needs the inner optimizer, which steps.
            "optimizer": getattr(self._optimizer, "optimizer", self._optimizer),
            "scheduler": self._scheduler,
            "scaler": self._scaler,
            "rng": self._rng,
            "trainer": self._trainer_part,
        }

    def prepare(self, step: int) -> str:
        """Write the folder that the Trainer reads; return its path."""
        self.step = step
        restored: Any = self._trainer_part.restored
        self._place = restored["place"]
        fields = {field.name for field in dataclasses.fields(TrainerState)}
        values = {name: value for name, value in restored["state"].items() if name in fields}
        history = [json.loads(line) for line in restored["log_history"].splitlines()]
        self._folder = make_temporary_folder(Path(tempfile.gettempdir()) / _FOLDER)
        TrainerState(**values, log_history=history).save_to_json(str(self._folder / TRAINER_STATE_NAME))
        setattr(self.trainer, _LOAD_WEIGHTS_METHOD, _skip_weights)
        self._groups = groups_of(self._optimizer)
        return str(self._folder)

    def may_begin(self, state: TrainerState) -> bool:
        """Tell whether ``train()`` begins with the restored state, which a failed ``train()`` may have changed."""
        return not self._has_begun and self.trainer.state is state and self.step == state.global_step

    def begin(self) -> None:
        """Restore the objects that the Trainer has created, and save them from now on."""
        self._has_begun = True
        self._remove_folder()
        for part in (self._scheduler, self._scaler, self._trainer_part, self._rng):
            part.is_live = True
        for part in (self._scheduler, self._scaler, self._trainer_part):
            part.put_back()
        if self.trainer.is_fsdp_enabled:
            # Accelerate has looked up the parameters by address, and empty shards have no address.
            for group, parameters in zip(self._optimizer.param_groups, self._parameters, strict=True):
                group["params"] = parameters
        # Creating a scheduler has set the learning rate of the first step.
        set_groups(self._optimizer, self._groups)
        setattr(self.trainer, _LOAD_BEST_METHOD, self._load_best_model)

    def reach(self, place: Literal["epoch", "step"]) -> None:
        """Capture a checkpoint if a step was done; restore the random numbers if training resumes here."""
        if self.is_due:
            self.is_due, self._place = False, place
            step = self.trainer.state.global_step
            self.checkpointer.step(step, metrics=_metrics(self.trainer.state))
        elif place == self._place:
            self._rng.put_back()

    def _load_best_model(self) -> None:
        """Save the last step before the Trainer replaces its weights by the best ones."""
        self.finish()
        self._remove_method(_LOAD_BEST_METHOD)
        getattr(self.trainer, _LOAD_BEST_METHOD)()

    def finish(self) -> None:
        """Save the last step, unless it was saved."""
        if self._is_finished:
            return
        self._is_finished = True
        step = self.trainer.state.global_step
        is_whole = float(self.trainer.state.epoch or 0).is_integer()
        self.is_due, self._place = False, "epoch" if is_whole else "step"
        if step and self.checkpointer.latest_step != step:
            self.checkpointer.save(step, metrics=_metrics(self.trainer.state))
        # From now on, the Trainer may change the model outside of an optimizer step.
        self.checkpointer.fence()

    def close(self) -> None:
        self._remove_folder()
        self._remove_method(_LOAD_BEST_METHOD)
        self.checkpointer.close()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            self._remove_method(_LOAD_WEIGHTS_METHOD)

    def _remove_method(self, name: str) -> None:
        """Give the trainer the method of its class back."""
        vars(self.trainer).pop(name, None)

    def _trainer_state(self) -> State:
        """Return the content of ``trainer_state.json``, with one line per entry of the log."""
        trainer = self.trainer
        state = trainer.state
        values = {
            field.name: getattr(state, field.name) for field in dataclasses.fields(state) if field.name != "log_history"
        }
        values["stateful_callbacks"] = _callback_states([*trainer.callback_handler.callbacks, trainer.control])
        # Only new entries are encoded, because the log grows with every step.
        if len(self._log) > len(state.log_history):
            self._log.clear()
        self._log.extend(json.dumps(entry) for entry in state.log_history[len(self._log) :])
        sums = {}
        if hasattr(trainer, _LOSS):
            sums = {"loss": getattr(trainer, _LOSS)} | {key: getattr(trainer, name) for key, name in _SUMS.items()}
        return {
            "state": json.loads(json.dumps(values)),
            "log_history": "\n".join(self._log),
            "place": self._place,
            "sums": sums,
            # Each rank saves its own number, because store_flos() adds them up with a collective.
            "flos": trainer.current_flos,
        }

    def _put_trainer_state(self, state: State) -> None:
        sums: Any = state["sums"]
        trainer = self.trainer
        trainer.current_flos = state.get("flos", 0)  # type: ignore[assignment]  # as saved
        if sums and hasattr(trainer, _LOSS):
            loss: torch.Tensor = sums["loss"].to(getattr(trainer, _LOSS).device)
            setattr(trainer, _LOSS, loss)
            # Without these, train() would return the mean loss of the steps since the resume.
            for key in _SUMS.keys() & sums:
                setattr(trainer, _SUMS[key], sums[key])


def _skip_weights(*_args: object, **_kwargs: object) -> None:
    """Replace the method that loads weights from a folder, because the weights are already restored."""


def _callback_states(callbacks: list[object]) -> dict[str, object]:
    """Return the states of callbacks by class name, as the Trainer expects them: a list for several callbacks."""
    states: dict[str, list[object]] = {}
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: listed[0] if len(listed) == 1 else listed for name, listed in states.items()}


def _metrics(state: TrainerState) -> Mapping[str, float]:
    metrics: dict[str, float] = {}
    log: Any = state.log_history
    for entry in reversed(log):
        if entry.get("step") != state.global_step:
            break
        metrics = {name: value for name, value in entry.items() if isinstance(value, (int, float))} | metrics
    return first_metrics({name: value for name, value in metrics.items() if name not in _NO_METRICS})
