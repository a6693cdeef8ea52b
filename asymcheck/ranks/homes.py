"""Homes: which ranks save into one store. Each machine of a job has a store of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Home:
    """Where a rank saves."""

    store: str
    """The id of its store."""
    node: str
    """The name of its machine."""
    boot: str
    """What the kernel of that machine calls its present life."""
    pushes: bool = False
    """Whether it was told a location to push to."""


NO_HOME = Home("", "", "")
"""That of ranks of which nobody asks."""


def grouped(homes: Sequence[Home]) -> list[list[int]]:
    """Return the ranks of each store, in order of their first, given where each rank saves."""
    groups: dict[str, list[int]] = {}
    for rank, home in enumerate(homes):
        groups.setdefault(home.store, []).append(rank)
    return list(groups.values())


def refusal_of(homes: Sequence[Home]) -> str:
    """Say why ranks that save there cannot save together; empty when they can."""
    of_store: dict[str, int] = {}
    of_node: dict[str, int] = {}
    for rank, home in enumerate(homes):
        first = of_store.setdefault(home.store, rank)
        if homes[first].boot != home.boot:
            return (
                f"the stores of rank {first} on {homes[first].node} and of rank {rank} on {home.node} have one id "
                f"({home.store}): one is a copy of the other. Remove the copy, so that a new store is made there"
            )
        first = of_node.setdefault(home.node, rank)
        if homes[first].store != home.store:
            return (
                f"ranks on one machine save into one store: rank {first} has {homes[first].store}, rank {rank} has "
                f"{home.store}, both on {home.node}. Open the same directory on both; containers with a drive of their "
                "own say so by Ranks.from_torch(node=…), with a name for each"
            )
    return _silent([group[0] for group in grouped(homes)], homes)


def _silent(firsts: Sequence[int], homes: Sequence[Home]) -> str:
    """Say that the first ranks of some stores push and others do not; empty when that is not so."""
    pushes, silent = ([rank for rank in firsts if homes[rank].pushes is does] for does in (True, False))
    if not pushes or not silent:
        return ""
    does, does_not = (f"rank {rank} on {homes[rank].node}" for rank in (pushes[0], silent[0]))
    return (
        f"{does} pushes, and {does_not} does not: where machines have a store each, a checkpoint is whole only where "
        "all push. Give all of them the same push=, or none"
    )
