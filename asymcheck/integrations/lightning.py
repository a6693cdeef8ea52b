"""The Trainer of Lightning: checkpoints in the background, and an exact resume.

The progress of its loops is noted where Lightning's own checkpoints note it, at the end of a batch or of an epoch. The
rest of the checkpoint is taken where the next batch or epoch begins. It includes the effects of validations in between
on schedulers, callbacks and random numbers, and a resume does not run these validations again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader

from asymcheck.checkpointer import Checkpointer
from asymcheck.distributed.ranks import is_initialised
from asymcheck.errors import InvalidInputError
from asymcheck.integrations.trainer_callback import Deferred, SavingCallback, State
from asymcheck.state.rng import RngState
from asymcheck.store import Store
from asymcheck.types import is_stateful


class AsymcheckCallback(SavingCallback, Callback):
    """Saves the whole state of a fit every so many optimizer steps, and resumes from the newest checkpoint.

    Use it so::

        trainer = Trainer(..., callbacks=[AsymcheckCallback(store, every=50)])
        trainer.fit(module)

    A checkpoint holds ``model``, ``optimizers``, ``schedulers``, ``precision``, ``callbacks``, ``loops``, ``rng`` and
    ``datamodule``; its step is the Trainer's ``global_step``, the number of optimizer steps done. With several
    ranks, every rank uses the callback.
    """

    def __init__(self, store: Store, *, resume: int | bool = True, **options: Any) -> None:  # noqa: ANN401 - see below
        """Save to ``store``, which stays the caller's, with the other ``options`` of :class:`SavingCallback`.

        ``resume`` says what a fit begins with: True for the newest consistent checkpoint, if there is one; the number
        of a step; or False for nothing, so that the stored checkpoints are abandoned.
        """
        super().__init__(store, **options)
        self._resume = resume
        self._fit: _Fit | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring everything back.

        Raises:
            InvalidInputError: the trainer is one that cannot be resumed so; the message says why.
            CheckpointNotFoundError, InconsistentCheckpointError, StateMismatchError, PartialRestoreError,
            HeadRecordError: see :meth:`asymcheck.Checkpointer.restore`.
        """
        self._end()
        if trainer.world_size > 1 and not is_initialised():
            raise InvalidInputError(f"the {trainer.world_size} processes of the Trainer are none of torch.distributed")
        if trainer.ckpt_path is not None and self._resume is not False:
            raise InvalidInputError(
                f"fit() was given ckpt_path={trainer.ckpt_path!r} too: leave it out, or resume=False"
            )
        fit = _Fit(trainer, self)
        fit.checkpointer = self._checkpointer(fit.state(pl_module))
        self._fit = fit
        if self._resume is not False:
            restored = fit.checkpointer.restore(None if self._resume is True else self._resume)
            if restored is not None:
                fit.go_on()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the loaders continue where they were."""
        self._under_way().begin()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the checkpoint of the last step of the epoch before."""
        self._under_way().reach("epoch")

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - Lightning's way
        """Take the checkpoint of the step before."""
        self._under_way().reach("step")

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - Lightning's way
        """Note the progress of training, when an optimizer has stepped."""
        self._under_way().note_batch()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the progress of training."""
        self._under_way().note_epoch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, unless it was saved, and wait until everything is durable."""
        self._under_way().finish()
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Wait until saves in flight are durable, but not for long for ranks that may have ended."""
        self._end(exception)

    def _under_way(self) -> _Fit:
        if self._fit is None:
            raise InvalidInputError("the callback was added while the Trainer trained; give it to Trainer(callbacks=…)")
        return self._fit

    def _end(self, failure: BaseException | None = None) -> None:
        if self._fit is not None:
            fit, self._fit = self._fit, None
            fit.checkpointer.__exit__(None if failure is None else type(failure), failure, None)


class _Fit:
    """One call of ``fit()``: the parts of its state, and where it is."""

    checkpointer: Checkpointer

    def __init__(self, trainer: Trainer, own: Callback) -> None:
        self._trainer = trainer
        self._own = own
        self._step = trainer.global_step
        self._is_due = False
        self._place = "step"
        self._resumed = ""
        self._progress: State = {}
        self._loops = Deferred(lambda: {"fit": self._progress, "place": self._place}, self._put_loops)
        self._callbacks = Deferred(self._callback_states, self._put_callbacks)
        self._rng = Deferred.of(RngState)
        self._waiting = (self._loops, self._callbacks, self._rng)

    def state(self, module: LightningModule) -> dict[str, object]:
        trainer = self._trainer
        datamodule = getattr(trainer, "datamodule", None)
        return {
            "model": module,
            "optimizers": list(trainer.optimizers),
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin,
            "datamodule": {} if datamodule is None else datamodule,
            "callbacks": self._callbacks,
            "loops": self._loops,
            "rng": self._rng,
        }

    def go_on(self) -> None:
        """Put back what was restored, but random numbers."""
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
            # Lightning steps those that listen to a metric at the end of no epoch that was resumed.
            if self._knows_what_schedulers_ask():
                self._trainer.fit_loop._restarting = False  # noqa: SLF001 - its setter does nothing with max_steps

    def _knows_what_schedulers_ask(self) -> bool:
        asked = [config.monitor for config in self._trainer.lr_scheduler_configs if config.reduce_on_plateau]
        return all(name in self._trainer.callback_metrics for name in asked)

    def _note(self) -> None:
        # A copy: loaders that can be resumed give out what they go on changing.
        self._progress = copy.deepcopy(self._trainer.fit_loop.state_dict())

    def reach(self, place: Literal["epoch", "step"]) -> None:
        """Take a checkpoint if a step was done; put the random numbers back if training goes on from here."""
        if self._is_due:
            self._begin(place, self.checkpointer.step)
        elif place == "step":
            self._rng.put_back()
        elif self._resumed == "epoch":
            self._resumed = ""
            self._begin_epoch()

    def begin(self) -> None:
        """Let loaders whose order is that of the epoch go on within it.

        Lightning lets them go on before it says which epoch it is, so that they give rows of the first.
        """
        loop = self._trainer.fit_loop
        if any(map(_draws_its_order, CombinedLoader(self._trainer.train_dataloader).flattened)):
            raise InvalidInputError(
                "the order of rows is drawn by a sampler that Lightning has wrapped for several ranks, and no state of "
                "the loader has it: give the loader sampler=torch.utils.data.RandomSampler(dataset), for which "
                "Lightning takes one whose order follows from seed and epoch, or such a one"
            )
        if self._resumed == "step":
            loaders = self._loaders()
            epoch: int = loop.epoch_progress.current.processed  # type: ignore[attr-defined]  # that of epochs has it
            if [loader for loader, _ in loaders if _set_epoch(loader, epoch)]:
                for loader, state in loaders:
                    loader.load_state_dict(copy.deepcopy(state))
                fetcher: Any = loop._data_fetcher  # noqa: SLF001 - else the iterators of before are used
                iter(fetcher)

    def _loaders(self) -> list[tuple[Any, Any]]:
        """Return the loaders that can be resumed, each with its state."""
        states: Any = self._progress["state_dict"]
        loaders = [item for item in CombinedLoader(self._trainer.train_dataloader).flattened if is_stateful(item)]
        return list(zip(loaders, states.get("combined_loader", ()), strict=False))

    def _begin_epoch(self) -> None:
        """Let the loaders begin the epoch where the one before left them, which Lightning does within an epoch only."""
        loop = self._trainer.fit_loop
        for loader, state in self._loaders():
            loader.load_state_dict(copy.deepcopy(state))
            # The Trainer, which counts, may have left it with nothing to give, but before it knew that.
            if next(iter(loader), self) is not self:
                loader.load_state_dict(copy.deepcopy(state))
        # Else the iterators of before are used; there is no other way to say so.
        loop._resuming_from_checkpoint = False  # noqa: SLF001 - see above
        self._rng.put_back()

    def finish(self) -> None:
        if self._step and self.checkpointer.latest_step != self._step:
            self._begin("epoch", self.checkpointer.save)

    def _begin(self, place: str, save: Callable[[int, Mapping[str, float]], object]) -> None:
        self._is_due, self._place = False, place
        for part in self._waiting:
            part.is_live = True
        metrics = {name: float(value) for name, value in self._trainer.callback_metrics.items()}
        save(self._step, metrics)

    def _put_loops(self, state: State) -> None:
        self._place = str(state["place"])
        self._progress = dict(state["fit"])  # type: ignore[call-overload]  # as it was stored
        self._trainer.fit_loop.load_state_dict(self._progress)

    def _callback_states(self) -> State:
        states = {item.state_key: item.state_dict() for item in self._others()}
        return {key: state for key, state in states.items() if state}

    def _put_callbacks(self, state: State) -> None:
        for item in self._others():
            if item.state_key in state:
                item.load_state_dict(state[item.state_key])  # type: ignore[arg-type]  # what it gave out

    def _others(self) -> list[Callback]:
        return [item for item in self._trainer.callbacks if item is not self._own]  # type: ignore[attr-defined]  # set in its constructor by a connector


def _set_epoch(loader: Any, epoch: int) -> bool:  # noqa: ANN401 - whatever is iterated over
    """Tell the samplers of a loader which epoch it is; return whether one wants to know."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), getattr(batches, "sampler", None))
    listening: list[Any] = [one for one in samplers if hasattr(one, "set_epoch")]
    for one in listening:
        one.set_epoch(epoch)
    return bool(listening)


def _draws_its_order(loader: object) -> bool:
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSamplerWrapper):
        return False
    # What was wrapped is to be had in no other way.
    return hasattr(getattr(sampler.dataset, "_sampler", None), "generator")
