"""Stages: whose parameters an optimizer's stored numbers mean, where ranks have other parts of a model each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from asymcheck.format.tree import Key
from asymcheck.recovery.shape import rows_in

_ADVICE = (
    "the stages of a pipeline come back by as many ranks as saved them; for other numbers save the optimizer's state "
    "by the names of parameters (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict)"
)


class Stages:
    """Finds optimizers that would get the numbered state of another stage: number 0 is another parameter there."""

    def __init__(self, rank_of: Callable[[int], int]) -> None:
        """Begin without an object; ``rank_of`` gives the rank that stored a tensor."""
        self._rank_of = rank_of
        # By parameter: its name, by ranks that have no such one and others instead.
        self._lacking: dict[int, dict[int, str]] = {}
        self._numbered: list[tuple[str, torch.optim.Optimizer, int]] = []

    def add_module(
        self, name: str, module: torch.nn.Module, state: Mapping[str, object], stored: Sequence[Mapping[Key, object]]
    ) -> None:
        """Take note of a module, of its present state, and of what ranks stored under its name."""
        supplied = {key for one in stored for key in one}
        parameters = [pair for pair in module.named_parameters(remove_duplicate=False) if pair[0] in supplied]
        # Who has less and nothing else is no other stage: it left to others to save what all have.
        for one in (one for one in stored if not one.keys() <= state.keys()):
            for row in rows_in(one)[:1]:
                rank = self._rank_of(row)
                for key, parameter in parameters:
                    if key not in one:
                        self._lacking.setdefault(id(parameter), {})[rank] = _joined(name, key)

    def add_optimizer(self, name: str, optimizer: torch.optim.Optimizer, stored: Mapping[Key, object]) -> None:
        """Take note of an optimizer, and of what it gets."""
        states = stored.get("state")
        if isinstance(states, dict) and all(type(key) is int for key in states):
            # Without a tensor it is as good as that of any other stage.
            for row in rows_in(states)[:1]:
                self._numbered.append((name, optimizer, self._rank_of(row)))

    def problems(self) -> Iterator[str]:
        """Yield what is wrong, when all objects are known."""
        for name, optimizer, rank in self._numbered:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            lacking = (self._lacking.get(id(parameter), {}).get(rank) for parameter in parameters)
            place = next(filter(None, lacking), None)
            if place is not None:
                what = f"its parameters are numbered as rank {rank} has them, which saved no {place}"
                yield f"{name or '<root>'}: {what}: {_ADVICE}"


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
