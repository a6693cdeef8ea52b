"""A session: ranks that found each other, and come to decisions one after the other.

Each decision is a *round*: every rank reports, rank 0 decides on all reports, and every rank gets the verdict. Rounds
have the same numbers on all ranks, because all ranks do the same things in the same order. A session has a random name
from rank 0, so that an answer of earlier processes in the key-value store is never taken for a new one.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from asymcheck.distributed.kv_store import ENDING_S, Clock, KeyReader, in_parts, missing_error
from asymcheck.distributed.ranks import Ranks
from asymcheck.distributed.rendezvous import NO_HOME, RankLocation, RendezvousResult, meet
from asymcheck.errors import RankFailedError, RanksError, RanksMissingError
from asymcheck.format.spans import ranks_in

_SHOWN = 8
_SAID, _FAILED, _MISSING, _EACH = b"v", b"f", b"m", b"e"

Round = tuple[int, int]  # the number of a common action, and of a part of it; rounds of one thread come in this order
_LAST: Round = (1 << 62, 0)
Decide = Callable[[Sequence[bytes]], "bytes | list[bytes]"]
"""Makes the verdict from all reports: one for all ranks, or one for each rank."""


class Session:
    """Ranks that found each other. One thread uses it at a time; another one takes :meth:`for_thread`.

    Methods that wait raise RanksMissingError when ranks do not report in time, or rank 0 does not answer, and
    RankFailedError when a rank reports a failure, or ranks are about to do different things.
    """

    def __init__(
        self, ranks: Ranks, keys: KeyReader, name: str, met: RendezvousResult, posted: list[tuple[Round, str]]
    ) -> None:
        """Use :meth:`join` instead."""
        self._ranks, self._keys, self._name, self._met = ranks, keys, name, met
        # On rank 0: keys to be removed when all ranks have read them. Shared by all threads.
        self._posted = posted
        # On rank 0: the round in which all ranks report on the last action that it has announced, if in any.
        self._awaited: Round | None = None
        self._lock = threading.Lock()
        self._absent = Stragglers()
        self._number = 0
        # On other ranks: the part of the action in which to report, and whether an action may have been missed.
        self._first: int | None = None
        self._is_behind = False
        self._reported: tuple[Round, int] | None = None
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.is_first = ranks.rank == 0
        self.local_size = min(ranks.local_size, len(ranks_in(met.groups[0])))
        """Number of ranks that share the memory of this machine, as far as is known."""
        self.groups = met.groups  # the ranks of each store: on rank 0, of all stores; on other ranks, of its own
        self.store_ranks = met.groups[0] if met.count > 1 else None
        """The ranks that save into this rank's store; None when all ranks do."""
        self.is_first_here = met.groups[0][0][0] == ranks.rank  # whether this is the first rank of its store
        self.is_ending: Callable[[], bool] = lambda: False
        """Tells whether this process is to end, and so must not wait for long."""

    @classmethod
    def join(cls, ranks: Ranks, run: str, terms: Mapping[str, str], home: RankLocation = NO_HOME) -> Session:
        """Find the other ranks: when this returns, all have come and have the same ``terms``.

        ``home`` is the place where this rank saves.
        """
        keys = ranks.connect()
        met = meet(ranks, keys, run, terms, home)
        return cls(ranks, keys, f"{run}/{met.name}", met, [])

    def for_thread(self) -> Session:
        """Return this session for another thread, which waits by itself."""
        other = Session(self._ranks, self._ranks.connect(), self._name, self._met, self._posted)
        other._lock, other._absent = self._lock, self._absent
        other.is_ending = self.is_ending
        return other

    # -------------------------------------------------------------------- common actions, on the training thread

    def next_number(self) -> int:
        """Return the number of the next action. Rank 0 counts it now, other ranks when they hear of it."""
        self._number += self.is_first
        return self._number if self.is_first else self._number + 1

    def open(self, number: int, does: str, step: int | None, first: int | None, said: object) -> None:
        """Announce an action, as rank 0; the other ranks report in its part ``first``, if in any."""
        self._awaited = None if first is None else (number, first)
        self.post((number, 0), json.dumps({"does": does, "step": step, "first": first, "said": said}).encode())

    def follow(self, does: str, step: int | None, what: str, *, old_counts: bool = False) -> tuple[int, Any]:
        """Wait until rank 0 announces the same action; return its number, and what rank 0 says of it.

        A rank that may have missed an action skips those that rank 0 has done without it. With ``old_counts``, the
        same action at an earlier step is not skipped.
        """
        while True:
            word = self._next_word(what)
            if (word["does"], word["step"]) == (does, step):
                self._is_behind = False
                return self._number, word["said"]
            is_ahead = step is not None and word["step"] is not None and word["step"] > step
            is_passed = self._is_behind and not is_ahead
            if is_passed and old_counts and word["does"] == does:
                return self._number, word["said"]
            theirs, mine = _named(word["does"], word["step"]), _named(does, step)
            error = RankFailedError(
                f"rank 0 {theirs} where rank {self.rank} {mine}: all ranks have to call the same methods with the "
                "same steps"
            )
            self.give_up(self._number, error)
            if not is_passed:
                self._is_behind = True
                raise error

    def begin(
        self, does: str, step: int | None, first: int | None, say: Callable[[], object], what: str
    ) -> tuple[int, Any]:
        """Begin an action: return its number, and on all ranks what ``say`` returns on rank 0."""
        if not self.is_first:
            return self.follow(does, step, what, old_counts=True)
        number = self.next_number()
        said = say()
        self.open(number, does, step, first, said)
        return number, said

    def give_up(self, number: int, error: BaseException) -> None:
        """Tell the other ranks that this one does not take part, even if rank 0 has not announced the action yet."""
        reason = reason_of(error).encode()
        with contextlib.suppress(RanksError):
            if self.is_first:
                self.report((number, 0), reason, failed=True)
                if self._awaited is not None and self._awaited[0] == number:
                    # A rank that has heard the announcement waits for the verdict of this round.
                    self.report(self._awaited, reason, failed=True)
                return
            if number > self._number:
                was_behind, self._is_behind = self._is_behind, True
                # After a missing answer this rank does not ask again, and after an interrupt it does not wait.
                if isinstance(error, Exception) and not isinstance(error, RanksError):
                    self._next_word("giving up")
                    self._is_behind = was_behind
            if number <= self._number and self._first is not None:
                first, self._first = self._first, None
                self.report((self._number, first), reason, failed=True)

    def _next_word(self, what: str) -> Any:  # noqa: ANN401 - what JSON can say
        number, self._first = self._number + 1, None
        try:
            word = json.loads(self.hear((number, 0), what))
        except RanksMissingError:
            self._is_behind = True
            raise
        except RankFailedError:
            self._number = number
            raise
        self._number, self._first = number, word["first"]
        return word

    def post(self, at: Round, value: bytes, *, failed: bool = False) -> None:
        """Say something to all other ranks, as rank 0."""
        self._post(self._key(at), (_FAILED if failed else _SAID) + value, at)

    def hear(self, at: Round, what: str) -> bytes:
        """Wait for what rank 0 posts."""
        return self._heard(at, what, self._ranks.timeout_s)

    def _heard(self, at: Round, what: str, timeout_s: float) -> bytes:
        key = self._key(at)
        clock = self._clock(self.world_size, timeout_s)
        if not clock.wait(lambda: self._keys.has([key])):
            # Rank 0 may post it late, and removes it when this rank has reported in a later round.
            self._absent.note({0: key})
            raise missing_error([0], what, clock.waited_s)
        self._absent.clear()
        (said,) = self._keys.get([key])
        tag, value = said[:1], said[1:]
        if tag == _FAILED:
            raise RankFailedError(value.decode())
        if tag == _MISSING:
            found = json.loads(value)
            raise missing_error(found["ranks"], what, found["waited_s"])
        if tag == _EACH:
            value = self._keys.take(f"{key}/to/{self.rank}")
        return value

    # ------------------------------------------------------------------------------------------------------ rounds

    def report(self, at: Round, value: bytes, *, failed: bool = False) -> None:
        """Report in a round without waiting for the verdict; rank 0 reports only failures."""
        tagged = (_FAILED if failed else _SAID) + value
        if not self.is_first:
            self._reported = at, self._keys.put(self._report_key(at, self.rank), tagged)
        elif failed:
            self._post(self._key(at), _FAILED + f"rank 0: {value.decode()}".encode(), at)

    def agree(self, at: Round, value: bytes, decide: Decide, what: str) -> bytes:
        """Report, and return the verdict on all reports, which ``decide`` makes on rank 0.

        Args:
            at: the round.
            value: the report of this rank.
            decide: called on rank 0 with the reports by rank; its errors fail the round on all ranks.
            what: name of the action in errors.
        """
        if not self.is_first:
            self.report(at, value)
            return self.verdict(at, what)
        reports = self._gather(at, value, what)
        self._forget_before(at)
        try:
            verdict_of_all = decide(reports)
        except BaseException as error:
            self.post(at, f"rank 0: {error}".encode(), failed=True)
            raise
        if isinstance(verdict_of_all, bytes):
            self.post(at, verdict_of_all)
            return verdict_of_all
        key = self._key(at)
        for rank, verdict in enumerate(verdict_of_all[1:], 1):
            self._keys.put(f"{key}/to/{rank}", verdict)
        self._post(key, _EACH, at)
        return verdict_of_all[0]

    def verdict(self, at: Round, what: str) -> bytes:
        """Wait for the verdict of a round in which this rank has reported; not for rank 0."""
        # Rank 0 may begin later to wait for a missing rank, and its verdict names that rank.
        verdict = self._heard(at, what, 2 * self._ranks.timeout_s)
        if self._reported is not None and self._reported[0] == at:
            self._keys.remove(self._report_key(at, self.rank), self._reported[1])
        return verdict

    def _gather(self, at: Round, value: bytes, what: str) -> list[bytes]:
        keys = [self._report_key(at, rank) for rank in range(1, self.world_size)]
        clock = self._clock(1, self._ranks.timeout_s)
        found: list[bytes] = [_SAID + value]
        for some in in_parts(keys):
            if not clock.wait(partial(self._keys.has, some)):
                missing = [rank for rank, key in enumerate(keys, 1) if not self._keys.has([key])]
                if missing:
                    self._absent.note({rank: self._report_key(at, rank) for rank in missing})
                    said = {"ranks": missing, "waited_s": clock.waited_s}
                    self._post(self._key(at), _MISSING + json.dumps(said).encode(), at)
                    raise missing_error(missing, what, clock.waited_s)
            found += self._keys.get(some)
        self._absent.clear()
        failures = [f"rank {rank}: {one[1:].decode()}" for rank, one in enumerate(found) if one[:1] == _FAILED]
        if failures:
            message = "; ".join(failures[:_SHOWN])
            self.post(at, message.encode(), failed=True)
            raise RankFailedError(message)
        return [one[1:] for one in found]

    def leave(self) -> None:
        """End the session. Rank 0 waits a moment for the others, because its process may hold the key-value store."""
        at = _LAST
        if not self.is_first:
            self._keys.put(self._report_key(at, self.rank), b"")
            return
        keys = [self._report_key(at, rank) for rank in range(1, self.world_size)]
        clock = self._clock(1, min(self._ranks.timeout_s, ENDING_S))
        if all(clock.wait(partial(self._keys.has, some)) for some in in_parts(keys)):
            self._forget_before(at)
        self._keys.drop(keys)

    def _clock(self, lookers: int, timeout_s: float) -> Clock:
        is_gone = partial(self._absent.is_any_still, self._keys) if self._absent.is_any() else None
        return Clock(timeout_s, lookers, self.is_ending, is_gone)

    def _key(self, at: Round) -> str:
        return f"{self._name}/{at[0]}.{at[1]}"

    def _report_key(self, at: Round, rank: int) -> str:
        return f"{self._key(at)}/of/{rank}"

    def _post(self, key: str, value: bytes, at: Round) -> None:
        with self._lock:
            self._posted.append((at, key))
        self._keys.put(key, value)

    def _forget_before(self, at: Round) -> None:
        """Remove the keys of earlier rounds, which all ranks that report in this one have read."""
        with self._lock:
            heard = [key for when, key in self._posted if when < at]
            self._posted[:] = [one for one in self._posted if one[0] >= at]
        self._keys.drop(heard)


def _named(does: str, step: int | None) -> str:
    return does if step is None else f"{does} step {step}"


def reason_of(error: BaseException) -> str:
    """Return the reason of a failure for other ranks."""
    return str(error) if isinstance(error, RanksError) else f"{type(error).__name__}: {error}"


class Stragglers:
    """The ranks that did not come in time. The threads of a session share it, each with keys of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._signs: dict[int, list[str]] = {}

    def note(self, signs: Mapping[int, str]) -> None:
        """Note that ranks did not come in time, each with the key that it sets when it comes too late."""
        with self._lock:
            for rank, key in signs.items():
                # The first key, because a rank that is late each time may also set the newest one too late. The newest
                # key, because the first one may never come.
                self._signs[rank] = [*self._signs.get(rank, [])[:1], key]

    def clear(self) -> None:
        """Note that all ranks have come."""
        with self._lock:
            self._signs.clear()

    def is_any(self) -> bool:
        """Tell whether a rank is missing, without looking for its keys."""
        with self._lock:
            return bool(self._signs)

    def is_any_still(self, keys: KeyReader) -> bool:
        """Tell whether a rank is missing that has set none of its keys since."""
        with self._lock:
            signs = dict(self._signs)
        # The store is asked without the lock, so that a note made meanwhile has to stay.
        come = [rank for rank, some in signs.items() if any(keys.has([key]) for key in some)]
        with self._lock:
            for rank in come:
                if self._signs.get(rank) == signs[rank]:
                    del self._signs[rank]
            return bool(self._signs)
