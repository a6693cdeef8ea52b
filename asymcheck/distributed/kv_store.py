"""Access to the key-value store of the ranks (torch's TCPStore, FileStore or HashStore), and waiting for its keys.

A wait polls with growing pauses, up to a time limit.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from asymcheck.errors import RanksError, RanksMissingError, listed

_PIECE_BYTES = 4 << 20  # torch's server closes a connection that sends more than 8 MiB at once
_KEYS_PER_REQUEST = 64
_COUNT_BYTES = 4

_POLL_S = (0.0002, 0.05)
"""First and longest pause between two polls."""
_POLL_PER_RANK_S = 50e-6
"""Increase of the longest pause per rank that polls at the same time, because all ranks poll one server."""
ENDING_S = 10.0  # time limit in a process that is about to exit
_LATE_SHARE = 0.1
"""Fraction of the time limits for a rank that was missing last time. It may be dead, while saves queue up."""


@runtime_checkable
class KeyStore(Protocol):
    """A ``torch.distributed.Store``, or an object with these methods."""

    def set(self, key: str, value: Any) -> None:  # noqa: ANN401 - torch declares str, and accepts bytes
        """Set or replace a value."""

    def get(self, key: str) -> bytes:
        """Return a value; wait until it exists."""

    def check(self, keys: list[str]) -> bool:
        """Tell whether all keys exist, without waiting."""

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it existed."""


class KeyReader:
    """Connection to a key-value store, for one thread at a time. No method waits for a key."""

    def __init__(self, store: KeyStore) -> None:
        """Use ``store`` through a separate connection if possible.

        On a shared connection, a blocking call of another user of the store would block ours.
        """
        clone = getattr(store, "clone", None)
        self._store: KeyStore = store if clone is None else clone()
        has_more = getattr(self._store, "has_extended_api", lambda: False)
        self._multi_get = getattr(self._store, "multi_get", None) if has_more() else None

    def put(self, key: str, value: bytes) -> int:
        """Set a key to a value of any length, which is complete once the key exists; return the number of its pieces.

        Raises:
            RanksError: the store does not respond; so do all other methods.
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
            return all(self._store.check(part) for part in in_parts(keys))

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of existing keys."""
        with _translated(f"get {keys[0] if keys else ''}"):
            return [self._whole(key, first) for key, first in zip(keys, self._firsts(keys), strict=True)]

    def take(self, key: str) -> bytes:
        """Return the value of an existing key, and remove it."""
        with _translated(f"get {key}"):
            (first,) = self._firsts([key])
            value = self._whole(key, first)
            self.remove(key, _count(first))
        return value

    def remove(self, key: str, pieces: int) -> None:
        """Remove a key whose number of pieces is known, which saves a request."""
        with _translated("delete keys"):
            for number in range(pieces):
                self._store.delete_key(_piece_key(key, number))

    def _firsts(self, keys: Sequence[str]) -> Iterator[bytes]:
        for part in in_parts(keys):
            if self._multi_get is not None:
                yield from self._multi_get(part)
            else:
                yield from map(self._store.get, part)

    def _whole(self, key: str, first: bytes) -> bytes:
        more = [self._store.get(_piece_key(key, number)) for number in range(1, _count(first))]
        return b"".join([first[_COUNT_BYTES:], *more])

    def drop(self, keys: Iterable[str]) -> None:
        """Remove keys, which need not exist."""
        with _translated("delete keys"):
            for key in keys:
                if self._store.check([key]):
                    self.remove(key, _count(self._store.get(key)))


def in_parts(keys: Sequence[str]) -> Iterator[list[str]]:
    """Split keys into groups for one request each."""
    for start in range(0, len(keys), _KEYS_PER_REQUEST):
        yield list(keys[start : start + _KEYS_PER_REQUEST])


def _count(first: bytes) -> int:
    return int.from_bytes(first[:_COUNT_BYTES], "little")


def _piece_key(key: str, number: int) -> str:
    return f"{key}+{number}" if number else key


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn errors of the store into RanksError. Not all versions of torch have narrower classes."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        message = f"the key-value store of the ranks does not respond ({what}): {str(error).splitlines()[0]}"
        raise RanksError(message) from error


class Clock:
    """Waits until a condition holds, or a time limit has passed."""

    def __init__(
        self,
        timeout_s: float,
        waiting_ranks: int,
        is_ending: Callable[[], bool],
        is_gone: Callable[[], bool] | None = None,
    ) -> None:
        """Start the clock.

        Args:
            timeout_s: time limit in seconds.
            waiting_ranks: number of ranks that wait at the same time.
            is_ending: return whether this process is about to exit, which shortens the limit.
            is_gone: return whether a rank that was missing before is still missing, which shortens the limits to a
                fraction.
        """
        self._began = time.monotonic()
        self._timeout_s = timeout_s
        self._is_ending, self._is_gone = is_ending, is_gone
        self._ending_since: float | None = None
        self._pause_s, self._pause_max_s = _POLL_S[0], _POLL_S[1] + waiting_ranks * _POLL_PER_RANK_S

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._began

    def wait(self, is_met: Callable[[], bool]) -> bool:
        """Return whether the condition held in time."""
        while not is_met():
            if self._is_over():
                # Check once more, because this process may have been stopped.
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
    """Advice about missing ranks."""

    MEETING = (
        "each rank has to create a Checkpointer and call the same methods in the same order; pass ranks=None to save "
        "a single rank"
    )
    ROUND = "check the logs of that rank"


def missing_error(
    missing: Sequence[int], what: str, waited_s: float, remedy: Remedy = Remedy.ROUND
) -> RanksMissingError:
    """Return an error that names the missing ranks, the action and the remedy."""
    noun = "rank" if len(missing) == 1 else "ranks"
    return RanksMissingError(
        f"{what}: {noun} {listed(missing)} did not respond within {waited_s:.1f} s; {remedy.value}", missing
    )
