"""Rendezvous: ranks find each other through a key that rank 0 writes, and compare their stores."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from asymcheck.distributed.kv_store import Clock, KeyReader, in_parts, missing_error
from asymcheck.distributed.ranks import Ranks
from asymcheck.errors import RankFailedError
from asymcheck.format.spans import Spans, spans_of

_REMEDY = (
    "each rank has to create a Checkpointer and call the same methods in the same order; pass ranks=None to save a "
    "single rank"
)


@dataclasses.dataclass(frozen=True)
class RankLocation:
    """Store and node of a rank."""

    store: str
    node: str
    boot: str
    pushes: bool = False  # whether the rank pushes to a remote location


NO_LOCATION = RankLocation("", "", "")  # for ranks whose location does not matter


@dataclasses.dataclass(frozen=True)
class RendezvousResult:
    """Result of a rendezvous."""

    name: str
    groups: tuple[Spans, ...]  # on rank 0: the ranks of each store; on other ranks: those of the same store
    count: int


def meet(ranks: Ranks, keys: KeyReader, run: str, location: RankLocation) -> RendezvousResult:
    """Wait until all ranks have arrived, and check that they have the same world size and compatible locations.

    Raises:
        RanksMissingError: some ranks did not arrive in time.
        RankFailedError: world sizes or locations of the ranks are incompatible.
    """
    meeting = f"{run}/meet"
    report = {"token": os.urandom(8).hex(), "ranks": ranks.world_size, "home": dataclasses.asdict(location)}
    clock = Clock(ranks.timeout_s, 1 if ranks.rank == 0 else ranks.world_size, lambda: False)
    if ranks.rank:
        return _arrive(ranks, keys, meeting, report, clock)
    name = os.urandom(8).hex()
    keys.put(meeting, name.encode())
    groups = _receive(ranks, keys, f"{meeting}/{name}", report, clock)
    return RendezvousResult(name, groups, len(groups))


def _arrive(ranks: Ranks, keys: KeyReader, meeting: str, report: dict[str, Any], clock: Clock) -> RendezvousResult:
    """Report to the meeting that rank 0 opened, and wait for the answer to this report."""
    token = report["token"].encode()
    reported = ""
    answer = b""

    def is_answered() -> bool:
        nonlocal reported, answer
        if not keys.has([meeting]):
            return False
        name = keys.get([meeting])[0].decode()
        # Checked even after a change of the name: rank 0 answers in one meeting before it opens the next.
        key = f"{meeting}/{reported}/to/{ranks.rank}"
        answer = keys.get([key])[0] if reported and keys.has([key]) else b""
        if answer.startswith(token):
            return True
        if name != reported:
            # The earlier name was that of a meeting of ended processes.
            keys.drop([f"{meeting}/{reported}/{ranks.rank}"])
            keys.put(f"{meeting}/{name}/{ranks.rank}", json.dumps(report).encode())
            reported = name
        return False

    if not clock.wait(is_answered):
        raise missing_error([0], "finding each other", clock.waited_s, _REMEDY)
    keys.drop([f"{meeting}/{reported}/{ranks.rank}", f"{meeting}/{reported}/to/{ranks.rank}"])
    verdict = json.loads(answer.removeprefix(token))
    if verdict["refusal"]:
        raise RankFailedError(verdict["refusal"])
    spans = tuple((first, last) for first, last in verdict["spans"])
    return RendezvousResult(reported, (spans,), verdict["stores"])


def _receive(ranks: Ranks, keys: KeyReader, meeting: str, own: dict[str, Any], clock: Clock) -> tuple[Spans, ...]:
    """Wait for the reports of all ranks, compare them, and answer each; return the ranks of each store."""
    report_keys = [f"{meeting}/{rank}" for rank in range(1, ranks.world_size)]
    reports = [own]
    for part in in_parts(report_keys):
        if not clock.wait(partial(keys.has, part)):
            missing = [rank for rank, key in enumerate(report_keys, 1) if not keys.has([key])]
            raise missing_error(missing or [0], "finding each other", clock.waited_s, _REMEDY)
        reports += map(json.loads, keys.get(part))
    differing = next((rank for rank, report in enumerate(reports) if report["ranks"] != own["ranks"]), None)
    locations = [RankLocation(**report["home"]) for report in reports]
    refusal = refusal_of(locations)
    if differing is not None:
        size = reports[differing]["ranks"]
        refusal = f"rank {differing} belongs to {size} ranks, and rank 0 to {own['ranks']}: start all ranks of one job"
    groups = tuple(spans_of(group) for group in grouped(locations))
    answers = {
        locations[spans[0][0]].store: json.dumps({"refusal": refusal, "spans": spans, "stores": len(groups)})
        for spans in groups
    }
    for rank, report in enumerate(reports[1:], 1):
        keys.put(f"{meeting}/to/{rank}", (report["token"] + answers[locations[rank].store]).encode())
    if refusal:
        raise RankFailedError(refusal)
    return groups


def grouped(locations: Sequence[RankLocation]) -> list[list[int]]:
    """Return the ranks of each store, ordered by their first rank."""
    groups: dict[str, list[int]] = {}
    for rank, location in enumerate(locations):
        groups.setdefault(location.store, []).append(rank)
    return list(groups.values())


def refusal_of(locations: Sequence[RankLocation]) -> str:
    """Return the reason why ranks at these locations cannot save together; empty if they can."""
    of_store: dict[str, int] = {}
    of_node: dict[str, int] = {}
    for rank, location in enumerate(locations):
        first = of_store.setdefault(location.store, rank)
        if locations[first].boot != location.boot:
            return (
                f"the stores of rank {first} on {locations[first].node} and of rank {rank} on {location.node} have the "
                f"same id ({location.store}): one is a copy of the other, or both are one directory of a shared file "
                f"system. Open a new directory on the local drive of {location.node}; a new store will be created in it"
            )
        first = of_node.setdefault(location.node, rank)
        if locations[first].store != location.store:
            return (
                f"ranks on one machine must save into one store, but rank {first} has {locations[first].store}, "
                f"rank {rank} has {location.store}, both on {location.node}. Open the same directory on both. For "
                "containers with their own drives, pass a different name in each: Ranks.from_torch(node=…)"
            )
    firsts = [group[0] for group in grouped(locations)]
    pushing, others = ([rank for rank in firsts if locations[rank].pushes is does] for does in (True, False))
    if not pushing or not others:
        return ""
    pusher, other = (f"rank {rank} on {locations[rank].node}" for rank in (pushing[0], others[0]))
    return (
        f"{pusher} pushes, and {other} does not. With one store per machine, a remote checkpoint is complete only if "
        "all machines push. Pass the same push= on all ranks, or none"
    )
