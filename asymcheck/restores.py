"""What a store does to read checkpoints: into new tensors, into existing ones, and into other formats."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asymcheck.arguments import check_device, check_glob, check_rank, check_which
from asymcheck.config import DEFAULT_RUN, CaptureConfig
from asymcheck.errors import (
    UNKNOWING,
    CheckpointNotFoundError,
    FormatError,
    InconsistentCheckpointError,
    RecoveryError,
    RefusedStateError,
    RemoteCopyWarning,
    SkippedCheckpointWarning,
    StorageError,
    UnsupportedFormatError,
    warn_user,
)
from asymcheck.events import timed
from asymcheck.format import layout
from asymcheck.recovery.describe import describe_loaded
from asymcheck.recovery.resolve import Resolved, candidates
from asymcheck.remotes import Remotes
from asymcheck.tiers.reading import ReadTier
from asymcheck.tiers.spanning import SpanningTier
from asymcheck.types import Checkpoint, CheckpointRef, Progress, Restored

if TYPE_CHECKING:
    import torch

    from asymcheck.recovery.load import Finish, Loaded
    from asymcheck.recovery.stream import Sink


class Restores(Remotes):
    """An opened store, as far as checkpoints are read from it; :class:`asymcheck.Store` adds the rest."""

    def load(
        self,
        step: int | str | None = None,
        *,
        tensors: str = "*",
        into: object = None,
        device: str | torch.device | None = None,
        run: str = DEFAULT_RUN,
        rank: int | None = None,
    ) -> object:
        """Return a stored state, every byte verified: that of ``step``, or the newest consistent one on the line.

        A checkpoint that several ranks saved can be read by any number of them. Every tensor of ``into`` gets its bytes
        from whatever parts were saved, so that a ``DTensor`` may lie on another mesh, with other placements; what is
        not cut (plain values, states of random number generators) is that of ``rank``, taken modulo the number of
        ranks that saved. Without ``into`` and ``rank`` the states of all ranks are merged: mappings by key, sequences
        of one length by item, parts put together to whole tensors; what differs from rank to rank is rank 0's.

        Args:
            step: which one; None for the newest. ``"save:"`` and the first digits of a save id name one of several
                saves of a step.
            tensors: a glob of dotted names, for instance ``"model.*"``; only what matches is read and returned.
            into: a state whose tensors are filled in place, without a second copy in memory; objects in it get
                ``load_state_dict``. It may be a part
                of what is stored, for instance ``{"model": model}``.
            device: where new tensors are made; CPU by default.
            run: whose checkpoint.
            rank: which rank of the present job reads; 0 by default with ``into``. Without it: return what this rank
                saved, its parts of whole tensors as :class:`asymcheck.TensorShard`.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError, StateMismatchError, PartialRestoreError,
            HeadRecordError

        Warns:
            SkippedCheckpointWarning: a newer checkpoint was passed over.
        """
        restored = self.restore(step, tensors=tensors, into=into, device=device, run=run, rank=rank)
        for reason in restored.skipped:
            warn_user(f"run {run!r}: passed over {reason}", SkippedCheckpointWarning)
        return restored.state

    def restore(
        self,
        step: int | str | None = None,
        *,
        tensors: str = "*",
        into: object = None,
        device: str | torch.device | None = None,
        run: str = DEFAULT_RUN,
        rank: int | None = None,
        fall_back: bool = False,
        grows: bool = False,
    ) -> Restored:
        """Do as :meth:`load` does, and also say which checkpoint was read and what was passed over.

        An ``into`` that ``grows`` gets back what the mappings inside it lack: what a training has put there meanwhile.

        With ``fall_back``, a newest checkpoint whose damage shows only when some of ``into`` is overwritten gives way
        to the next older one, which overwrites it again; without, that is a PartialRestoreError.
        """
        from asymcheck.recovery.load import Wanted, load

        self._tier.check_usable()
        layout.check_run(run)
        step = None if step is None else check_which(step)
        check_glob(tensors)
        wanted = Wanted(tensors, into, check_device(device), fall_back, check_rank(rank), grows)
        if into is not None:
            self._fence()
        with timed("restore", 0, lambda: {"run": run}), self._source() as source:
            return self._restored(load(source, run, step, wanted), step)

    def restore_part(self, ref: CheckpointRef, *, into: object, run: str, rank: int) -> Checkpoint:
        """Fill ``into`` with what ``rank`` saved of a checkpoint: from this store, or from the location behind it.

        For jobs whose machines have a store each. It is right when all ranks do so with the same ``ref``.

        Raises:
            InconsistentCheckpointError, FormatError, RecoveryError, StorageError: it is not whole in any of them.
            StateMismatchError, RefusedStateError: the state does not fit, or an object refused its own.
        """
        from asymcheck.recovery.load import Wanted, load_part

        self._fence()
        wanted = Wanted("*", into, check_device(None), rank=check_rank(rank), grows=True)
        problems: list[str] = []
        # What lies here takes no question to a location that is far.
        tiers: list[ReadTier] = [self._nvme, *([] if self._far is None else [SpanningTier(self._nvme, self._far)])]
        with timed("restore", 0, lambda: {"run": run}):
            for tier in tiers:
                try:
                    loaded = load_part(self._with_memory(tier), run, ref, wanted)
                except (UnsupportedFormatError, RefusedStateError, *UNKNOWING):
                    raise
                except (FormatError, RecoveryError, StorageError) as error:
                    problems.append(str(error))
                    continue
                if self._far is not None and tier is not self._nvme:
                    what = f"{ref}: what rank {rank} needs was read from {self._far.name}"
                    warn_user(f"{what}, for it is not whole on this machine: {problems[0]}", RemoteCopyWarning)
                return describe_loaded(tier, loaded, is_newest=True)
        raise InconsistentCheckpointError(f"{ref} cannot be restored on this machine:", problems)

    def restorable_parts(self, run: str, step: int | None, ranks: Sequence[int]) -> dict[CheckpointRef, bool]:
        """Return the checkpoints of a run, or of a step of it, and of each whether these ranks all have a part of it.

        Raises:
            HeadRecordError: which one is newest cannot be known.
        """
        with self._source() as source:
            try:
                found = candidates(source, run, step)
            except CheckpointNotFoundError:
                return {}
        return {
            one.ref: bool(one.world_size) and all(one.has(rank % one.world_size) for rank in ranks) for one in found
        }

    def read(
        self,
        read: Callable[[ReadTier, Resolved], Finish],
        step: int | str | None = None,
        *,
        run: str = DEFAULT_RUN,
    ) -> Restored:
        """Have ``read`` make what it likes of a consistent checkpoint, for interfaces that this class does not have.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError: as :meth:`load`.
        """
        from asymcheck.recovery.load import read_first

        self._tier.check_usable()
        layout.check_run(run)
        step = None if step is None else check_which(step)
        with timed("restore", 0, lambda: {"run": run}), self._source() as source:
            return self._restored(read_first(source, run, step, partial(read, source)), step)

    def stream(
        self,
        sink: Sink,
        step: int | str | None = None,
        *,
        tensors: str = "*",
        run: str = DEFAULT_RUN,
        rank: int | None = None,
        progress: Progress | None = None,
    ) -> Restored:
        """Hand a checkpoint to ``sink`` as it is read, every byte verified, in bounded memory however large it is.

        Of several ranks that is what they have together, with whole tensors, or what ``rank`` saved. The state of the
        result is what ``sink.finish()`` returned.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError: as :meth:`load`.
        """
        from asymcheck.recovery.stream import stream

        self._tier.check_usable()
        layout.check_run(run)
        step = None if step is None else check_which(step)
        check_glob(tensors)
        with self._source() as source:
            return self._restored(stream(source, run, step, tensors, sink, progress, rank=check_rank(rank)), step)

    def stream_from_memory(
        self,
        sink: Sink,
        step: int | str | None = None,
        *,
        tensors: str = "*",
        run: str = DEFAULT_RUN,
        ring_folder: str | os.PathLike[str] = CaptureConfig.ring_folder,
        progress: Progress | None = None,
    ) -> Restored:
        """Do as :meth:`stream` does with what killed processes left complete in memory, durable or not.

        Only the rings in ``ring_folder`` are read, and they are left as they are. A damaged capture gives way to an
        older one, unless a step was named.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError: as :meth:`stream`, of what lies in memory.
            LockTimeoutError: the ring is in use, and to read it would race with its process.
        """
        from asymcheck.recovery.ring_stream import RingWanted, stream_from_rings

        self._tier.check_usable()
        layout.check_run(run)
        step = None if step is None else check_which(step)
        check_glob(tensors)
        loaded = stream_from_rings(self._tier, Path(ring_folder), RingWanted(run, step, tensors), sink, progress)
        return self._restored(loaded, step=loaded.ref.step)

    def _restored(self, loaded: Loaded, step: int | str | None) -> Restored:
        return Restored(loaded.state, describe_loaded(self._tier, loaded, is_newest=step is None), loaded.skipped)
