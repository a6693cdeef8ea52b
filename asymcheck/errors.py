"""Every error that asymcheck raises, grouped by what a handler would do about it.

::

    AsymcheckError
    ├── InvalidInputError              the caller passed something that cannot be used; nothing was changed
    │   └── UnsupportedValueError, StateMismatchError, ForeignFileError
    ├── NotFoundError                  what was asked for is not there
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
    └── StorageError                   the place where bytes lie refused
        ├── OutOfSpaceError, UnsupportedFileSystemError, ReadOnlyStoreError, LockTimeoutError
        └── TooManyFilesError, RemoteUnreachableError, CatalogError, ClosedStoreError, ForkedStoreError

Warnings: :class:`AbandonedCheckpointsWarning`, :class:`SkippedCheckpointWarning`, :class:`StepOrderWarning`,
:class:`CaptureWarning`, :class:`StaleStateWarning`, :class:`LostCheckpointWarning`, :class:`PruneWarning`,
:class:`UnreachableRemoteWarning`, :class:`RemoteCopyWarning`, :class:`SilentDivergenceWarning`.

``kind`` is a stable machine-readable code; codes are only ever added.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Sequence
from typing import ClassVar


class AsymcheckError(Exception):
    """Root of all errors of this package."""

    kind: ClassVar[str] = "error"


class InvalidInputError(AsymcheckError):
    """An argument cannot be used; nothing was changed."""

    kind = "invalid-input"


class UnsupportedValueError(InvalidInputError):
    """A leaf of the state cannot be stored; raised before anything is written."""

    kind = "unsupported-value"

    def __init__(self, path: str, reason: str) -> None:
        """Name the leaf by its dotted ``path`` in the state."""
        super().__init__(f"cannot store state at {path or '<root>'}: {reason}")
        self.path = path
        self.reason = reason


class StateMismatchError(InvalidInputError):
    """The state given to fill does not fit; raised before anything is overwritten, unless its tensors share memory."""

    kind = "state-mismatch"


class ForeignFileError(InvalidInputError):
    """A file or folder of another program (safetensors, Hugging Face, torch) does not follow the rules of its format.

    No :class:`FormatError`: those are about the store's own bytes, and mean damage to look for in the store.
    """

    kind = "foreign-file"

    def __init__(self, path: str | os.PathLike[str], problem: str, remedy: str) -> None:
        """Name the file, what is wrong with it, and what to do."""
        super().__init__(f"{os.fspath(path)}: {problem}; {remedy}")
        self.path = os.fspath(path)
        self.problem = problem
        self.remedy = remedy


class NotFoundError(AsymcheckError):
    """What was asked for does not exist."""

    kind = "not-found"


class StoreNotFoundError(NotFoundError):
    """There is no store at the location; ``is_empty`` unless something else lies there."""

    kind = "store-not-found"
    is_empty: bool = True


class CheckpointNotFoundError(NotFoundError):
    """The store has no such checkpoint."""

    kind = "checkpoint-not-found"


class FormatError(AsymcheckError):
    """Bytes do not follow the store format (SPEC.md)."""

    kind = "format"


class BadMagicError(FormatError):
    """A structure does not begin with its magic."""

    kind = "bad-magic"


class ChecksumError(FormatError):
    """A checksum of a header, an index, a record or a file name does not match."""

    kind = "bad-checksum"


class DigestMismatchError(FormatError):
    """The plain bytes of a partition do not have the digest that names it."""

    kind = "digest-mismatch"


class StructureError(FormatError):
    """Fields contradict each other or the format's rules."""

    kind = "bad-structure"


class TruncatedError(FormatError):
    """Bytes end before the structure does."""

    kind = "truncated"


class LimitError(FormatError):
    """A length is beyond a limit of the format; nothing was allocated for it."""

    kind = "limit-exceeded"


class BaseDamagedError(FormatError):
    """A frame is decoded from another partition, which is missing, damaged, or no base that a frame may have."""

    kind = "damaged-base"


class UnsupportedFormatError(FormatError):
    """Bytes are intact, but need a newer program; recovery stops here instead of passing them over."""

    kind = "unsupported-format"


class UnsupportedVersionError(UnsupportedFormatError):
    """A structure has a format version that this program cannot read."""

    kind = "unsupported-version"


class UnsupportedFeatureError(UnsupportedFormatError):
    """The store needs a feature that this program does not know."""

    kind = "unsupported-feature"


class UnsupportedCodecError(UnsupportedFormatError):
    """A frame has a codec, kind or digest algorithm that this program does not know."""

    kind = "unsupported-codec"


class RecoveryError(AsymcheckError):
    """No intact copy of something that a restore needs."""

    kind = "recovery"

    def __init__(self, message: str, digest: bytes | None = None) -> None:
        """Keep the digest of the (first) partition, where the error is about one."""
        super().__init__(message)
        self.digest = digest


class MissingPartitionError(RecoveryError):
    """A digest that a manifest names lies in no pack."""

    kind = "missing-partition"


class DamagedPartitionError(RecoveryError):
    """Every copy of a partition is damaged."""

    kind = "damaged-partition"


class InconsistentCheckpointError(RecoveryError):
    """A checkpoint, or every candidate, cannot be restored; the message lists the reasons."""

    kind = "inconsistent-checkpoint"

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        """Keep the reasons apart from the message, one for each rejected candidate."""
        super().__init__("\n  ".join([message, *reasons]))
        self.reasons = tuple(reasons)


class HeadRecordError(RecoveryError):
    """A head record is missing or damaged, so which checkpoint is newest cannot be known."""

    kind = "head-record"


class PartialRestoreError(RecoveryError):
    """A restore in place failed after some tensors were overwritten."""

    kind = "partial-restore"

    def __init__(self, message: str, overwritten: Sequence[str], next_step: int | None) -> None:
        """Say which tensors hold restored bytes and which older step could be restored instead."""
        super().__init__(message)
        self.overwritten = tuple(overwritten)
        self.next_step = next_step


class RefusedStateError(PartialRestoreError):
    """An object refused its state in ``load_state_dict()``: nothing is wrong with the checkpoint."""

    kind = "refused-state"


class TornCaptureError(AsymcheckError):
    """A tensor changed while it was being captured for a checkpoint; that checkpoint was given up."""

    kind = "torn-capture"


class LostCheckpointError(AsymcheckError):
    """Checkpoints that were begun in the background could not be stored; later ones may be.

    The message names all since the last report; the cause is that of the first.
    """

    kind = "lost-checkpoint"


class PruneError(AsymcheckError):
    """What retention does not keep could not be removed, see the cause; none was lost. The next checkpoint retries."""

    kind = "prune"


class RanksError(AsymcheckError):
    """Ranks that save or restore one state together did not come to an end together."""

    kind = "ranks"


class RanksMissingError(RanksError):
    """Some ranks did not answer in time: they have ended, hang, or do something else than this one."""

    kind = "ranks-missing"

    def __init__(self, message: str, missing: Sequence[int]) -> None:
        """Keep the numbers of the missing ranks."""
        super().__init__(message)
        self.missing = tuple(missing)


class RankFailedError(RanksError):
    """Another rank failed; the message has its reason. What was begun together was given up by all."""

    kind = "rank-failed"


class StorageError(AsymcheckError):
    """Reading or writing failed below the format: the operating system or the device refused."""

    kind = "storage"


class OutOfSpaceError(StorageError):
    """The file system has no room; nothing was committed."""

    kind = "out-of-space"


class UnsupportedFileSystemError(StorageError):
    """The store cannot be placed on this kind of file system."""

    kind = "unsupported-file-system"


class ReadOnlyStoreError(StorageError):
    """The store was opened read-only, or can only be read, or this user may not even read it."""

    kind = "read-only"


class LockTimeoutError(StorageError):
    """Another process held a lock for too long; the message names it."""

    kind = "lock-timeout"


class TooManyFilesError(StorageError):
    """This process, or the system, may not open more files; nothing is wrong with the store."""

    kind = "too-many-files"


class RemoteUnreachableError(StorageError):
    """A remote location did not answer, or not in time: nothing is known of what lies there."""

    kind = "unreachable"


class GivenUpError(AsymcheckError):
    """An upload was ended before it was done: another one of the same push failed, or there was no more time."""

    kind = "given-up"


UNKNOWING = (TooManyFilesError, RemoteUnreachableError, ReadOnlyStoreError)
"""Errors after which nothing is known of the stored bytes: who takes them for damage would pass over a sound one."""


class CatalogError(StorageError):
    """The catalog cannot be used; the message says how to rebuild it."""

    kind = "catalog"


class ClosedStoreError(StorageError):
    """The store object was closed."""

    kind = "closed"


class ForkedStoreError(StorageError):
    """The store object was inherited by a forked process; open the store again there."""

    kind = "forked"


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


def warn_user(message: str, category: type[Warning]) -> None:
    """Give a warning that points at the line outside of this package which led to it."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("asymcheck."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


class UnreachableRemoteWarning(UserWarning):
    """A remote location did not answer, or has no store; what is meant to lie there is not known."""


class RemoteCopyWarning(UserWarning):
    """Something was missing or damaged on this machine, and was read from a remote location instead."""
