"""Explore the write protocol of SPEC.md exhaustively: ``python -m tools.protocol [SCENARIO] [--without RULE]``.

The explorer visits all interleavings of some processes breadth-first, with a kill or a power loss between any two
steps, and checks the invariants of SPEC.md §B11 in every state. If a rule of the protocol is left out, it prints the
shortest trace to a broken invariant.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import NamedTuple

from tools import protocol_remote, protocol_store
from tools.protocol_model import Model

RULES = {**protocol_store.RULES, **protocol_remote.RULES}
SCENARIOS = {**protocol_store.SCENARIOS, **protocol_remote.SCENARIOS}


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
    level, depth = [(hash(first.key()), first)], 0
    came_from: dict[int, tuple[int, str]] = {level[0][0]: (0, "")}
    while level:
        depth, following = depth + 1, []
        for at, world in level:
            for text, after in model.moves(world):
                key = hash(after.key())
                if key in came_from:
                    continue
                came_from[key] = at, text
                if problem := model.problem(after):
                    trace = [problem]
                    while came_from[key][1]:
                        key, step = came_from[key]
                        trace.append(step)
                    return Result(len(came_from), depth, is_complete=False, trace=trace[::-1])
                following.append((key, after))
            if len(came_from) >= states_max:
                return Result(len(came_from), depth, is_complete=False, trace=[])
        level = following
    return Result(len(came_from), depth, is_complete=True, trace=[])


def model(name: str, without: Iterable[str] = (), **more: int) -> Model:
    """Return the model of a scenario without some rules, and with ``more`` events of a budget."""
    is_remote = name in protocol_remote.SCENARIOS
    scenario = (protocol_remote if is_remote else protocol_store).SCENARIOS[name]
    left = scenario.left.copy()
    for budget, count in more.items():
        setattr(left, budget, getattr(left, budget) + count)
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
