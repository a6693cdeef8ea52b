"""Explore the write protocol of SPEC.md §8 exhaustively: ``python -m tools.protocol [SCENARIO] [--without RULE]``.

The explorer visits all interleavings of some processes breadth-first, with a kill or a power loss between any two
steps, and checks the invariants of SPEC.md §9 in every state. If a rule of the protocol is left out, it prints the
shortest trace to a broken invariant.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from tools import protocol_remote, protocol_store

RULES = {**protocol_store.RULES, **protocol_remote.RULES}
SCENARIOS = {**protocol_store.SCENARIOS, **protocol_remote.SCENARIOS}


class Model(Protocol):
    """A protocol to explore. States are hashable."""

    def first(self) -> Any:  # noqa: ANN401 - each model has its own states
        """Return the first state."""

    def moves(self, world: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - as above
        """Yield the text of each next step, and the state after it."""

    def problem(self, world: Any) -> str:  # noqa: ANN401 - as above
        """Return the invariant that a state breaks, or an empty string."""


class Result(NamedTuple):
    """Result of an exploration."""

    states: int
    depth: int
    is_complete: bool
    trace: list[str]
    """Steps to a broken invariant, which is the last line; empty if none is broken."""


def explore(model: Model, states_max: int) -> Result:
    """Visit states breadth-first, until an invariant is broken or ``states_max`` states are known."""
    first = model.first()
    came_from: dict[int, tuple[int, str]] = {hash(first): (0, "")}
    level, depth = [first], 0
    while level:
        depth, following = depth + 1, []
        for world in level:
            at = hash(world)
            for text, after in model.moves(world):
                key = hash(after)
                if key in came_from:
                    continue
                came_from[key] = at, text
                if problem := model.problem(after):
                    trace = [problem]
                    while came_from[key][1]:
                        key, step = came_from[key]
                        trace.append(step)
                    return Result(len(came_from), depth, is_complete=False, trace=trace[::-1])
                following.append(after)
            if len(came_from) >= states_max:
                return Result(len(came_from), depth, is_complete=False, trace=[])
        level = following
    return Result(len(came_from), depth, is_complete=True, trace=[])


def model(name: str, without: Iterable[str] = (), **more: int) -> Model:
    """Return the model of a scenario without some rules, and with ``more`` events of a budget."""
    scenario: Any = SCENARIOS[name]
    is_remote = name in protocol_remote.SCENARIOS
    budgets = (protocol_remote if is_remote else protocol_store).BUDGETS
    left = tuple(count + more.get(budget, 0) for budget, count in zip(budgets, scenario.left, strict=True))
    make = protocol_remote.RemoteModel if is_remote else protocol_store.StoreModel
    return make(scenario._replace(left=left), without)


def main() -> int:
    """Explore a scenario; return 1 if an invariant is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", nargs="?", default="all", choices=SCENARIOS)
    parser.add_argument("--without", action="append", default=[], choices=RULES, metavar="RULE", help=", ".join(RULES))
    parser.add_argument("--states", type=int, default=100_000, help="maximum number of states (default: %(default)s)")
    options = parser.parse_args()
    result = explore(model(options.scenario, options.without), options.states)
    for number, line in enumerate(result.trace, 1):
        print(f"{number:3d}. {line}")
    print(f"{result.states:,} states, depth {result.depth}{', all' if result.is_complete else ''}")
    return bool(result.trace)


if __name__ == "__main__":
    sys.exit(main())
