"""Common parts of the models of :mod:`tools.protocol`: records, states, and the moves of processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from typing_extensions import Self

Names = frozenset[str]
Packs = frozenset[int]
Move = tuple[str, Any]
"""Text of a step, and the state after it."""


class Record:
    """A part of a state. A subclass names its fields and their first values, which are hashable."""

    fields: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **fields: Any) -> None:  # noqa: ANN401 - fields have different types
        cls.fields = fields

    def __init__(self, **fields: Any) -> None:  # noqa: ANN401 - as above
        self.__dict__.update(self.fields | fields)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # noqa: ANN401 - as above
        def __setattr__(self, name: str, value: Any) -> None: ...  # noqa: ANN401 - as above

    def copy(self) -> Self:
        """Return a copy."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def key(self) -> tuple[Any, ...]:
        """Return a hashable value."""
        return tuple(self.__dict__.values())


class World(Record):
    """A state. Its fields are lists of records, records, and hashable values."""

    def copy(self) -> Self:
        """Return a copy of the state and of its records."""
        new = super().copy()
        for name, value in self.__dict__.items():
            if type(value) is list:
                new.__dict__[name] = [record.copy() for record in value]
            elif isinstance(value, Record):
                new.__dict__[name] = value.copy()
        return new

    def key(self) -> tuple[Any, ...]:
        """Return a hashable value."""
        return tuple(
            tuple(record.key() for record in value)
            if type(value) is list
            else value.key()
            if isinstance(value, Record)
            else value
            for value in self.__dict__.values()
        )

    def spent(self, event: str) -> Self:
        """Return a copy in which an event can happen once less."""
        after = self.copy()
        after.left.__dict__[event] -= 1
        return after


class Left(Record, save=0, push=0, delete=0, collect=0, read=0, kill=0, power=0, day=0):
    """How often each operation and event may happen."""


class Scenario(NamedTuple):
    """Operations of each process, a first state with some checkpoints done, and budgets."""

    programs: list[list[str]]
    packs: list[str]
    """Digests in the packs of the first state."""
    saves: list[str]
    """Digests of each checkpoint; a 2 at the end begins generation 2."""
    done: int
    left: Left

    @classmethod
    def of(cls, programs: str, packs: str, saves: str, done: int, **left: int) -> Self:
        """Return a scenario whose processes are separated by ``|``. An operation without a budget happens once."""
        operations = [program.split() for program in programs.split("|")]
        once = {operation: 1 for program in operations for operation in program}
        return cls(operations, packs.split(), saves.split(), done, Left(**once | left))


class Model:
    """A protocol to explore. The method of a step changes a state, and returns its text, empty if it has to wait."""

    first: Any
    problem: Any
    choices: Any
    events: Any
    kill: Any

    def __init__(self, scenario: Scenario, without: Iterable[str] = ()) -> None:
        self.scenario, self.without = scenario, frozenset(without)

    def has(self, rule: str) -> bool:
        """Tell whether the protocol has a rule."""
        return rule not in self.without

    def moves(self, w: World) -> Iterator[Move]:
        """Yield the text of each next step, and the state after it."""
        for number, process in enumerate(w.processes):
            if process.step:
                after = w.copy()
                if text := getattr(self, f"_{process.step}")(after, after.processes[number]):
                    yield f"P{number} {text}", after
                if w.left.kill:
                    after = w.spent("kill")
                    self.kill(after, number)
                    yield f"P{number} is killed", after
                continue
            for operation in self.scenario.programs[number]:
                for choice in self.choices(w, operation) if getattr(w.left, operation) else ():
                    after = w.spent(operation)
                    yield (
                        f"P{number} {getattr(self, f'_start_{operation}')(after, after.processes[number], choice)}",
                        after,
                    )
        yield from self.events(w)
