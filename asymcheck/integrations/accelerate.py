"""State of everything that an Accelerator of Hugging Face Accelerate has prepared or registered.

The state has the same objects as ``accelerator.save_state()``. That method's hooks cannot replace its files, because
only the weights pass through the hooks. Therefore a Checkpointer takes the place of ``save_state()``, and captures the
objects in the background.

This module does not import ``accelerate``, because the accelerator provides everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from asymcheck.errors import InvalidInputError
from asymcheck.integrations.deepspeed import EngineState
from asymcheck.integrations.trainer_callback import Deferred, State
from asymcheck.state.rng import RngState


def accelerator_state(accelerator: Any) -> dict[str, object]:  # noqa: ANN401 - accelerate is not imported
    """Return the state of the prepared and registered objects, for a Checkpointer.

    Example::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        checkpointer = asymcheck.Checkpointer(store, accelerator_state(accelerator), every=50)
        restored = checkpointer.restore()

    Keys are numbered like the files of ``save_state()``: ``model``, ``model_1``, ``optimizer``, ``scheduler``,
    ``loader``, ``custom``, and so on. Further keys are ``scaler``, ``accelerator`` and ``rng``. Call the function on
    all ranks, after the last ``prepare()`` and ``register_for_checkpointing()``.

    Raises:
        InvalidInputError: the accelerator uses FSDP1 or Megatron-LM, or has prepared no model.
    """
    kind = accelerator.distributed_type.value
    if kind == "MEGATRON_LM" or (kind == "FSDP" and not accelerator.is_fsdp2):
        raise InvalidInputError(
            f"cannot save the state of an Accelerator with {kind}; use DDP, DeepSpeed, or FSDP with fsdp_version=2"
        )
    models = accelerator._models  # noqa: SLF001 - Accelerate has no public names for what it has prepared
    if not models:
        raise InvalidInputError("the Accelerator has prepared no model; call accelerator.prepare() first")
    optimizers, schedulers = accelerator._optimizers, accelerator._schedulers  # noqa: SLF001 - see above
    if kind == "DEEPSPEED":
        # The engine has its optimizer, and its scheduler if the configuration of DeepSpeed names a scheduler.
        models, optimizers = map(EngineState, models), []
        schedulers = [item for item in schedulers if type(item).__name__ != "DeepSpeedSchedulerWrapper"]
    loaders = accelerator._dataloaders  # noqa: SLF001 - see above
    if any(map(_has_hidden_order, loaders)):
        raise InvalidInputError(
            "cannot resume exactly: a loader shuffles rows in an order that is in no state. Pass "
            "dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True) to the Accelerator"
        )
    state = {
        **_numbered("model", models),
        # A background copy needs the inner optimizer, which steps.
        **_numbered("optimizer", (getattr(item, "optimizer", item) for item in optimizers)),
        **_numbered("scheduler", schedulers),
        **_numbered("loader", (_Loader(item) for item in loaders if getattr(item, "use_stateful_dataloader", False))),
        **_numbered("custom", accelerator._custom_objects),  # noqa: SLF001 - see above
    }
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return state | {"accelerator": _Progress(accelerator), "rng": _Rng(accelerator)}


def _numbered(name: str, items: Iterable[object]) -> dict[str, object]:
    return {name if number == 0 else f"{name}_{number}": item for number, item in enumerate(items)}


def _has_hidden_order(loader: Any) -> bool:  # noqa: ANN401 - as above
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    return isinstance(sampler, torch.utils.data.RandomSampler) and not hasattr(sampler, "set_epoch")


class _Loader:
    """Position of a loader of torchdata."""

    def __init__(self, loader: Any) -> None:  # noqa: ANN401 - as above
        self._loader = loader

    def state_dict(self) -> State:
        state: State = self._loader.state_dict()
        return state

    def load_state_dict(self, state: State) -> None:
        self._loader.load_state_dict(state)
        if state["_iterator_finished"]:
            # torchdata creates two iterators for a finished epoch, and each draws a random number.
            iter(self._loader.base_dataloader)


class _Progress:
    """Number of micro steps of an accelerator."""

    def __init__(self, accelerator: Any) -> None:  # noqa: ANN401 - as above
        self._accelerator = accelerator

    def state_dict(self) -> State:
        if not self._accelerator.sync_gradients:
            raise InvalidInputError(
                "cannot save accumulated gradients; call checkpointer.step() only if accelerator.sync_gradients"
            )
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: State) -> None:
        self._accelerator.step = state["step"]


class _Rng:
    """Random numbers. Within an epoch, they are restored before the first forward pass.

    A resumed loop begins another iteration of its loader, which draws a random number that the uninterrupted loop has
    drawn at the start of the epoch.
    """

    def __init__(self, accelerator: Any) -> None:  # noqa: ANN401 - as above
        self._accelerator = accelerator
        self._hooks: list[RemovableHandle] = []

    def state_dict(self) -> State:
        loaders = self._accelerator.gradient_state
        return {"rng": RngState().state_dict(), "in_epoch": loaders.in_dataloader and not loaders.end_of_dataloader}

    def load_state_dict(self, state: State) -> None:
        self._remove_hooks()
        waiting = Deferred.of(RngState)
        waiting.load_state_dict(state["rng"])  # type: ignore[arg-type]  # as saved
        if not state["in_epoch"]:
            waiting.put_back()
            return

        def put_back(*_args: object) -> None:
            waiting.put_back()
            self._remove_hooks()

        models: list[torch.nn.Module] = self._accelerator._models  # noqa: SLF001 - see above
        self._hooks = [model.register_forward_pre_hook(put_back) for model in models]

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
