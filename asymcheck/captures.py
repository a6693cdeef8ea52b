"""What a store does for saving in the background: it places captures on their line, and takes up what was left."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from asymcheck.arguments import check_metrics, check_step
from asymcheck.config import CaptureConfig
from asymcheck.errors import InvalidInputError, StepOrderWarning, warn_user
from asymcheck.format import layout
from asymcheck.format.manifest import ManifestHeader
from asymcheck.format.manifest_reader import decode_manifest
from asymcheck.pipeline.adopt import Adopted, adopt
from asymcheck.pipeline.background import Background
from asymcheck.pipeline.capture import Capture
from asymcheck.pipeline.request import Place, SaveRequest
from asymcheck.recovery.line import read_line
from asymcheck.recovery.load import load_captured
from asymcheck.recovery.rebuild import rebuild
from asymcheck.reports import Reports
from asymcheck.tiers.nvme import Catalog, NvmeTier, Transaction
from asymcheck.types import Checkpoint, CheckpointRef, Digest


class Captures(Reports):
    """An opened store, as far as background saving needs it; :class:`asymcheck.Store` adds the rest."""

    def __init__(self, tier: NvmeTier) -> None:
        """Wrap an opened tier; use :meth:`Store.open`."""
        super().__init__(tier)
        self._backgrounds: list[Background] = []

    def request(self, run: str, step: int, metrics: Mapping[str, float] | None) -> SaveRequest:
        """Check what a checkpoint is to be called, and that the store takes one.

        Raises:
            InvalidInputError, ClosedStoreError, ReadOnlyStoreError
        """
        self._tier.check_writable()
        return SaveRequest(layout.check_run(run), check_step(step), check_metrics(metrics or {}))

    def _place(self, run: str, generation: int | None) -> Place:
        """Return where on its line a checkpoint goes.

        Raises:
            InvalidInputError: nobody opened that generation.
        """
        if generation is not None:
            self._check_generation(run, generation)
        present = read_line(self._tier, run).generation if generation is None else generation
        return Place(present, self._newest_before(run, present))

    def _check_generation(self, run: str, generation: int) -> None:
        """Refuse a generation without a head record: a checkpoint of it would hide which one is newest."""
        if type(generation) is not int or generation not in (1, *self._tier.manifests.heads(run)):
            raise InvalidInputError(
                f"generation {generation!r} of run {run!r} was never opened; see begin_generation()"
            )

    def _newest_before(self, run: str, generation: int) -> CheckpointRef | None:
        newest = self._tier.manifests.newest(run, generation)
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

    def background(self, run: str, config: CaptureConfig, generation: Callable[[], int]) -> Background:
        """Return what saves states of a run in the background; :class:`asymcheck.Checkpointer` keeps it for you.

        ``generation`` is asked when a checkpoint is all but committed.
        """
        self._tier.check_writable()
        layout.check_run(run)

        def placing(_capture: Capture) -> Place:
            return self._place(run, generation())

        background = Background(self._tier, self._catalog(), placing, run, config)
        self._backgrounds.append(background)
        return background

    def settle(self) -> None:
        """Wait until everything that is being saved in the background is durable, or lost."""
        for background in self._backgrounds:
            background.wait("nvme")

    def finish(self) -> None:
        """End saving in the background, when everything begun is durable, or lost."""
        while self._backgrounds:
            self._backgrounds.pop().close()

    def load_captured(
        self, ref: CheckpointRef, manifest: bytes, payload: Callable[[Digest], memoryview], *, into: object
    ) -> Checkpoint:
        """Fill a state with a checkpoint that lies in memory; ``payload`` gives the bytes of a partition.

        Raises:
            StateMismatchError: it does not fit; nothing was overwritten.
            DigestMismatchError: the memory has changed; tensors may have been overwritten.
        """
        captured = decode_manifest(manifest, "manifest in memory")
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

    def adopt(self, ring_folder: str | os.PathLike[str] = CaptureConfig.ring_folder) -> list[Adopted]:
        """Commit the checkpoints of this store that killed processes left complete in memory.

        Raises:
            StorageError: the device refused; what was left stays there.
        """
        self._tier.check_writable()

        def placing(header: ManifestHeader) -> Place:
            return self._place(header.run, header.ref.generation)

        return adopt(self._tier, self._catalog(), Path(ring_folder), placing)

    def _catalog(self) -> Catalog:
        return self._tier.open_catalog(self._populate)

    def _populate(self, transaction: Transaction) -> None:
        rebuild(self._tier, transaction)


def warn_of_order(run: str, newest: int, step: int) -> None:
    """Warn of a step that is older than what its line has."""
    warn_user(
        f"run {run!r} already has step {newest}, so step {step} will not be its newest checkpoint; "
        "to train on from an earlier step, restore it with a Checkpointer first",
        StepOrderWarning,
    )
