"""The services that a Checkpointer needs of a store, beside those that it offers to everybody."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from asymcheck.arguments import check_device, check_metrics, check_part, check_rank, check_step
from asymcheck.config import CaptureConfig, ring_folder_of
from asymcheck.errors import (
    UNKNOWING,
    CheckpointNotFoundError,
    FormatError,
    InconsistentCheckpointError,
    InvalidInputError,
    RecoveryError,
    RefusedStateError,
    RemoteCopyWarning,
    RemoteUnreachableError,
    StorageError,
    UnreachableRemoteWarning,
    UnsupportedFormatError,
    warn_user,
)
from asymcheck.events import timed
from asymcheck.format import layout
from asymcheck.format.manifest import Manifest, ManifestHeader
from asymcheck.format.record import HeadRecord
from asymcheck.opened_store import OpenedStore
from asymcheck.pipeline.request import Place, SaveRequest
from asymcheck.policies.interval import Pace
from asymcheck.policies.retention import Retention
from asymcheck.pruning import Pruner
from asymcheck.recovery.history import describe_loaded
from asymcheck.recovery.line import intact_heads, read_line
from asymcheck.recovery.resolve import candidates, resolve_each
from asymcheck.tiers.reading import ReadTier
from asymcheck.tiers.remote import RemoteTier
from asymcheck.tiers.spanning import Far, SpanningTier
from asymcheck.types import Checkpoint, CheckpointRef, Digest, Part, SaveId

if TYPE_CHECKING:
    from asymcheck.pipeline.adopt import Adopted
    from asymcheck.pipeline.background import Background
    from asymcheck.pipeline.capture import Capture
    from asymcheck.ranks import Session


class TrainingServices:
    """Saves in the background, restores in step with other ranks, and keeps the line of training of an opened store."""

    def __init__(self, opened: OpenedStore) -> None:
        """Serve one opened store."""
        self._opened = opened
        self._backgrounds: list[Background] = []
        # Of these runs the location behind the store was asked for head records.
        self._has_taken_heads: set[str] = set()

    def request(
        self,
        run: str,
        step: int,
        metrics: Mapping[str, float] | None,
        part: Part | None = None,
        pace: Pace | None = None,
    ) -> SaveRequest:
        """Check what a checkpoint, or a rank's part of one, is to be called, and that the store takes one.

        ``pace`` goes with it.

        Raises:
            InvalidInputError, ClosedStoreError, ReadOnlyStoreError
        """
        self._opened.writable()
        request = SaveRequest(layout.check_run(run), check_step(step), check_metrics(metrics or {}), pace=pace)
        if part is None:
            return request
        check_part(part)
        return dataclasses.replace(
            request, rank=part.rank, world_size=part.world_size, save_id=SaveId(bytes.fromhex(part.save_id))
        )

    def place(self, run: str, generation: int | None, before: SaveId | None = None) -> Place:
        """Return where on its line a checkpoint goes.

        With ``before``, its save id, it is one of several ranks, of which others may be further than this one.

        Raises:
            InvalidInputError: nobody opened that generation.
        """
        if generation is not None:
            self._check_generation(run, generation)
        present = read_line(self._opened.tier, run).generation if generation is None else generation
        return Place(present, self._newest_before(run, present, before))

    def _check_generation(self, run: str, generation: int) -> None:
        """Refuse a generation without a head record: a checkpoint of it would hide which one is newest."""
        if type(generation) is not int or generation not in (1, *self._opened.tier.manifests.heads(run)):
            raise InvalidInputError(
                f"generation {generation!r} of run {run!r} was never opened; see begin_generation()"
            )

    def _newest_before(self, run: str, generation: int, before: SaveId | None) -> CheckpointRef | None:
        newest = self._opened.nvme.manifests.newest(run, generation, before)
        if newest is None:
            head = self._opened.tier.manifests.read_head(run, generation)
            return head[0].parent if head is not None else None
        return newest

    def background(
        self, run: str, config: CaptureConfig, generation: Callable[[], int], session: Session | None = None
    ) -> Background:
        """Return what saves states of a run in the background; :class:`asymcheck.Checkpointer` keeps it for you.

        ``generation`` is asked when a checkpoint is all but committed; of the ranks of ``session``, on rank 0.
        """
        from asymcheck.pipeline.background import Background

        tier = self._opened.writable()
        layout.check_run(run)

        def placing(capture: Capture) -> Place:
            return self.place(run, generation(), None if session is None else capture.request.save_id)

        background = Background(tier, self._opened.catalog(), self._opened.encoder, placing, run, config, session)
        self._backgrounds.append(background)
        background.on_close = self._forget
        return background

    def _forget(self, background: Background) -> None:
        if background in self._backgrounds:
            self._backgrounds.remove(background)

    def pruner(self, run: str, retention: Retention) -> Pruner:
        """Return what deletes the checkpoints of a run that ``retention`` does not keep.

        :class:`asymcheck.Checkpointer` keeps it for you; :meth:`Store.prune` does it once.

        Raises:
            InvalidInputError: that is no retention.
        """
        tier = self._opened.writable()
        if not isinstance(retention, Retention):
            raise InvalidInputError(f"retention {retention!r:.100}: give asymcheck.Retention(keep_last=…)")
        return Pruner(tier, self._opened.catalog(), layout.check_run(run), retention)

    def fence(self) -> None:
        """Wait until the states that are saved in the background may change: one may be what is filled."""
        for background in tuple(self._backgrounds):
            background.fence()

    def settle(self) -> None:
        """Wait until everything that is being saved in the background is durable, or lost."""
        for background in tuple(self._backgrounds):
            background.wait("nvme")

    def close(self) -> None:
        """End saving in the background, when everything begun is durable, or lost."""
        while self._backgrounds:
            self._backgrounds.pop().close()

    @contextlib.contextmanager
    def adopting(
        self, ring_folder: str | os.PathLike[str] | None = None, *, run: str | None = None
    ) -> Iterator[list[Adopted]]:
        """Commit the checkpoints of this store that killed processes left complete in memory.

        What is restored in the ``with`` block is read from that memory as far as it lies there, which goes after it.
        What is left of ``run``, which is to go on, comes first, and is waited for while another process takes it up.

        Raises:
            LockTimeoutError: that process does not come to an end; the message names it.
            StorageError: the device refused; what was left stays there.
        """
        from asymcheck.pipeline.adopt import adopting

        tier = self._opened.writable()

        def placing(header: ManifestHeader) -> Place:
            before = header.ref.save_id if header.world_size > 1 else None
            return self.place(header.run, header.ref.generation, before)

        with contextlib.ExitStack() as held:
            with timed("adopt"):
                adopted, packs = held.enter_context(
                    adopting(
                        tier, self._opened.catalog, self._opened.encoder, ring_folder_of(ring_folder), placing, run
                    )
                )
            self._opened.in_memory = packs
            # Before their memory is given back.
            held.callback(self._opened.in_memory.clear)
            yield adopted

    def load_captured(
        self, ref: CheckpointRef, captured: Manifest, payload: Callable[[Digest], memoryview], *, into: object
    ) -> Checkpoint:
        """Fill a state with a checkpoint that lies in memory; ``payload`` gives the bytes of a partition.

        Raises:
            StateMismatchError: it does not fit; nothing was overwritten.
            DigestMismatchError: the memory has changed; tensors may have been overwritten.
        """
        from asymcheck.recovery.load import load_captured

        load_captured(captured, payload, into)
        header = captured.header
        return Checkpoint.of(header.run, ref, header.world_size, header.metrics, captured.total_bytes)

    def line(self, run: str) -> Callable[[CheckpointRef], bool]:
        """Return what tells whether a checkpoint of a run leads to the present.

        Raises:
            HeadRecordError: that cannot be known.
        """
        return read_line(self._opened.tier, run).__contains__

    def restorable(self, run: str, step: int | None, skipped: list[str]) -> Iterator[CheckpointRef]:
        """Yield the consistent checkpoints of a run, or of a step of it, in the order in which to try them.

        Appends to ``skipped`` why others are passed over.

        Raises:
            CheckpointNotFoundError, HeadRecordError, UnsupportedFormatError: as :meth:`asymcheck.Store.load`.
        """
        with self._opened.source() as source:
            for resolved in resolve_each(source, candidates(source, run, step), skipped):
                resolved.sources.close()
                yield resolved.ref

    def restorable_parts(self, run: str, step: int | None, ranks: Sequence[int]) -> dict[CheckpointRef, bool]:
        """Return the checkpoints of a run, or of a step of it, and of each whether these ranks all have a part of it.

        Raises:
            HeadRecordError: which one is newest cannot be known.
        """
        with self._opened.source() as source:
            try:
                found = candidates(source, run, step)
            except CheckpointNotFoundError:
                return {}
        return {
            one.ref: bool(one.world_size) and all(one.has(rank % one.world_size) for rank in ranks) for one in found
        }

    def restore_part(self, ref: CheckpointRef, *, into: object, run: str, rank: int) -> Checkpoint:
        """Fill ``into`` with what ``rank`` saved of a checkpoint: from this store, or from the location behind it.

        For jobs whose machines have a store each. It is right when all ranks do so with the same ``ref``.

        Raises:
            InconsistentCheckpointError, FormatError, RecoveryError, StorageError: it is not whole in any of them.
            StateMismatchError, RefusedStateError: the state does not fit, or an object refused its own.
        """
        from asymcheck.recovery.load import Wanted, load_part

        self.fence()
        wanted = Wanted("*", into, check_device(None), rank=check_rank(rank), grows=True)
        problems: list[str] = []
        # What lies here takes no question to a location that is far.
        near, far = self._opened.nvme, self._opened.far
        tiers: list[ReadTier] = [near, *([] if far is None else [SpanningTier(near, far)])]
        with timed("restore", 0, lambda: {"run": run}):
            for tier in tiers:
                try:
                    loaded = load_part(self._opened.with_memory(tier), run, ref, wanted)
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

    def warn_of_empty_remote(self) -> None:
        """Say that there is nothing in the location behind the store, for a training that begins from nothing.

        Warns:
            UnreachableRemoteWarning: nothing is there, which can be a mount point without its file system.
        """
        if self._opened.far is not None and self._opened.far.tier() is None:
            warn_user(
                f"nothing is restored: nothing was pushed to {self._opened.far.name} yet. If something was, stop this "
                "training and see whether the name is right and the file system is mounted",
                UnreachableRemoteWarning,
            )

    def heads(self, run: str, *, behind: bool = False) -> list[HeadRecord]:
        """Return the head records of a run, oldest first; one that is damaged is not among them.

        With those ``behind`` this store, in the location that was given as ``remote``, if that is of the same training.

        Raises:
            RemoteUnreachableError: nobody knows what that has.
        """
        own = intact_heads(self._opened.tier, run, self._opened.tier.manifests.heads(layout.check_run(run)))
        if behind and self._opened.far is not None:
            own += self._heads_behind(self._opened.far, run, {head.generation: head for head in own})
        return sorted(own, key=lambda head: head.generation)

    def _heads_behind(self, far: Far, run: str, own: Mapping[int, HeadRecord]) -> list[HeadRecord]:
        """Return those head records that only the location has."""

        def ask(there: RemoteTier) -> list[HeadRecord]:
            numbers = there.manifests.heads(run)
            newest_common = [number for number in numbers if number in own][-1:]
            return intact_heads(there, run, [*newest_common, *(number for number in numbers if number not in own)])

        found = far.ask(ask)
        pairs = [(head, own[head.generation]) for head in found if head.generation in own]
        if not all(one.is_same(other) for one, other in pairs):
            return []
        return [head for head in found if head.generation not in own]

    def take_head(self, head: HeadRecord) -> None:
        """Begin a generation as the store of another machine of the same job has.

        Raises:
            HeadRecordError: it is another one here.
        """
        self._opened.writable().manifests.take_head(head)

    def take_heads_behind(self, run: str, *, is_new: bool) -> None:
        """Have the head records that the location behind the store has, before a generation is begun.

        Their numbers are taken, and the line may lead through generations that only it knows. Nothing is taken when the
        generation ``is_new``, begun from nothing, and checkpoints are there: they are of another training.
        """
        # Once is enough: what comes there while the store is open is of other trainings, and a rollback must not wait.
        if self._opened.far is None or run in self._has_taken_heads:
            return
        with contextlib.suppress(RemoteUnreachableError):
            if not (is_new and self._opened.far.ask(lambda there: there.manifests.refs(run))):
                for head in self.heads(run, behind=True):
                    self.take_head(head)
                self._has_taken_heads.add(run)
