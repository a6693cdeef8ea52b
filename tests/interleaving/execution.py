"""Run processes at one store under a chosen schedule of their file operations, and check the store afterwards.

``python -m tests.interleaving SCENARIO --seed 7`` runs and prints one schedule.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import socket
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from asymcheck.errors import LockTimeoutError, LostCheckpointError, RanksError, RunInUseError
from asymcheck.policies.retention import Retention
from asymcheck.storage.nvme import NvmeTier
from asymcheck.store import Store
from tests.crash.actions import Action, take
from tests.crash.power import Entry, LoggedJournal, RecordingFiles
from tests.crash.states import Journal
from tests.interleaving import remote, trainings
from tests.interleaving.breaks import BREAKS
from tests.interleaving.gate import Gate, Operation, answer, received
from tests.interleaving.readers import READS, Expected, read

_LOGGED = {
    **{name: {name} for name in ("create", "write", "truncate", "sync", "rename", "link", "mkdir")},
    "sync_directory": {"sync"},
    "unlink": {"unlink", "rmdir"},
}
"""Operations at the gate for entries of the log."""
_STEP_S = 1e-4
"""Time that an operation takes on the simulated clock."""
_PATIENCE_S = 60.0
_STEPS_MAX = 5_000
_WITHOUT_RANKS = "a rank without the other one: "
_PAUSE_S = 30.0
"""Longer than all timeouts of locks in these tests."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Processes at one store."""

    before: Sequence[Action]
    """Actions that make the store."""
    programs: Mapping[str, Sequence[Action]]
    """Actions of each process, by the name of the process."""
    late: frozenset[str] = frozenset()
    """Processes that open the store as a part of the schedule. All others have opened it before."""
    prepare: Callable[[Path], object] = lambda _store: None
    """Changes the store before the processes start."""
    finish: Mapping[str, Sequence[Action]] = dataclasses.field(default_factory=dict)
    """Actions of processes that start when all others have ended, and that are not killed."""
    after: Sequence[Action] = ()
    """Actions before the check of the store."""
    loses_power: bool = True
    """Whether the store is also checked after a power loss, which may leave a part of a checkpoint of several ranks."""
    pushed: tuple[int, ...] | None = None
    """Steps at the remote location before the processes start; None if there is no location."""

    def only(self, *names: str) -> Scenario:
        """Return the scenario with some of the processes."""
        return dataclasses.replace(self, programs={name: self.programs[name] for name in names})

    def expected(self) -> Expected:
        """Return what readers may find."""
        first = {int(str(action[1])) for action in self.before if action[0] == "save"}
        saved: dict[int, int] = {}
        gone: set[int] = set()
        for action in [*self.before, *(action for program in self.programs.values() for action in program)]:
            word, *arguments = action
            numbers = [int(str(argument)) for argument in arguments]
            if word == "save":
                saved[numbers[0]] = numbers[-1]
            elif word == "delete":
                gone.add(numbers[0])
            elif word == "keep":
                gone.update(first)
        return Expected(saved, frozenset(first - gone), frozenset(gone))


class Choice(NamedTuple):
    """The next step: a thread of a process goes on, or the process is killed."""

    process: str
    """Name of the process; of a thread other than the first, ``process/thread``."""
    is_killed: bool = False
    pause_s: float = 0.0
    """Time that passes before the step [s]."""

    def __str__(self) -> str:
        """Return the text for :class:`InOrder`."""
        return self.process + "!" * self.is_killed + "+" * bool(self.pause_s)


class Step(NamedTuple):
    """A step that was taken."""

    choice: Choice
    operation: Operation
    """Operation before which the process was stopped."""
    others: tuple[str, ...]
    """Other threads that could go on, of all processes."""

    def __str__(self) -> str:
        """Return one line."""
        pause = f"({self.choice.pause_s:g} s pass) " if self.choice.pause_s else ""
        text = f"is killed before: {self.operation}" if self.choice.is_killed else str(self.operation)
        return f"{pause}{self.choice.process}: {text}"


Strategy = Callable[[int, Sequence[str], str], Choice]
"""Choose the next step from its number, the names of the threads that can go on, and the last thread."""


def process_of(name: str) -> str:
    """Return the process of a thread."""
    return name.partition("/")[0]


def stay(ready: Sequence[str], last: str) -> Sequence[str]:
    """Return the last thread if it can go on, or the threads of its process, or all."""
    return [last] if last in ready else [name for name in ready if process_of(name) == process_of(last)] or ready


class InOrder:
    """Follows the text of an order, then lets each process run to its end."""

    def __init__(self, order: str) -> None:
        """Parse words such as ``save*12 gc! save+``: 12 steps of one process, a kill, and a step after a pause."""
        self._choices: list[Choice] = []
        for word in order.split():
            name, _, count = word.partition("*")
            choice = Choice(name.rstrip("!+"), "!" in name, _PAUSE_S * ("+" in name))
            self._choices += [choice] * int(count or 1)

    def __call__(self, number: int, ready: Sequence[str], last: str) -> Choice:
        """Return the choice of the order."""
        if number < len(self._choices) and self._choices[number].process in ready:
            return self._choices[number]
        return Choice(stay(ready, last)[0])


class AtRandom:
    """Switches, kills and lets time pass at random: often, sometimes or rarely."""

    def __init__(self, seed: int) -> None:
        """Choose by ``seed``, also how often."""
        self._dice = dice = random.Random(seed)
        self._switch = dice.choice([0.2, 0.03, 0.01])
        self._kill = dice.choice([0.0, 0.001, 0.004])
        self._pause = dice.choice([0.0, 0.0, 0.0, 0.01])

    def __call__(self, _number: int, ready: Sequence[str], last: str) -> Choice:
        """Return a random choice."""
        dice = self._dice
        is_switch = last in ready and dice.random() < self._switch
        name = last if last in ready and not is_switch else dice.choice(ready if is_switch else stay(ready, last))
        return Choice(name, dice.random() < self._kill, _PAUSE_S * (dice.random() < self._pause))


class Result:
    """Record of a schedule: its steps, the changes of the disk, and the problems found."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        """Steps before the processes that finish the schedule."""
        self.log: list[Entry] = []
        """Operations that changed the disk, and lines of the journal."""
        self.problems: list[str] = []

    def order(self) -> str:
        """Return the text for :class:`InOrder`."""
        words: list[tuple[str, int]] = []
        for text in (str(step.choice) for step in self.steps):
            if words and words[-1][0] == text:
                words[-1] = text, words[-1][1] + 1
            else:
                words.append((text, 1))
        return " ".join(f"{text}*{count}" if count > 1 else text for text, count in words)

    def report(self) -> str:
        """Return the problems, the order and all steps."""
        steps = (f"{number:4d}. {step}" for number, step in enumerate(self.steps))
        return "\n".join([*self.problems, *steps, *self.problems, f"--order '{self.order()}'"])


class _Process:
    """A child that waits at its gate."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid, self.channel = pid, channel
        self.stopped: dict[str, tuple[Operation, float]] = {}
        """Operations before which threads are stopped, with the times at which the threads wake [s]."""
        self.last: Operation | None = None
        """Operation of the last step."""


class Execution:
    """One scenario under one schedule."""

    def __init__(self, scenario: Scenario, base: Path, strategy: Strategy, breaks: Iterable[str] = ()) -> None:
        """Run the processes at the store in ``base/store``, with some rules broken."""
        self._scenario, self._base, self._strategy, self._breaks = scenario, base, strategy, tuple(breaks)
        self._processes: dict[str, _Process] = {}
        self._started = 0
        self._has_killed = False
        self._now_s = 1.0
        self.result = Result()

    def run(self) -> Result:
        """Start all processes, and take steps until all have ended."""
        try:
            self._run_all(self._scenario.programs, self._strategy, self.result.steps)
            self._run_all(self._scenario.finish, InOrder(""), [])
        finally:
            for name in tuple(self._processes):
                self._kill(name)
        return self.result

    def _run_all(self, names: Iterable[str], strategy: Strategy, steps: list[Step]) -> None:
        for name in names:
            self._start(name)
        last = ""
        while self._processes and not self.result.problems:
            last = self._step(last, strategy, steps)

    def _step(self, last: str, strategy: Strategy, steps: list[Step]) -> str:
        ready = self._ready()
        choice = strategy(len(steps), ready, last)
        name, _, thread = choice.process.partition("/")
        process = self._processes[name]
        process.last, _ = process.stopped[thread]
        others = tuple(other for other in ready if other != choice.process)
        steps.append(Step(choice, process.last, others))
        self._now_s += _STEP_S + choice.pause_s
        if choice.is_killed:
            self._has_killed = True
            self._kill(name)
        else:
            process.channel.send(answer(self._now_s, [*process.stopped].index(thread)))
            self._receive(name)
        if len(steps) > _STEPS_MAX:
            self.result.problems.append(f"{sorted(self._processes)} have not ended after {_STEPS_MAX} operations")
        return choice.process

    def _ready(self) -> list[str]:
        """Return the threads that can go on. If all sleep, let time pass."""
        wakes = {
            f"{name}/{thread}".removesuffix("/"): wakes_s
            for name, process in self._processes.items()
            for thread, (_, wakes_s) in process.stopped.items()
        }
        self._now_s = max(self._now_s, min(wakes.values()))
        return [name for name, wakes_s in wakes.items() if wakes_s <= self._now_s]

    def _start(self, name: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_PATIENCE_S)
        pid = os.fork()
        if not pid:
            for channel in (ours, *(process.channel for process in self._processes.values())):
                channel.close()
            self._run_child(name, Gate(theirs, str(self._base), seed=self._started))
        theirs.close()
        self._started += 1
        self._processes[name] = _Process(pid, ours)
        self._receive(name)

    def _receive(self, name: str) -> None:
        """Read messages of a process until it stops again, or has ended."""
        process = self._processes[name]
        while True:
            try:
                word, content = received(process.channel)
            except TimeoutError:
                self.result.problems.append(f"{name} does not answer after: {process.last}")
                return
            if word == "stop":
                process.stopped = content
                return
            if word == "log":
                self.result.log.append(content)
                stopped = process.last
                if stopped is not None and stopped.name not in _LOGGED.get(content[0], {stopped.name}):
                    self.result.problems.append(f"{name} did not stop before: {content[:2]}")
                continue
            if content is not None and not (self._has_killed and content.startswith(_WITHOUT_RANKS)):
                self.result.problems.append(f"{name} failed: {content}")
            self._end(name)
            return

    def _kill(self, name: str) -> None:
        os.kill(self._processes[name].pid, signal.SIGKILL)
        self._end(name)

    def _end(self, name: str) -> None:
        process = self._processes.pop(name)
        os.waitpid(process.pid, 0)
        process.channel.close()

    def _run_child(self, name: str, gate: Gate) -> NoReturn:
        problem: str | None = None
        try:
            warnings.simplefilter("ignore")
            for name_of_break in self._breaks:
                BREAKS[name_of_break]()
            self._perform(name, gate)
        except (LockTimeoutError, LostCheckpointError, RanksError, RunInUseError):
            # Waits time out only in a pause, or after the death of a rank.
            is_rank = any(action[0] == "rank" for action in self._scenario.programs.get(name, ()))
            problem = None if gate.has_paused else _WITHOUT_RANKS * is_rank + traceback.format_exc()
        except BaseException:  # noqa: BLE001 - whatever it is, the schedule shows it
            problem = traceback.format_exc()
        finally:
            gate.is_open = False
            gate.send("end", problem)
            os._exit(0)

    def _perform(self, name: str, gate: Gate) -> None:
        log = _SentLog(gate)
        program = {**self._scenario.programs, **self._scenario.finish}[name]
        expected = self._scenario.expected()
        is_reader = all(action[0] in (*READS, "rings") for action in program)
        is_late = name in self._scenario.late
        if self._scenario.pushed is not None:
            remote.run_without_threads()
        if is_late:
            gate.open()
        files = RecordingFiles(log)
        with Store(NvmeTier(self._base / "store", remote.CONFIG, files=files, read_only=is_reader)) as store:
            if not is_late:
                if not is_reader:
                    store.resources.catalog()
                gate.open()
            for action in program:
                if action[0] in READS:
                    read(store, action, expected)
                else:
                    self._act(store, LoggedJournal(log), action)

    def _act(self, store: Store, journal: Journal, action: Action) -> None:
        word, *numbers = action
        if word == "branch":
            (parent,) = (found for found in store.checkpoints() if found.step == numbers[0])
            store.training.begin_generation(parent)
        elif word == "keep":
            for step in self._scenario.expected().gone:
                journal.note("deleting", step=step)
            store.prune(Retention(keep_last=int(str(numbers[0]))))
        elif word in remote.ACTIONS:
            remote.act(store, self._base, journal, action)
        elif word in trainings.ACTIONS:
            trainings.act(store, self._base, journal, action)
        else:
            take(store, journal, [action])


class _SentLog(list[Entry]):
    """Log that sends its entries to the scheduler."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    def append(self, entry: Entry) -> None:
        """Send an entry."""
        self._gate.send("log", entry)
