"""How Checkpointers go back to a checkpoint: those of several ranks together, one by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from asymcheck.errors import (
    AsymcheckError,
    CheckpointNotFoundError,
    FormatError,
    InconsistentCheckpointError,
    LostCheckpointError,
    RankFailedError,
    RanksError,
    RecoveryError,
    RefusedStateError,
    UnsupportedFormatError,
)
from asymcheck.machines import Proposals, align, named, open_too, opened, ref_of
from asymcheck.pipeline.background import Background
from asymcheck.pipeline.capture import Capture
from asymcheck.pipeline.ownership import distributed
from asymcheck.pipeline.request import new_save_id
from asymcheck.policies.pushing import Push
from asymcheck.ranks import Ranks, Session
from asymcheck.ranks.homes import Home
from asymcheck.ranks.session import reason_of
from asymcheck.store import Store
from asymcheck.tiers.owners import this_process
from asymcheck.types import Checkpoint, CheckpointRef, Part

_REASONS_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class Returned:
    """Where all ranks have gone back to."""

    checkpoint: Checkpoint
    """The checkpoint, as this rank has read it."""
    generation: int
    """The line of training that was opened from it."""
    skipped: tuple[str, ...]
    """On rank 0: what was passed over, with the reasons."""


class Together:
    """This rank among those that train one state."""

    def __init__(
        self, store: Store, run: str, ranks: Ranks, is_ending: Callable[[], bool], push: Push | None = None
    ) -> None:
        """Prepare; the ranks find each other when they are needed first. ``is_ending``: this process is to end."""
        self._store, self._run, self._ranks, self._is_ending = store, run, ranks, is_ending
        self._pushes = push is not None
        self._session: Session | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._ranks.rank == 0

    @property
    def rank(self) -> int:
        """This rank."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """How many there are."""
        return self._ranks.world_size

    def part(self) -> Part:
        """Return this rank's part of a checkpoint that is begun now; the save id of rank 0 is that of all."""
        return Part(self.rank, self.world_size, new_save_id().hex())

    def session(self) -> Session:
        """Return what the ranks agree by.

        Raises:
            RanksMissingError: some are not there.
            RankFailedError: they are about to do different things.
        """
        if self._session is None:
            terms = {"ranks": str(self._ranks.world_size)}
            home = Home(self._store.store_id, self._ranks.node, this_process().boot_id, self._pushes)
            session = Session.join(self._ranks, self._run, terms, home)
            session.is_ending = self._is_ending
            if session.store_ranks is not None:
                align(session, self._store, self._run)
            self._session = session
        return self._session

    def told(self, step: int, say: Callable[[], object]) -> Any:  # noqa: ANN401 - what JSON can say
        """Return on all ranks what ``say`` makes on rank 0, the only one that is waited for. On the training thread.

        Raises:
            RanksMissingError: it says nothing in time.
            RankFailedError: the ranks are about to do different things.
        """
        what = f"choice of an interval at step {step}"
        _, said = self.session().begin("chooses an interval at", step, None, say, what)
        return said

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this rank takes no part in what they do next."""
        if self._session is not None:
            self._session.give_up(self._session.next_number(), error)

    def close(self) -> None:
        """End what the ranks agree by; they find each other again when they are needed again."""
        session, self._session = self._session, None
        if session is not None:
            # What is to be known is known by now.
            with contextlib.suppress(RanksError):
                session.leave()

    def restore(
        self, step: int | None, into: object, prepare: Callable[[], object], tell: Callable[[], object]
    ) -> Returned | None:
        """Restore the newest checkpoint that all ranks can read, or that of ``step``; None when there is none yet.

        Rank 0 calls ``prepare`` first, while the others wait. What ``tell`` raises fails the restore of all.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError: on rank 0, as :meth:`Store.load`.
            RankFailedError: on the others, and when another one could not restore.
            RanksMissingError: some did not come so far in time.
        """
        session = self.session()
        does = "restores the newest checkpoint" if step is None else f"restores step {step}"
        is_one = session.store_ranks is None
        number, _ = session.begin(does, None, 2 if is_one else 1, lambda: None, f"restore of run {self._run!r}")
        skipped: list[str] = []
        proposals: Iterator[CheckpointRef] = iter(())
        if is_one and self.is_first:
            proposals = self._proposals(step, skipped, prepare)
        elif not is_one:
            common = Proposals(session, self._store, self._run, step)
            common.gather((number, 1), prepare)
            proposals = common.each(skipped)
        part = 1 if is_one else 2
        steps = set[int]()
        while True:
            ref = self._proposed(session, (number, part), proposals, step)
            if ref is None:
                return None
            # By its step each rank would read the newest of several attempts, which one has found damaged.
            by_step = is_one and ref.step not in steps
            steps.add(ref.step)
            read = partial(self._read if by_step else self._read_part, ref, into, tell)
            returned = self._try(session, (number, part + 1), ref, read, skipped if step is None else None)
            if returned is not None:
                _settle(into)
                return dataclasses.replace(returned, skipped=tuple(skipped))
            part += 2

    def _proposals(
        self, step: int | None, skipped: list[str], prepare: Callable[[], object]
    ) -> Iterator[CheckpointRef]:
        prepare()
        is_any = False
        for ref in self._store.training.restorable(self._run, step, skipped):
            is_any = True
            yield ref
        if is_any or skipped:
            what = "no checkpoint" if step is None else f"step {step}"
            message = f"{what} of run {self._run!r} can be restored by all ranks; see asymcheck verify:"
            raise InconsistentCheckpointError(message, skipped)

    def _proposed(
        self, session: Session, at: tuple[int, int], proposals: Iterator[CheckpointRef], step: int | None
    ) -> CheckpointRef | None:
        """Return what rank 0 wants to restore next; None when there is nothing."""
        if not self.is_first:
            return ref_of(json.loads(session.hear(at, f"restore of run {self._run!r}")))
        try:
            ref = next(proposals, None)
        except CheckpointNotFoundError as error:
            if step is not None:
                session.post(at, reason_of(error).encode(), failed=True)
                raise
            ref = None
        except BaseException as error:
            session.post(at, f"rank 0: {reason_of(error)}".encode(), failed=True)
            raise
        session.post(at, json.dumps(named(ref)).encode())
        return ref

    def _read(self, ref: CheckpointRef, into: object, tell: Callable[[], object]) -> Checkpoint:
        tell()
        read = self._store.restore(ref.step, into=into, run=self._run, rank=self.rank, grows=True).checkpoint
        if read.ref != ref:
            raise InconsistentCheckpointError(f"{ref} could not be read, but another attempt, {read.ref}")
        return read

    def _read_part(self, ref: CheckpointRef, into: object, tell: Callable[[], object]) -> Checkpoint:
        tell()
        return self._store.training.restore_part(ref, into=into, run=self._run, rank=self.rank)

    def _try(
        self,
        session: Session,
        at: tuple[int, int],
        ref: CheckpointRef,
        read: Callable[[], Checkpoint],
        skipped: list[str] | None,
    ) -> Returned | None:
        """Go back to a checkpoint by ``read``, all ranks or none; None: one found it damaged, so another is tried.

        Without ``skipped``, to which rank 0 appends why, there is no other to be tried.
        """
        checkpoint, failure, is_damage = None, None, False
        try:
            checkpoint = read()
        except AsymcheckError as error:
            failure = error
            # What an object refuses now, it would refuse of an older checkpoint, too.
            is_damage = isinstance(error, (RecoveryError, FormatError)) and not isinstance(
                error, (RefusedStateError, UnsupportedFormatError)
            )
        except BaseException as error:
            session.report(at, reason_of(error).encode(), failed=True)
            raise
        mine = {"failed": None if failure is None else reason_of(failure), "is_damage": is_damage}

        def decide(reports: Sequence[bytes]) -> bytes:
            found: list[Mapping[str, object]] = [json.loads(report) for report in reports]
            failed = [f"rank {rank}: {one['failed']}" for rank, one in enumerate(found) if one["failed"] is not None]
            if not failed and checkpoint is not None:
                generation = self._store.begin_generation(checkpoint, run=self._run)
                head = None if session.store_ranks is None else opened(self._store, self._run, generation)
                return json.dumps({"generation": generation, "head": head}).encode()
            reasons = "; ".join(failed[:_REASONS_SHOWN])
            if skipped is not None and all(one["failed"] is None or one["is_damage"] for one in found):
                skipped.append(f"{ref}: {reasons}")
                return json.dumps({"again": True}).encode()
            return json.dumps({"failed": f"{ref} could not be restored: {reasons}"}).encode()

        what = f"restore of step {ref.step} of run {self._run!r}"
        said = json.loads(session.agree(at, json.dumps(mine).encode(), decide, what))
        if "again" in said:
            return None
        if failure is not None:
            raise failure
        if checkpoint is None or "failed" in said:
            raise RankFailedError(f"{said['failed']}; no rank may train on from it")
        if said["head"] is not None:
            open_too(self._store, said["head"])
        return Returned(checkpoint, said["generation"], ())

    def rollback(self, background: Background | None, into: object, tell: Callable[[], object]) -> Returned:
        """Go back to the newest checkpoint on the line that is complete in the memory of all ranks.

        What ``tell`` raises fails it for all.

        Raises:
            CheckpointNotFoundError: there is none.
            RanksError
        """
        session = self.session()
        what = f"rollback of run {self._run!r}"
        number, _ = session.begin("rolls back", None, 1, lambda: None, what)
        mine = [named(ref) for ref in (() if background is None else background.in_ring())]

        def decide(reports: Sequence[bytes]) -> bytes:
            everywhere = set.intersection(*({ref_of(one) for one in json.loads(report)} for report in reports))
            on_line = self._store.training.line(self._run)
            newest = max((ref for ref in everywhere if ref is not None and on_line(ref)), default=None)
            return json.dumps(named(newest)).encode()

        ref = ref_of(json.loads(session.agree((number, 1), json.dumps(mine).encode(), decide, what)))
        if ref is None or background is None:
            raise CheckpointNotFoundError(
                f"no checkpoint of run {self._run!r} is in the memory of all {self.world_size} ranks; restore() reads "
                "the store"
            )

        def read() -> Checkpoint:
            tell()
            found = background.newest_in_ring(lambda one: one == ref)
            if found is None:
                raise RanksError(f"{ref} is not in memory any more")
            return self._store.training.load_captured(*found, into=into)

        returned = self._try(session, (number, 2), ref, read, None)
        if returned is None:
            raise RankFailedError(f"{ref} could not be restored")
        _settle(into)
        return returned


def _settle(into: object) -> None:
    """Let parts do what takes all ranks: from here on none of them can have failed to come so far."""
    for part in distributed(into):
        part.settle()


def saved(capture: Capture) -> Checkpoint:
    """Return the checkpoint that a capture of all ranks became.

    Raises:
        LostCheckpointError: it became none.
    """
    ref, request = capture.ref, capture.request
    if ref is None:
        raise LostCheckpointError(f"step {request.step} of run {request.run!r} was not saved: {capture.error}")
    written = capture.written_bytes
    return Checkpoint.of(
        request.run, ref, request.world_size, request.metrics, capture.state_bytes, written_bytes=written
    )


def restored_alone(
    store: Store, run: str, step: int | None, into: object, tell_of_skipped: Callable[[Sequence[str]], object]
) -> Returned | None:
    """Restore the newest consistent checkpoint, or that of ``step``; None when there is none yet.

    What was passed over is told before it is abandoned: a caller may turn the warning into an error.

    Raises:
        CheckpointNotFoundError: ``step`` was given and is not there.
        InconsistentCheckpointError, StateMismatchError, PartialRestoreError, HeadRecordError: as :meth:`Store.load`.
    """
    try:
        found = store.restore(step, into=into, run=run, fall_back=True, grows=True)
    except CheckpointNotFoundError:
        if step is not None:
            raise
        return None
    tell_of_skipped(found.skipped)
    return Returned(found.checkpoint, store.begin_generation(found.checkpoint, run=run), ())


def rolled_back_alone(store: Store, run: str, background: Background | None, into: object) -> Returned:
    """Go back to the newest checkpoint on the line that is complete in memory.

    Raises:
        CheckpointNotFoundError: none is.
        StateMismatchError, DigestMismatchError: as :meth:`TrainingServices.load_captured`.
    """
    on_line = store.training.line(run)
    found = None if background is None else background.newest_in_ring(on_line)
    if found is None:
        raise CheckpointNotFoundError(f"no checkpoint of run {run!r} is in memory; restore() reads the store")
    checkpoint = store.training.load_captured(*found, into=into)
    return Returned(checkpoint, store.begin_generation(checkpoint, run=run), ())
