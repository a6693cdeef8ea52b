"""Keys and values that all ranks see, in a key-value store as torch has them: TCPStore, FileStore, HashStore."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from asymcheck.errors import RanksError

_PIECE_BYTES = 4 << 20
"""torch's server ends the connection of who sends more than 8 MiB at once."""
_AT_ONCE = 64
_COUNT_BYTES = 4


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


class Keys:
    """One connection to a store, for one thread at a time; nothing here waits for a key."""

    def __init__(self, store: KeyStore) -> None:
        """Use ``store`` through a connection of its own, where a store has several.

        A call that waits, of whoever else has the store, would hold ours up on the same connection.
        """
        clone = getattr(store, "clone", None)
        self._store: KeyStore = store if clone is None else clone()
        has_more = getattr(self._store, "has_extended_api", lambda: False)
        self._multi_get = getattr(self._store, "multi_get", None) if has_more() else None

    def put(self, key: str, value: bytes) -> int:
        """Put a value of any length there: once the key is there, all of it is. Returns in how many pieces it lies.

        Raises:
            RanksError: the store does not answer.
        """
        pieces = [value[start : start + _PIECE_BYTES] for start in range(0, len(value), _PIECE_BYTES)] or [b""]
        with _translated(f"set {key}"):
            for number, piece in reversed(list(enumerate(pieces))):
                head = b"" if number else len(pieces).to_bytes(_COUNT_BYTES, "little")
                self._store.set(_piece_key(key, number), head + piece)
        return len(pieces)

    def has(self, keys: Sequence[str]) -> bool:
        """Tell whether all of these are there.

        Raises:
            RanksError: the store does not answer.
        """
        with _translated("check keys"):
            return all(self._store.check(some) for some in in_parts(keys))

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return values that are there.

        Raises:
            RanksError: the store does not answer.
        """
        with _translated(f"get {keys[0] if keys else ''}"):
            return [self._whole(key, first) for key, first in zip(keys, self._firsts(keys), strict=True)]

    def take(self, key: str) -> bytes:
        """Return a value that is there, and remove it.

        Raises:
            RanksError: the store does not answer.
        """
        with _translated(f"get {key}"):
            (first,) = self._firsts([key])
            value = self._whole(key, first)
            self._remove(key, _count(first))
        return value

    def remove(self, key: str, pieces: int) -> None:
        """Remove a key that lies in so many pieces; of many ranks, each asks the one server as seldom as it can.

        Raises:
            RanksError: the store does not answer.
        """
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
        """Remove keys with their values, also ones that are not there.

        Raises:
            RanksError: the store does not answer.
        """
        with _translated("delete keys"):
            for key in keys:
                if self._store.check([key]):
                    self._remove(key, _count(self._store.get(key)))

    def _remove(self, key: str, pieces: int) -> None:
        for number in range(pieces):
            self._store.delete_key(_piece_key(key, number))


def in_parts(keys: Sequence[str]) -> Iterator[list[str]]:
    """Yield keys as many at a time as are asked for at once."""
    for start in range(0, len(keys), _AT_ONCE):
        yield list(keys[start : start + _AT_ONCE])


def _count(first: bytes) -> int:
    return int.from_bytes(first[:_COUNT_BYTES], "little")


def _piece_key(key: str, number: int) -> str:
    return f"{key}+{number}" if number else key


class _translated:  # noqa: N801 - reads as a statement
    """Turns what the store raises into an error of ours."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        # torch's own errors are of no narrower class in all versions.
        if isinstance(error, (RuntimeError, OSError)):
            message = f"the key-value store of the ranks does not answer ({self._what}): {str(error).splitlines()[0]}"
            raise RanksError(message) from error
