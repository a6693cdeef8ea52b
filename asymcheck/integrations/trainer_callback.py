"""Base class of trainer callbacks, and state parts with a deferred restore."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from asymcheck.capture.inflight import CheckpointReport
from asymcheck.checkpointer import KEEP_NEWEST, Checkpointer, OnError
from asymcheck.config import DEFAULT_RUN, CaptureConfig, Grace
from asymcheck.distributed.ranks import RanksGiven
from asymcheck.format.registry import METRICS_MAX
from asymcheck.policies.interval import AutoInterval
from asymcheck.policies.push_selection import Push
from asymcheck.policies.retention import Retention
from asymcheck.store import Store

State = dict[str, object]
Groups = Sequence[dict[str, Any]]  # the options of an optimizer's parameter groups, without the parameters


class SavingCallback:
    """Base class of callbacks that save through a Checkpointer."""

    def __init__(  # noqa: PLR0913 - the arguments of a Checkpointer
        self,
        store: Store,
        *,
        every: int | Literal["auto"] | AutoInterval = 500,
        keep: Retention | None = KEEP_NEWEST,
        push: Push | None = None,
        run: str = DEFAULT_RUN,
        save_on_signal: bool | Grace = False,
        on_error: OnError = "raise",
        capture: CaptureConfig | None = None,
        on_checkpoint: Callable[[CheckpointReport], object] | None = None,
        ranks: RanksGiven = "auto",
        takeover: bool = False,
    ) -> None:
        """Save to ``store`` with the options of :class:`asymcheck.Checkpointer`. The caller closes the store."""
        super().__init__()
        self._checkpointer = partial(
            Checkpointer,
            store,
            every=every,
            keep=keep,
            push=push,
            run=run,
            save_on_exit=True,
            save_on_signal=save_on_signal,
            on_error=on_error,
            capture=capture,
            on_checkpoint=on_checkpoint,
            ranks=ranks,
            takeover=takeover,
        )


class Deferred:
    """``Stateful`` part whose restored state is applied later, by :meth:`put_back`."""

    def __init__(self, get: Callable[[], State], put: Callable[[State], object]) -> None:
        """Save the result of ``get``, and restore it with ``put``."""
        self._get = get
        self._put = put
        self.is_live = False  # whether ``get`` can be called yet; until then, the state is empty
        self.restored: State | None = None  # the restored state until it is applied

    @classmethod
    def of(cls, part: Callable[[], Any]) -> Deferred:
        """Defer the state of the object that ``part`` returns. None has an empty state."""
        return cls(lambda: {} if part() is None else part().state_dict(), lambda state: part().load_state_dict(state))

    def state_dict(self) -> State:
        """Return the state to save."""
        return self._get() if self.is_live else {}

    def load_state_dict(self, state_dict: State) -> None:
        """Keep a restored state for :meth:`put_back`."""
        self.restored = state_dict

    def put_back(self) -> None:
        """Apply the restored state once, unless it is empty."""
        restored, self.restored = self.restored, None
        if restored:
            self._put(restored)


def first_metrics(metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Return as many metrics as a checkpoint can have, because a Trainer may log one for each of a thousand classes."""
    return dict(itertools.islice(metrics.items(), METRICS_MAX))


def groups_of(optimizer: torch.optim.Optimizer) -> Groups:
    """Return a copy of the options of an optimizer's parameter groups, such as learning rates."""
    return [
        {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def set_groups(optimizer: torch.optim.Optimizer, groups: Groups) -> None:
    """Set the options that :func:`groups_of` returned; tensors are updated in place."""
    for group, options in zip(optimizer.param_groups, groups, strict=False):
        for name, value in options.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                group[name].copy_(value)
            else:
                group[name] = value
