"""Parts of a trainer's state that can be put back only when the trainer has come to where it makes or uses them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

State = dict[str, object]
Groups = Sequence[dict[str, Any]]
"""What an optimizer holds for each of its parameter groups, without the parameters."""


class Deferred:
    """A ``Stateful`` part: what is restored waits here for :meth:`put_back`."""

    def __init__(self, get: Callable[[], State], put: Callable[[State], object]) -> None:
        """Store what ``get`` returns when a checkpoint is taken; give it back to ``put``."""
        self._get = get
        self._put = put
        self.is_live = False
        """Whether what ``get`` returns is there yet; before, the part counts as empty."""
        self.restored: State | None = None
        """What waits; None when nothing does."""

    def state_dict(self) -> State:
        """Return what is to be stored."""
        return self._get() if self.is_live else {}

    def load_state_dict(self, state_dict: State) -> None:
        """Let what was stored wait."""
        self.restored = state_dict

    def put_back(self) -> None:
        """Put back what waits, once; what was stored empty changes nothing."""
        waiting, self.restored = self.restored, None
        if waiting:
            self._put(waiting)


def groups_of(optimizer: torch.optim.Optimizer) -> Groups:
    """Return a copy of the options of an optimizer's parameter groups: learning rates and the like."""
    return [
        {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def set_groups(optimizer: torch.optim.Optimizer, groups: Groups) -> None:
    """Give an optimizer the options that :func:`groups_of` returned; a tensor among them stays the one it is."""
    for group, options in zip(optimizer.param_groups, groups, strict=False):
        for name, value in options.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                group[name].copy_(value)
            else:
                group[name] = value
