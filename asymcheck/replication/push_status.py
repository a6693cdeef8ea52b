"""Job, request and status between a training and the process that pushes for it, all JSON in anonymous memory.

The training writes the request, and the pushing process writes the status. Each describes the whole present state, so
that no message can be lost, and neither process waits for the other.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
import types
import typing
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeVar

from asymcheck.config import StoreConfig
from asymcheck.errors import AsymcheckError, GivenUpError
from asymcheck.events import Interval
from asymcheck.format import registry
from asymcheck.format.digest import digest
from asymcheck.policies.push_selection import Push
from asymcheck.replication.run_lease import LeaseClaim, LeaseStatus
from asymcheck.replication.transfer_stats import PushStatistics

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class PushRequest:
    """Requests of the training."""

    looks: int = 0
    """Number of commits so far: after each, the loop lists the store."""
    waits: int = 0
    """Number of the last ``wait()``; :attr:`PushStatus.answered` follows."""
    is_closing: bool = False
    """Whether to push the remaining checkpoints once, and end."""
    close_s: float | None = None
    """Time limit of the end [s]; None for no limit."""
    sends_newest: bool = False
    """Whether to push the newest checkpoint before all others, even if no rule selects it."""
    claim: LeaseClaim | None = None
    """Claim to the lease of the run."""
    is_alone: bool = False
    """Whether another rank of the job has ended, so that its machine may send nothing more."""
    damaged: tuple[tuple[str, int], ...] = ()
    """Frames that the training has found damaged, which the location may hold: packs and offsets."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error of the loop."""

    kind: str
    """Name of the class."""
    message: str
    fields: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Describe an error. Fields that JSON cannot express become None."""
        return cls(type(error).__name__, str(error), json.loads(json.dumps(vars(error), default=lambda _: None)))

    def error(self) -> AsymcheckError:
        """Return the error. An error that is not of this package becomes a GivenUpError."""
        kind = vars(sys.modules[AsymcheckError.__module__]).get(self.kind)
        if not (isinstance(kind, type) and issubclass(kind, AsymcheckError)):
            return GivenUpError(f"{self.kind}: {self.message}")
        error = kind.__new__(kind, self.message)
        error.__dict__.update(
            {name: tuple(value) if isinstance(value, list) else value for name, value in self.fields.items()}
        )
        return error

    def __str__(self) -> str:
        """Return class and message, as statistics show them."""
        return f"{self.kind}: {self.message}"


@dataclasses.dataclass(frozen=True)
class PushStatus:
    """State of a push loop."""

    statistics: PushStatistics = dataclasses.field(default_factory=PushStatistics)
    waiting: tuple[str, ...] = ()
    """Save ids of the newest checkpoints that wait, newest last; at least ``Push.hold``."""
    sending: str | None = None
    """Save id of the checkpoint that is being uploaded."""
    begun: str | None = None
    """Save id of the newest waiting checkpoint that another machine has begun to push."""
    newest_seen: str = ""
    """Greatest save id of the store at the last listing. Save ids sort by time, so greater ones are unseen."""
    is_connected: bool = False
    """Whether this process, or an earlier one, has listed the remote location."""
    lease: LeaseStatus = dataclasses.field(default_factory=LeaseStatus)
    answered: int = 0
    """Number of the last wait that has ended; -1 if the loop could not start."""
    failure: Failure | None = None
    """Error of that wait, or of the start."""
    traced: int = 0
    """Number of uploads so far."""
    intervals: tuple[Interval, ...] = ()
    """Trace intervals of the last uploads. All processes of a machine share the monotonic clock."""

    def intervals_since(self, traced: int) -> tuple[Interval, ...]:
        """Return the intervals after the first ``traced`` uploads, as far as they are kept."""
        return self.intervals[max(len(self.intervals) - self.traced + traced, 0) :]


@dataclasses.dataclass(frozen=True)
class PushJob:
    """Parameters of a push loop. They may contain credentials, so the child reads them from a pipe."""

    store: str
    """Path or URI of the store."""
    config: StoreConfig
    rules: Push
    run: str
    poll_s: float
    """Seconds between two listings of the store."""
    prunes: bool
    """Whether to apply the retention of the remote location."""
    before: PushStatus = dataclasses.field(default_factory=PushStatus)
    """Last status of the loop before, from which this loop goes on."""


def encoded(value: object) -> str:
    """Return a job, a request or a status as JSON."""
    return json.dumps(value, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, timedelta):
        return value.total_seconds()
    return dict(value) if isinstance(value, Mapping) else vars(value)


def decoded(kind: type[_T], text: str | bytes) -> _T:
    """Return what :func:`encoded` was given, an instance of the dataclass ``kind``."""
    found: _T = _built(kind, json.loads(text))
    return found


def _built(kind: Any, value: Any) -> Any:  # noqa: ANN401 - types of fields, and JSON values
    """Return a JSON value as ``kind``: a dataclass, a tuple, a timedelta, a plain value, or a union of these."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    if isinstance(value, dict):
        for choice in kinds:
            if dataclasses.is_dataclass(choice) and isinstance(choice, type):
                hints = typing.get_type_hints(choice)
                return choice(**{name: _built(hints[name], field) for name, field in value.items()})
    if isinstance(value, list):
        elements = (*typing.get_args(kinds[0]), object)
        return tuple(_built(elements[0], element) for element in value)
    return timedelta(seconds=value) if timedelta in kinds and value is not None else value


class Mailbox:
    """Present state of one process, in anonymous memory that another process reads. Neither ever waits.

    The digest in front of the content shows a reader whether it has read half of a new one.
    """

    def __init__(self, file: io.FileIO) -> None:
        """Use ``file``, which both processes have open."""
        self.file = file
        self._seen = b""

    def write(self, value: object) -> None:
        """Replace the content. For one writer."""
        data = encoded(value).encode()
        os.ftruncate(self.file.fileno(), os.pwrite(self.file.fileno(), digest(data) + data, 0))

    def read(self, kind: type[_T]) -> _T | None:
        """Return the content if it is new and complete; otherwise None. For one thread at a time."""
        content = os.pread(self.file.fileno(), os.fstat(self.file.fileno()).st_size, 0)
        name, data = content[: registry.DIGEST_BYTES], content[registry.DIGEST_BYTES :]
        if name == self._seen or digest(data) != name:
            return None
        self._seen = name
        return decoded(kind, data)
