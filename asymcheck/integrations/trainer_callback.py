"""Base class of trainer callbacks, and state parts with a deferred restore."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from asymcheck.checkpointer import Checkpointer
from asymcheck.format.registry import METRICS_MAX
from asymcheck.policies.interval import AutoInterval
from asymcheck.store import Store

State = dict[str, object]
Groups = Sequence[dict[str, Any]]  # the options of an optimizer's parameter groups, without the parameters


class SavingCallback:
    """Base class of callbacks that save through a Checkpointer."""

    def __init__(self, store: Store, *, every: int | Literal["auto"] | AutoInterval = 500, **options: Any) -> None:  # noqa: ANN401 - see below
        """Save to ``store``. The caller closes the store.

        Args:
            store: the store.
            every: as for :class:`asymcheck.Checkpointer`.
            options: other options of :class:`asymcheck.Checkpointer`, except ``save_on_exit`` and ``publish``.
        """
        super().__init__()
        given: dict[str, Any] = {"every": every, "save_on_exit": True, "publish": None}
        # Refuse a wrong name now, because the Checkpointer is created when the training begins.
        inspect.signature(Checkpointer).bind(store, {}, **given, **options)
        self._checkpointer: Callable[..., Checkpointer] = partial(Checkpointer, store, **given, **options)


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
