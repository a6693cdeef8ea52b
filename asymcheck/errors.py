"""Every error that asymcheck raises, grouped by what a handler would do about it.

::

    AsymcheckError
    ├── InvalidInputError              the caller passed something that cannot be used; nothing was changed
    │   └── UnsupportedValueError, StateMismatchError, ForeignFileError
    ├── NotFoundError                  a requested object does not exist
    │   └── StoreNotFoundError, CheckpointNotFoundError
    ├── FormatError                    stored bytes are not what the format says
    │   ├── BadMagicError, ChecksumError, DigestMismatchError, StructureError, TruncatedError
    │   ├── LimitError, BaseDamagedError
    │   └── UnsupportedFormatError         intact, but of a kind that this program does not know
    │       └── UnsupportedVersionError, UnsupportedFeatureError, UnsupportedCodecError
    ├── RecoveryError                  no intact copy of something that is needed
    │   ├── MissingPartitionError, DamagedPartitionError, InconsistentCheckpointError, HeadRecordError
    │   └── PartialRestoreError            tensors were overwritten before the failure
    │       └── RefusedStateError              not damage: an object refused its state
    ├── TornCaptureError               the state changed while it was captured; nothing was committed
    ├── LostCheckpointError            checkpoints of the background could not be stored
    ├── PruneError                     old checkpoints could not be removed; none was lost
    ├── RanksError                     ranks that save or restore together did not come to an end together
    │   └── RanksMissingError, RankFailedError
    ├── GivenUpError                   an upload was ended before it was done; nothing was committed by it
    └── StorageError                   the place where bytes are stored refused
        ├── OutOfSpaceError, UnsupportedFileSystemError, ReadOnlyStoreError, LockTimeoutError
        └── TooManyFilesError, RemoteUnreachableError, CatalogError, ClosedStoreError, ForkedStoreError

Warnings: :class:`AbandonedCheckpointsWarning`, :class:`SkippedCheckpointWarning`, :class:`StepOrderWarning`,
:class:`CaptureWarning`, :class:`StaleStateWarning`, :class:`LostCheckpointWarning`, :class:`PruneWarning`,
:class:`UnreachableRemoteWarning`, :class:`RemoteCopyWarning`, :class:`SilentDivergenceWarning`.

``kind`` is a stable machine-readable code; codes are only ever added.
"""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Sequence
from typing import ClassVar


class AsymcheckError(Exception):
    """Root of all errors of this package."""

    kind: ClassVar[str] = "error"
    """A stable code of the class, for programs."""

    def __init_subclass__(cls, *, kind: str | None = None) -> None:
        """Give a class its code; without one it has that of its base."""
        super().__init_subclass__()
        cls.kind = kind or cls.kind


class InvalidInputError(AsymcheckError, kind="invalid-input"):
    """An argument cannot be used; nothing was changed."""


class UnsupportedValueError(InvalidInputError, kind="unsupported-value"):
    """A leaf of the state cannot be stored; raised before anything is written."""

    def __init__(self, path: str, reason: str) -> None:
        """Name the leaf by its dotted ``path`` in the state."""
        super().__init__(f"cannot store state at {path or '<root>'}: {reason}")
        self.path = path
        """The dotted name of the value in the state."""
        self.reason = reason
        """Why the value cannot be stored."""


class StateMismatchError(InvalidInputError, kind="state-mismatch"):
    """The state given to fill does not fit; raised before anything is overwritten, unless its tensors share memory."""


class ForeignFileError(InvalidInputError, kind="foreign-file"):
    """A file or folder of another program (safetensors, Hugging Face, torch) does not follow the rules of its format.

    No :class:`FormatError`: those are about the store's own bytes, and mean damage to look for in the store.
    """

    def __init__(self, path: str | os.PathLike[str], problem: str, remedy: str) -> None:
        """Name the file, what is wrong with it, and what to do."""
        super().__init__(f"{os.fspath(path)}: {problem}; {remedy}")
        self.path = os.fspath(path)
        """The file or folder."""
        self.problem = problem
        """The rule that the file breaks."""
        self.remedy = remedy
        """The advice for the user."""


class NotFoundError(AsymcheckError, kind="not-found"):
    """A requested object does not exist."""


class StoreNotFoundError(NotFoundError, kind="store-not-found"):
    """No store is at the location; ``is_empty`` says that nothing else is there, either."""

    is_empty: bool = True
    """Whether the location holds nothing else."""


class CheckpointNotFoundError(NotFoundError, kind="checkpoint-not-found"):
    """The store has no such checkpoint."""


class FormatError(AsymcheckError, kind="format"):
    """Bytes do not follow the store format (SPEC.md)."""


class BadMagicError(FormatError, kind="bad-magic"):
    """A structure does not begin with its magic."""


class ChecksumError(FormatError, kind="bad-checksum"):
    """A checksum of a header, an index, a record or a file name does not match."""


class DigestMismatchError(FormatError, kind="digest-mismatch"):
    """The plain bytes of a partition do not have the digest that names it."""


class StructureError(FormatError, kind="bad-structure"):
    """Fields contradict each other or the format's rules."""


class TruncatedError(FormatError, kind="truncated"):
    """Bytes end before the structure does."""


class LimitError(FormatError, kind="limit-exceeded"):
    """A length is beyond a limit of the format; nothing was allocated for it."""


class BaseDamagedError(FormatError, kind="damaged-base"):
    """A frame is decoded from another partition, which is missing, damaged, or no base that a frame may have."""


class UnsupportedFormatError(FormatError, kind="unsupported-format"):
    """Bytes are intact, but need a newer program; recovery stops here instead of passing them over."""


class UnsupportedVersionError(UnsupportedFormatError, kind="unsupported-version"):
    """A structure has a format version that this program cannot read."""


class UnsupportedFeatureError(UnsupportedFormatError, kind="unsupported-feature"):
    """The store needs a feature that this program does not know."""


class UnsupportedCodecError(UnsupportedFormatError, kind="unsupported-codec"):
    """A frame has a codec, kind or digest algorithm that this program does not know."""


class RecoveryError(AsymcheckError, kind="recovery"):
    """No intact copy of something that a restore needs."""

    def __init__(self, message: str, digest: bytes | None = None) -> None:
        """Keep the digest of the (first) partition, where the error is about one."""
        super().__init__(message)
        self.digest = digest
        """The digest of the first lost partition; None if the error is not about a partition."""


class MissingPartitionError(RecoveryError, kind="missing-partition"):
    """A partition that a manifest names is in no pack."""


class DamagedPartitionError(RecoveryError, kind="damaged-partition"):
    """Every copy of a partition is damaged."""


class InconsistentCheckpointError(RecoveryError, kind="inconsistent-checkpoint"):
    """A checkpoint, or every candidate, cannot be restored; the message lists the reasons."""

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        """Keep the reasons apart from the message, one for each rejected candidate."""
        super().__init__("\n  ".join([message, *reasons]))
        self.reasons = tuple(reasons)
        """The reason for each rejected checkpoint."""


class HeadRecordError(RecoveryError, kind="head-record"):
    """A head record is missing or damaged, so which checkpoint is newest cannot be known."""


class PartialRestoreError(RecoveryError, kind="partial-restore"):
    """A restore in place failed after some tensors were overwritten."""

    def __init__(self, message: str, overwritten: Sequence[str], next_step: int | None) -> None:
        """Say which tensors hold restored bytes and which older step could be restored instead."""
        super().__init__(message)
        self.overwritten = tuple(overwritten)
        """The dotted names of the tensors that hold restored bytes."""
        self.next_step = next_step
        """The older step to restore instead; None if there is none."""


class RefusedStateError(PartialRestoreError, kind="refused-state"):
    """An object refused its state in ``load_state_dict()``: nothing is wrong with the checkpoint."""


class TornCaptureError(AsymcheckError, kind="torn-capture"):
    """A tensor changed while it was being captured for a checkpoint; that checkpoint was given up."""


class LostCheckpointError(AsymcheckError, kind="lost-checkpoint"):
    """Checkpoints that were begun in the background could not be stored; later ones may be.

    The message names all since the last report; the cause is that of the first.
    """


class PruneError(AsymcheckError, kind="prune"):
    """Old checkpoints could not be removed, see the cause; no checkpoint was lost. The next checkpoint retries."""


class RanksError(AsymcheckError, kind="ranks"):
    """Ranks that save or restore one state together did not come to an end together."""


class RanksMissingError(RanksError, kind="ranks-missing"):
    """Some ranks did not answer in time: they have ended, hang, or do something else than this one."""

    def __init__(self, message: str, missing: Sequence[int]) -> None:
        """Keep the numbers of the missing ranks."""
        super().__init__(message)
        self.missing = tuple(missing)
        """The numbers of the missing ranks."""


class RankFailedError(RanksError, kind="rank-failed"):
    """Another rank failed; the message has its reason. All ranks gave up the common operation."""


class StorageError(AsymcheckError, kind="storage"):
    """Reading or writing failed below the format: the operating system or the device refused."""


class OutOfSpaceError(StorageError, kind="out-of-space"):
    """The file system has no room; nothing was committed."""


class UnsupportedFileSystemError(StorageError, kind="unsupported-file-system"):
    """The store cannot be placed on this kind of file system."""


class ReadOnlyStoreError(StorageError, kind="read-only"):
    """The store was opened read-only, or can only be read, or this user may not even read it."""


class LockTimeoutError(StorageError, kind="lock-timeout"):
    """Another process held a lock for too long; the message names it."""


class TooManyFilesError(StorageError, kind="too-many-files"):
    """This process, or the system, may not open more files; nothing is wrong with the store."""


class RemoteUnreachableError(StorageError, kind="unreachable"):
    """A remote location did not answer, or not in time: nothing is known of what lies there."""


class GivenUpError(AsymcheckError, kind="given-up"):
    """An upload was ended before it was done: another one of the same push failed, or there was no more time."""


UNKNOWING = (TooManyFilesError, RemoteUnreachableError, ReadOnlyStoreError)
"""Errors after which nothing is known of the stored bytes: who takes them for damage would pass over a sound one."""


class CatalogError(StorageError, kind="catalog"):
    """The catalog cannot be used; the message says how to rebuild it."""


class ClosedStoreError(StorageError, kind="closed"):
    """The store object was closed."""


class ForkedStoreError(StorageError, kind="forked"):
    """The store object was inherited by a forked process; open the store again there."""


class AbandonedCheckpointsWarning(UserWarning):
    """Training starts from nothing on a run that has checkpoints."""


class SkippedCheckpointWarning(UserWarning):
    """A newer checkpoint was passed over because it cannot be restored."""


class StepOrderWarning(UserWarning):
    """A step was saved that is older than what its line has; it may not become the newest checkpoint."""


class CaptureWarning(UserWarning):
    """Capture cannot do all that it should, as with a small ring, or waits for one; checkpoints are right anyway."""


class StaleStateWarning(UserWarning):
    """Every tensor is equal to the one of the checkpoint before: is the right state being saved?"""


class LostCheckpointWarning(UserWarning):
    """A checkpoint that was begun in the background could not be stored; training went on."""


class SilentDivergenceWarning(UserWarning):
    """A tensor of which several ranks had equal copies is not equal on them any more."""


class PruneWarning(UserWarning):
    """Checkpoints that retention does not keep could not be removed; training went on."""


_LOGGER = logging.getLogger("asymcheck")
# Without a handler, Python would print each record beside the warning.
_LOGGER.addHandler(logging.NullHandler())


def warn_user(message: str, category: type[Warning]) -> None:
    """Give a warning that points at the line outside of this package which led to it."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("asymcheck."):
        level, frame = level + 1, frame.f_back
    _LOGGER.warning("%s: %s", category.__name__, message)
    warnings.warn(message, category, stacklevel=level)


class UnreachableRemoteWarning(UserWarning):
    """A remote location did not answer, or has no store; what is meant to lie there is not known."""


class RemoteCopyWarning(UserWarning):
    """Something was missing or damaged on this machine, and was read from a remote location instead."""
