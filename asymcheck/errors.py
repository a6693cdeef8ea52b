"""All errors and warnings of asymcheck, grouped by how to handle them.

::

    AsymcheckError
    ├── InvalidInputError              an argument is invalid; nothing was changed
    │   └── UnsupportedValueError, StateMismatchError, ForeignFileError
    ├── NotFoundError                  a requested object does not exist
    │   └── StoreNotFoundError, CheckpointNotFoundError, MissingEntryError
    ├── FormatError                    stored bytes break a rule of the format
    │   ├── BadMagicError, ChecksumError, DigestMismatchError, StructureError, TruncatedError
    │   ├── LimitError, BaseDamagedError
    │   └── UnsupportedFormatError         intact, but requires a newer version of asymcheck
    │       └── UnsupportedVersionError, UnsupportedFeatureError, UnsupportedCodecError
    ├── RecoveryError                  required data has no intact copy
    │   ├── MissingPartitionError, DamagedPartitionError, InconsistentCheckpointError, HeadRecordError
    │   └── PartialRestoreError            tensors were overwritten before the failure
    │       └── RefusedStateError              not damage: an object refused its state
    ├── TornCaptureError               the state changed while it was captured; nothing was committed
    ├── LostCheckpointError            background saves failed
    ├── PruneError                     old checkpoints could not be removed; none was lost
    ├── PublishError                   a step could not be published; checkpoints are not affected
    ├── RunInUseError                  another process trains this run
    ├── RanksError                     a common operation of several ranks failed
    │   └── RanksMissingError, RankFailedError
    ├── GivenUpError                   an upload was cancelled; it committed nothing
    └── StorageError                   the drive or the operating system failed
        ├── OutOfSpaceError, UnsupportedFileSystemError, ReadOnlyStoreError, LockTimeoutError
        └── TooManyFilesError, RemoteUnreachableError, CatalogError, ClosedStoreError, ForkedStoreError

All warnings derive from :class:`AsymcheckWarning`: :class:`AbandonedCheckpointsWarning`,
:class:`SkippedCheckpointWarning`, :class:`StateDifferenceWarning`, :class:`StepOrderWarning`, :class:`CaptureWarning`,
:class:`StaleStateWarning`, :class:`LostCheckpointWarning`, :class:`PruneWarning`, :class:`PublishWarning`,
:class:`UnreachableRemoteWarning`, :class:`RemoteCopyWarning`, :class:`SilentDivergenceWarning`,
:class:`PreemptionWarning`.

:class:`Preempted` is not an error: it ends a training whose kill was announced.

``kind`` is a stable machine-readable code; codes are only ever added.
"""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import ClassVar, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class AsymcheckError(Exception):
    """Base class of all errors of this package."""

    kind: ClassVar[str] = "error"
    """Stable code of the class, for programs."""
    overwritten: tuple[str, ...] = ()
    """Dotted names of the tensors that a failed restore in place has overwritten."""

    def __init_subclass__(cls, *, kind: str | None = None) -> None:
        """Set the code of a subclass, which is that of its base by default."""
        super().__init_subclass__()
        cls.kind = kind or cls.kind

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle class, message and fields. By default, Python would call the constructor with the message alone."""
        return _rebuilt, (type(self), self.args), self.__dict__


def _rebuilt(kind: type[AsymcheckError], args: tuple[object, ...]) -> AsymcheckError:
    return kind.__new__(kind, *args)


class InvalidInputError(AsymcheckError, kind="invalid-input"):
    """An argument is invalid; nothing was changed."""


class UnsupportedValueError(InvalidInputError, kind="unsupported-value"):
    """A value in the state cannot be stored; raised before anything is written."""

    def __init__(self, path: str, reason: str) -> None:
        """Create an error about the value at the dotted ``path``."""
        super().__init__(f"cannot store state at {path or '<root>'}: {reason}")
        self.path = path
        """Dotted name of the value in the state."""
        self.reason = reason
        """Reason why the value cannot be stored."""


class StateMismatchError(InvalidInputError, kind="state-mismatch"):
    """The given state does not fit; raised before anything is overwritten, unless its tensors share memory."""

    lacking: tuple[str, ...] = ()
    """Problems with entries and parts of tensors that the manifests lack, but which other ranks may have saved."""


class ForeignFileError(InvalidInputError, kind="foreign-file"):
    """A file or folder of another program (safetensors, Hugging Face, torch) breaks a rule of its format.

    Unlike a :class:`FormatError`, this is no damage of the store.
    """

    def __init__(self, path: str | os.PathLike[str], problem: str, remedy: str) -> None:
        """Create an error from the file, the problem and the remedy."""
        super().__init__(f"{os.fspath(path)}: {problem}; {remedy}")
        self.path = os.fspath(path)
        """File or folder."""
        self.problem = problem
        """Problem with the file."""
        self.remedy = remedy
        """Advice for the user."""


class NotFoundError(AsymcheckError, kind="not-found"):
    """A requested object does not exist."""


class StoreNotFoundError(NotFoundError, kind="store-not-found"):
    """The location has no store."""

    is_empty: bool = True
    """Whether the location is empty."""


class CheckpointNotFoundError(NotFoundError, kind="checkpoint-not-found"):
    """The store has no such checkpoint."""


class MissingEntryError(CheckpointNotFoundError, FileNotFoundError):
    """A listed run or checkpoint does not exist. Programs expect this error of a file system."""


class FormatError(AsymcheckError, kind="format"):
    """Stored bytes break a rule of the format (SPEC.md)."""


class BadMagicError(FormatError, kind="bad-magic"):
    """A structure does not begin with its magic number."""


class ChecksumError(FormatError, kind="bad-checksum"):
    """A checksum of a header, an index, a record or a file name does not match."""


class DigestMismatchError(FormatError, kind="digest-mismatch"):
    """The plain bytes of a partition do not match its digest."""


class StructureError(FormatError, kind="bad-structure"):
    """Fields contradict each other or break a rule of the format."""


class TruncatedError(FormatError, kind="truncated"):
    """Bytes end before the end of the structure."""


class LimitError(FormatError, kind="limit-exceeded"):
    """A length exceeds a limit of the format; nothing was allocated."""


class BaseDamagedError(FormatError, kind="damaged-base"):
    """The base of a frame is missing, damaged or not permitted."""


class UnsupportedFormatError(FormatError, kind="unsupported-format"):
    """Intact bytes require a newer version of asymcheck. A restore stops instead of skipping the checkpoint."""


class UnsupportedVersionError(UnsupportedFormatError, kind="unsupported-version"):
    """A structure has an unknown format version."""


class UnsupportedFeatureError(UnsupportedFormatError, kind="unsupported-feature"):
    """The store requires an unknown feature."""


class UnsupportedCodecError(UnsupportedFormatError, kind="unsupported-codec"):
    """A frame has an unknown codec, kind or digest algorithm."""


class RecoveryError(AsymcheckError, kind="recovery"):
    """Data for a restore has no intact copy."""

    def __init__(self, message: str, digest: bytes | None = None) -> None:
        """Create an error, with the digest of the partition that it concerns, if any."""
        super().__init__(message)
        self.digest = digest
        """Digest of the first lost partition; None if the error does not concern a partition."""


class MissingPartitionError(RecoveryError, kind="missing-partition"):
    """A partition that a manifest names is in no pack."""


class DamagedPartitionError(RecoveryError, kind="damaged-partition"):
    """Every copy of a partition is damaged."""


class InconsistentCheckpointError(RecoveryError, kind="inconsistent-checkpoint"):
    """A checkpoint, or every candidate, cannot be restored. The message lists the reasons."""

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        """Create an error with one reason for each rejected candidate."""
        super().__init__("\n  ".join([message, *reasons]))
        self.reasons = tuple(reasons)
        """Reason for each rejected checkpoint."""


class HeadRecordError(RecoveryError, kind="head-record"):
    """A head record is missing or damaged, so the newest checkpoint is unknown."""


class PartialRestoreError(RecoveryError, kind="partial-restore"):
    """A restore in place failed after some tensors were overwritten."""

    def __init__(self, message: str, overwritten: Sequence[str], next_step: int | None) -> None:
        """Create an error with the overwritten tensors and an older step to restore instead."""
        super().__init__(message)
        self.overwritten = tuple(overwritten)
        """Dotted names of overwritten tensors."""
        self.next_step = next_step
        """Older step to restore instead, if any."""


class RefusedStateError(PartialRestoreError, kind="refused-state"):
    """An object refused its state in ``load_state_dict()``. The checkpoint is intact."""


class TornCaptureError(AsymcheckError, kind="torn-capture"):
    """A tensor changed while it was captured, so the checkpoint was discarded."""


class LostCheckpointError(AsymcheckError, kind="lost-checkpoint"):
    """Background saves failed. Later saves may succeed.

    The message names all lost checkpoints since the last report. ``__cause__`` is the error of the first one.
    """


class PruneError(AsymcheckError, kind="prune"):
    """Old checkpoints could not be removed. No checkpoint was lost, and the next one retries."""


class PublishError(AsymcheckError, kind="publish"):
    """A step could not be published; checkpoints are not affected."""


class RunInUseError(AsymcheckError, kind="run-in-use"):
    """Another process trains this run, or has taken it over; or another process publishes to the location."""

    def __init__(self, run: str, trainer: str, last_step: int | None, *, taken_over: bool = False) -> None:
        """Create an error about ``run`` and the process that trains it."""
        last = "without a checkpoint" if last_step is None else f"last checkpoint of step {last_step}"
        super().__init__(
            f"run {run} was taken over by {trainer}. Stop this training: its later checkpoints would be abandoned"
            if taken_over
            else f"run {run} is trained by {trainer}, {last}. Stop that training, use another run name, or pass "
            "takeover=True, which ends that training at its next step"
        )
        self.run = run
        """Name of the run."""
        self.trainer = trainer
        """Process, host and start of the other training."""
        self.last_step = last_step
        """Step of the newest checkpoint of the run; None if it has none."""
        self.taken_over = taken_over
        """Whether this training has lost the run to the other."""


class RanksError(AsymcheckError, kind="ranks"):
    """A common save or restore of several ranks failed."""


class RanksMissingError(RanksError, kind="ranks-missing"):
    """Some ranks did not respond in time. They have ended, hang, or call other methods."""

    def __init__(self, message: str, missing: Sequence[int]) -> None:
        """Create an error with the missing ranks."""
        super().__init__(message)
        self.missing = tuple(missing)
        """Missing ranks."""


class RankFailedError(RanksError, kind="rank-failed"):
    """Another rank failed; the message has its reason. All ranks aborted the common operation."""


class StorageError(AsymcheckError, kind="storage"):
    """Reading or writing failed in the operating system or on the drive."""


class OutOfSpaceError(StorageError, kind="out-of-space"):
    """The file system is full; nothing was committed."""


class UnsupportedFileSystemError(StorageError, kind="unsupported-file-system"):
    """The store cannot be placed on this kind of file system."""


class ReadOnlyStoreError(StorageError, kind="read-only"):
    """The store is read-only, or this user has no permission to read or write it."""


class LockTimeoutError(StorageError, kind="lock-timeout"):
    """Another process held a lock for too long; the message names it."""


class TooManyFilesError(StorageError, kind="too-many-files"):
    """This process or the system has reached its limit of open files. The store is intact."""


class RemoteUnreachableError(StorageError, kind="unreachable"):
    """A remote location, or the server of a mount, did not respond in time. Its content is unknown."""


class GivenUpError(AsymcheckError, kind="given-up"):
    """An upload was cancelled, because another one failed or its time limit has passed."""


INCONCLUSIVE = (TooManyFilesError, RemoteUnreachableError, ReadOnlyStoreError)
"""Errors that say nothing about stored bytes. Treating them as damage would skip an intact checkpoint."""


def result_or_error(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | AsymcheckError:
    """Call a function that reads stored bytes; return its result, or the error that describes their damage.

    Errors in :data:`INCONCLUSIVE` are raised.
    """
    try:
        return function(*args, **kwargs)
    except INCONCLUSIVE:
        raise
    except AsymcheckError as error:
        return error


class CatalogError(StorageError, kind="catalog"):
    """The catalog is unusable. The message says how to rebuild it."""


class ClosedStoreError(StorageError, kind="closed"):
    """The store or the Checkpointer was closed."""


class ForkedStoreError(StorageError, kind="forked"):
    """The store object was inherited by a forked process, which has to open the store again."""


class AsymcheckWarning(UserWarning):
    """Base class of all warnings of asymcheck."""


class AbandonedCheckpointsWarning(AsymcheckWarning):
    """Training starts from scratch although the run has checkpoints, or checkpoints may be torn."""


class SkippedCheckpointWarning(AsymcheckWarning):
    """A newer checkpoint was skipped because it cannot be restored."""


class StateDifferenceWarning(AsymcheckWarning):
    """The given state differs from the checkpoint in a way that torch accepts in silence."""


class StepOrderWarning(AsymcheckWarning):
    """A saved step is lower than an earlier one, and will not be the newest checkpoint."""


class CaptureWarning(AsymcheckWarning):
    """Captures take longer, or fewer of them survive the process, for instance because of a small ring."""


class StaleStateWarning(AsymcheckWarning):
    """A checkpoint is identical to the previous one, or a part of the state is a copy. Was the live state passed?"""


class LostCheckpointWarning(AsymcheckWarning):
    """A background save failed; training continues."""


class SilentDivergenceWarning(AsymcheckWarning):
    """Replicas of a tensor on several ranks have diverged."""


class PruneWarning(AsymcheckWarning):
    """Old checkpoints could not be removed; training continues."""


class PublishWarning(AsymcheckWarning):
    """A step could not be published; training continues."""


_CALLEES = ("asymcheck.", "torch.distributed.checkpoint.", "contextlib", "threading")
_LOGGER = logging.getLogger(__name__)
# Without this handler, Python would print each record in addition to the warning. The loggers of other modules have no
# handler, so that Python prints their records, such as the wait for another training.
_LOGGER.addHandler(logging.NullHandler())


def listed(items: Sequence[object], limit: int = 8) -> str:
    """Return the first ``limit`` items for a message, and the number of the others."""
    more = f" and {len(items) - limit:,} more" if len(items) > limit else ""
    return ", ".join(map(str, items[:limit])) + more


class Preempted(SystemExit):
    """The kill of the training was announced. Its newest checkpoint is durable, unless a warning says otherwise.

    :meth:`asymcheck.Checkpointer.step` raises this exception if ``save_on_signal`` is set. Not an Exception: a loop
    that catches errors does not catch it. The exit status of the process is 143, as after SIGTERM.
    """

    STATUS = 143

    def __init__(self, step: int | None) -> None:
        """Create an exception for the last step; None if the training has ended without a further step."""
        super().__init__(self.STATUS)
        self.step = step


def warn_user(message: str, category: type[Warning]) -> None:
    """Issue a warning that points at the calling line of the user's program, or at none from a background thread."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_CALLEES):
        level, frame = level + 1, frame.f_back
    _LOGGER.warning("%s: %s", category.__name__, message)
    warnings.warn(message, category, stacklevel=level)


class PreemptionWarning(AsymcheckWarning):
    """The training will be killed soon, or the time for its last checkpoint is over."""


class UnreachableRemoteWarning(AsymcheckWarning):
    """A remote location did not respond, is empty, or gets few checkpoints. Uploads or lookups did not happen."""


class RemoteCopyWarning(AsymcheckWarning):
    """Missing or damaged data was read from a remote location instead."""
