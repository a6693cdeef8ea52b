"""Messages between a training and the process that pushes for it. They travel pickled, between these two alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from asymcheck.config import StoreConfig
from asymcheck.events import Interval
from asymcheck.migration.failures import Hopeless
from asymcheck.migration.statistics import PushStatistics
from asymcheck.policies.pushing import Push
from asymcheck.types import Checkpoint


@dataclasses.dataclass(frozen=True)
class Order:
    """The first one: what is to be pushed."""

    location: str
    """Where the store lies."""
    config: StoreConfig
    """How it is opened."""
    rules: Push
    """What of it goes where."""
    run: str
    """Whose checkpoints."""
    poll_s: float
    """Seconds between two looks."""
    prunes: bool
    """Whether what is not kept there is removed."""


@dataclasses.dataclass(frozen=True)
class Look:
    """A checkpoint was committed. Answered by :class:`News`, and not asked again before that."""


@dataclasses.dataclass(frozen=True)
class Wait:
    """All that is to be pushed now is waited for. Answered by :class:`Waited`."""

    number: int
    """Which wait it is."""


@dataclasses.dataclass(frozen=True)
class Close:
    """Push what is left, and end."""

    limit_s: float | None
    """In so many seconds; None for as long as it takes."""


@dataclasses.dataclass(frozen=True)
class News:
    """What was done; sent when there is any, and after a :class:`Look`."""

    statistics: PushStatistics
    """What it has done so far."""
    sending: str | None
    """The save id of the one that is being sent."""
    sent: Mapping[str, Checkpoint]
    """What is known to be there and was not before, by save id."""
    not_sent: Collection[str]
    """The save ids of those that are not there, as was thought."""
    generation: int
    """The newest that is known there."""
    hopeless: Hopeless
    """What cannot be pushed."""
    is_connected: bool
    """Whether it has looked what is there."""
    is_well: bool
    """Whether it has done what there was to do, and nothing was in the way."""
    has_looked: bool
    """Whether it is the answer to a :class:`Look`."""
    intervals: Sequence[Interval] = ()
    """What it has told its watchers since the last news; clocks of one machine agree."""


@dataclasses.dataclass(frozen=True)
class Waited:
    """The end of a wait."""

    number: int
    """Of which."""
    error: Exception | None
    """Why not all is there."""


@dataclasses.dataclass(frozen=True)
class Failed:
    """The last one: it could not begin."""

    error: Exception
    """Why."""
