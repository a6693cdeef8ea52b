"""Machines: what ranks do as one whose machines have a store each. One line of training leads through all stores."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from asymcheck.errors import (
    CheckpointNotFoundError,
    HeadRecordError,
    InconsistentCheckpointError,
    RemoteUnreachableError,
)
from asymcheck.format.record import HeadRecord, head_from_json, head_to_json
from asymcheck.format.spans import Spans, named_spans, ranks_in
from asymcheck.ranks import Session
from asymcheck.ranks.session import reason_of
from asymcheck.recovery.resolve import Skips
from asymcheck.store import Store
from asymcheck.types import CheckpointRef, SaveId

_SHOWN = 4
_WHERE = "head record of another machine"


def named(ref: CheckpointRef | None) -> list[object] | None:
    """Return a checkpoint's identity as other ranks hear it."""
    return None if ref is None else [ref.generation, ref.step, ref.save_id.hex()]


def ref_of(said: object) -> CheckpointRef | None:
    """Return the identity that another rank said."""
    if not isinstance(said, list):
        return None
    generation, step, save_id = said
    return CheckpointRef(generation, step, SaveId(bytes.fromhex(save_id)))


def align(session: Session, store: Store, run: str) -> None:
    """Have the head records of every store in all of them: a machine may be new, or have been away.

    Raises:
        HeadRecordError: one is damaged in all stores, or two stores are of different trainings.
        RanksError: the others do not come so far, or one could not read its store.
        AsymcheckError: this one could not; the others are told.
    """
    what = f"line of run {run!r}"
    number, _ = session.begin("compares its line of training", None, 1, lambda: None, what)
    try:
        heads = _heads(session, store, run)
    except BaseException as error:
        session.report((number, 1), reason_of(error).encode(), failed=True)
        raise
    mine = [head_to_json(head) for head in heads]
    decide = partial(_merged, session.groups)
    for said in json.loads(session.agree((number, 1), json.dumps(mine).encode(), decide, what)):
        store.training.take_head(head_from_json(said, _WHERE))


def _heads(session: Session, store: Store, run: str) -> list[HeadRecord]:
    if not session.is_first_here:
        return []
    if session.is_first:
        # Where all machines are new, the location behind them has what they had.
        with contextlib.suppress(RemoteUnreachableError):
            return store.training.heads(run, behind=True)
    return store.training.heads(run)


def _merged(groups: Sequence[Spans], reports: Sequence[bytes]) -> bytes:
    """Return all head records that some store has.

    Raises:
        HeadRecordError: two stores have different ones of one generation.
    """
    found: dict[int, tuple[HeadRecord, Spans]] = {}
    for group in groups:
        for said in json.loads(reports[group[0][0]]):
            head = head_from_json(said, _WHERE)
            other, theirs = found.setdefault(head.generation, (head, group))
            if not other.is_same(head):
                raise HeadRecordError(
                    f"generation {head.generation} of run {head.run!r} is one thing in the store of "
                    f"{named_spans(theirs)} and another in that of {named_spans(group)}: one of the two machines "
                    "was part of an attempt, or of another training, of which the other knows nothing. Remove its "
                    "store, or give the run another name"
                )
    return json.dumps([head_to_json(found[generation][0]) for generation in sorted(found)]).encode()


class Proposals:
    """Which checkpoints all ranks may have, each in its store or behind it: rank 0 tries them in turn."""

    def __init__(self, session: Session, store: Store, run: str, step: int | None) -> None:
        """Look for those of ``step``, or for all on the line."""
        self._session, self._store, self._run, self._step = session, store, run, step
        # By store: what is there, and whether its ranks can read it.
        self._found: list[dict[CheckpointRef, bool]] = []

    def gather(self, at: tuple[int, int], prepare: Callable[[], object]) -> None:
        """Have the first rank of each store ``prepare`` it, and say what its ranks can read.

        Raises:
            RanksError: some do not come so far, or could not.
            AsymcheckError: this one could not; the others are told.
        """
        session = self._session
        try:
            mine = self._mine(prepare) if session.is_first_here else []
        except BaseException as error:
            session.report(at, reason_of(error).encode(), failed=True)
            raise
        what = f"restore of run {self._run!r}"
        session.agree(at, json.dumps(mine).encode(), self._take, what)

    def _mine(self, prepare: Callable[[], object]) -> list[object]:
        prepare()
        found = self._store.training.restorable_parts(self._run, self._step, ranks_in(self._session.groups[0]))
        return [[named(ref), is_readable] for ref, is_readable in found.items()]

    def _take(self, reports: Sequence[bytes]) -> bytes:
        firsts = [json.loads(reports[group[0][0]]) for group in self._session.groups]
        self._found = [
            {ref: is_readable for said, is_readable in found if (ref := ref_of(said)) is not None} for found in firsts
        ]
        return b""

    def each(self, skipped: list[str]) -> Iterator[CheckpointRef]:
        """Yield the checkpoints that all may have, on rank 0, newest first; append to ``skipped`` what some lack.

        Raises:
            CheckpointNotFoundError: nobody has anything of one.
            InconsistentCheckpointError: no further one is there.
        """
        which = "no checkpoint" if self._step is None else f"no checkpoint of step {self._step}"
        if not any(self._found):
            raise CheckpointNotFoundError(f"none of {len(self._found)} stores has {which} of run {self._run!r}")
        skips = Skips(skipped)
        for ref in sorted(set[CheckpointRef]().union(*self._found), reverse=True):
            if all(found.get(ref, False) for found in self._found):
                yield ref
            else:
                skips.add(ref, self._lacking(ref))
        raise InconsistentCheckpointError(
            f"{which} of run {self._run!r} can be restored by all ranks. Machines that lost their store, or have other "
            "ranks than before, restore from the location to which all push: give it as remote:",
            skipped,
        )

    def _lacking(self, ref: CheckpointRef) -> str:
        groups = zip(self._session.groups, self._found, strict=True)
        lacking = [named_spans(group) for group, found in groups if not found.get(ref, False)]
        more = f" and {len(lacking) - _SHOWN} further machines" if len(lacking) > _SHOWN else ""
        return f"what {', '.join(lacking[:_SHOWN])}{more} would read of it is not there"


def opened(store: Store, run: str, generation: int) -> Mapping[str, object]:
    """Return the head record of a generation that this store has begun, as other stores hear it."""
    return next(head_to_json(head) for head in store.training.heads(run) if head.generation == generation)


def open_too(store: Store, said: Mapping[str, object]) -> None:
    """Begin a generation in this store as another one has."""
    store.training.take_head(head_from_json(said, _WHERE))
