"""Releases: weights of a training step, committed atomically under increasing numbers.

A release is an ordinary checkpoint of the run ``release``. Its step is the number of the release. The step of the
training is a metric.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from functools import partial
from typing import TYPE_CHECKING

from asymcheck.commit.encoder import Encoder
from asymcheck.commit.synchronous_save import EarlierState, save
from asymcheck.config import COMPRESSIONS, SECONDS, Compression, Limits, check_choice, check_numbers
from asymcheck.errors import (
    AsymcheckError,
    FormatError,
    InvalidInputError,
    OutOfSpaceError,
    PruneWarning,
    RecoveryError,
    warn_user,
)
from asymcheck.events import timed
from asymcheck.format import registry
from asymcheck.gc.retention_runner import Pruner
from asymcheck.policies.retention import Retention
from asymcheck.publish.snapshot import Snapshot
from asymcheck.replication.collect_remote import RemotePruner
from asymcheck.replication.push import encoder_for, open_location, push
from asymcheck.state.walk import flatten
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.remote import RemoteTier, is_uri, parse_location
from asymcheck.store import Store
from asymcheck.training_services import place
from asymcheck.types import Checkpoint, CheckpointRef
from asymcheck.validation import check_glob

if TYPE_CHECKING:
    import torch

RUN = "release"
"""Run of the releases, in the store at the location and in the spool."""
TRAINING_STEP = "training_step"
_DELTAS = "deltas"
"""Metric: number of releases since the last full one."""
_LIMITS: Limits = {
    "every": (1, math.inf),
    "full_every": (1, registry.DELTA_DEPTH_MAX + 1),
    "keep": (1, math.inf),
    "close_s": SECONDS,
}


@dataclasses.dataclass(frozen=True)
class Publish:
    """Rules for the releases of a training: where to publish, which tensors, and how often."""

    location: str
    """A directory on a local drive, which becomes a store, or the URI of a remote location."""
    tensors: str = "model.*"
    """Glob of the dotted names to publish."""
    every: int = 1
    """Number of training steps between two releases."""
    dtype: torch.dtype | None = None
    """Dtype to which floating-point tensors are cast, for instance ``torch.bfloat16``; None keeps the dtypes."""
    full_every: int = 8
    """Every such release is full. The others are stored as differences from the previous release where smaller."""
    keep: int = 3
    """Number of newest releases to keep. A release that is being read stays until the reader has finished."""
    close_s: float | None = 60.0
    """Time that ``close()`` of a Checkpointer waits for the release in flight [s]; None for no limit."""
    compression: Compression = "smallest"
    """On a local drive, ``"auto"`` encodes tensors only if that takes less time than to write them plain."""

    def __post_init__(self) -> None:
        """Refuse invalid rules."""
        check_numbers(self, _LIMITS)
        check_choice("compression", self.compression, COMPRESSIONS)
        check_glob(self.tensors)
        if self.dtype is not None and not getattr(self.dtype, "is_floating_point", False):
            raise InvalidInputError(f"Publish(dtype={self.dtype!r:.100}): give a floating-point dtype, or None")


@dataclasses.dataclass(frozen=True)
class Release:
    """A published release."""

    number: int
    """Number of the release, from 1."""
    step: int
    """Training step of the weights."""
    state_bytes: int
    """Bytes of all tensors."""
    written_bytes: int
    """Payload bytes that the release needed."""
    deltas: int
    """Number of releases since the last full one."""


def training_step(store: Store, release: Checkpoint) -> int:
    """Return the training step of a release; -1 if its manifest cannot be read."""
    tier = store.resources.tier
    return _metric(tier, tier.manifests.listing(RUN, release.ref), TRAINING_STEP, -1)


def _metric(tier: ReadTier, listing: CheckpointFiles, name: str, default: int) -> int:
    """Return a metric of a release; ``default`` if it is missing, or the manifest cannot be read."""
    with contextlib.suppress(AsymcheckError):
        header = tier.manifests.read(RUN, listing.ref, listing.manifests[0]).header
        return int(header.metrics.get(name, default))
    return default


class Publisher(contextlib.AbstractContextManager["Publisher"]):
    """Publishes releases to one location. Not thread-safe. Close it, or use it in a ``with`` block."""

    def __init__(self, rules: Publish, spool: Store | None = None, *, create: bool = False) -> None:
        """Open the location, or create it.

        Args:
            rules: the location and the tensors.
            spool: writable store in which releases for a remote location are committed first. The caller closes it.
            create: create a remote location again that was emptied since the last release from ``spool``.

        Raises:
            InvalidInputError: the location is remote, and there is no spool on a local drive.
            StorageError, FormatError: the location cannot be opened.
        """
        self.rules = rules
        self._snapshot = Snapshot(rules.tensors, rules.dtype)
        self._create = create
        self._location = parse_location(rules.location) if is_uri(rules.location) else None
        if self._location is not None and spool is None:
            raise InvalidInputError(
                f"location {rules.location!r:.100} is remote: pass a store on a local drive as spool"
            )
        self._own = Store.open(rules.location, create=True) if self._location is None else None
        self._store: Store = self._own or spool  # type: ignore[assignment]  # checked above
        self._far: RemoteTier | None = None
        self._encoder = Encoder(rules.compression, "nvme")
        self._lock = self._store.training.run_lock(RUN)
        # Kept, because a new one reads all manifests and indexes of the store, also those of the training.
        self._pruner: Pruner | None = None
        self._newest: CheckpointRef | None = None
        self._earlier: EarlierState | None = None
        self._deltas = 0

    def publish(self, state: object, step: int) -> Release:
        """Publish the selected tensors of a state; after the return, the release is durable and visible.

        Raises:
            InvalidInputError: no tensor matches, a tensor is sharded, or cannot be stored. Nothing was published.
            RunInUseError: another process publishes to this location.
            StorageError: the location failed. The release may be visible, and the next one has a higher number.
        """
        return self.commit(self.take(state), step)

    def take(self, state: object, *, copies: bool = True) -> dict[str, object]:
        """Copy the selected tensors, cast, so that the training may continue; see :meth:`publish`.

        Without ``copies``, tensors that need no cast are not copied. Nothing may change them any more.
        """
        return self._snapshot.take(state, copies=copies)

    def last_step(self, since_ns: int = 0) -> int | None:
        """Return the training step of the newest release at the location; None if there is none.

        A release that was published before ``since_ns``, nanoseconds since 1970-01-01 UTC, does not count.

        Raises:
            RemoteUnreachableError: the location does not answer.
        """
        # The spool may have a release that never arrived.
        tier = self._store.resources.nvme if self._location is None else self._remote()
        newest = [listing for listing in tier.manifests.checkpoints(RUN) if listing.is_complete][-1:]
        if not newest or int.from_bytes(newest[0].ref.save_id[:8], "big") < since_ns:
            return None
        return _metric(tier, newest[0], TRAINING_STEP, -1)

    def commit(self, copies: dict[str, object], step: int) -> Release:
        """Publish the result of :meth:`take`; see :meth:`publish`."""
        tier = self._store.resources.writable()
        self._listed()  # Raises StorageError if the location was deleted.
        self._lock.take(tier.config.lock_timeout_s, takeover=False)
        self._lock.check()
        # The location is asked first: if it does not answer, the weights of the newest release need not be read.
        released = [] if self._location is None else self._remote().manifests.checkpoints(RUN)
        listed = self._listed()
        if (listed[-1].ref if listed else None) != self._newest:
            self._resume(listed)
        number = max((listing.ref.step for listing in (*listed, *released)), default=0) + 1
        is_full = self._earlier is None or self._deltas + 1 >= self.rules.full_every
        deltas = 0 if is_full else self._deltas + 1
        request = self._store.training.request(RUN, number, {TRAINING_STEP: step, _DELTAS: deltas})
        earlier = None if is_full else self._earlier
        with timed("publish", 0, lambda: {"number": number}):
            catalog = self._store.resources.catalog()
            placing = partial(place, tier, RUN, None)
            try:
                saved = save(tier, catalog, self._encoder, flatten(copies), request, placing, earlier=earlier)
            except OutOfSpaceError:
                # Otherwise the packs of this release could keep the drive full.
                self._prune(always_collect=True)
                raise
            self._newest, self._earlier, self._deltas = saved.ref, saved.state, deltas
            self._snapshot.keep()
            try:
                written = saved.written_bytes if self._location is None else self._send(saved.ref)
            finally:
                # Otherwise a location that accepts no upload lets the spool grow without limit.
                self._prune()
        return Release(number, step, saved.state_bytes, written, deltas)

    def _listed(self) -> list[CheckpointFiles]:
        return self._store.resources.nvme.manifests.checkpoints(RUN)

    def _resume(self, listed: list[CheckpointFiles]) -> None:
        """Read the newest release of an earlier publisher, from which the next one may be a difference."""
        self._newest = self._earlier = None
        if not listed:
            return
        newest = listed[-1]
        self._newest = newest.ref
        self._deltas = _metric(self._store.resources.nvme, newest, _DELTAS, self.rules.full_every)
        if self._deltas + 1 >= self.rules.full_every:
            return
        # A damaged release is no base. The next release is then full.
        with contextlib.suppress(FormatError, RecoveryError, InvalidInputError):
            state = self._store.load(f"save:{newest.ref.save_id.hex()}", run=RUN)
            self._earlier = EarlierState.of(flatten(state), self._store.resources.nvme.config)

    def _remote(self) -> RemoteTier:
        if self._far is None:
            assert self._location is not None  # noqa: S101 - for the reader and mypy
            spool = self._store.resources.nvme
            self._far = open_location(spool, self._location, spool.config, create=self._create)
            self._far_encoder = encoder_for(self._far)
            self._far_pruner = RemotePruner(self._far, RUN, Retention(keep_last=self.rules.keep))
        return self._far

    def _send(self, ref: CheckpointRef) -> int:
        """Push a release of the spool; return the bytes sent."""
        tier = self._store.resources.nvme
        moved = push(tier, self._remote(), [tier.manifests.listing(RUN, ref)], encoder=self._far_encoder)
        return moved.moved_bytes

    def _prune(self, *, always_collect: bool = False) -> None:
        """Remove old releases. A failure delays no later release."""
        opened, retention = self._store.resources, Retention(keep_last=self.rules.keep)
        try:
            self._pruner = self._pruner or Pruner(opened.writable(), opened.catalog(), RUN, retention)
            self._pruner.prune(time.time_ns(), always_collect=always_collect)
            if self._far is not None:
                self._far_pruner.prune(time.time_ns())
                # Reported once for each collection.
                failure, self._far_pruner.failure = self._far_pruner.failure, None
                if failure is not None:
                    raise failure
        except AsymcheckError as error:
            self._pruner = None
            warn_user(f"cannot remove old releases at {self.rules.location}: {error}", PruneWarning)

    def close(self) -> None:
        """Release the lock of the location, and close it."""
        self._lock.close()
        if self._far is not None:
            self._far.close()
        if self._own is not None:
            self._own.close()

    def __exit__(self, *_error: object) -> None:
        """Close the location."""
        self.close()
