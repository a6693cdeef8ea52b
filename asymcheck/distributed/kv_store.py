"""Access to the key-value store of the ranks (torch's TCPStore, FileStore or HashStore), and waiting for its keys.

A wait polls with growing pauses, up to a time limit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

from asymcheck.errors import RanksError, RanksMissingError, listed

_VALUE_BYTES_MAX = 7 << 20  # torch's server closes a connection that sends more than 8 MiB at once
_KEYS_PER_REQUEST = 64
_CONNECT_S_MAX = 86_400.0  # torch takes no infinite time

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

    def __init__(self, store: KeyStore, timeout_s: float) -> None:
        """Use ``store`` through a separate connection if possible.

        On a shared connection, a blocking call of another user of the store would block ours. ``timeout_s`` limits how
        long :meth:`another` tries to connect.

        Raises:
            RanksError: the store does not respond.
        """
        with _translated("connect"):
            self._store: KeyStore = getattr(store, "clone", lambda: store)()
        self._timeout_s = timeout_s
        if self._store is not store and hasattr(self._store, "set_timeout"):
            self._store.set_timeout(timedelta(seconds=min(timeout_s, _CONNECT_S_MAX)))
        has_more = getattr(self._store, "has_extended_api", lambda: False)
        self._multi_get = getattr(self._store, "multi_get", None) if has_more() else None

    def another(self) -> KeyReader:
        """Return a separate connection, for another thread.

        Raises:
            RanksError: the store does not respond.
        """
        return KeyReader(self._store, self._timeout_s)

    def put(self, key: str, value: bytes) -> None:
        """Set a key.

        Raises:
            RanksError: the value is too large, or the store does not respond; so do all other methods.
        """
        if len(value) > _VALUE_BYTES_MAX:
            problem = f"the key-value store of the ranks takes {_VALUE_BYTES_MAX} bytes, but {key} has {len(value)}"
            raise RanksError(f"{problem}. The state has too many partitions: configure larger ones in StoreConfig")
        with _translated(f"set {key}"):
            self._store.set(key, value)

    def has(self, keys: Sequence[str]) -> bool:
        """Tell whether all of these keys exist."""
        with _translated("check keys"):
            return all(self._store.check(part) for part in in_parts(keys))

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of existing keys."""
        with _translated(f"get {keys[0] if keys else ''}"):
            if self._multi_get is None:
                return [*map(self._store.get, keys)]
            return [value for part in in_parts(keys) for value in self._multi_get(part)]

    def drop(self, keys: Iterable[str]) -> None:
        """Remove keys, which need not exist."""
        with _translated("delete keys"):
            for key in keys:
                self._store.delete_key(key)


def in_parts(keys: Sequence[str]) -> Iterator[list[str]]:
    """Split keys into groups for one request each."""
    for start in range(0, len(keys), _KEYS_PER_REQUEST):
        yield list(keys[start : start + _KEYS_PER_REQUEST])


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn errors of the store into RanksError. Not all versions of torch have narrower classes."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise RanksError(f"the key-value store of the ranks does not respond ({what}): {reason}") from error


class Clock:
    """Waits until a condition holds, or a time limit has passed."""

    def __init__(
        self,
        timeout_s: float,
        waiting_ranks: int,
        is_ending: Callable[[], bool],
        is_gone: Callable[[], bool] | None = None,
    ) -> None:
        """Start the clock, for a limit of ``timeout_s`` and ``waiting_ranks`` that wait at the same time.

        ``is_ending`` tells whether this process is about to exit, which shortens the limit. ``is_gone`` tells whether a
        rank that was missing before is still missing, which shortens all limits to a fraction.
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


_REMEDY = "check the logs of missing ranks, or give slow ranks more time: asymcheck.Ranks.from_torch(timeout_s=…)"


def missing_error(missing: Sequence[int], what: str, waited_s: float, remedy: str = _REMEDY) -> RanksMissingError:
    """Return an error that names the missing ranks, the action and the remedy."""
    noun = "rank" if len(missing) == 1 else "ranks"
    return RanksMissingError(
        f"{what}: {noun} {listed(missing)} did not respond within {waited_s:.1f} s; {remedy}", missing
    )
