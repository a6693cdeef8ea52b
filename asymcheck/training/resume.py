"""Restore and rollback of a Checkpointer, for one process or for several ranks together.

Each node of a job may have its own store. All stores then share one lineage.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from asymcheck.capture.background_saver import BackgroundSaver
from asymcheck.capture.inflight import Capture
from asymcheck.capture.optimizer_fence import distributed
from asymcheck.commit.orphan_recovery import Agree, Metrics
from asymcheck.distributed import Ranks, Session
from asymcheck.distributed.coordinator import reason_of
from asymcheck.distributed.rendezvous import RankLocation
from asymcheck.errors import (
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
    StateMismatchError,
    StorageError,
    UnsupportedFormatError,
    listed,
    warn_user,
)
from asymcheck.events import timed
from asymcheck.format.layout import checkpoint_name, parse_checkpoint_name
from asymcheck.format.manifest import Manifest
from asymcheck.format.record import HeadRecord, head_from_json, head_to_json
from asymcheck.format.registry import METRICS_MAX
from asymcheck.format.ring_records import CAPTURES_MAX
from asymcheck.format.spans import Spans, named_spans, ranks_in
from asymcheck.inspect.history import describe_loaded
from asymcheck.policies.push_selection import Push
from asymcheck.restore.lineage import read_line
from asymcheck.restore.load import LoadRequest, load, load_captured, load_part, noting_overwritten
from asymcheck.restore.resolve import SkippedCheckpoints, best_checkpoint, candidates, resolve_each, warn_of_skipped
from asymcheck.state.walk import flatten
from asymcheck.storage.fallback_tier import FallbackTier
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.process_identity import this_process
from asymcheck.store import Store
from asymcheck.types import Checkpoint, CheckpointRef, Digest, SaveId
from asymcheck.validation import check_device, metric_and_sign

_SHOWN = 4
_COMPARED_MAX = 64  # problems of a rank that are compared with those of the other ranks
_WHERE = "head record of another machine"


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which all ranks continue."""

    checkpoint: Checkpoint  # as read by this rank
    generation: int  # the new generation
    skipped: tuple[str, ...]  # on rank 0: skipped checkpoints with the reasons


class ResumeCoordinator:
    """One rank of a job that saves one state together."""

    def __init__(
        self, store: Store, run: str, ranks: Ranks, is_ending: Callable[[], bool], push: Push | None = None
    ) -> None:
        """Prepare; the rendezvous follows at the first use. ``is_ending`` returns whether this process is to end."""
        self._store, self._run, self._ranks, self._is_ending = store, run, ranks, is_ending
        self._pushes = push is not None
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.is_first = ranks.rank == 0
        self.lacks_ranks = False
        """Whether another rank had ended or did not respond when the last session ended."""
        self._session: Session | None = None
        # Whether a checkpoint that another rank cannot read was restored on this rank, in this restore.
        self._is_filled = False
        # Tensors that a checkpoint overwrote before it was found to be damaged, in this restore.
        self._overwritten: tuple[str, ...] = ()

    def session(self) -> Session:
        """Return the session of the ranks; the first call is the rendezvous."""
        if self._session is None:
            home = RankLocation(
                self._store.resources.tier.descriptor.store_id.hex(),
                self._ranks.node,
                this_process().boot_id,
                self._pushes,
            )
            session = Session.join(self._ranks, self._run, home)
            session.is_ending = self._is_ending
            if session.store_ranks is not None:
                align(session, self._store, self._run)
            self._session = session
        return self._session

    def broadcast(self, step: int, decide: Callable[[], object], why: str = "chooses an interval at") -> Any:  # noqa: ANN401 - JSON
        """Run ``decide`` on rank 0 and return its result on all ranks. Rank 0 does not wait for the others."""
        _, chosen = self.session().begin(why, step, None, decide, f"decision of rank 0 at step {step}")
        return chosen

    def give_up(self, error: BaseException) -> None:
        """Report to the other ranks that this one does not take part in the next action."""
        if self._session is not None:
            self._session.give_up(self._session.next_number(), error)

    def close(self) -> None:
        """End the session; the next use begins a new rendezvous."""
        session, self._session = self._session, None
        if session is not None:
            try:
                session.leave()
                self.lacks_ranks = session.lacks_ranks
            except RanksError:
                # The process with the key-value store has ended.
                self.lacks_ranks = True

    def restore(
        self,
        step: int | str | None,
        into: object,
        prepare: Callable[[Agree | None], object],
        report: Callable[[], object],
        *,
        strict: bool = False,
    ) -> ResumePoint | None:
        """Restore the newest checkpoint that all ranks can read, or that of ``step``.

        The first rank of each store calls ``prepare`` first, while the others wait. An error of ``report`` fails the
        restore on all ranks.

        Returns:
            The resume point, or None if the run has no checkpoint yet.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError: on rank 0, see :meth:`Store.load`.
            RankFailedError: on other ranks, or another rank could not restore.
            RanksMissingError: some ranks did not take part in time.
        """
        session = self.session()
        does = "restores the newest checkpoint" if step is None else f"restores step {step}"
        shares_store = session.store_ranks is None
        number, _ = session.begin(does, None, 2 if shares_store else 1, lambda: None, f"restore of run {self._run!r}")
        skipped: list[str] = []
        if not shares_store:
            proposals = self._common(session, self._readable(session, number, step, prepare), step, skipped)
        elif self.is_first:
            proposals = self._proposals(step, skipped, partial(prepare, None))
        else:
            proposals = iter(())
        part = 1 if shares_store else 3
        self._is_filled, self._overwritten = False, ()
        try:
            while True:
                ref = self._proposed(session, (number, part), proposals, step)
                if ref is None:
                    return None
                read = partial(self._read, ref, into, strict=strict)
                returned = self._try(
                    session, (number, part + 1), ref, read, into, report, skipped if step is None else None
                )
                if returned is not None:
                    _settle(into)
                    return dataclasses.replace(returned, skipped=tuple(skipped))
                part += 2
        except AsymcheckError as error:
            # The last error may be that of another rank.
            error.overwritten = error.overwritten or self._overwritten
            raise

    def _proposals(
        self, step: int | str | None, skipped: list[str], prepare: Callable[[], object]
    ) -> Iterator[CheckpointRef]:
        prepare()
        is_any = False
        with self._store.resources.source() as source:
            listings = candidates(source, self._run, step)
            for resolved in resolve_each(source, listings, skipped):
                resolved.sources.close()
                is_any = True
                yield resolved.ref
        if not is_any and step is None and self._is_new(self._is_unfinished(listing.ref) for listing in listings):
            return
        if is_any or skipped:
            what = f"store {self._store.location}: {'no checkpoint' if step is None else f'step {step}'}"
            message = f"{what} of run {self._run!r} can be restored by all ranks; see asymcheck verify:"
            raise InconsistentCheckpointError(message, skipped)

    def _readable(
        self, session: Session, number: int, step: int | str | None, prepare: Callable[[Agree], object]
    ) -> list[dict[CheckpointRef, bool | None]]:
        """Return, on rank 0, :meth:`_parts_here` of each store.

        The first rank of each store calls ``prepare``, and reports.
        """
        at = number, 2
        mine: dict[str, bool | None] = {}
        try:
            if session.is_first_here:
                prepare(partial(self._in_all_stores, session, (number, 1)))
                mine = self._parts_here(ranks_in(session.groups[0]), step)
            else:
                self._in_all_stores(session, (number, 1), {})
        except BaseException as error:
            # The other ranks wait in one of the rounds, unless they know the error.
            for failed in () if isinstance(error, RanksError) else ((number, 1), at):
                session.fail(failed, error)
            raise
        stores: list[dict[CheckpointRef, bool | None]] = []

        def take(reports: list[Any]) -> None:
            for group in session.groups:
                parsed = ((parse_checkpoint_name(name), has_parts) for name, has_parts in reports[group[0][0]].items())
                stores.append({ref: has_parts for ref, has_parts in parsed if ref is not None})

        session.agree_json(at, mine, take, f"restore of run {self._run!r}")
        return stores

    def _in_all_stores(
        self, session: Session, at: tuple[int, int], in_memory: Mapping[SaveId, Metrics]
    ) -> dict[SaveId, Metrics]:
        """Return the saves of which each store has a part; ``in_memory`` are those in the memory of this machine.

        Each save comes with the metrics of all ranks whose parts are in memory.
        """
        mine: dict[str, Metrics] = {}
        if session.is_first_here:
            stored = self._store.resources.nvme.manifests.refs(self._run)[-CAPTURES_MAX:]
            mine = {ref.save_id.hex(): {} for ref in stored}
            mine |= {save_id.hex(): metrics for save_id, metrics in in_memory.items()}

        def decide(reports: list[Any]) -> dict[str, Metrics]:
            stores: list[dict[str, Metrics]] = [reports[group[0][0]] for group in session.groups]
            # For different values of a metric, the last rank wins, as for readers.
            merged = {
                save_id: dict(item for store in stores for item in store[save_id].items())
                for save_id in set(stores[0]).intersection(*stores)
            }
            return {save_id: dict(list(metrics.items())[:METRICS_MAX]) for save_id, metrics in merged.items()}

        common = session.agree_json(at, mine, decide, f"restore of run {self._run!r}")
        return {SaveId(bytes.fromhex(save_id)): metrics for save_id, metrics in common.items()}

    def _parts_here(self, ranks: Sequence[int], step: int | str | None) -> dict[str, bool | None]:
        """Return the names of checkpoints, and for each whether this store or its remote has a part for each rank.

        None instead of False means that the checkpoint was never durable. For ``best:METRIC``, return all checkpoints
        on the line, because rank 0 chooses among those of which all ranks find their part.
        """
        which = None if _best_of(step) else step
        with self._store.resources.source() as source, contextlib.suppress(CheckpointNotFoundError):
            return {
                checkpoint_name(listing.ref): (
                    bool(listing.world_size) and all(listing.has(rank % listing.world_size) for rank in ranks)
                )
                or (None if self._is_unfinished(listing.ref) else False)
                for listing in candidates(source, self._run, which)
            }
        return {}

    def _is_unfinished(self, ref: CheckpointRef) -> bool:
        """Tell whether a rank of this store never published its manifest, so that the checkpoint was never durable."""
        manifests = self._store.resources.nvme.manifests
        listing = manifests.listing(self._run, ref)
        with contextlib.suppress(FormatError, StorageError, RecoveryError):
            # A damaged manifest does not show which ranks save into this store.
            return bool(listing.missing_ranks and manifests.read_all(listing))
        return False

    def _is_new(self, are_unfinished: Iterable[bool]) -> bool:
        """Tell whether no checkpoint of the run was ever durable, because the job ended during its first one."""
        return len(read_line(self._store.resources.tier, self._run).limits) == 1 and all(are_unfinished)

    def _common(
        self,
        session: Session,
        stores: Sequence[Mapping[CheckpointRef, bool | None]],
        step: int | str | None,
        skipped: list[str],
    ) -> Iterator[CheckpointRef]:
        """Yield, on rank 0, the checkpoints that all ranks can read, newest first; append the others to ``skipped``."""
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        if not any(stores):
            raise CheckpointNotFoundError(f"{which} of run {self._run!r} is in any of the {len(stores)} stores")
        skips, is_any = SkippedCheckpoints(skipped), False
        refs = sorted(set[CheckpointRef]().union(*stores), reverse=True)
        best = _best_of(step)
        common = {ref for ref in refs if all(store.get(ref) for store in stores)} if best else set[CheckpointRef]()
        if best and common:
            with self._store.resources.source() as source:
                refs = [best_checkpoint(source, self._run, *best, lambda listing: listing.ref in common).ref]
        for ref in refs:
            lacking = [
                named_spans(group) for group, store in zip(session.groups, stores, strict=True) if not store.get(ref)
            ]
            if lacking:
                skips.add(ref, f"the parts of {listed(lacking, _SHOWN)} are missing")
            else:
                is_any = True
                yield ref
        if (
            not is_any
            and step is None
            and self._is_new(None in [store.get(ref, False) for store in stores] for ref in refs)
        ):
            return
        remote = self._store.resources.remote
        advice = (
            "If a machine has lost its store or changed its ranks, pass the remote location to which all machines push "
            "as Store.open(…, remote=URI)"
            if remote is None
            else f"{remote.name} lacks the parts that are not in the store of their machine, too, or did not answer"
        )
        what = f"{which} of run {self._run!r} can be restored by all ranks"
        raise InconsistentCheckpointError(f"{what}. {advice}. To start from scratch, choose another run:", skipped)

    def _proposed(
        self, session: Session, at: tuple[int, int], proposals: Iterator[CheckpointRef], step: int | str | None
    ) -> CheckpointRef | None:
        """Return the next checkpoint that rank 0 proposes; None if none is left."""
        if not self.is_first:
            return parse_checkpoint_name(session.receive(at, f"restore of run {self._run!r}").decode())
        with session.failing(at):
            try:
                ref = next(proposals, None)
            except CheckpointNotFoundError:
                if step is not None:
                    raise
                ref = None
        session.post(at, b"" if ref is None else checkpoint_name(ref).encode())
        return ref

    def _read(self, ref: CheckpointRef, into: object, *, strict: bool) -> Checkpoint:
        """Fill ``into`` from the common store, or with the part of this rank from the store of its machine."""
        wanted = LoadRequest(
            "*",
            into,
            check_device(None),
            rank=self.rank,
            grows=True,
            # The state has the values of a newer checkpoint, if that was restored here.
            returns=self._is_filled,
            strict=strict,
            world_size=self.world_size,
        )
        store_ranks = self.session().store_ranks
        if store_ranks is not None:
            return _restored_part(self._store, self._run, ref, wanted, store_ranks)
        self._store.training.fence()
        with timed("restore", 0, lambda: {"run": self._run}):
            read = partial(load, run=self._run, step=f"save:{ref.save_id.hex()}", wanted=wanted)
            return self._store.resources.read(read, is_newest=False).checkpoint

    def _try(
        self,
        session: Session,
        at: tuple[int, int],
        ref: CheckpointRef,
        read: Callable[[], Checkpoint],
        into: object,
        report: Callable[[], object],
        skipped: list[str] | None,
    ) -> ResumePoint | None:
        """Restore ``into`` on all ranks by ``read``, after ``report``; return None if the checkpoint is damaged.

        Rank 0 appends the reason to ``skipped``, and may try another checkpoint. If ``skipped`` is None, it does not.
        """
        checkpoint, failure = None, None
        with session.failing(at):
            try:
                report()
                checkpoint = read()
            except AsymcheckError as error:
                failure = error
        cause = failure.__cause__ if isinstance(failure, InconsistentCheckpointError) else None
        mismatch = cause if isinstance(cause, StateMismatchError) else None
        lacking = () if mismatch is None else mismatch.lacking[:_COMPARED_MAX]
        reason = None if failure is None else reason_of(failure)
        mine = {"failed": reason, "is_damage": _is_damage(failure), "lacking": lacking}

        def decide(outcomes: list[Any]) -> object:
            failed = [f"rank {rank}: {it['failed']}" for rank, it in enumerate(outcomes) if it["failed"] is not None]
            if not failed and checkpoint is not None:
                generation = self._store.training.begin_generation(checkpoint, run=self._run)
                manifests = self._store.resources.nvme.manifests
                head = None if session.store_ranks is None else manifests.read_head(self._run, generation)
                return {"generation": generation, "head": None if head is None else head_to_json(head[0])}
            reasons = "; ".join(failed[:_SHOWN])
            # No rank saved an entry that the stores of all ranks lack, so the state does not fit.
            if set[str].intersection(*(set(it["lacking"]) for it in outcomes)):
                return {"failed": f"{ref} could not be restored: {reasons}", "is_mismatch": True}
            if skipped is not None and all(it["failed"] is None or it["is_damage"] for it in outcomes):
                skipped.append(f"{ref}: {reasons}")
                return {"again": True}
            return {"failed": f"{ref} could not be restored: {reasons}"}

        try:
            record = session.agree_json(at, mine, decide, f"restore of step {ref.step} of run {self._run!r}")
        except AsymcheckError as error:
            # Another rank is missing, or has failed with an error of its program.
            error.overwritten = self._note_overwritten(into, failure)
            raise
        if "again" in record or "failed" in record:
            self._note_overwritten(into, failure)
        if "again" in record:
            return None
        if checkpoint is None or "failed" in record:
            known = mismatch if "is_mismatch" in record else failure
            failed = known or RankFailedError(f"{record['failed']}; no rank may continue from it")
            failed.overwritten = failed.overwritten or self._overwritten
            raise failed
        if record["head"] is not None:
            head = head_from_json(record["head"], _WHERE)
            self._store.resources.writable().manifests.take_head(head)
        return ResumePoint(checkpoint, record["generation"], ())

    def _note_overwritten(self, into: object, failure: AsymcheckError | None) -> tuple[str, ...]:
        """Note which tensors this rank has overwritten, although not all ranks were restored; return their names."""
        # A rank that was restored has another state than the ranks that failed.
        self._is_filled |= failure is None
        overwritten = tuple(flatten(into).columns.names) if failure is None else failure.overwritten
        self._overwritten = overwritten or self._overwritten
        return self._overwritten

    def rollback(self, background: BackgroundSaver | None, into: object, report: Callable[[], object]) -> ResumePoint:
        """Restore the newest checkpoint of the lineage that is complete in the memory of all ranks.

        An error of ``report`` fails the rollback on all ranks.

        Raises:
            CheckpointNotFoundError: no checkpoint is in the memory of all ranks.
            RanksError
        """
        session = self.session()
        what = f"rollback of run {self._run!r}"
        number, _ = session.begin("rolls back", None, 1, lambda: None, what)
        captures = {} if background is None else background.in_ring()
        mine = [*map(checkpoint_name, captures)]

        def decide(reports: list[Any]) -> str | None:
            everywhere = map(parse_checkpoint_name, set[str].intersection(*map(set, reports)))
            line = read_line(self._store.resources.tier, self._run)
            newest = max((ref for ref in everywhere if ref is not None and ref in line), default=None)
            return None if newest is None else checkpoint_name(newest)

        ref = parse_checkpoint_name(session.agree_json((number, 1), mine, decide, what) or "")
        if ref is None:
            raise CheckpointNotFoundError(
                f"no checkpoint of run {self._run!r} is in the memory of all {self.world_size} ranks; restore() reads "
                "the store"
            )
        self._overwritten = ()
        read = partial(_loaded_from_ring, ref, *captures[ref], into)
        returned = self._try(session, (number, 2), ref, read, into, report, None)
        if returned is None:
            raise RankFailedError(f"{ref} could not be restored")
        _settle(into)
        return returned


def _best_of(step: int | str | None) -> tuple[str, int] | None:
    """Return the metric and the sign of ``best:METRIC``; None for other selections."""
    return metric_and_sign(step) if isinstance(step, str) else None


def _is_damage(failure: AsymcheckError | None) -> bool:
    """Tell whether an older checkpoint may be restored after a failure."""
    # An object that refuses its state would refuse that of an older checkpoint, too.
    is_refused = isinstance(failure, (RefusedStateError, UnsupportedFormatError))
    return isinstance(failure, (RecoveryError, FormatError)) and not is_refused


def _restored_part(
    store: Store, run: str, ref: CheckpointRef, wanted: LoadRequest, store_ranks: Spans | None
) -> Checkpoint:
    """Fill a state with the part that one rank saved, from this store or from its remote."""
    store.training.fence()
    opened = store.resources
    problems: list[str] = []
    cause: BaseException | None = None
    overwritten: tuple[str, ...] = ()
    # The local store first, so that an intact part needs no remote access.
    local, remote = opened.nvme, opened.remote
    attempts: list[tuple[ReadTier, Spans | None]] = [(local, None)]
    if remote is not None:
        # All ranks only if the shards are cut in another way now: they may be in a hundred times more packs.
        attempts += [(FallbackTier(local, remote), ranks) for ranks in (store_ranks, None)]
    with timed("restore", 0, lambda: {"run": run}):
        for tier, ranks in attempts:
            try:
                loaded = load_part(opened.with_memory(tier), run, ref, wanted, ranks)
            except AsymcheckError as error:
                if not _is_damage(error):
                    error.overwritten = error.overwritten or overwritten
                    raise
                problems.append(str(error))
                cause = error.__cause__
                overwritten = error.overwritten or overwritten
                continue
            if remote is not None and tier is not local:
                source = f"{ref}: the part of rank {wanted.rank} was read from {remote.name}"
                warn_user(f"{source}, because it is not complete on this machine: {problems[0]}", RemoteCopyWarning)
            return describe_loaded(tier, loaded, is_newest=True)
    failure = InconsistentCheckpointError(f"{ref} cannot be restored on this machine:", problems)
    failure.overwritten = overwritten
    raise failure from cause


def _loaded_from_ring(
    ref: CheckpointRef, captured: Manifest, payload: Callable[[Digest], memoryview], into: object
) -> Checkpoint:
    """Fill a state with a checkpoint in memory."""
    load_captured(captured, payload, into)
    header = captured.header
    return Checkpoint.of(header.run, ref, header.world_size, header.metrics, captured.total_bytes)


def _settle(into: object) -> None:
    """Run the collective steps of objects in the state, once all ranks are sure to take part."""
    for part in distributed(into):
        part.settle()


def saved(capture: Capture) -> Checkpoint:
    """Return the checkpoint of a capture that all ranks committed."""
    ref, request = capture.ref, capture.request
    if ref is None or capture.error is not None:
        raise LostCheckpointError(f"step {request.step} of run {request.run!r} was not saved: {capture.error}")
    written = capture.written_bytes
    return Checkpoint.of(
        request.run, ref, request.world_size, request.metrics, capture.state_bytes, written_bytes=written
    )


def restored_alone(store: Store, run: str, step: int | str | None, into: object, *, strict: bool) -> ResumePoint | None:
    """Restore the newest consistent checkpoint, or that of ``step``; return None if the run has no checkpoint yet.

    Raises:
        CheckpointNotFoundError: the run has no checkpoint of ``step``.
        InconsistentCheckpointError, StateMismatchError, PartialRestoreError, HeadRecordError: as :meth:`Store.load`.
    """
    try:
        restored = store.restore(step, into=into, run=run, fall_back=True, grows=True, strict=strict)
    except CheckpointNotFoundError:
        if step is not None:
            raise
        return None
    with noting_overwritten(lambda: flatten(into).columns.names):
        # Warnings may be turned into errors, which must abandon no checkpoint.
        warn_of_skipped(store.location, run, restored.skipped)
        return ResumePoint(restored.checkpoint, store.training.begin_generation(restored.checkpoint, run=run), ())


def rolled_back_alone(store: Store, run: str, background: BackgroundSaver | None, into: object) -> ResumePoint:
    """Restore the newest checkpoint of the lineage that is complete in memory.

    Raises:
        CheckpointNotFoundError: no checkpoint is in memory.
        HeadRecordError: the lineage is broken.
        StateMismatchError: the state does not fit; nothing was overwritten.
        DigestMismatchError: the memory has changed; tensors may have been overwritten.
    """
    line = read_line(store.resources.tier, run)
    captures = {} if background is None else background.in_ring()
    ref = next(filter(line.__contains__, captures), None)
    if ref is None:
        raise CheckpointNotFoundError(f"no checkpoint of run {run!r} is in memory; restore() reads the store")
    checkpoint = _loaded_from_ring(ref, *captures[ref], into)
    with noting_overwritten(lambda: flatten(into).columns.names):
        return ResumePoint(checkpoint, store.training.begin_generation(checkpoint, run=run), ())


def align(session: Session, store: Store, run: str) -> None:
    """Copy the head records of every store to all stores, because a node may be new or may have been absent.

    Raises:
        HeadRecordError: a record is damaged in all stores, or two stores belong to different jobs.
        RanksError: another rank is missing, or could not read its store.
        AsymcheckError: this rank could not read its store; it reports that to the others.
    """
    what = f"line of run {run!r}"
    number, _ = session.begin("compares its line of training", None, 1, lambda: None, what)
    with session.failing((number, 1)):
        mine = [head_to_json(head) for head in _heads(session, store, run)]
    for record in session.agree_json((number, 1), mine, partial(_merged, session.groups), what):
        store.resources.writable().manifests.take_head(head_from_json(record, _WHERE))


def _heads(session: Session, store: Store, run: str) -> list[HeadRecord]:
    if not session.is_first_here:
        return []
    if session.is_first:
        # If all nodes are new, only the remote has the records.
        with contextlib.suppress(RemoteUnreachableError):
            return store.training.heads(run, behind=True)
    return store.training.heads(run)


def _merged(groups: Sequence[Spans], reports: list[Any]) -> object:
    """Return the head records of all stores."""
    heads: dict[int, tuple[HeadRecord, Spans]] = {}
    for group in groups:
        for record in reports[group[0][0]]:
            head = head_from_json(record, _WHERE)
            other, theirs = heads.setdefault(head.generation, (head, group))
            if not other.is_same(head):
                raise HeadRecordError(
                    f"generation {head.generation} of run {head.run!r} differs between the store of "
                    f"{named_spans(theirs)} and that of {named_spans(group)}: one of the two machines took part in "
                    "another attempt or another job. Remove its store, or give the run another name"
                )
    return [head_to_json(heads[generation][0]) for generation in sorted(heads)]
