"""The services that a Checkpointer needs of a store, beside those that it offers to everybody."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from asymcheck.commit.save_request import LineagePosition, SaveRequest
from asymcheck.config import CaptureConfig, ring_folder_of
from asymcheck.errors import InvalidInputError, RemoteUnreachableError
from asymcheck.events import timed
from asymcheck.format import layout
from asymcheck.format.manifest import ManifestHeader
from asymcheck.format.record import HeadRecord
from asymcheck.opened_store import OpenedStore
from asymcheck.policies.interval import TrainingPace
from asymcheck.restore.lineage import intact_heads, read_line
from asymcheck.storage.fallback_tier import RemoteFallback
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.remote import RemoteTier
from asymcheck.types import Part, SaveId
from asymcheck.validation import check_metrics, check_part, check_step

if TYPE_CHECKING:
    from asymcheck.capture.background_saver import BackgroundSaver
    from asymcheck.capture.inflight import Capture
    from asymcheck.commit.orphan_recovery import RecoveredCapture
    from asymcheck.distributed import Session


def place(tier: NvmeTier, run: str, generation: int | None, before: SaveId | None = None) -> LineagePosition:
    """Return where on its line a checkpoint goes: in ``generation``, or in the present one.

    With ``before``, its save id, it is one of several ranks, of which others may be further than this one.

    Raises:
        InvalidInputError: nobody opened that generation, and a checkpoint of it would hide which one is newest.
    """
    if generation is None:
        generation = read_line(tier, run).generation
    elif type(generation) is not int or generation not in (1, *tier.manifests.heads(run)):
        raise InvalidInputError(f"generation {generation!r} of run {run!r} was never opened; see begin_generation()")
    parent = tier.manifests.newest(run, generation, before)
    if parent is None:
        head = tier.manifests.read_head(run, generation)
        parent = None if head is None else head[0].parent
    return LineagePosition(generation, parent)


class TrainingServices:
    """Saves to an opened store in the background, and keeps its line of training."""

    def __init__(self, opened: OpenedStore) -> None:
        """Serve one opened store."""
        self.opened = opened
        """The opened store."""
        self._backgrounds: set[BackgroundSaver] = set()
        # Of these runs the location behind the store was asked for head records.
        self._has_taken_heads: set[str] = set()

    def request(
        self,
        run: str,
        step: int,
        metrics: Mapping[str, float] | None,
        part: Part | None = None,
        pace: TrainingPace | None = None,
    ) -> SaveRequest:
        """Check what a checkpoint, or a rank's part of one, is to be called, and that the store takes one.

        ``pace`` goes with it.

        Raises:
            InvalidInputError, ClosedStoreError, ReadOnlyStoreError
        """
        self.opened.writable()
        request = SaveRequest(layout.check_run(run), check_step(step), check_metrics(metrics or {}), pace=pace)
        if part is None:
            return request
        check_part(part)
        return dataclasses.replace(
            request, rank=part.rank, world_size=part.world_size, save_id=SaveId(bytes.fromhex(part.save_id))
        )

    def background(
        self, run: str, config: CaptureConfig, generation: Callable[[], int], session: Session | None = None
    ) -> BackgroundSaver:
        """Return what saves states of a run in the background; :class:`asymcheck.Checkpointer` keeps it for you.

        ``generation`` is asked when a checkpoint is all but committed; of the ranks of ``session``, on rank 0.
        """
        from asymcheck.capture.background_saver import BackgroundSaver

        tier = self.opened.writable()
        layout.check_run(run)

        def placing(capture: Capture) -> LineagePosition:
            return place(tier, run, generation(), None if session is None else capture.request.save_id)

        background = BackgroundSaver(tier, self.opened.catalog(), self.opened.encoder, placing, run, config, session)
        self._backgrounds.add(background)
        background.on_close = self._backgrounds.discard
        return background

    def fence(self) -> None:
        """Wait until the states that are saved in the background may change: one may be what is filled."""
        for background in tuple(self._backgrounds):
            background.fence()

    def settle(self) -> None:
        """Wait until everything that is being saved in the background is durable, or lost."""
        for background in tuple(self._backgrounds):
            background.wait("local")

    def close(self) -> None:
        """End saving in the background, when everything begun is durable, or lost."""
        while self._backgrounds:
            self._backgrounds.pop().close()

    @contextlib.contextmanager
    def adopting(
        self, ring_folder: str | os.PathLike[str] | None = None, *, run: str | None = None
    ) -> Iterator[list[RecoveredCapture]]:
        """Commit the checkpoints of this store that killed processes left complete in memory.

        A restore in the ``with`` block reads from that memory as far as possible. The memory is released after the
        block. Captures of ``run``, which is about to resume, come first. If another process is recovering them, this
        waits.

        Raises:
            LockTimeoutError: that process does not come to an end; the message names it.
            StorageError: the device refused; what was left stays there.
        """
        from asymcheck.commit.orphan_recovery import adopting

        tier = self.opened.writable()

        def placing(header: ManifestHeader) -> LineagePosition:
            before = header.ref.save_id if header.world_size > 1 else None
            return place(tier, header.run, header.ref.generation, before)

        with contextlib.ExitStack() as held:
            with timed("adopt"):
                adopted, packs = held.enter_context(
                    adopting(tier, self.opened.catalog, self.opened.encoder, ring_folder_of(ring_folder), placing, run)
                )
            self.opened.in_memory = packs
            # Before their memory is given back.
            held.callback(self.opened.in_memory.clear)
            yield adopted

    def heads(self, run: str, *, behind: bool = False) -> list[HeadRecord]:
        """Return the head records of a run, oldest first; one that is damaged is not among them.

        With those ``behind`` this store, in the location that was given as ``remote``, if that is of the same training.

        Raises:
            RemoteUnreachableError: nobody knows what that has.
        """
        own = intact_heads(self.opened.tier, run, self.opened.tier.manifests.heads(layout.check_run(run)))
        if behind and self.opened.far is not None:
            own += self._heads_behind(self.opened.far, run, {head.generation: head for head in own})
        return sorted(own, key=lambda head: head.generation)

    def _heads_behind(self, far: RemoteFallback, run: str, own: Mapping[int, HeadRecord]) -> list[HeadRecord]:
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

    def take_heads_behind(self, run: str, *, is_new: bool) -> None:
        """Have the head records that the location behind the store has, before a generation is begun.

        Their numbers are taken, and the line may lead through generations that only it knows. Nothing is taken when the
        generation ``is_new``, begun from nothing, and checkpoints are there: they are of another training.
        """
        # Once is enough: what comes there while the store is open is of other trainings, and a rollback must not wait.
        if self.opened.far is None or run in self._has_taken_heads:
            return
        with contextlib.suppress(RemoteUnreachableError):
            if not (is_new and self.opened.far.ask(lambda there: there.manifests.refs(run))):
                for head in self.heads(run, behind=True):
                    self.opened.writable().manifests.take_head(head)
                self._has_taken_heads.add(run)
