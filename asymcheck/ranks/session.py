"""A session: ranks that found each other, and come to decisions one after the other.

Each decision is a *round*: every rank reports, rank 0 decides on all reports, and everyone gets the verdict. Rounds
are numbered the same on all ranks, because all do the same things in the same order; a session has a random name that
rank 0 gave it, so that what processes of before have left in the store is never taken for an answer.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from asymcheck.errors import RankFailedError, RanksError, RanksMissingError
from asymcheck.format.spans import ranks_in
from asymcheck.ranks.clock import ENDING_S, Clock, missing_error
from asymcheck.ranks.homes import NO_HOME, Home
from asymcheck.ranks.keys import Keys, in_parts
from asymcheck.ranks.meeting import Met, meet
from asymcheck.ranks.ranks import Ranks

_SHOWN = 8
_SAID, _FAILED, _MISSING, _EACH = b"v", b"f", b"m", b"e"

Round = tuple[int, int]
"""A number of what is done together, and of a part of that; rounds of one thread come in this order."""
_LAST: Round = (1 << 62, 0)
Decide = Callable[[Sequence[bytes]], "bytes | list[bytes]"]
"""Makes the verdict of all reports: one for all, or one for each rank."""


class Session:
    """Ranks that found each other. One thread uses it at a time; a further one takes :meth:`for_thread`."""

    def __init__(self, ranks: Ranks, keys: Keys, name: str, met: Met, posted: list[tuple[Round, str]]) -> None:
        """Wrap what was agreed; use :meth:`join`."""
        self._ranks, self._keys, self._name, self._met = ranks, keys, name, met
        # Of rank 0: what it has said, to be removed when everybody has heard it. Shared by all threads.
        self._posted = posted
        # Of rank 0, too: the round to which all report in what it has told them last, if to any.
        self._awaited: Round | None = None
        self._lock = threading.Lock()
        self._absent = Absent()
        self._number = 0
        # Of the others: to which part of what rank 0 does this one has to report, and whether it may have missed some.
        self._first: int | None = None
        self._is_behind = False
        self._reported: tuple[Round, int] | None = None
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.is_first = ranks.rank == 0
        self.local_size = min(ranks.local_size, len(ranks_in(met.groups[0])))
        """How many ranks share the memory of this machine, as far as is known."""
        self.groups = met.groups
        """The ranks of each store: on rank 0 of all stores, on others of its own."""
        self.store_ranks = met.groups[0] if met.count > 1 else None
        """The ranks that save into the store of this one; None when all do."""
        self.is_first_here = met.groups[0][0][0] == ranks.rank
        """Whether this is the first rank of its store, which does there what is done once."""
        self.is_ending: Callable[[], bool] = lambda: False
        """Tells whether this process is to end, and so should not wait for long."""

    @classmethod
    def join(cls, ranks: Ranks, run: str, terms: Mapping[str, str], home: Home = NO_HOME) -> Session:
        """Find the other ranks: when this returns, all are there, alive, and have the same ``terms``.

        ``home`` says where this one saves.

        Raises:
            RanksMissingError: some are not there.
            RankFailedError: they differ in what they are about to do.
        """
        keys = ranks.connect()
        met = meet(ranks, keys, run, terms, home)
        return cls(ranks, keys, f"{run}/{met.name}", met, [])

    def for_thread(self) -> Session:
        """Return this session for another thread, which then waits without holding this one up."""
        other = Session(self._ranks, self._ranks.connect(), self._name, self._met, self._posted)
        other._lock, other._absent = self._lock, self._absent
        other.is_ending = self.is_ending
        return other

    # -------------------------------------------------------------- what is done together next, on the training thread

    def next_number(self) -> int:
        """Return the number of what is done together next. Rank 0 counts it now, others when they hear of it."""
        self._number += self.is_first
        return self._number if self.is_first else self._number + 1

    def open(self, number: int, does: str, step: int | None, first: int | None, said: object) -> None:
        """Tell all others, as rank 0, what is done together now; they report to part ``first``, if to any."""
        self._awaited = None if first is None else (number, first)
        self.post((number, 0), json.dumps({"does": does, "step": step, "first": first, "said": said}).encode())

    def follow(self, does: str, step: int | None, what: str, *, old_counts: bool = False) -> tuple[int, Any]:
        """Wait until rank 0 does the same; return its number, and what rank 0 says of it.

        A rank that may have missed something passes over what rank 0 has done without it, but for the same thing at an
        earlier step where ``old_counts``.

        Raises:
            RanksMissingError: rank 0 does nothing in time; what it does later will be passed over.
            RankFailedError: it failed, or does something else.
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
        """Do something together: return its number, and on all ranks what ``say`` makes on rank 0.

        Raises:
            RanksError: as :meth:`follow`; what rank 0 said of an earlier step counts.
        """
        if not self.is_first:
            return self.follow(does, step, what, old_counts=True)
        number = self.next_number()
        said = say()
        self.open(number, does, step, first, said)
        return number, said

    def give_up(self, number: int, error: BaseException) -> None:
        """Tell the others that this rank takes no part, also when rank 0 has not begun yet; what fails then is told."""
        reason = reason_of(error).encode()
        with contextlib.suppress(RanksError):
            if self.is_first:
                self.report((number, 0), reason, failed=True)
                if self._awaited is not None and self._awaited[0] == number:
                    # Who has heard by now that it begins waits for the verdict of that round.
                    self.report(self._awaited, reason, failed=True)
                return
            if number > self._number:
                was_behind, self._is_behind = self._is_behind, True
                # Whom nobody answered asks no more, and who is interrupted waits for nobody.
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

    # ---------------------------------------------------------------------------------------------- what rank 0 says

    def post(self, at: Round, value: bytes, *, failed: bool = False) -> None:
        """Say something to all others, as rank 0."""
        self._post(self._key(at), (_FAILED if failed else _SAID) + value, at)

    def hear(self, at: Round, what: str) -> bytes:
        """Wait for what rank 0 says.

        Raises:
            RanksMissingError: it says nothing in time.
            RankFailedError: it says that it failed.
        """
        return self._heard(at, what, self._ranks.timeout_s)

    def _heard(self, at: Round, what: str, timeout_s: float) -> bytes:
        key = self._key(at)
        clock = self._clock(self.world_size, timeout_s)
        if not clock.wait(lambda: self._keys.has([key])):
            # Rank 0 says late what it has to say, and removes it when this one has reported to something later.
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

    # ------------------------------------------------------------------------------------------------------- a round

    def report(self, at: Round, value: bytes, *, failed: bool = False) -> None:
        """Give this rank's report of a round without waiting for the verdict; on rank 0, only a failure."""
        tagged = (_FAILED if failed else _SAID) + value
        if not self.is_first:
            self._reported = at, self._keys.put(self._report_key(at, self.rank), tagged)
        elif failed:
            self._post(self._key(at), _FAILED + f"rank 0: {value.decode()}".encode(), at)

    def agree(self, at: Round, value: bytes, decide: Decide, what: str) -> bytes:
        """Report, and return the verdict on all reports, which ``decide`` makes on rank 0.

        Args:
            at: the round.
            value: what this rank reports.
            decide: called on rank 0 with the reports by rank; what it raises fails the round on all ranks.
            what: for errors: what is being done.

        Raises:
            RanksMissingError: some ranks did not report in time, or rank 0 did not decide.
            RankFailedError: one reported a failure.
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
        """Wait for the verdict of a round that this rank has reported to; not for rank 0.

        Raises:
            RanksMissingError, RankFailedError: as :meth:`agree`.
        """
        # Rank 0 may begin to wait for a missing rank later than this one, and its verdict names that one.
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
        """End the session. Rank 0, whose process may hold the store, waits a moment until the others have heard all."""
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

    # ------------------------------------------------------------------------------------------------------- keys

    def _key(self, at: Round) -> str:
        return f"{self._name}/{at[0]}.{at[1]}"

    def _report_key(self, at: Round, rank: int) -> str:
        return f"{self._key(at)}/of/{rank}"

    def _post(self, key: str, value: bytes, at: Round) -> None:
        with self._lock:
            self._posted.append((at, key))
        self._keys.put(key, value)

    def _forget_before(self, at: Round) -> None:
        """Remove what was said in earlier rounds: who reports in this one has heard it."""
        with self._lock:
            heard = [key for when, key in self._posted if when < at]
            self._posted[:] = [one for one in self._posted if one[0] >= at]
        self._keys.drop(heard)


def _named(does: str, step: int | None) -> str:
    return does if step is None else f"{does} step {step}"


def reason_of(error: BaseException) -> str:
    """Say to other ranks why this one failed."""
    return str(error) if isinstance(error, RanksError) else f"{type(error).__name__}: {error}"


class Absent:
    """The ranks that one rank misses. It is shared by the threads of a session, each with keys of its own."""

    def __init__(self) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self._signs: dict[int, list[str]] = {}

    def note(self, signs: Mapping[int, str]) -> None:
        """Note that ranks did not come in time, each with the key that it puts there when it comes too late."""
        with self._lock:
            for rank, key in signs.items():
                # The first, for who is late each time may put the newest there too late again; and the newest, for
                # nothing says that the first ever comes.
                self._signs[rank] = [*self._signs.get(rank, [])[:1], key]

    def clear(self) -> None:
        """Note that all have come."""
        with self._lock:
            self._signs.clear()

    def is_any(self) -> bool:
        """Tell whether some rank is missed, without looking for a sign of life."""
        with self._lock:
            return bool(self._signs)

    def is_any_still(self, keys: Keys) -> bool:
        """Tell whether some rank is missed that has shown no sign of life since; who has shown one is not missed."""
        with self._lock:
            signs = dict(self._signs)
        # What is noted meanwhile stays: the store is asked without the lock.
        come = [rank for rank, some in signs.items() if any(keys.has([key]) for key in some)]
        with self._lock:
            for rank in come:
                if self._signs.get(rank) == signs[rank]:
                    del self._signs[rank]
            return bool(self._signs)
