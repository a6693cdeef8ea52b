"""What a store does for saving in the background: it places captures on their line, and takes up what was left."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from asymcheck.arguments import check_metrics, check_part, check_step
from asymcheck.config import CaptureConfig
from asymcheck.errors import InvalidInputError, ReadOnlyStoreError, StepOrderWarning, warn_user
from asymcheck.events import timed
from asymcheck.format import layout
from asymcheck.format.manifest import Manifest, ManifestHeader
from asymcheck.pipeline.encoder import Encoder
from asymcheck.pipeline.request import Place, SaveRequest
from asymcheck.policies.interval import Pace
from asymcheck.policies.retention import Retention
from asymcheck.pruning import Pruner
from asymcheck.recovery.line import read_line
from asymcheck.recovery.rebuild import rebuild
from asymcheck.reports import Reports
from asymcheck.tiers.dram_ring import RingPack
from asymcheck.tiers.nvme import Catalog, NvmeTier, Transaction
from asymcheck.tiers.reading import ReadTier
from asymcheck.types import Checkpoint, CheckpointRef, Digest, Part, SaveId

if TYPE_CHECKING:
    from asymcheck.pipeline.adopt import Adopted
    from asymcheck.pipeline.background import Background
    from asymcheck.pipeline.capture import Capture
    from asymcheck.ranks import Session


class Captures(Reports):
    """An opened store, as far as background saving needs it; :class:`asymcheck.Store` adds the rest."""

    def __init__(self, tier: ReadTier) -> None:
        """Wrap an opened tier; use :meth:`Store.open`."""
        super().__init__(tier)
        self._backgrounds: list[Background] = []
        config = tier.config
        self._encoder = Encoder(config.compression, "nvme")
        self._at_hand: list[RingPack] = []

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
        self._writable()
        request = SaveRequest(layout.check_run(run), check_step(step), check_metrics(metrics or {}), pace=pace)
        if part is None:
            return request
        check_part(part)
        return dataclasses.replace(
            request, rank=part.rank, world_size=part.world_size, save_id=SaveId(bytes.fromhex(part.save_id))
        )

    def _place(self, run: str, generation: int | None, before: SaveId | None = None) -> Place:
        """Return where on its line a checkpoint goes.

        With ``before``, its save id, it is one of several ranks, of which others may be further than this one.

        Raises:
            InvalidInputError: nobody opened that generation.
        """
        if generation is not None:
            self._check_generation(run, generation)
        present = read_line(self._tier, run).generation if generation is None else generation
        return Place(present, self._newest_before(run, present, before))

    def _check_generation(self, run: str, generation: int) -> None:
        """Refuse a generation without a head record: a checkpoint of it would hide which one is newest."""
        if type(generation) is not int or generation not in (1, *self._tier.manifests.heads(run)):
            raise InvalidInputError(
                f"generation {generation!r} of run {run!r} was never opened; see begin_generation()"
            )

    def _newest_before(self, run: str, generation: int, before: SaveId | None) -> CheckpointRef | None:
        newest = self._nvme.manifests.newest(run, generation, before)
        if newest is None:
            head = self._tier.manifests.read_head(run, generation)
            return head[0].parent if head is not None else None
        return newest

    def line(self, run: str) -> Callable[[CheckpointRef], bool]:
        """Return what tells whether a checkpoint of a run leads to the present.

        Raises:
            HeadRecordError: that cannot be known.
        """
        return read_line(self._tier, run).__contains__

    def background(
        self, run: str, config: CaptureConfig, generation: Callable[[], int], session: Session | None = None
    ) -> Background:
        """Return what saves states of a run in the background; :class:`asymcheck.Checkpointer` keeps it for you.

        ``generation`` is asked when a checkpoint is all but committed; of the ranks of ``session``, on rank 0.
        """
        from asymcheck.pipeline.background import Background

        tier = self._writable()
        layout.check_run(run)

        def placing(capture: Capture) -> Place:
            return self._place(run, generation(), None if session is None else capture.request.save_id)

        background = Background(tier, self._catalog(), self._encoder, placing, run, config, session)
        self._backgrounds.append(background)
        background.on_close = self._forget
        return background

    def pruner(self, run: str, retention: Retention) -> Pruner:
        """Return what deletes the checkpoints of a run that ``retention`` does not keep.

        :class:`asymcheck.Checkpointer` keeps it for you; :meth:`Store.prune` does it once.

        Raises:
            InvalidInputError: that is no retention.
        """
        tier = self._writable()
        if not isinstance(retention, Retention):
            raise InvalidInputError(f"retention {retention!r:.100}: give asymcheck.Retention(keep_last=…)")
        return Pruner(tier, self._catalog(), layout.check_run(run), retention)

    def _forget(self, background: Background) -> None:
        if background in self._backgrounds:
            self._backgrounds.remove(background)

    def _fence(self) -> None:
        """Wait until the states that are saved in the background may change: one may be what is filled."""
        for background in tuple(self._backgrounds):
            background.fence()

    def settle(self) -> None:
        """Wait until everything that is being saved in the background is durable, or lost."""
        for background in tuple(self._backgrounds):
            background.wait("nvme")

    def finish(self) -> None:
        """End saving in the background, when everything begun is durable, or lost."""
        while self._backgrounds:
            self._backgrounds.pop().close()

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
        return Checkpoint(
            run=header.run,
            step=ref.step,
            generation=ref.generation,
            save_id=ref.save_id.hex(),
            world_size=header.world_size,
            complete=True,
            on_line=True,
            created_ns=int.from_bytes(ref.save_id[:8], "big"),
            state_bytes=captured.total_bytes,
            metrics=header.metrics,
        )

    @contextlib.contextmanager
    def adopting(
        self, ring_folder: str | os.PathLike[str] = CaptureConfig.ring_folder, *, run: str | None = None
    ) -> Iterator[list[Adopted]]:
        """Commit the checkpoints of this store that killed processes left complete in memory.

        What is restored in the ``with`` block is read from that memory as far as it lies there, which goes after it.
        What is left of ``run``, which is to go on, comes first, and is waited for while another process takes it up.

        Raises:
            LockTimeoutError: that process does not come to an end; the message names it.
            StorageError: the device refused; what was left stays there.
        """
        from asymcheck.pipeline.adopt import adopting

        tier = self._writable()

        def placing(header: ManifestHeader) -> Place:
            before = header.ref.save_id if header.world_size > 1 else None
            return self._place(header.run, header.ref.generation, before)

        with contextlib.ExitStack() as held:
            with timed("adopt"):
                taken = held.enter_context(
                    adopting(tier, self._catalog(), self._encoder, Path(ring_folder), placing, run)
                )
            self._at_hand = taken.packs
            # Before their memory is given back.
            held.callback(self._at_hand.clear)
            yield taken.adopted

    def _catalog(self) -> Catalog:
        return self._nvme.open_catalog(self._populate)

    def _populate(self, transaction: Transaction) -> None:
        rebuild(self._nvme, transaction)

    def _writable(self) -> NvmeTier:
        """Return the tier, to be written to.

        Raises:
            ReadOnlyStoreError: it was opened to be read only, or lies in a remote location.
        """
        if not isinstance(self._tier, NvmeTier):
            raise ReadOnlyStoreError(
                f"store {self.location} can only be read there; save on a local drive, and push from that"
            )
        self._tier.check_writable()
        return self._tier


def warn_of_order(run: str, newest: int, step: int) -> None:
    """Warn of a step that is older than what its line has."""
    warn_user(
        f"run {run!r} already has step {newest}, so step {step} will not be its newest checkpoint; "
        "to train on from an earlier step, restore it with a Checkpointer first",
        StepOrderWarning,
    )
