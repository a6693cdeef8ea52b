"""How the Checkpointer of one process goes back; :class:`asymcheck.together.Together` does it for several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asymcheck.errors import CheckpointNotFoundError
from asymcheck.pipeline.background import Background
from asymcheck.store import Store
from asymcheck.together import Returned


def restored(
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


def rolled_back(store: Store, run: str, background: Background | None, into: object) -> Returned:
    """Go back to the newest checkpoint on the line that is complete in memory.

    Raises:
        CheckpointNotFoundError: none is.
        StateMismatchError, DigestMismatchError: as :meth:`Store.load_captured`.
    """
    on_line = store.line(run)
    found = None if background is None else background.newest_in_ring(on_line)
    if found is None:
        raise CheckpointNotFoundError(f"no checkpoint of run {run!r} is in memory; restore() reads the store")
    checkpoint = store.load_captured(*found, into=into)
    return Returned(checkpoint, store.begin_generation(checkpoint, run=run), ())
