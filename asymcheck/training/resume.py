"""How Checkpointers go back to a checkpoint: several ranks together, or one process alone.

The machines of a job may have a store each. Then one line of training leads through all stores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from asymcheck.capture.background_saver import BackgroundSaver
from asymcheck.capture.inflight import Capture
from asymcheck.capture.optimizer_fence import distributed
from asymcheck.commit.save_request import new_save_id
from asymcheck.distributed import Ranks, Session
from asymcheck.distributed.coordinator import reason_of
from asymcheck.distributed.rendezvous import RankLocation
from asymcheck.errors import (
    UNKNOWING,
    AsymcheckError,
    CheckpointNotFoundError,
    FormatError,
    HeadRecordError,
    InconsistentCheckpointError,
    LostCheckpointError,
    RankFailedError,
    RanksError,
    RecoveryError,
    RefusedStateError,
    RemoteCopyWarning,
    RemoteUnreachableError,
    StorageError,
    UnsupportedFormatError,
    warn_user,
)
from asymcheck.events import timed
from asymcheck.format.manifest import Manifest
from asymcheck.format.record import HeadRecord, head_from_json, head_to_json
from asymcheck.format.spans import Spans, named_spans, ranks_in
from asymcheck.inspect.history import describe_loaded
from asymcheck.policies.push_selection import Push
from asymcheck.restore.lineage import read_line
from asymcheck.restore.load import LoadRequest, load_captured, load_part
from asymcheck.restore.resolve import SkippedCheckpoints, candidates, resolve_each
from asymcheck.storage.fallback_tier import FallbackTier
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.process_identity import this_process
from asymcheck.store import Store
from asymcheck.types import Checkpoint, CheckpointRef, Digest, Part, SaveId
from asymcheck.validation import check_device

_SHOWN = 4
_WHERE = "head record of another machine"


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to which all ranks have gone back."""

    checkpoint: Checkpoint  # as this rank has read it
    generation: int  # which was opened from it
    skipped: tuple[str, ...]  # on rank 0: the checkpoints that were passed over, with the reasons


class ResumeCoordinator:
    """One of the ranks that train one state."""

    def __init__(
        self, store: Store, run: str, ranks: Ranks, is_ending: Callable[[], bool], push: Push | None = None
    ) -> None:
        """Prepare; the ranks find each other later. ``is_ending`` tells whether this process is to end."""
        self._store, self._run, self._ranks, self._is_ending = store, run, ranks, is_ending
        self._pushes = push is not None
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.is_first = ranks.rank == 0
        self._session: Session | None = None

    def part(self) -> Part:
        """Return this rank's part of a new checkpoint; all ranks will take the save id of rank 0."""
        return Part(self.rank, self.world_size, new_save_id().hex())

    def session(self) -> Session:
        """Return the session of the ranks, which find each other at the first call."""
        if self._session is None:
            terms = {"ranks": str(self._ranks.world_size)}
            home = RankLocation(self._store.store_id, self._ranks.node, this_process().boot_id, self._pushes)
            session = Session.join(self._ranks, self._run, terms, home)
            session.is_ending = self._is_ending
            if session.store_ranks is not None:
                align(session, self._store, self._run)
            self._session = session
        return self._session

    def told(self, step: int, say: Callable[[], object]) -> Any:  # noqa: ANN401 - what JSON can say
        """Return on all ranks what ``say`` returns on rank 0, which waits for no other; on the training thread."""
        what = f"choice of an interval at step {step}"
        _, said = self.session().begin("chooses an interval at", step, None, say, what)
        return said

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks that this one does not take part in the next action."""
        if self._session is not None:
            self._session.give_up(self._session.next_number(), error)

    def close(self) -> None:
        """End the session; the ranks find each other again when they need to."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(RanksError):
                session.leave()

    def restore(
        self, step: int | None, into: object, prepare: Callable[[], object], tell: Callable[[], object]
    ) -> ResumePoint | None:
        """Restore the newest checkpoint that all ranks can read, or that of ``step``; None when there is none yet.

        Rank 0 calls ``prepare`` first, while the others wait. An error of ``tell`` fails the restore of all ranks.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError: on rank 0, as :meth:`Store.load`.
            RankFailedError: on other ranks, and when another rank could not restore.
            RanksMissingError: some did not come in time.
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
            common = _Proposals(session, self._store, self._run, step)
            common.gather((number, 1), prepare)
            proposals = common.each(skipped)
        part = 1 if is_one else 2
        steps = set[int]()
        while True:
            ref = self._proposed(session, (number, part), proposals, step)
            if ref is None:
                return None
            # A read by step would take the newest of several attempts again, which a rank has found damaged.
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
        with self._store.training.opened.source() as source:
            for resolved in resolve_each(source, candidates(source, self._run, step), skipped):
                resolved.sources.close()
                is_any = True
                yield resolved.ref
        if is_any or skipped:
            what = "no checkpoint" if step is None else f"step {step}"
            message = f"{what} of run {self._run!r} can be restored by all ranks; see asymcheck verify:"
            raise InconsistentCheckpointError(message, skipped)

    def _proposed(
        self, session: Session, at: tuple[int, int], proposals: Iterator[CheckpointRef], step: int | None
    ) -> CheckpointRef | None:
        """Return the checkpoint that rank 0 proposes next; None when none is left."""
        if not self.is_first:
            return _ref_of(json.loads(session.hear(at, f"restore of run {self._run!r}")))
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
        session.post(at, json.dumps(_named(ref)).encode())
        return ref

    def _read(self, ref: CheckpointRef, into: object, tell: Callable[[], object]) -> Checkpoint:
        tell()
        read = self._store.restore(ref.step, into=into, run=self._run, rank=self.rank, grows=True).checkpoint
        if read.ref != ref:
            raise InconsistentCheckpointError(f"{ref} could not be read, but another attempt, {read.ref}")
        return read

    def _read_part(self, ref: CheckpointRef, into: object, tell: Callable[[], object]) -> Checkpoint:
        tell()
        return _restored_part(self._store, self._run, ref, self.rank, into)

    def _try(
        self,
        session: Session,
        at: tuple[int, int],
        ref: CheckpointRef,
        read: Callable[[], Checkpoint],
        skipped: list[str] | None,
    ) -> ResumePoint | None:
        """Go back by ``read``, all ranks or none; return None if the checkpoint is damaged and another may be tried.

        Rank 0 appends the reason to ``skipped``; without that, no other is tried.
        """
        checkpoint, failure, is_damage = None, None, False
        try:
            checkpoint = read()
        except AsymcheckError as error:
            failure = error
            # An object would refuse the state of an older checkpoint, too.
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
                head = None
                if session.store_ranks is not None:
                    heads = self._store.training.heads(self._run)
                    head = next(head_to_json(one) for one in heads if one.generation == generation)
                return json.dumps({"generation": generation, "head": head}).encode()
            reasons = "; ".join(failed[:_SHOWN])
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
            head = head_from_json(said["head"], _WHERE)
            self._store.training.opened.writable().manifests.take_head(head)
        return ResumePoint(checkpoint, said["generation"], ())

    def rollback(self, background: BackgroundSaver | None, into: object, tell: Callable[[], object]) -> ResumePoint:
        """Go back to the newest checkpoint on the line that is complete in the memory of all ranks.

        An error of ``tell`` fails it for all ranks.

        Raises:
            CheckpointNotFoundError: no checkpoint is in the memory of all.
            RanksError
        """
        session = self.session()
        what = f"rollback of run {self._run!r}"
        number, _ = session.begin("rolls back", None, 1, lambda: None, what)
        mine = [_named(ref) for ref in (() if background is None else background.in_ring())]

        def decide(reports: Sequence[bytes]) -> bytes:
            everywhere = set.intersection(*({_ref_of(one) for one in json.loads(report)} for report in reports))
            line = read_line(self._store.training.opened.tier, self._run)
            newest = max((ref for ref in everywhere if ref is not None and ref in line), default=None)
            return json.dumps(_named(newest)).encode()

        ref = _ref_of(json.loads(session.agree((number, 1), json.dumps(mine).encode(), decide, what)))
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
            return _loaded_from_ring(*found, into)

        returned = self._try(session, (number, 2), ref, read, None)
        if returned is None:
            raise RankFailedError(f"{ref} could not be restored")
        _settle(into)
        return returned


def _restored_part(store: Store, run: str, ref: CheckpointRef, rank: int, into: object) -> Checkpoint:
    """Fill ``into`` with what ``rank`` saved of a checkpoint: from this store, or from the location behind it.

    Raises:
        InconsistentCheckpointError, FormatError, RecoveryError, StorageError: it is not whole in any of them.
        StateMismatchError, RefusedStateError: the state does not fit, or an object refused its own.
    """
    store.training.fence()
    opened = store.training.opened
    wanted = LoadRequest("*", into, check_device(None), rank=rank, grows=True)
    problems: list[str] = []
    # What lies here takes no question to a location that is far.
    near, far = opened.nvme, opened.far
    tiers: list[ReadTier] = [near, *([] if far is None else [FallbackTier(near, far)])]
    with timed("restore", 0, lambda: {"run": run}):
        for tier in tiers:
            try:
                loaded = load_part(opened.with_memory(tier), run, ref, wanted)
            except (UnsupportedFormatError, RefusedStateError, *UNKNOWING):
                raise
            except (FormatError, RecoveryError, StorageError) as error:
                problems.append(str(error))
                continue
            if far is not None and tier is not near:
                what = f"{ref}: what rank {rank} needs was read from {far.name}"
                warn_user(f"{what}, for it is not whole on this machine: {problems[0]}", RemoteCopyWarning)
            return describe_loaded(tier, loaded, is_newest=True)
    raise InconsistentCheckpointError(f"{ref} cannot be restored on this machine:", problems)


def _loaded_from_ring(
    ref: CheckpointRef, captured: Manifest, payload: Callable[[Digest], memoryview], into: object
) -> Checkpoint:
    """Fill a state with a checkpoint in memory.

    Raises:
        StateMismatchError: it does not fit; nothing was overwritten.
        DigestMismatchError: the memory has changed; tensors may have been overwritten.
    """
    load_captured(captured, payload, into)
    header = captured.header
    return Checkpoint.of(header.run, ref, header.world_size, header.metrics, captured.total_bytes)


def _settle(into: object) -> None:
    """Let parts of the state do what needs all ranks, none of which can fail to come from here on."""
    for part in distributed(into):
        part.settle()


def saved(capture: Capture) -> Checkpoint:
    """Return the checkpoint of a capture of all ranks."""
    ref, request = capture.ref, capture.request
    if ref is None or capture.error is not None:
        raise LostCheckpointError(f"step {request.step} of run {request.run!r} was not saved: {capture.error}")
    written = capture.written_bytes
    return Checkpoint.of(
        request.run, ref, request.world_size, request.metrics, capture.state_bytes, written_bytes=written
    )


def restored_alone(
    store: Store, run: str, step: int | None, into: object, tell_of_skipped: Callable[[Sequence[str]], object]
) -> ResumePoint | None:
    """Restore the newest consistent checkpoint, or that of ``step``; None when there is none yet.

    ``tell_of_skipped`` is called before a checkpoint is abandoned, because a warning may be turned into an error.

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
    return ResumePoint(found.checkpoint, store.begin_generation(found.checkpoint, run=run), ())


def rolled_back_alone(store: Store, run: str, background: BackgroundSaver | None, into: object) -> ResumePoint:
    """Go back to the newest checkpoint on the line that is complete in memory.

    Raises:
        CheckpointNotFoundError: none is.
        HeadRecordError: the line cannot be followed.
        StateMismatchError: the state does not fit; nothing was overwritten.
        DigestMismatchError: the memory has changed; tensors may have been overwritten.
    """
    line = read_line(store.training.opened.tier, run)
    found = None if background is None else background.newest_in_ring(line.__contains__)
    if found is None:
        raise CheckpointNotFoundError(f"no checkpoint of run {run!r} is in memory; restore() reads the store")
    checkpoint = _loaded_from_ring(*found, into)
    return ResumePoint(checkpoint, store.begin_generation(checkpoint, run=run), ())


def _named(ref: CheckpointRef | None) -> list[object] | None:
    """Return the identity of a checkpoint as JSON."""
    return None if ref is None else [ref.generation, ref.step, ref.save_id.hex()]


def _ref_of(said: object) -> CheckpointRef | None:
    """Return the identity that :func:`_named` encoded."""
    if not isinstance(said, list):
        return None
    generation, step, save_id = said
    return CheckpointRef(generation, step, SaveId(bytes.fromhex(save_id)))


def align(session: Session, store: Store, run: str) -> None:
    """Copy the head records of every store to all stores, because a machine may be new, or have been away.

    Raises:
        HeadRecordError: a record is damaged in all stores, or two stores belong to different trainings.
        RanksError: another rank is missing, or could not read its store.
        AsymcheckError: this rank could not read its store; it tells the others.
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
        store.training.opened.writable().manifests.take_head(head_from_json(said, _WHERE))


def _heads(session: Session, store: Store, run: str) -> list[HeadRecord]:
    if not session.is_first_here:
        return []
    if session.is_first:
        # If all machines are new, the records are in the location behind them.
        with contextlib.suppress(RemoteUnreachableError):
            return store.training.heads(run, behind=True)
    return store.training.heads(run)


def _merged(groups: Sequence[Spans], reports: Sequence[bytes]) -> bytes:
    """Return the head records of all stores."""
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


class _Proposals:
    """The checkpoints that the ranks of several stores can read, each from its store or the location behind it."""

    def __init__(self, session: Session, store: Store, run: str, step: int | None) -> None:
        self._session, self._store, self._run, self._step = session, store, run, step
        # For each store, its checkpoints, and whether its ranks can read them.
        self._found: list[dict[CheckpointRef, bool]] = []

    def gather(self, at: tuple[int, int], prepare: Callable[[], object]) -> None:
        """Let the first rank of each store call ``prepare``, and report what the ranks of the store can read."""
        session = self._session
        try:
            mine: list[object] = []
            if session.is_first_here:
                prepare()
                mine = [[_named(ref), is_readable] for ref, is_readable in self._of_this_store()]
        except BaseException as error:
            session.report(at, reason_of(error).encode(), failed=True)
            raise
        what = f"restore of run {self._run!r}"
        session.agree(at, json.dumps(mine).encode(), self._take, what)

    def _of_this_store(self) -> list[tuple[CheckpointRef, bool]]:
        """Return the checkpoints, and of each whether the ranks of this store all have a part of it."""
        ranks = ranks_in(self._session.groups[0])
        with self._store.training.opened.source() as source, contextlib.suppress(CheckpointNotFoundError):
            return [
                (one.ref, bool(one.world_size) and all(one.has(rank % one.world_size) for rank in ranks))
                for one in candidates(source, self._run, self._step)
            ]
        return []

    def _take(self, reports: Sequence[bytes]) -> bytes:
        firsts = [json.loads(reports[group[0][0]]) for group in self._session.groups]
        self._found = [
            {ref: is_readable for said, is_readable in found if (ref := _ref_of(said)) is not None} for found in firsts
        ]
        return b""

    def each(self, skipped: list[str]) -> Iterator[CheckpointRef]:
        """Yield, on rank 0, the checkpoints that all ranks can read, newest first; append the others to ``skipped``."""
        which = "no checkpoint" if self._step is None else f"no checkpoint of step {self._step}"
        if not any(self._found):
            raise CheckpointNotFoundError(f"none of {len(self._found)} stores has {which} of run {self._run!r}")
        skips = SkippedCheckpoints(skipped)
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
