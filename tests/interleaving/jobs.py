"""Work of the tests in a child process: many schedules of one scenario."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from asymcheck.config import RING_FOLDER_VARIABLE
from tests.interleaving.execution import AtRandom, InOrder, Result
from tests.interleaving.scenarios import SCENARIOS
from tests.interleaving.schedules import Template, run
from tests.interleaving.search import Bounded, search


@contextmanager
def _template(scenario: str, processes: Sequence[str] = ()) -> Iterator[tuple[Template, Path]]:
    """Provide the store of a scenario with some or all of its processes, and a path for a copy of the store."""
    base = Path(tempfile.mkdtemp(prefix="interleaving-", dir=os.environ.get(RING_FOLDER_VARIABLE)))
    try:
        chosen = SCENARIOS[scenario]
        yield Template(chosen.only(*processes) if processes else chosen, base / "template"), base / "copy"
    finally:
        shutil.rmtree(base)


def at_random(scenario: str, first: int, count: int, breaks: Sequence[str] = ()) -> None:
    """Run random schedules and power losses; fail at the first problem. Runs in a child."""
    with _template(scenario) as (template, path):
        for seed in range(first, first + count):
            result = run(template, path, AtRandom(seed), breaks=breaks, power_seed=seed)
            assert not result.problems, f"{scenario}, seed {seed}:\n{result.report()}"


def in_turn(scenario: str, processes: Sequence[str], limits: Sequence[int], breaks: Sequence[str] = ()) -> None:
    """Run schedules with few switches and kills; fail at the first problem. Runs in a child.

    ``limits`` has the maximum number of schedules with 0, 1, … switches and kills.
    """
    with _template(scenario, processes) as (template, path):

        def execute(schedule: Bounded, known: set[int]) -> Result:
            return run(template, path, schedule, breaks=breaks, known=known)

        for result in search(processes, execute, limits):
            assert not result.problems, f"{scenario} with {processes}:\n{result.report()}"


def twice(scenario: str, seed: int) -> None:
    """Run a random schedule, and repeat it by its seed and by its order. Runs in a child."""
    with _template(scenario) as (template, path):
        first, again = (run(template, path, AtRandom(seed)) for _ in range(2))
        assert first.report() == again.report()
        repeated = run(template, path, InOrder(first.order()))
        assert first.report() == repeated.report()
