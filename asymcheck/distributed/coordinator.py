"""Session: coordination of ranks by rank 0.

Each decision is a *round*: every rank reports, rank 0 decides on all reports, and every rank receives the verdict.
Rounds have the same numbers on all ranks, because all ranks call the same methods in the same order. Rank 0 gives the
session a random name, so that values of earlier processes in the key-value store are never mistaken for new ones.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from asymcheck.distributed.kv_store import ENDING_S, Clock, KeyReader, in_parts, missing_error
from asymcheck.distributed.ranks import Ranks
from asymcheck.distributed.rendezvous import NO_LOCATION, RankLocation, RendezvousResult, meet
from asymcheck.errors import RankFailedError, RanksError, RanksMissingError
from asymcheck.format.spans import ranks_in

_SHOWN = 8
_READ_EVERY = 64
"""Number of actions after which a rank says which announcements it has read."""
_VALUE, _FAILED, _MISSING, _EACH = b"v", b"f", b"m", b"e"

Round = tuple[int, int]  # number of a common action, and number of a phase; ascending within a thread
_LAST: Round = (1 << 62, 0)
Decide = Callable[[Sequence[bytes]], "bytes | list[bytes]"]
"""Decide on all reports; return one verdict for all ranks, or one for each rank."""


class Session:
    """Session of ranks after their rendezvous. For one thread; use :meth:`for_thread` in another one.

    Methods that wait raise RanksMissingError if a rank does not respond in time. They raise RankFailedError if a rank
    reports a failure, or if the ranks call different methods.
    """

    def __init__(self, ranks: Ranks, keys: KeyReader, name: str, met: RendezvousResult) -> None:
        """Use :meth:`join` instead."""
        self._ranks, self._keys, self._name = ranks, keys, name
        # Rank 0: keys to remove once all ranks have read them. Shared by all threads.
        self._posted: list[tuple[Round, str]] = []
        # Rank 0: the round in which all ranks report on the last announced action, if any.
        self._awaited: Round | None = None
        self._lock = threading.Lock()
        self._stragglers = Stragglers()
        self._number = 0
        # Other ranks: the phase of the action in which to report, and whether an action may have been missed.
        self._first: int | None = None
        self._is_behind = False
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.is_first = ranks.rank == 0
        self.local_size = min(ranks.local_size, len(ranks_in(met.groups[0])))
        """Number of ranks that share the memory of this machine."""
        self.groups = met.groups  # the ranks of each store: on rank 0, of all stores; on other ranks, of its own
        self.store_ranks = met.groups[0] if met.count > 1 else None
        """Ranks that save into this rank's store; None if all ranks do."""
        self.is_first_here = met.groups[0][0][0] == ranks.rank  # whether this is the first rank of its store
        self.is_ending: Callable[[], bool] = lambda: False
        """Return whether this process is about to exit, and must not wait for long."""

    @classmethod
    def join(cls, ranks: Ranks, run: str, location: RankLocation = NO_LOCATION) -> Session:
        """Wait until all ranks have arrived. ``location`` is the store of this rank."""
        keys = ranks.connect()
        met = meet(ranks, keys, run, location)
        return cls(ranks, keys, f"{run}/{met.name}", met)

    def for_thread(self) -> Session:
        """Return this session with a separate connection for another thread."""
        other: Session = copy.copy(self)
        other._keys = self._keys.another()
        return other

    def next_number(self) -> int:
        """Return the number of the next action. Rank 0 counts at once, other ranks when it is announced."""
        self._number += self.is_first
        return self._number if self.is_first else self._number + 1

    def open(self, number: int, action: str, step: int | None, first: int | None, details: object) -> None:
        """Announce an action on rank 0. The other ranks report in its phase ``first``, if it is not None."""
        self._awaited = None if first is None else (number, first)
        if number % _READ_EVERY == 0:
            self._forget_announcements()
        self.post(
            (number, 0), json.dumps({"action": action, "step": step, "first": first, "details": details}).encode()
        )

    def follow(self, action: str, step: int | None, what: str, *, accept_older: bool = False) -> tuple[int, Any]:
        """Wait until rank 0 announces the same action; return its number and details.

        A rank that may have missed an action skips actions that rank 0 has done without it. With ``accept_older``, the
        same action at an earlier step is not skipped.
        """
        while True:
            announced = self._next_announcement(what)
            if (announced["action"], announced["step"]) == (action, step):
                self._is_behind = False
                return self._number, announced["details"]
            is_ahead = step is not None and announced["step"] is not None and announced["step"] > step
            is_skipped = self._is_behind and not is_ahead
            if is_skipped and accept_older and announced["action"] == action:
                return self._number, announced["details"]
            theirs, mine = _named(announced["action"], announced["step"]), _named(action, step)
            error = RankFailedError(
                f"rank 0 {theirs} where rank {self.rank} {mine}: all ranks have to call the same methods with the "
                "same steps"
            )
            self.give_up(self._number, error)
            if not is_skipped:
                self._is_behind = True
                raise error

    def begin(
        self, action: str, step: int | None, first: int | None, decide: Callable[[], object], what: str
    ) -> tuple[int, Any]:
        """Begin an action; return its number, and on all ranks the result of ``decide`` on rank 0."""
        if not self.is_first:
            return self.follow(action, step, what, accept_older=True)
        number = self.next_number()
        try:
            details = decide()
            self.open(number, action, step, first, details)
        except BaseException as error:
            # Otherwise, the other ranks would wait for this number in all later actions, too.
            self.give_up(number, error)
            raise
        return number, details

    def give_up(self, number: int, error: BaseException) -> None:
        """Report that this rank does not take part, even if rank 0 has not announced the action yet."""
        if self.is_first:
            self.fail((number, 0), error)
            if self._awaited is not None and self._awaited[0] == number:
                # Ranks that have received the announcement wait for the verdict of this round.
                self.fail(self._awaited, error)
            return
        if number > self._number:
            was_behind, self._is_behind = self._is_behind, True
            # This rank does not wait after a missing response or an interrupt.
            if isinstance(error, Exception) and not isinstance(error, RanksError):
                with contextlib.suppress(RanksError):
                    self._next_announcement("giving up")
                    self._is_behind = was_behind
        if number <= self._number and self._first is not None:
            first, self._first = self._first, None
            self.fail((self._number, first), error)

    def _next_announcement(self, what: str) -> Any:  # noqa: ANN401 - JSON
        number, self._first = self._number + 1, None
        try:
            announced = json.loads(self.receive((number, 0), what))
        except RanksMissingError:
            self._is_behind = True
            raise
        except RankFailedError:
            self._number = number
            raise
        self._number, self._first = number, announced["first"]
        if number % _READ_EVERY == 0:
            self._keys.put(self._read_key(self.rank), str(number).encode())
        return announced

    def post(self, at: Round, value: bytes, tag: bytes = _VALUE) -> None:
        """Send a value from rank 0 to all other ranks."""
        key = self._key(at)
        with self._lock:
            self._posted.append((at, key))
        self._keys.put(key, tag + value)

    def receive(self, at: Round, what: str, patience: int = 1) -> bytes:
        """Wait for the value that rank 0 posts, up to ``patience`` times the time limit."""
        key = self._key(at)
        clock = self._clock(self.world_size, patience * self._ranks.timeout_s)
        if not clock.wait(lambda: self._keys.has([key])):
            # Rank 0 may post the value late, and removes it when this rank has reported in a later round.
            self._stragglers.note({0: key})
            raise missing_error([0], what, clock.waited_s)
        self._stragglers.clear()
        (posted,) = self._keys.get([key])
        tag, value = posted[:1], posted[1:]
        if tag == _FAILED:
            raise RankFailedError(value.decode())
        if tag == _MISSING:
            missing = json.loads(value)
            raise missing_error(missing["ranks"], what, missing["waited_s"])
        if tag == _EACH:
            own_key = f"{key}/to/{self.rank}"
            (value,) = self._keys.get([own_key])
            self._keys.drop([own_key])
        return value

    def report(self, at: Round, value: bytes, *, failed: bool = False) -> None:
        """Report in a round without waiting for the verdict. Rank 0 reports only failures."""
        tagged = (_FAILED if failed else _VALUE) + value
        if not self.is_first:
            self._keys.put(self._report_key(at, self.rank), tagged)
        elif failed:
            self.post(at, b"rank 0: " + value, _FAILED)

    def agree(self, at: Round, value: bytes, decide: Decide, what: str) -> bytes:
        """Report ``value``, and return the verdict; ``what`` names the action in errors.

        Rank 0 calls ``decide`` with the reports of all ranks. An error of ``decide`` fails the round on all ranks.
        """
        if not self.is_first:
            self.report(at, value)
            return self.verdict(at, what)
        reports = self._gather(at, value, what)
        self._forget_before(at)
        try:
            verdicts = decide(reports)
        except BaseException as error:
            self.post(at, f"rank 0: {error}".encode(), _FAILED)
            raise
        if isinstance(verdicts, bytes):
            self.post(at, verdicts)
            return verdicts
        key = self._key(at)
        for rank, verdict in enumerate(verdicts[1:], 1):
            self._keys.put(f"{key}/to/{rank}", verdict)
        self.post(at, b"", _EACH)
        return verdicts[0]

    def agree_json(self, at: Round, value: object, decide: Callable[[list[Any]], object], what: str) -> Any:  # noqa: ANN401 - JSON
        """Agree as :meth:`agree` does, on JSON values. Equal reports are decoded once, because most are equal."""

        def decide_bytes(reports: Sequence[bytes]) -> bytes:
            decoded = {report: json.loads(report) for report in {*reports}}
            return json.dumps(decide([decoded[report] for report in reports])).encode()

        return json.loads(self.agree(at, json.dumps(value).encode(), decide_bytes, what))

    @contextlib.contextmanager
    def failing(self, at: Round) -> Iterator[None]:
        """Report an error of the block, so that the round fails on all ranks."""
        try:
            yield
        except BaseException as error:
            self.fail(at, error)
            raise

    def fail(self, at: Round, error: BaseException) -> None:
        """Report the failure of this rank, so that the round fails on all ranks. Raises no RanksError."""
        with contextlib.suppress(RanksError):
            self.report(at, reason_of(error).encode(), failed=True)

    def verdict(self, at: Round, what: str) -> bytes:
        """Wait for the verdict of a round in which this rank has reported. Not for rank 0."""
        # Rank 0 may begin to wait later. Twice its time limit suffices for a verdict that names the missing rank.
        verdict = self.receive(at, what, patience=2)
        self._keys.drop([self._report_key(at, self.rank)])
        return verdict

    def _gather(self, at: Round, value: bytes, what: str) -> list[bytes]:
        keys = [self._report_key(at, rank) for rank in range(1, self.world_size)]
        clock = self._clock(1, self._ranks.timeout_s)
        reports: list[bytes] = [_VALUE + value]
        for part in in_parts(keys):
            if not clock.wait(partial(self._keys.has, part)):
                missing = {rank: key for rank, key in enumerate(keys, 1) if not self._keys.has([key])}
                if missing:
                    self._stragglers.note(missing)
                    details = {"ranks": [*missing], "waited_s": clock.waited_s}
                    self.post(at, json.dumps(details).encode(), _MISSING)
                    raise missing_error([*missing], what, clock.waited_s)
            reports += self._keys.get(part)
        self._stragglers.clear()
        failures = [
            f"rank {rank}: {report[1:].decode()}" for rank, report in enumerate(reports) if report[:1] == _FAILED
        ]
        if failures:
            message = "; ".join(failures[:_SHOWN])
            self.post(at, message.encode(), _FAILED)
            raise RankFailedError(message)
        return [report[1:] for report in reports]

    def note(self, name: str, value: str) -> None:
        """Leave a note for :meth:`noted` on rank 0, outside of any round."""
        self._keys.put(f"{self._name}/{name}", value.encode())

    def noted(self, name: str) -> str | None:
        """Return a note that any rank has left."""
        key = f"{self._name}/{name}"
        return self._keys.get([key])[0].decode() if self._keys.has([key]) else None

    @property
    def lacks_ranks(self) -> bool:
        """Whether a rank did not respond in time, and no later response was seen."""
        return self._stragglers.is_any()

    def leave(self) -> None:
        """End the session. Rank 0 waits a moment for the others, because its process may hold the key-value store.

        Raises:
            RanksError: the key-value store has ended.
        """
        if not self.is_first:
            self._keys.put(self._report_key(_LAST, self.rank), b"")
            if self.is_ending():
                # A store that has ended fails here, because torch does not wait for a response to the value above.
                self._keys.has([self._read_key(self.rank)])
            return
        keys = [self._report_key(_LAST, rank) for rank in range(1, self.world_size)]
        clock = self._clock(1, min(self._ranks.timeout_s, ENDING_S))
        if all(clock.wait(partial(self._keys.has, part)) for part in in_parts(keys)):
            self._forget_before(_LAST)
        elif self.is_ending():
            # In other cases, another rank may be alive, and leave later.
            self._stragglers.note(dict(enumerate(keys, 1)))
        self._keys.drop([*keys, *self._read_keys()])

    def _clock(self, waiting_ranks: int, timeout_s: float) -> Clock:
        is_gone = partial(self._stragglers.is_any_still, self._keys) if self._stragglers.is_any() else None
        return Clock(timeout_s, waiting_ranks, self.is_ending, is_gone)

    def _key(self, at: Round) -> str:
        return f"{self._name}/{at[0]}.{at[1]}"

    def _report_key(self, at: Round, rank: int) -> str:
        return f"{self._key(at)}/of/{rank}"

    def _read_key(self, rank: int) -> str:
        return f"{self._name}/read/{rank}"

    def _read_keys(self) -> list[str]:
        return [*map(self._read_key, range(1, self.world_size))]

    def _forget_before(self, at: Round) -> None:
        """Remove the keys of earlier rounds, which all ranks that report in this one have read."""
        self._forget(lambda posted_at: posted_at < at)

    def _forget_announcements(self) -> None:
        """Remove the announcements that all ranks have read. No rank reports on decisions between two saves."""
        keys = self._read_keys()
        if self._keys.has(keys):
            read = min(map(int, self._keys.get(keys)))
            self._forget(lambda posted_at: posted_at[0] <= read and not posted_at[1])

    def _forget(self, is_read: Callable[[Round], bool]) -> None:
        with self._lock:
            read = [key for at, key in self._posted if is_read(at)]
            self._posted[:] = [(at, key) for at, key in self._posted if not is_read(at)]
        self._keys.drop(read)


def _named(action: str, step: int | None) -> str:
    return action if step is None else f"{action} step {step}"


def reason_of(error: BaseException) -> str:
    """Return the reason of a failure for other ranks."""
    return str(error) if isinstance(error, RanksError) else f"{type(error).__name__}: {error}"


class Stragglers:
    """Ranks that did not respond in time. Shared by the threads of a session, each of which has its own keys."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._late_keys: dict[int, list[str]] = {}

    def note(self, late_keys: Mapping[int, str]) -> None:
        """Note that ranks did not respond in time, each with the key that the rank will set when it responds."""
        with self._lock:
            for rank, key in late_keys.items():
                # Keep the first key, because a slow rank may also set the newest one too late. Keep the newest key,
                # because the first one may never be set.
                self._late_keys[rank] = [*self._late_keys.get(rank, [])[:1], key]

    def clear(self) -> None:
        """Note that all ranks have responded."""
        with self._lock:
            self._late_keys.clear()

    def is_any(self) -> bool:
        """Tell whether a rank is missing, without a request to the key-value store."""
        with self._lock:
            return bool(self._late_keys)

    def is_any_still(self, keys: KeyReader) -> bool:
        """Tell whether a rank is missing that has set none of its keys since then."""
        with self._lock:
            late_keys = dict(self._late_keys)
        # The store is asked without the lock, so notes of other threads in the meantime are kept.
        responded = [rank for rank, own in late_keys.items() if any(keys.has([key]) for key in own)]
        with self._lock:
            for rank in responded:
                if self._late_keys.get(rank) == late_keys[rank]:
                    del self._late_keys[rank]
            return bool(self._late_keys)
