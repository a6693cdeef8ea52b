"""The key-value store through which ranks agree (TCPStore, FileStore or HashStore of torch), and waiting for its keys.

Waiting means to look again and again, ever less often, up to a time limit.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from asymcheck.errors import RanksError, RanksMissingError

_PIECE_BYTES = 4 << 20  # torch's server closes a connection that sends more than 8 MiB at once
_AT_ONCE = 64
_COUNT_BYTES = 4

_POLL_S = (0.0002, 0.05)
"""The first and the longest pause between two looks …"""
_POLL_OF_EACH_S = 50e-6
"""… and the addition for each rank that looks at the same time, because all of them ask one server."""
ENDING_S = 10.0  # time limit in a process that is to end; a fraction of it for a rank that was missing the last time
_LATE_SHARE = 0.1
"""Fraction of the time limit for a rank that was missing the last time: it may be dead, and saves queue up."""
_SHOWN = 8


@runtime_checkable
class KeyStore(Protocol):
    """A ``torch.distributed.Store``, or anything that does what these of its methods do."""

    def set(self, key: str, value: Any) -> None:  # noqa: ANN401 - torch says str, and takes bytes
        """Put a value there, or another one in its place."""

    def get(self, key: str) -> bytes:
        """Return a value; waits for one that is not there."""

    def check(self, keys: list[str]) -> bool:
        """Tell whether all of these are there; waits for none."""

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""


class KeyReader:
    """One connection to a store, for one thread at a time; nothing here waits for a key."""

    def __init__(self, store: KeyStore) -> None:
        """Use ``store`` through a connection of its own, where a store has several.

        Another user of the store may make a call that waits, which would block ours on the same connection.
        """
        clone = getattr(store, "clone", None)
        self._store: KeyStore = store if clone is None else clone()
        has_more = getattr(self._store, "has_extended_api", lambda: False)
        self._multi_get = getattr(self._store, "multi_get", None) if has_more() else None

    def put(self, key: str, value: bytes) -> int:
        """Set a key to a value of any length, which is complete once the key exists; return the number of its pieces.

        Raises:
            RanksError: the store does not answer, here and in all other methods.
        """
        pieces = [value[start : start + _PIECE_BYTES] for start in range(0, len(value), _PIECE_BYTES)] or [b""]
        with _translated(f"set {key}"):
            for number, piece in reversed(list(enumerate(pieces))):
                head = b"" if number else len(pieces).to_bytes(_COUNT_BYTES, "little")
                self._store.set(_piece_key(key, number), head + piece)
        return len(pieces)

    def has(self, keys: Sequence[str]) -> bool:
        """Tell whether all of these keys exist."""
        with _translated("check keys"):
            return all(self._store.check(some) for some in in_parts(keys))

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of existing keys."""
        with _translated(f"get {keys[0] if keys else ''}"):
            return [self._whole(key, first) for key, first in zip(keys, self._firsts(keys), strict=True)]

    def take(self, key: str) -> bytes:
        """Return the value of an existing key, and remove it."""
        with _translated(f"get {key}"):
            (first,) = self._firsts([key])
            value = self._whole(key, first)
            self._remove(key, _count(first))
        return value

    def remove(self, key: str, pieces: int) -> None:
        """Remove a key whose number of pieces is known, which spares the server a question."""
        with _translated("delete keys"):
            self._remove(key, pieces)

    def _firsts(self, keys: Sequence[str]) -> Iterator[bytes]:
        for some in in_parts(keys):
            if self._multi_get is not None:
                yield from self._multi_get(some)
            else:
                yield from map(self._store.get, some)

    def _whole(self, key: str, first: bytes) -> bytes:
        more = [self._store.get(_piece_key(key, number)) for number in range(1, _count(first))]
        return b"".join([first[_COUNT_BYTES:], *more])

    def drop(self, keys: Iterable[str]) -> None:
        """Remove keys, which need not exist."""
        with _translated("delete keys"):
            for key in keys:
                if self._store.check([key]):
                    self._remove(key, _count(self._store.get(key)))

    def _remove(self, key: str, pieces: int) -> None:
        for number in range(pieces):
            self._store.delete_key(_piece_key(key, number))


def in_parts(keys: Sequence[str]) -> Iterator[list[str]]:
    """Yield as many keys at a time as one question to the store may have."""
    for start in range(0, len(keys), _AT_ONCE):
        yield list(keys[start : start + _AT_ONCE])


def _count(first: bytes) -> int:
    return int.from_bytes(first[:_COUNT_BYTES], "little")


def _piece_key(key: str, number: int) -> str:
    return f"{key}+{number}" if number else key


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn errors of the store into RanksError; torch's own have no narrower class in all versions."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        message = f"the key-value store of the ranks does not answer ({what}): {str(error).splitlines()[0]}"
        raise RanksError(message) from error


class Clock:
    """Waits until a condition holds, or a time limit has passed."""

    def __init__(
        self, timeout_s: float, lookers: int, is_ending: Callable[[], bool], is_gone: Callable[[], bool] | None = None
    ) -> None:
        """Begin to wait.

        Args:
            timeout_s: the limit in seconds.
            lookers: ranks that wait at the same time.
            is_ending: tells whether this process is to end, which sets another limit.
            is_gone: tells whether a rank is still missing that was missing before. As long as that is so, only a
                small fraction of the limits is waited.
        """
        self._began = time.monotonic()
        self._timeout_s = timeout_s
        self._is_ending, self._is_gone = is_ending, is_gone
        self._ending_since: float | None = None
        self._pause_s, self._pause_max_s = _POLL_S[0], _POLL_S[1] + lookers * _POLL_OF_EACH_S

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._began

    def wait(self, is_met: Callable[[], bool]) -> bool:
        """Return whether the condition held in time."""
        while not is_met():
            if self._is_over():
                # Once more, because this process may have been stopped all the time.
                return is_met()
            time.sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 1.2, self._pause_max_s)
        return True

    def _is_over(self) -> bool:
        now = time.monotonic()
        if self._ending_since is None and self._is_ending():
            self._ending_since = now
        if self._is_gone is not None and self._is_past(now, _LATE_SHARE) and not self._is_gone():
            self._is_gone = None
        return self._is_past(now, 1.0 if self._is_gone is None else _LATE_SHARE)

    def _is_past(self, now: float, share: float) -> bool:
        return now - self._began > self._timeout_s * share or (
            self._ending_since is not None and now - self._ending_since > ENDING_S * share
        )


class Remedy(enum.Enum):
    """The advice about missing ranks."""

    MEETING = (
        "each rank has to make its Checkpointer and call the same methods in the same order; pass ranks=None to save "
        "one rank alone"
    )
    ROUND = "look there for what ended or held it up"


def missing_error(
    missing: Sequence[int], what: str, waited_s: float, remedy: Remedy = Remedy.ROUND
) -> RanksMissingError:
    """Return an error that names the missing ranks, what was being done, and the remedy."""
    ranks = ", ".join(map(str, missing[:_SHOWN]))
    if len(missing) > _SHOWN:
        ranks += f" and {len(missing) - _SHOWN} more"
    noun = "rank" if len(missing) == 1 else "ranks"
    return RanksMissingError(f"{what}: {noun} {ranks} did not answer within {waited_s:.1f} s; {remedy.value}", missing)
