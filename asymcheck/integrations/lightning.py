"""Callback for Lightning's Trainer: background checkpoints and exact resume.

Loop progress is recorded where Lightning's own checkpoints record it, at the end of a batch or epoch. The rest of the
checkpoint is captured at the start of the next batch or epoch. It includes the effects of validation in between on
schedulers, callbacks and random numbers, so that a resume does not run this validation again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader

from asymcheck.checkpointer import Checkpointer
from asymcheck.distributed.ranks import is_initialised
from asymcheck.errors import InvalidInputError, StateDifferenceWarning, listed, warn_user
from asymcheck.integrations.trainer_callback import Deferred, SavingCallback, State, first_metrics
from asymcheck.state.rng import RngState
from asymcheck.store import Store
from asymcheck.types import is_stateful

_NOT_RESUMABLE = (BaseFinetuning, StochasticWeightAveraging)
"""Callbacks of Lightning that a resume leaves with other parameter groups, learning rates or schedules."""


class AsymcheckCallback(SavingCallback, Callback):
    """Callback that saves the state of a fit at regular optimizer steps, and resumes from the newest checkpoint.

    Example::

        trainer = Trainer(..., callbacks=[AsymcheckCallback(store, every=50)])
        trainer.fit(module)

    A checkpoint holds ``model``, ``optimizers``, ``schedulers``, ``precision``, ``callbacks``, ``loops``, ``rng`` and
    ``datamodule``. Its step is the Trainer's ``global_step``, the number of optimizer steps done. With several ranks,
    every rank uses the callback.
    """

    def __init__(self, store: Store, *, resume: int | bool = True, **options: Any) -> None:  # noqa: ANN401 - see below
        """Save to ``store``. The caller closes the store.

        Args:
            store: the store.
            resume: checkpoint from which a fit starts. True means the newest consistent checkpoint, if any, and a
                number means this step. False means a start from scratch, which abandons the stored checkpoints.
            options: other options of :class:`SavingCallback`.
        """
        super().__init__(store, **options)
        self._resume = resume
        self._fit: _Fit | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the state.

        Raises:
            InvalidInputError: the trainer cannot be resumed exactly; the message says why.
            CheckpointNotFoundError, InconsistentCheckpointError, StateMismatchError, PartialRestoreError,
            HeadRecordError: see :meth:`asymcheck.Checkpointer.restore`.

        Warns:
            StateDifferenceWarning: state that ``on_save_checkpoint`` adds to Lightning's own checkpoints is not saved.
        """
        self._end()
        if trainer.world_size > 1 and not is_initialised():
            raise InvalidInputError(
                f"the {trainer.world_size} processes of the Trainer do not use torch.distributed; use DDP"
            )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set in its constructor by a connector
        for item in callbacks:
            if isinstance(item, (LearningRateFinder, BatchSizeFinder)) and self._resume is not False:
                raise InvalidInputError(
                    f"cannot resume exactly: {type(item).__name__} searches again in each fit, also in one that "
                    "resumes. Leave this callback out, and call the Tuner of lightning.pytorch.tuner before the first "
                    "fit, or pass resume=False"
                )
            if isinstance(item, _NOT_RESUMABLE) and self._resume is not False:
                raise InvalidInputError(
                    f"cannot resume exactly: {type(item).__name__} changes the optimizer or its schedule at the start "
                    "of epochs, which a resume does not repeat. Leave this callback out, or pass resume=False; instead "
                    "of StochasticWeightAveraging, use WeightAveraging"
                )
        if trainer.ckpt_path is not None and self._resume is not False:
            raise InvalidInputError(
                f"fit() has ckpt_path={trainer.ckpt_path!r}, but the callback resumes from the store; "
                "leave out ckpt_path, or pass resume=False"
            )
        if names := _with_hidden_state([pl_module, getattr(trainer, "datamodule", None), *callbacks]):
            warn_user(
                f"on_save_checkpoint() and on_load_checkpoint() of {listed(names)} are not called, so a resume lacks "
                "the state that they add to a checkpoint. Make this state a buffer, or add it to state_dict(); modules "
                "do so with get_extra_state() and set_extra_state()",
                StateDifferenceWarning,
            )
        fit = _Fit(trainer, self)
        fit.checkpointer = self._checkpointer(fit.state(pl_module))
        self._fit = fit
        if self._resume is not False:
            restored = fit.checkpointer.restore(None if self._resume is True else self._resume)
            if restored is not None:
                fit.restore()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the loaders continue where they were."""
        self._current_fit().begin()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Capture the checkpoint of the last step of the previous epoch."""
        self._current_fit().reach("epoch")

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - signature of Lightning
        """Capture the checkpoint of the previous step."""
        self._current_fit().reach("step")

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - signature of Lightning
        """Record the loop progress after an optimizer step."""
        self._current_fit().note_batch()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Complete the copy of the state, because other callbacks may swap the weights during a validation."""
        if self._fit is not None:
            self._fit.checkpointer.fence()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the loop progress."""
        self._current_fit().note_epoch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, unless it was saved, and wait until all checkpoints are durable."""
        self._current_fit().finish()
        self._end()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the Checkpointer of a fit that had nothing left to train, for which Lightning calls no other hook."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Wait until in-flight saves are durable. Waits for other ranks are short, because they may have ended."""
        self._end(exception)

    def _current_fit(self) -> _Fit:
        if self._fit is None:
            raise InvalidInputError("the callback was added during training; pass it to Trainer(callbacks=…)")
        return self._fit

    def _end(self, failure: BaseException | None = None) -> None:
        if self._fit is not None:
            fit, self._fit = self._fit, None
            fit.end()
            fit.checkpointer.__exit__(None if failure is None else type(failure), failure, None)


class _Fit:
    """State and progress of one call of ``fit()``."""

    checkpointer: Checkpointer

    def __init__(self, trainer: Trainer, own: Callback) -> None:
        self._trainer = trainer
        self._own = own
        self._step = trainer.global_step
        self._is_due = False
        self._place = "step"
        self._resumed = ""
        self._progress: State = {}
        self._loader_states: list[Any] = []
        self._random: State = {}  # the random numbers before the fetch of the next batch
        self._loops = Deferred(self._loop_states, self._put_loops)
        self._callbacks = Deferred(self._callback_states, self._put_callbacks)
        self._rng = Deferred.of(RngState)
        self._waiting = (self._loops, self._callbacks, self._rng)

    def state(self, module: LightningModule) -> dict[str, object]:
        trainer = self._trainer
        datamodule = getattr(trainer, "datamodule", None)
        # Lightning's averaging callbacks give their weights in on_save_checkpoint() only, which is not called.
        found = [getattr(item, "_average_model", None) for item in self._other_callbacks()]
        averages = [model for model in found if isinstance(model, torch.optim.swa_utils.AveragedModel)]
        return {
            "model": module,
            "optimizers": list(trainer.optimizers),
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin,
            "datamodule": {} if datamodule is None else datamodule,
            "callbacks": self._callbacks,
            "loops": self._loops,
            "rng": self._rng,
            **({"averages": averages} if averages else {}),
        }

    def restore(self) -> None:
        """Apply the restored state, except the random numbers."""
        self._loops.put_back()
        self._callbacks.put_back()
        self._step = self._trainer.global_step
        self._resumed = self._place

    def note_batch(self) -> None:
        if self._trainer.global_step != self._step:
            self._step, self._is_due = self._trainer.global_step, True
            self._note()

    def note_epoch(self) -> None:
        if self._is_due:
            self._note()
        if self._resumed == "step":
            self._resumed = ""
            # At the end of a resumed epoch, Lightning does not step schedulers that monitor a metric.
            if self._has_monitored_metrics():
                self._trainer.fit_loop._restarting = False  # noqa: SLF001 - its setter does nothing with max_steps

    def _has_monitored_metrics(self) -> bool:
        monitored = [config.monitor for config in self._trainer.lr_scheduler_configs if config.reduce_on_plateau]
        return all(name in self._trainer.callback_metrics for name in monitored)

    def _note(self) -> None:
        # Stateful loaders return objects that they change later, so the state is copied.
        loop = self._trainer.fit_loop
        self._progress = copy.deepcopy(loop.state_dict())
        if getattr(loop._data_fetcher, "batches", None):  # noqa: SLF001 - a batch was fetched, but not trained
            self._progress["state_dict"]["combined_loader"] = self._loader_states  # type: ignore[index]  # of Lightning

    def _before_fetch(self) -> None:
        """Keep what a resume needs to fetch the next batch again.

        These are the random numbers, because a dataset may draw from them, and the states of loaders of unknown
        length, of which Lightning fetches one batch ahead.
        """
        if self._is_due:
            self._random = RngState().state_dict()
        elif self._random:  # as restored
            RngState().load_state_dict(self._random)
            self._random = {}
        loop = self._trainer.fit_loop
        type(loop.epoch_loop)._on_before_fetch(loop.epoch_loop)  # noqa: SLF001 - the method that this one replaces
        fetcher, loader = loop._data_fetcher, loop._combined_loader  # noqa: SLF001 - Lightning has no public name
        if fetcher is not None and loader is not None and fetcher.length is None:
            self._loader_states = copy.deepcopy(loader._state_dicts())  # noqa: SLF001 - as Lightning saves them

    def reach(self, place: Literal["epoch", "step"]) -> None:
        """Capture a checkpoint if a step was done; restore the random numbers if training resumes here."""
        if self._is_due:
            self._begin(place, self.checkpointer.step)
        elif place == "step":
            self._rng.put_back()
            if self._resumed == "step":
                self._accumulate()
        elif self._resumed == "epoch":
            self._resumed = ""
            self._begin_epoch()

    def _accumulate(self) -> None:
        """Accumulate as many batches as the resumed epoch does.

        Lightning calls no ``on_train_epoch_start`` for an epoch that it resumes in the middle. Its scheduler refuses
        other numbers in ``on_train_start``, so this comes later.
        """
        for item in self._other_callbacks():
            if isinstance(item, GradientAccumulationScheduler):
                item.on_train_epoch_start(self._trainer)

    def begin(self) -> None:
        """Restore loaders that Lightning has not restored, or not correctly.

        Lightning restores loaders before it sets the epoch. If their order depends on the epoch, they would yield rows
        of the first epoch.
        """
        loop = self._trainer.fit_loop
        if any(map(_has_hidden_order, CombinedLoader(self._trainer.train_dataloader).flattened)):
            raise InvalidInputError(
                "cannot resume exactly: Lightning has wrapped the sampler for several ranks, and the order of rows "
                "is not in the state of the loader. Pass a sampler whose order follows from seed and epoch, or "
                "sampler=torch.utils.data.RandomSampler(dataset), which Lightning replaces by such a sampler"
            )
        if self._resumed == "step":
            loaders = self._loaders()
            epoch: int = loop.epoch_progress.current.processed  # type: ignore[attr-defined]  # progress of epochs
            # setup_data() has left the states unused if configure_optimizers() asked for estimated_stepping_batches.
            is_unused = bool(loop._combined_loader_states_to_load)  # noqa: SLF001 - Lightning has no public name
            if [loader for loader, _ in loaders if _set_epoch(loader, epoch)] or is_unused:
                for loader, state in loaders:
                    loader.load_state_dict(copy.deepcopy(state))
                fetcher: Any = loop._data_fetcher  # noqa: SLF001 - otherwise the old iterators are used
                iter(fetcher)
        # Lightning has no hook for this. Its loop gives the method to the fetcher at the start of each epoch.
        loop.epoch_loop.__dict__["_on_before_fetch"] = self._before_fetch

    def end(self) -> None:
        """Give the loop its own method back."""
        self._trainer.fit_loop.epoch_loop.__dict__.pop("_on_before_fetch", None)

    def _loaders(self) -> list[tuple[Any, Any]]:
        states: Any = self._progress["state_dict"]
        loaders = [item for item in CombinedLoader(self._trainer.train_dataloader).flattened if is_stateful(item)]
        return list(zip(loaders, states.get("combined_loader", ()), strict=False))

    def _begin_epoch(self) -> None:
        """Restore the loaders at the start of an epoch. Lightning itself does so only within an epoch."""
        loop = self._trainer.fit_loop
        for loader, state in self._loaders():
            loader.load_state_dict(copy.deepcopy(state))
            # A loader of torchdata applies the state to its next iterator. Another iterator begins the next epoch. The
            # Trainer counts batches, and may have stopped before any other loader noticed its end.
            rows = iter(loader)
            if not _is_of_torchdata(state) and next(rows, self) is not self:
                loader.load_state_dict(copy.deepcopy(state))
        # Otherwise the old iterators are used. Lightning has no public name for this flag.
        loop._resuming_from_checkpoint = False  # noqa: SLF001 - see above
        self._rng.put_back()

    def finish(self) -> None:
        if self._step and self.checkpointer.latest_step != self._step:
            self._begin("epoch", self.checkpointer.save)

    def _begin(self, place: str, save: Callable[[int, Mapping[str, float]], object]) -> None:
        self._is_due, self._place = False, place
        for part in self._waiting:
            part.is_live = True
        # Their values stay on their device unless the step is saved, because the training would wait for the device.
        metrics: Any = self._trainer.callback_metrics
        save(self._step, first_metrics(metrics))
        self._random = {}

    def _loop_states(self) -> State:
        return {"fit": self._progress, "place": self._place, "fetch": self._random if self._place == "step" else {}}

    def _put_loops(self, state: State) -> None:
        self._place = str(state["place"])
        self._progress = dict(state["fit"])  # type: ignore[call-overload]  # as saved
        self._random = dict(state.get("fetch", {}))  # type: ignore[call-overload]  # as saved
        self._trainer.fit_loop.load_state_dict(self._progress)

    def _callback_states(self) -> State:
        states = {item.state_key: item.state_dict() for item in self._other_callbacks()}
        return {key: state for key, state in states.items() if state}

    def _put_callbacks(self, state: State) -> None:
        for item in self._other_callbacks():
            if item.state_key in state:
                item.load_state_dict(state[item.state_key])  # type: ignore[arg-type]  # as returned by state_dict()

    def _other_callbacks(self) -> list[Callback]:
        return [item for item in self._trainer.callbacks if item is not self._own]  # type: ignore[attr-defined]  # set in its constructor by a connector


def _with_hidden_state(items: Iterable[object]) -> list[str]:
    """Return the classes that restore state in ``on_load_checkpoint()``, except those of Lightning itself."""
    hooks = {type(item).__name__: getattr(item, "on_load_checkpoint", None) for item in items}
    return [name for name, hook in hooks.items() if hook and not hook.__module__.startswith("lightning.")]


def _is_of_torchdata(state: object) -> bool:
    """Tell whether this is the state of a loader of torchdata."""
    return isinstance(state, Mapping) and "_iterator_finished" in state


def _set_epoch(loader: Any, epoch: int) -> bool:  # noqa: ANN401 - any iterable
    """Set the epoch of a loader's samplers; return whether a sampler depends on the epoch."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), getattr(batches, "sampler", None))
    epoch_samplers: list[Any] = [sampler for sampler in samplers if hasattr(sampler, "set_epoch")]
    for sampler in epoch_samplers:
        sampler.set_epoch(epoch)
    return bool(epoch_samplers)


def _has_hidden_order(loader: object) -> bool:
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSamplerWrapper):
        return False
    # Lightning has no public name for the wrapped sampler.
    return hasattr(getattr(sampler.dataset, "_sampler", None), "generator")
