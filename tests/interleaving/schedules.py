"""Run one schedule of a scenario from a template, and check the store afterwards."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from asymcheck.errors import AsymcheckError
from tests.crash.actions import Action, open_store, take
from tests.crash.power import LOSSES, Entry, LoggedJournal, RecordingFiles, after_power_loss
from tests.crash.states import promises
from tests.crash.survival import check_survived, check_unrepaired
from tests.interleaving.execution import Execution, Result, Scenario, Strategy
from tests.interleaving.gate import EPOCH_S
from tests.interleaving.remote import check_far
from tests.interleaving.search import trace
from tests.interleaving.trainings import check_resumes


class Template:
    """The store of a scenario before its processes start, and the log of its making."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        """Make the store in ``folder``, which must not exist."""
        self.scenario = scenario
        self._folder, self._log = folder, list[Entry]()
        folder.mkdir()
        # The names of files decide the order in which they are used.
        urandom, os.urandom = os.urandom, random.Random("template").randbytes
        time_ns, time.time_ns = time.time_ns, itertools.count(EPOCH_S * 10**9 // 2).__next__
        try:
            with open_store(folder / "store", files=RecordingFiles(self._log), slots=1) as store:
                take(store, LoggedJournal(self._log), scenario.before)
            scenario.prepare(folder / "store")
        finally:
            os.urandom, time.time_ns = urandom, time_ns

    def copy(self, target: Path) -> list[Entry]:
        """Copy the store to a folder; return the log with the paths of the copy."""
        shutil.copytree(self._folder, target)
        return [tuple(self._moved(part, target) for part in entry) for entry in self._log]

    def _moved(self, part: object, target: Path) -> object:
        is_path = isinstance(part, Path) and part.is_relative_to(self._folder)
        return target / part.relative_to(self._folder) if is_path else part


def run(
    template: Template,
    folder: Path,
    strategy: Strategy,
    *,
    breaks: Iterable[str] = (),
    power_seed: int | None = None,
    known: set[int] | None = None,
) -> Result:
    """Run one schedule in ``folder``, and check the store; with ``power_seed``, also after a power loss.

    With ``known``, leave out the check if an equivalent schedule was checked, and add the trace of this one.
    """
    scenario, log = template.scenario, template.copy(folder)
    execution = Execution(scenario, folder, strategy, breaks)
    result = execution.run()
    key = None if known is None else trace(result.steps)
    if not result.problems and (known is None or key not in known):
        try:
            if power_seed is not None and scenario.loses_power:
                _check_power_loss(folder, log, result.log, power_seed)
            notes = [entry[1] for entry in (*log, *result.log) if entry[0] == "note"]
            if scenario.pushed is not None:
                check_far(folder, scenario.pushed, notes)
            check_resumes(notes)
            _check(folder, notes, scenario.after)
        except (AsymcheckError, AssertionError) as error:
            result.problems.append("".join(traceback.format_exception(error)[-3:]))
    if known is not None:
        known.add(key)
    shutil.rmtree(folder)
    return result


def _check(folder: Path, notes: list[dict[str, object]], after: Sequence[Action]) -> None:
    if after:
        with open_store(folder / "store") as store:
            take(store, LoggedJournal([]), after)
    promised = promises(notes)
    # Writers that do not know of each other may end in any order.
    promised.newest.clear()
    found = check_survived(folder / "store", promised)
    assert found.steps, "no checkpoint is left"


def _check_power_loss(folder: Path, before: list[Entry], log: list[Entry], seed: int) -> None:
    """Check the store after a power loss at some entry of the log."""
    dice = random.Random(seed)
    end, loss = dice.randrange(len(log) + 1), dice.choice(list(LOSSES))
    left = folder.with_name(f"{folder.name}-after")
    try:
        promised = after_power_loss(folder, [*before, *log[:end]], left, loss=loss, catalog="missing", seed=seed)
        promised.newest.clear()
        found = check_unrepaired(left / "store", promised)
        assert found.steps, "no checkpoint is left"
    except (AsymcheckError, AssertionError) as error:
        raise AssertionError(f"after a loss of {loss} at entry {end} of the log: {error}") from error
    finally:
        shutil.rmtree(left, ignore_errors=True)
