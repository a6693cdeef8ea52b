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
    return ""
