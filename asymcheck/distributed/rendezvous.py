"""The rendezvous: ranks find each other by a key that rank 0 writes, and compare where each of them saves."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial

from asymcheck.distributed.kv_store import Clock, KeyReader, Remedy, in_parts, missing_error
from asymcheck.distributed.ranks import Ranks
from asymcheck.errors import RankFailedError
from asymcheck.format.spans import Spans, spans_of


@dataclasses.dataclass(frozen=True)
class RankLocation:
    """The place where a rank saves."""

    store: str
    node: str
    boot: str
    pushes: bool = False  # whether it pushes to a location


NO_HOME = RankLocation("", "", "")  # for ranks whose place does not matter


@dataclasses.dataclass(frozen=True)
class RendezvousResult:
    """The result of a rendezvous."""

    name: str
    groups: tuple[Spans, ...]  # on rank 0: the ranks of each store. On others: those of its own alone
    count: int


def meet(ranks: Ranks, keys: KeyReader, run: str, terms: Mapping[str, str], home: RankLocation) -> RendezvousResult:
    """Find the other ranks; return when all are there, have the same ``terms``, and may save where they do.

    Raises:
        RanksMissingError: some are not there.
        RankFailedError: they differ in what they are about to do.
    """
    meeting = f"{run}/meet"
    report = {"token": os.urandom(8).hex(), "terms": dict(terms), "home": dataclasses.asdict(home)}
    mine = json.dumps(report).encode()
    clock = Clock(ranks.timeout_s, 1 if ranks.rank == 0 else ranks.world_size, lambda: False)
    if ranks.rank:
        return _arrive(ranks, keys, meeting, mine, clock)
    name = os.urandom(8).hex()
    keys.put(meeting, name.encode())
    groups = _receive(ranks, keys, f"{meeting}/{name}", mine, clock)
    return RendezvousResult(name, groups, len(groups))


def _arrive(ranks: Ranks, keys: KeyReader, meeting: str, mine: bytes, clock: Clock) -> RendezvousResult:
    """Report to the meeting that rank 0 opened; return when rank 0 has answered this very report."""
    reported = ""
    answer = b""

    def is_answered() -> bool:
        nonlocal reported, answer
        if not keys.has([meeting]):
            return False
        name = keys.get([meeting])[0].decode()
        # Also when there is a new name: rank 0 answers in one meeting before it opens the next.
        key = f"{meeting}/{reported}/to/{ranks.rank}"
        answer = keys.get([key])[0] if reported and keys.has([key]) else b""
        if answer.startswith(json.loads(mine)["token"].encode()):
            return True
        if name != reported:
            # That was a meeting of processes that have ended.
            keys.drop([f"{meeting}/{reported}/{ranks.rank}"])
            keys.put(f"{meeting}/{name}/{ranks.rank}", mine)
            reported = name
        return False

    if not clock.wait(is_answered):
        raise missing_error([0], "finding each other", clock.waited_s, Remedy.MEETING)
    keys.drop([f"{meeting}/{reported}/{ranks.rank}", f"{meeting}/{reported}/to/{ranks.rank}"])
    said = json.loads(answer[len(json.loads(mine)["token"]) :])
    if said["refusal"]:
        raise RankFailedError(said["refusal"])
    return RendezvousResult(reported, (tuple((first, last) for first, last in said["spans"]),), said["stores"])


def _receive(ranks: Ranks, keys: KeyReader, meeting: str, mine: bytes, clock: Clock) -> tuple[Spans, ...]:
    """Wait for the reports of all ranks, compare them with this one's, and answer each; return the ranks by store."""
    places = [f"{meeting}/{rank}" for rank in range(1, ranks.world_size)]
    found = [json.loads(mine)]
    for some in in_parts(places):
        if not clock.wait(partial(keys.has, some)):
            missing = [rank for rank, place in enumerate(places, 1) if not keys.has([place])]
            raise missing_error(missing or [0], "finding each other", clock.waited_s, Remedy.MEETING)
        found += map(json.loads, keys.get(some))
    terms = found[0]["terms"]
    others = [rank for rank, one in enumerate(found) if one["terms"] != terms]
    homes = [RankLocation(**one["home"]) for one in found]
    refusal = refusal_of(homes)
    if others:
        refusal = (
            f"ranks that save together have to do so in the same way: rank {others[0]} has "
            f"{found[others[0]]['terms']}, rank 0 has {terms}"
        )
    groups = tuple(spans_of(group) for group in grouped(homes))
    answers = {
        home.store: json.dumps({"refusal": refusal, "spans": spans, "stores": len(groups)})
        for home, spans in ((homes[spans[0][0]], spans) for spans in groups)
    }
    for rank, one in enumerate(found[1:], 1):
        keys.put(f"{meeting}/to/{rank}", (one["token"] + answers[homes[rank].store]).encode())
    if refusal:
        raise RankFailedError(refusal)
    return groups


def grouped(homes: Sequence[RankLocation]) -> list[list[int]]:
    """Return the ranks of each store, ordered by their first rank."""
    groups: dict[str, list[int]] = {}
    for rank, home in enumerate(homes):
        groups.setdefault(home.store, []).append(rank)
    return list(groups.values())


def refusal_of(homes: Sequence[RankLocation]) -> str:
    """Return why ranks that save in these places cannot save together; empty when they can."""
    of_store: dict[str, int] = {}
    of_node: dict[str, int] = {}
    for rank, home in enumerate(homes):
        first = of_store.setdefault(home.store, rank)
        if homes[first].boot != home.boot:
            return (
                f"the stores of rank {first} on {homes[first].node} and of rank {rank} on {home.node} have one id "
                f"({home.store}): one is a copy of the other. Remove the copy, so that a new store is made there"
            )
        first = of_node.setdefault(home.node, rank)
        if homes[first].store != home.store:
            return (
                f"ranks on one machine save into one store: rank {first} has {homes[first].store}, rank {rank} has "
                f"{home.store}, both on {home.node}. Open the same directory on both; containers with a drive of their "
                "own say so by Ranks.from_torch(node=…), with a name for each"
            )
    firsts = [group[0] for group in grouped(homes)]
    pushes, silent = ([rank for rank in firsts if homes[rank].pushes is does] for does in (True, False))
    if not pushes or not silent:
        return ""
    does, does_not = (f"rank {rank} on {homes[rank].node}" for rank in (pushes[0], silent[0]))
    return (
        f"{does} pushes, and {does_not} does not: where machines have a store each, a checkpoint is whole only where "
        "all push. Give all of them the same push=, or none"
    )
