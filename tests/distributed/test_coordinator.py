"""Test sessions: rendezvous and agreement of ranks, as threads of one process."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from asymcheck import Ranks
from asymcheck.distributed import KeyStore, Session
from asymcheck.distributed.kv_store import missing_error
from asymcheck.distributed.ranks import find_ranks
from asymcheck.distributed.rendezvous import RankLocation
from asymcheck.errors import InvalidInputError, RankFailedError, RanksError, RanksMissingError
from tests.zygote import wait_until

_T = TypeVar("_T")


def ranks_of(store: KeyStore, world_size: int) -> list[Ranks]:
    """Return all ranks, with one key-value store."""
    return [Ranks(rank, world_size, store, timeout_s=60.0) for rank in range(world_size)]


def each(count: int, work: Callable[[int], _T]) -> list[_T]:
    """Run a function on all ranks at the same time; return the results."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, range(count)))


def sessions_of(store: KeyStore, world_size: int, timeout_s: float = 60.0) -> list[Session]:
    """Return the sessions of all ranks after the rendezvous, with the timeout ``timeout_s``."""
    ranks = ranks_of(store, world_size)
    sessions = each(world_size, lambda rank: Session.join(ranks[rank], "run"))
    set_timeout(sessions, timeout_s)
    return sessions


def set_timeout(sessions: list[Session], timeout_s: float) -> None:
    """Set the timeout of all ranks."""
    for session in sessions:
        session._ranks.timeout_s = timeout_s


def joined(reports: Sequence[bytes]) -> bytes:
    """Decide for all ranks."""
    return b"+".join(reports)


def test_everyone_gets_the_verdict_on_all_reports() -> None:
    """Test that every rank gets all reports in order of rank, round after round."""
    sessions = sessions_of(dist.HashStore(), 5)
    for number in range(1, 4):
        verdicts = each(5, lambda rank: sessions[rank].agree((number, 1), b"%d" % rank, joined, "test"))  # noqa: B023 - used at once
        assert verdicts == [b"0+1+2+3+4"] * 5


def test_ranks_whose_machines_have_a_store_each() -> None:
    """Test ranks that share the memory of their own store; either all machines push, or none."""
    ranks = ranks_of(dist.HashStore(), 4)

    def join(rank: int, *, pushes: bool) -> Session:
        machine = rank // 2
        home = RankLocation(f"store {machine}", f"machine-{machine}", f"life {machine}", pushes)
        return Session.join(ranks[rank], "run", home)

    # The first rank of each machine pushes.
    found = each(4, lambda rank: join(rank, pushes=rank % 2 == 0))
    assert [one.local_size for one in found] == [2] * 4

    def refused(rank: int) -> str:
        with pytest.raises(RankFailedError) as error:
            join(rank, pushes=rank == 2)
        return str(error.value)

    (said,) = set(each(4, refused))
    assert said.startswith("rank 2 on machine-1 pushes, and rank 0 on machine-0 does not")


def test_each_rank_can_get_a_verdict_of_its_own() -> None:
    """Test also a large verdict, and one that is too large for the key-value store of torch."""
    sessions = sessions_of(dist.HashStore(), 3)
    large = os.urandom((3 << 20) + 5)

    def decide(reports: Sequence[bytes]) -> list[bytes]:
        return [large + report for report in reports]

    verdicts = each(3, lambda rank: sessions[rank].agree((1, 1), large[: (2 << 20) + rank], decide, "test"))
    assert verdicts == [large + large[: (2 << 20) + rank] for rank in range(3)]
    with pytest.raises(RanksError, match="too many partitions"):
        sessions[1].report((2, 1), large * 3)


def test_values_in_the_store_are_removed() -> None:
    """Test that the key-value store of a long training does not fill up."""
    store = dist.HashStore()
    sessions = sessions_of(store, 3)
    counts = []
    for number in range(1, 30):

        def work(rank: int, number: int = number) -> None:
            if rank == 0:
                sessions[0].post((number, 0), bytes(5 << 20))
            else:
                sessions[rank].receive((number, 0), "test")
            sessions[rank].agree((number, 1), b"", lambda reports: [b"x"] * len(reports), "test")
            sessions[rank].agree((number, 2), b"", joined, "test")

        each(3, work)
        counts.append(store.num_keys())
    assert max(counts) == counts[1]


def test_announcements_are_removed_without_a_save() -> None:
    """Test decisions on which no rank reports, while one rank lags: none is removed before all ranks have read it."""
    store = dist.HashStore()
    sessions = sessions_of(store, 3)
    before, counts = store.num_keys(), []

    def announced(rank: int, step: int) -> object:
        return sessions[rank].begin("ends at", step, None, lambda: step, "decision of rank 0")[1]

    for step in range(500):
        assert announced(0, step) == announced(1, step) == step
        if step >= 100:
            assert announced(2, step - 100) == step - 100
        counts.append(store.num_keys() - before)
    assert max(counts) < 250
    assert [announced(2, step) for step in range(400, 500)] == [*range(400, 500)]
    # A verdict of an earlier action, which another thread has not read yet.
    sessions[0].post((1, 1), b"verdict")
    for step in range(500, 1000):
        assert [announced(rank, step) for rank in range(3)] == [step] * 3
        counts.append(store.num_keys() - before)
    assert counts[-1] < 130
    assert sessions[1].receive((1, 1), "verdict") == b"verdict"
    each(3, lambda rank: sessions[rank].leave())
    assert store.num_keys() == before


class _Counting:
    """A key-value store that counts the requests of one rank."""

    def __init__(self, store: KeyStore) -> None:
        self._store, self.asked = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as the methods of torch
        if name not in ("set", "get", "check", "delete_key"):
            raise AttributeError(name)
        self.asked[name] += 1
        return getattr(self._store, name)


def test_a_rank_asks_the_store_seldom() -> None:
    """Test one request for each key that is written, read or removed, because one server serves all ranks."""
    shared = dist.HashStore()
    stores = [_Counting(shared) for _ in range(3)]
    ranks = [Ranks(rank, 3, store) for rank, store in enumerate(stores)]
    sessions = each(3, lambda rank: Session.join(ranks[rank], "run"))
    for decide, heard in ((joined, 1), (list, 2)):
        for store in stores:
            store.asked.clear()
        each(3, lambda rank: sessions[rank].agree((heard, 1), b"x", decide, "test"))  # noqa: B023 - used at once
        for store in stores[1:]:
            # A separate verdict is read and removed in addition to the common one.
            assert (store.asked["set"], store.asked["get"], store.asked["delete_key"]) == (1, heard, heard)


def test_a_rank_that_reports_a_failure_fails_the_round_for_all() -> None:
    """Test that the error has the reason of the failing rank."""
    sessions = sessions_of(dist.HashStore(), 3)
    sessions[2].report((1, 1), b"its disk is full", failed=True)

    def work(rank: int) -> str:
        with pytest.raises(RankFailedError) as caught:
            sessions[rank].agree((1, 1), b"", joined, "test")
        return str(caught.value)

    assert each(2, work) == ["rank 2: its disk is full"] * 2


def test_failed_decision_of_rank_0_fails_on_all_ranks() -> None:
    """Test that rank 0 raises its own error."""
    sessions = sessions_of(dist.HashStore(), 2)

    def decide(_reports: Sequence[bytes]) -> bytes:
        message = "no room for a head record"
        raise InvalidInputError(message)

    def work(rank: int) -> str:
        with pytest.raises((InvalidInputError, RankFailedError)) as caught:
            sessions[rank].agree((1, 1), b"", decide, "test")
        return f"{type(caught.value).__name__}: {caught.value}"

    reason = "no room for a head record"
    assert each(2, work) == [f"InvalidInputError: {reason}", f"RankFailedError: rank 0: {reason}"]


@pytest.mark.slow
def test_missing_ranks_are_named_on_all_others() -> None:
    """Test also ranks that began to wait before rank 0."""
    keys = dist.HashStore()
    sessions = sessions_of(keys, 4)
    set_timeout(sessions[:1], 0.2)

    def work(number: int) -> tuple[int, ...]:
        if number == 0:
            wait_until(lambda: keys.check([sessions[2]._report_key((1, 1), 2)]), "rank 2 to report")
        with pytest.raises(RanksMissingError, match="save of step 7: ranks 1, 3 did not respond") as caught:
            sessions[(0, 2)[number]].agree((1, 1), b"", joined, "save of step 7")
        return caught.value.missing

    assert each(2, work) == [(1, 3), (1, 3)]


def test_a_rank_that_was_missing_is_waited_for_again() -> None:
    """Test a rank that was slow, and takes part again after the missed round."""
    sessions = sessions_of(dist.HashStore(), 2, timeout_s=0.05)
    with pytest.raises(RanksMissingError):
        sessions[0].agree((1, 1), b"", joined, "test")
    with pytest.raises(RanksMissingError):
        sessions[1].agree((1, 1), b"", joined, "test")
    set_timeout(sessions, 60.0)
    assert each(2, lambda rank: sessions[rank].agree((2, 1), b"%d" % rank, joined, "test")) == [b"0+1"] * 2


def test_a_process_that_is_to_end_does_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a wait with a long timeout."""
    monkeypatch.setattr("asymcheck.distributed.kv_store.ENDING_S", 0.05)
    sessions = sessions_of(dist.HashStore(), 2, timeout_s=1000)
    other = sessions[0].for_thread()
    other.is_ending = lambda: True
    with pytest.raises(RanksMissingError):
        other.agree((1, 1), b"", joined, "test")


def test_nothing_is_taken_from_ranks_that_have_ended() -> None:
    """Test a key-value store with keys of an ended rendezvous and half a round."""
    store = dist.HashStore()
    before = sessions_of(store, 3)
    before[1].report((1, 1), b"old")
    before[0].post((1, 0), b"old")
    # One process ended during its rendezvous.
    with pytest.raises(RanksMissingError):
        Session.join(Ranks(0, 3, store, timeout_s=0.05), "run")
    # Another process was answered, and ended before it read the answer.
    left = Ranks(0, 3, store).connect()
    left.put("run/meet", b"left")
    for rank in (1, 2):
        left.put(f"run/meet/left/to/{rank}", b"0123456789abcdef")
    begun = threading.Barrier(3)
    ranks = ranks_of(store, 3)

    def work(rank: int) -> bytes:
        begun.wait()
        if rank == 0:
            # The other ranks see the old keys first.
            threading.Event().wait(0.2)
        session = Session.join(ranks[rank], "run")
        return session.agree((1, 1), b"new%d" % rank, joined, "test")

    assert each(3, work) == [b"new0+new1+new2"] * 3


class _Lagging(_Counting):
    """A key-value store that delays a rank until rank 0 has opened the second rendezvous."""

    def set(self, key: str, value: bytes) -> None:
        """Report, and return late."""
        meeting = self._store.get("run/meet")
        self._store.set(key, value)
        while key.count("/") == 3 and not self.asked["late"] and self._store.get("run/meet") == meeting:
            threading.Event().wait(0.001)
        self.asked["late"] += 1


def test_ranks_that_meet_twice_come_into_the_same_sessions() -> None:
    """Test a rank that sees the second rendezvous before it reads its answer of the first."""
    shared = dist.HashStore()
    ranks = [Ranks(0, 3, shared), Ranks(1, 3, _Lagging(shared)), Ranks(2, 3, shared)]

    def work(rank: int) -> list[bytes]:
        sessions = [Session.join(ranks[rank], "run") for _ in range(2)]
        return [session.agree((1, 1), b"%d" % rank, joined, "test") for session in sessions]

    assert each(3, work) == [[b"0+1+2"] * 2] * 3


def do(session: Session, step: int) -> str:
    """Run a common round of a step, to which all ranks report; return the results."""
    try:
        number, said = (
            session.begin("saves", step, 1, lambda: None, f"save of step {step}")
            if (session.is_first)
            else session.follow("saves", step, f"save of step {step}")
        )
        assert said is None
        return session.agree((number, 1), b"%d" % step, joined, f"save of step {step}").decode()
    except RanksError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.slow
def test_late_or_early_rank_takes_part_in_the_next_round() -> None:
    """Test that missed rounds raise named errors, and that nothing else is lost."""
    sessions = sessions_of(dist.HashStore(), 2, timeout_s=0.05)
    assert do(sessions[1], 1).startswith("RanksMissingError: save of step 1: rank 0 did not respond")
    assert do(sessions[0], 1).startswith("RanksMissingError: save of step 1: rank 1 did not respond")
    set_timeout(sessions, 60.0)
    mismatch = "rank 0 saves step 1 where rank 1 saves step 2"
    for step in (2, 3):
        assert each(2, lambda rank: do(sessions[rank], step)) == [f"{step}+{step}"] * 2  # noqa: B023 - used at once
    sessions = sessions_of(dist.HashStore(), 2)
    first, second = each(2, lambda rank: do(sessions[rank], 1 + rank))
    assert first.startswith(f"RankFailedError: rank 1: {mismatch}")
    assert second.startswith(f"RankFailedError: {mismatch}")
    # The rank knows the current round from this point on.
    sessions[0].open(sessions[0].next_number(), "saves", 2, 1, None)
    assert each(2, lambda rank: do(sessions[rank], 3)) == ["3+3"] * 2


def test_a_rank_that_cannot_take_part_says_so_whether_rank_0_has_begun_or_not() -> None:
    """Test the report before and after rank 0 has begun; the rank takes part in the next round."""
    sessions = sessions_of(dist.HashStore(), 3)
    refusal = InvalidInputError("no number")

    def work(rank: int) -> str:
        if rank == 2:
            sessions[2].give_up(sessions[2].next_number(), refusal)
            return ""
        return do(sessions[rank], 1)

    assert each(3, work)[:2] == ["RankFailedError: rank 2: InvalidInputError: no number"] * 2
    sessions[0].give_up(sessions[0].next_number(), refusal)
    assert do(sessions[1], 2) == do(sessions[2], 2) == "RankFailedError: rank 0: InvalidInputError: no number"
    assert each(3, lambda rank: do(sessions[rank], 3)) == ["3+3+3"] * 3


def test_rank_0_informs_all_when_it_gives_up() -> None:
    """Test ranks that have reported, and ranks that report later; all take part in the next round."""
    sessions = sessions_of(dist.HashStore(), 3)
    number, _ = sessions[0].begin("saves", 1, 1, lambda: None, "save of step 1")
    assert sessions[1].follow("saves", 1, "save of step 1") == (number, None)
    sessions[0].give_up(number, InvalidInputError("no memory"))
    with pytest.raises(RankFailedError, match=r"^rank 0: InvalidInputError: no memory$"):
        sessions[1].agree((number, 1), b"", joined, "save of step 1")
    assert do(sessions[2], 1) == "RankFailedError: rank 0: InvalidInputError: no memory"
    assert each(3, lambda rank: do(sessions[rank], 2)) == ["2+2+2"] * 3


def test_rank_0_informs_all_when_it_cannot_decide() -> None:
    """Test ranks that wait for a decision; all take part in the next round."""
    sessions = sessions_of(dist.HashStore(), 3)

    def decide() -> object:
        message = "no answer"
        raise InvalidInputError(message)

    def work(rank: int) -> str:
        with pytest.raises((InvalidInputError, RankFailedError)) as caught:
            sessions[rank].begin("ends at", 1, None, decide, "decision of rank 0")
        return str(caught.value)

    reason = "no answer"
    assert each(3, work) == [reason, *[f"rank 0: InvalidInputError: {reason}"] * 2]
    assert each(3, lambda rank: do(sessions[rank], 2)) == ["2+2+2"] * 3


def test_a_restore_is_taken_for_nothing_else() -> None:
    """Test a round of another kind, and a restore of another step."""
    sessions = sessions_of(dist.HashStore(), 2)
    sessions[0].begin("restores step 3", None, 1, lambda: None, "restore")
    with pytest.raises(RankFailedError, match="rank 0 restores step 3 where rank 1 restores step 4"):
        sessions[1].begin("restores step 4", None, 1, lambda: None, "restore")
    sessions[0].begin("saves", 5, 1, lambda: None, "save")
    sessions[0].begin("restores step 4", None, 1, lambda: "found", "restore")
    # The rank has missed a round, so the save is skipped.
    assert sessions[1].begin("restores step 4", None, 1, lambda: None, "restore") == (3, "found")


def test_rank_0_leaves_last_and_nothing_stays() -> None:
    """Test that rank 0, whose process may host the store, waits until its last message was read."""
    store = dist.HashStore()
    sessions = sessions_of(store, 3)
    before = store.num_keys()
    each(3, lambda rank: sessions[rank].agree((1, 1), b"", joined, "test"))
    left = [threading.Thread(target=sessions[rank].leave) for rank in range(3)]
    left[0].start()
    left[1].start()
    left[1].join()
    left[0].join(0.1)
    assert left[0].is_alive()
    left[2].start()
    left[0].join()
    assert store.num_keys() == before


def test_ranks_of_different_jobs_do_not_save_together() -> None:
    """Test ranks with different numbers of ranks."""
    store = dist.HashStore()

    def work(rank: int) -> str:
        with pytest.raises(RankFailedError) as caught:
            Session.join(Ranks(rank, 2 + rank, store, timeout_s=60.0), "run")
        return str(caught.value)

    first, second = each(2, work)
    assert first == second
    assert first == "rank 1 belongs to 3 ranks, and rank 0 to 2: start all ranks of one job"


def test_a_store_that_is_gone_is_an_error_of_ours() -> None:
    """Test that torch's own error, which is hard to understand, is not raised."""

    class Broken:
        def set(self, key: str, value: bytes) -> None:
            raise RuntimeError("Connection reset by peer")

        def get(self, key: str) -> bytes:
            raise RuntimeError("Connection reset by peer")

        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

        def delete_key(self, key: str) -> bool:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(RanksError, match=r"store of the ranks does not respond .*: Connection reset by peer"):
        Session.join(Ranks(0, 2, Broken()), "run")

    class Unconnected(Broken):
        def clone(self) -> Broken:
            raise RuntimeError("The client socket has timed out")

    with pytest.raises(RanksError, match=r"store of the ranks does not respond \(connect\): The client socket"):
        Ranks(0, 2, Unconnected()).connect()

    class Silent(Broken):
        def clone(self) -> Broken:
            raise TimeoutError

    with pytest.raises(RanksError, match=r"store of the ranks does not respond \(connect\): TimeoutError"):
        Ranks(0, 2, Silent()).connect()


def test_a_connection_to_a_dead_store_is_tried_no_longer_than_the_time_limit() -> None:
    """Test a store that ends between the rendezvous and the first save."""
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    patient = timedelta(seconds=60)
    client = dist.TCPStore("127.0.0.1", server.port, None, is_master=False, wait_for_workers=False, timeout=patient)
    keys = Ranks(0, 2, client, timeout_s=1.0).connect()
    del server
    began = time.monotonic()
    with pytest.raises(RanksError, match=r"store of the ranks does not respond \(connect\)"):
        keys.another()
    assert time.monotonic() - began < 30
    assert client.timeout == patient


@pytest.mark.parametrize(
    ("rank", "world_size", "store", "timeout_s"),
    [
        (2, 2, None, 1),
        (-1, 2, None, 1),
        (0, 100_000, None, 1),
        (True, 2, None, 1),
        (None, 2, None, 1),
        (0, None, None, 1),
        (0, 2, object(), 1),
        (0, 2, None, 0),
        (0, 2, None, "60"),
        (0, 2, None, None),
    ],
)
def test_invalid_ranks_are_refused(rank: int, world_size: int, store: object, timeout_s: float) -> None:
    """Test that the constructor raises an error that names the argument."""
    with pytest.raises(InvalidInputError):
        Ranks(rank, world_size, store or dist.HashStore(), timeout_s=timeout_s)  # type: ignore[arg-type]  # what is tested


def test_one_process_alone_has_no_ranks() -> None:
    """Test an explicit single process, and a world of one rank."""
    assert find_ranks("auto") is None
    assert find_ranks(None) is None
    assert find_ranks(Ranks(0, 1, dist.HashStore())) is None
    with pytest.raises(InvalidInputError, match="ranks="):
        find_ranks(json)


def test_advice_on_missing_ranks_depends_on_the_action() -> None:
    """Test that only the rendezvous advises to save a single rank instead."""
    assert "ranks=None" in str(missing_error([1], "the first save", 1.0, "pass ranks=None"))
    usual = str(missing_error([1], "finding each other", 1.0))
    assert "ranks=None" not in usual
    # A rank that reads its part from a remote location may need longer than the others.
    assert "timeout_s" in usual
