"""Failures: what one of them says of the checkpoints that wait to be pushed, of all of them or of one."""

from __future__ import annotations

import time
from collections.abc import Iterable

from asymcheck.errors import (
    UNKNOWING,
    ClosedStoreError,
    ForkedStoreError,
    GivenUpError,
    HeadRecordError,
    InvalidInputError,
    OutOfSpaceError,
    ReadOnlyStoreError,
)
from asymcheck.types import Checkpoint

SO_IS_ALL = (
    *(*UNKNOWING, OutOfSpaceError, ReadOnlyStoreError, ClosedStoreError, ForkedStoreError),
    *(GivenUpError, HeadRecordError, InvalidInputError),
)
"""Errors that every checkpoint would have. The last: another training has this name there, until somebody mends it."""

_AGAIN_S = 600.0
"""After so long one that is damaged is tried again."""


class Hopeless:
    """Checkpoints that are damaged here: another attempt changes nothing, until somebody has repaired them."""

    def __init__(self) -> None:
        """Begin with none."""
        self._found: dict[str, tuple[str, float]] = {}

    def __eq__(self, other: object) -> bool:
        """Tell whether these are the same, for the same reasons."""
        return isinstance(other, Hopeless) and other._found == self._found

    __hash__ = None  # type: ignore[assignment]  # more may be added

    def copy(self) -> Hopeless:
        """Return one to which nothing is added here."""
        copy = Hopeless()
        copy._found = dict(self._found)
        return copy

    def add(self, one: Checkpoint, error: Exception) -> None:
        """Note why one cannot be pushed."""
        self._found[one.save_id] = f"{one.ref}: {error}", time.monotonic() + _AGAIN_S

    def problems(self, due: Iterable[Checkpoint]) -> list[str]:
        """Return why some of those that are due cannot be pushed."""
        return [self._found[one.save_id][0] for one in due if one.save_id in self._found]

    def without(self, due: Iterable[Checkpoint]) -> list[Checkpoint]:
        """Return the others; now and then these, too, for nobody tells when they have been repaired."""
        now = time.monotonic()
        return [one for one in due if one.save_id not in self._found or self._found[one.save_id][1] <= now]
