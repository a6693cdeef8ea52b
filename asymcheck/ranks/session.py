"""A session: ranks that found each other, and come to decisions one after the other.

Each decision is a *round*: every rank reports, rank 0 decides on all reports, and everyone gets the verdict. Rounds
are numbered the same on all ranks, because all do the same things in the same order; a session has a random name that
rank 0 gave it, so that what processes of before have left in the store is never taken for an answer.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from asymcheck.errors import RankFailedError, RanksError, RanksMissingError
from asymcheck.ranks.keys import Keys, in_parts
from asymcheck.ranks.ranks import Ranks

_POLL_S = (0.0002, 0.05)
"""How long is slept between two looks, at first and in the end …"""
_POLL_OF_EACH_S = 50e-6
"""… and more for each that looks at the same time: all of them ask one server."""
_LATE_SHARE = 0.1
"""What part of the time a rank is waited for that was missing the last time: it may be dead, and saves queue up."""
_ENDING_S = 10.0
"""How long is waited in a process that is to end; likewise less for a rank that was missing the last time."""
_SHOWN = 8
_SAID, _FAILED, _MISSING, _EACH = b"v", b"f", b"m", b"e"

Round = tuple[int, int]
"""A number of what is done together, and of a part of that; rounds of one thread come in this order."""
_LAST: Round = (1 << 62, 0)
Decide = Callable[[Sequence[bytes]], "bytes | list[bytes]"]
"""Makes the verdict of all reports: one for all, or one for each rank."""


class Session:
    """Ranks that found each other. One thread uses it at a time; a further one takes :meth:`for_thread`."""

    def __init__(self, ranks: Ranks, keys: Keys, name: str, posted: list[tuple[Round, str]]) -> None:
        """Wrap what was agreed; use :meth:`join`."""
        self._ranks, self._keys, self._name = ranks, keys, name
        # Of rank 0: what it has said, to be removed when everybody has heard it. Shared by all threads.
        self._posted = posted
        self._lock = threading.Lock()
        self._was_missing = threading.Event()
        self._number = 0
        self._reported: tuple[Round, int] | None = None
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.is_first, self.local_size = ranks.rank == 0, ranks.local_size
        self.is_ending: Callable[[], bool] = lambda: False
        """Tells whether this process is to end, and so should not wait for long."""

    @classmethod
    def join(cls, ranks: Ranks, run: str, terms: Mapping[str, str]) -> Session:
        """Find the other ranks: when this returns, all are there, alive, and have the same ``terms``.

        Raises:
            RanksMissingError: some are not there.
            RankFailedError: they differ in what they are about to do.
        """
        keys = ranks.connect()
        meeting = f"{run}/meet"
        mine = json.dumps({"token": os.urandom(8).hex(), "terms": dict(terms)}).encode()
        clock = _Clock(ranks.timeout_s, 1 if ranks.rank == 0 else ranks.world_size, lambda: False)
        if ranks.rank == 0:
            name = os.urandom(8).hex()
            keys.put(meeting, name.encode())
            _receive(ranks, keys, f"{meeting}/{name}", mine, clock)
        else:
            name = _arrive(ranks, keys, meeting, mine, clock)
        return cls(ranks, keys, f"{run}/{name}", [])

    def for_thread(self) -> Session:
        """Return this session for another thread, which then waits without holding this one up."""
        other = Session(self._ranks, self._ranks.connect(), self._name, self._posted)
        other._lock, other._was_missing = self._lock, self._was_missing
        other.is_ending = self.is_ending
        return other

    def next_number(self) -> int:
        """Return the number of what is done together next. On the training thread, in the same order on all ranks."""
        self._number += 1
        return self._number

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
            self._was_missing.set()
            raise _missing([0], what, clock.waited_s)
        self._was_missing.clear()
        (said,) = self._keys.get([key])
        tag, value = said[:1], said[1:]
        if tag == _FAILED:
            raise RankFailedError(value.decode())
        if tag == _MISSING:
            found = json.loads(value)
            raise _missing(found["ranks"], what, found["waited_s"])
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
                    self._was_missing.set()
                    said = {"ranks": missing, "waited_s": clock.waited_s}
                    self._post(self._key(at), _MISSING + json.dumps(said).encode(), at)
                    raise _missing(missing, what, clock.waited_s)
            found += self._keys.get(some)
        self._was_missing.clear()
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
        clock = self._clock(1, min(self._ranks.timeout_s, _ENDING_S))
        if all(clock.wait(partial(self._keys.has, some)) for some in in_parts(keys)):
            self._forget_before(at)
        self._keys.drop(keys)

    def _clock(self, lookers: int, timeout_s: float) -> _Clock:
        return _Clock(timeout_s, lookers, self.is_ending, _LATE_SHARE if self._was_missing.is_set() else 1.0)

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


class _Clock:
    """Waits for something by looking at it, ever less often, up to a limit; so do ``lookers`` at the same time."""

    def __init__(
        self, timeout_s: float, lookers: int, is_ending: Callable[[], bool], share_of_patience: float = 1.0
    ) -> None:
        self._began = time.monotonic()
        self._timeout_s, self._ending_s = timeout_s * share_of_patience, _ENDING_S * share_of_patience
        self._is_ending = is_ending
        self._ending_since: float | None = None
        self._pause_s, self._pause_max_s = _POLL_S[0], _POLL_S[1] + lookers * _POLL_OF_EACH_S

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began

    def wait(self, is_there: Callable[[], bool]) -> bool:
        """Return whether it was there in time."""
        while not is_there():
            if self._is_over():
                # Once more: this process may have stood still for all of the time.
                return is_there()
            time.sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 1.2, self._pause_max_s)
        return True

    def _is_over(self) -> bool:
        now = time.monotonic()
        if self._ending_since is None and self._is_ending():
            self._ending_since = now
        return now - self._began > self._timeout_s or (
            self._ending_since is not None and now - self._ending_since > self._ending_s
        )


def _arrive(ranks: Ranks, keys: Keys, meeting: str, mine: bytes, clock: _Clock) -> str:
    """Report to the meeting that rank 0 opened; return its name when rank 0 has answered this very report."""
    reported = ""
    answer = b""

    def is_answered() -> bool:
        nonlocal reported, answer
        if not keys.has([meeting]):
            return False
        # What lies there may be of processes that have ended: then a new name comes, and no answer to the old one.
        name = keys.get([meeting])[0].decode()
        if name != reported:
            keys.put(f"{meeting}/{name}/{ranks.rank}", mine)
            reported = name
        key = f"{meeting}/{name}/to/{ranks.rank}"
        answer = keys.get([key])[0] if keys.has([key]) else b""
        return answer.startswith(json.loads(mine)["token"].encode())

    if not clock.wait(is_answered):
        raise _missing([0], "finding each other", clock.waited_s)
    keys.drop([f"{meeting}/{reported}/{ranks.rank}", f"{meeting}/{reported}/to/{ranks.rank}"])
    refusal = answer[len(json.loads(mine)["token"]) :]
    if refusal:
        raise RankFailedError(refusal.decode())
    return reported


def _receive(ranks: Ranks, keys: Keys, meeting: str, mine: bytes, clock: _Clock) -> None:
    """Wait for the reports of all ranks, compare them with this one's, and answer each."""
    places = [f"{meeting}/{rank}" for rank in range(1, ranks.world_size)]
    found = [json.loads(mine)]
    for some in in_parts(places):
        if not clock.wait(partial(keys.has, some)):
            missing = [rank for rank, place in enumerate(places, 1) if not keys.has([place])]
            raise _missing(missing or [0], "finding each other", clock.waited_s)
        found += map(json.loads, keys.get(some))
    terms = found[0]["terms"]
    others = [rank for rank, one in enumerate(found) if one["terms"] != terms]
    refusal = ""
    if others:
        refusal = (
            f"ranks that save together have to do so in the same way: rank {others[0]} has "
            f"{found[others[0]]['terms']}, rank 0 has {terms}"
        )
    for rank, one in enumerate(found[1:], 1):
        keys.put(f"{meeting}/to/{rank}", (one["token"] + refusal).encode())
    if refusal:
        raise RankFailedError(refusal)


def _missing(missing: Sequence[int], what: str, waited_s: float) -> RanksMissingError:
    ranks = ", ".join(map(str, missing[:_SHOWN]))
    if len(missing) > _SHOWN:
        ranks += f" and {len(missing) - _SHOWN} more"
    noun = "rank" if len(missing) == 1 else "ranks"
    remedy = "each rank has to make its Checkpointer and call the same methods in the same order"
    if what != "finding each other":
        remedy = "look there for what ended or held it up"
    else:
        remedy += "; pass ranks=None to save one rank alone"
    return RanksMissingError(f"{what}: {noun} {ranks} did not answer within {waited_s:.1f} s; {remedy}", missing)


def reason_of(error: BaseException) -> str:
    """Say to other ranks why this one failed."""
    return str(error) if isinstance(error, RanksError) else f"{type(error).__name__}: {error}"
