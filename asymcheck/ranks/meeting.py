"""The meeting: ranks find each other by a key that rank 0 writes and all others look at."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial

from asymcheck.errors import RankFailedError
from asymcheck.ranks.clock import Clock, missing_error
from asymcheck.ranks.keys import Keys, in_parts
from asymcheck.ranks.ranks import Ranks


def meet(ranks: Ranks, keys: Keys, run: str, terms: Mapping[str, str]) -> str:
    """Find the other ranks; return the name of their session, when all are there and have the same ``terms``.

    Raises:
        RanksMissingError: some are not there.
        RankFailedError: they differ in what they are about to do.
    """
    meeting = f"{run}/meet"
    mine = json.dumps({"token": os.urandom(8).hex(), "terms": dict(terms)}).encode()
    clock = Clock(ranks.timeout_s, 1 if ranks.rank == 0 else ranks.world_size, lambda: False)
    if ranks.rank:
        return _arrive(ranks, keys, meeting, mine, clock)
    name = os.urandom(8).hex()
    keys.put(meeting, name.encode())
    _receive(ranks, keys, f"{meeting}/{name}", mine, clock)
    return name


def _arrive(ranks: Ranks, keys: Keys, meeting: str, mine: bytes, clock: Clock) -> str:
    """Report to the meeting that rank 0 opened; return its name when rank 0 has answered this very report."""
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
        raise missing_error([0], "finding each other", clock.waited_s)
    keys.drop([f"{meeting}/{reported}/{ranks.rank}", f"{meeting}/{reported}/to/{ranks.rank}"])
    refusal = answer[len(json.loads(mine)["token"]) :]
    if refusal:
        raise RankFailedError(refusal.decode())
    return reported


def _receive(ranks: Ranks, keys: Keys, meeting: str, mine: bytes, clock: Clock) -> None:
    """Wait for the reports of all ranks, compare them with this one's, and answer each."""
    places = [f"{meeting}/{rank}" for rank in range(1, ranks.world_size)]
    found = [json.loads(mine)]
    for some in in_parts(places):
        if not clock.wait(partial(keys.has, some)):
            missing = [rank for rank, place in enumerate(places, 1) if not keys.has([place])]
            raise missing_error(missing or [0], "finding each other", clock.waited_s)
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
