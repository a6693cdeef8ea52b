"""Subscriber: follow the releases of a location, and update a model between two requests, all or nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch

from asymcheck.config import check_choice, check_number
from asymcheck.errors import (
    InconsistentCheckpointError,
    InvalidInputError,
    NotFoundError,
    SkippedCheckpointWarning,
    StoreNotFoundError,
    warn_user,
)
from asymcheck.events import timed
from asymcheck.executor import begin
from asymcheck.format.manifest import Manifest
from asymcheck.publish.held_release import HeldRelease
from asymcheck.publish.release import RUN, TRAINING_STEP
from asymcheck.publish.weights import Exchange, Weight, match, tensors_of
from asymcheck.restore.assemble import Assembly
from asymcheck.restore.load import fetch_in_place, read_first
from asymcheck.restore.partition_locator import PartitionCopy, PartitionLocator
from asymcheck.restore.read_plan import ReadPlan, execute
from asymcheck.restore.resolve import Resolved
from asymcheck.storage.available_memory import available_bytes
from asymcheck.storage.fallback_tier import OverlayTier
from asymcheck.storage.interfaces import OpenPack, ReadTier
from asymcheck.store import Store
from asymcheck.types import Digest

Buffering = Literal["auto", "double", "single"]
_RESERVE_BYTES = 256 << 20
"""Memory that a second copy of the weights must leave to others."""


class Update(NamedTuple):
    """An update of the subscriber to a release."""

    number: int
    """Number of the release."""
    step: int
    """Training step of the weights."""
    changed_tensors: int
    """Number of tensors that changed."""
    fetched_bytes: int
    """Payload bytes read from the location."""
    pause_s: float
    """Time in which the weights were being changed [s]. With one buffer, this includes the reads."""
    is_buffered: bool
    """Whether the release was complete in a second buffer before any weight changed."""


@dataclasses.dataclass
class _Held:
    """The release in the tensors of the subscriber."""

    number: int
    manifest: Manifest
    weights: dict[str, Weight]
    states: dict[str, tuple[tuple[int, int], ...]]

    def has(self, weight: Weight) -> bool:
        """Tell whether a tensor of another release is the same, and nobody changed it in memory."""
        mine = self.weights.get(weight.row.name)
        is_same = mine is not None and (mine.row.extents, mine.row.inline) == (weight.row.extents, weight.row.inline)
        return is_same and self.states[weight.row.name] == weight.state


@dataclasses.dataclass
class _Prepared:
    """A verified release that is not in use yet."""

    number: int
    manifest: Manifest
    weights: list[Weight]
    changed_tensors: int
    fetched_bytes: int
    new: list[tuple[Weight, torch.Tensor]] | None = None  # the second buffer; None if there is too little memory
    pause_s: float | None = None  # seconds in which the tensors were overwritten; None if they were not


class _Discard:
    """Target that drops verified bytes."""

    def put(self, _start: int, _data: memoryview) -> None:
        """Drop bytes."""

    def put_regions(self, _regions: object, _data: memoryview) -> None:
        """Drop bytes."""


class Subscriber(contextlib.AbstractContextManager["Subscriber"]):
    """Follows the releases of a location. Call all methods on one thread; close it, or use a ``with`` block.

    Example::

        with asymcheck.Subscriber("hdfs://namenode:8020/releases/gpt2", model, prefetch=True) as subscriber:
            subscriber.wait()
            while True:
                subscriber.update()
                answer(model, next_request())
    """

    def __init__(
        self,
        location: str,
        into: torch.nn.Module | dict[str, object],
        *,
        buffering: Buffering = "auto",
        keep_addresses: bool = False,
        prefetch: bool = False,
        poll_s: float = 0.2,
    ) -> None:
        """Follow ``location``, which need not exist yet.

        Args:
            location: directory or URI to which releases are published.
            into: model, or nested dict of tensors and models. An empty dict receives new tensors.
            buffering: ``"double"`` reads a release into a second buffer, and then exchanges the memory of all tensors
                at once. ``"single"`` verifies the whole release first, and then overwrites the tensors, which takes no
                memory, but reads twice and pauses longer. ``"auto"`` measures the available memory at each update.
            keep_addresses: copy new bytes to the addresses of the tensors, for CUDA graphs and other code that keeps
                pointers. By default, the tensors get the memory of the second buffer.
            prefetch: fetch releases on a background thread, so that :meth:`update` only exchanges memory.
            poll_s: seconds between two looks for a new release.

        Raises:
            InvalidInputError: an argument is invalid.
        """
        check_choice("buffering", buffering, get_args(Buffering))
        check_number("poll_s", poll_s, 1e-3, threading.TIMEOUT_MAX)
        if not isinstance(into, (dict, torch.nn.Module)):
            raise InvalidInputError(f"into={into!r:.100}: give a module, or a dict of tensors and modules")
        self.location = location
        self._into, self._buffering, self._poll_s = into, buffering, poll_s
        self._keep_addresses = keep_addresses
        self._store: Store | None = None
        self._held: _Held | None = None
        self._floor = 0
        self._prepared: _Prepared | None = None
        self._failure: BaseException | None = None
        self._garbage: list[torch.Tensor] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = begin(self._follow, "subscribe") if prefetch else None

    @property
    def number(self) -> int | None:
        """Number of the release in the model; None before the first, and after an update that failed halfway."""
        return None if self._held is None else self._held.number

    def poll(self) -> int | None:
        """Return the number of the newest release if it is newer than that of the model, else None.

        Raises:
            NotFoundError: the location was deleted, or lost its releases.
            RemoteUnreachableError: the location does not answer.
        """
        try:
            if self._store is None:
                self._store = Store.open(self.location, read_only=True)
            newest = max((c.ref.step for c in self._tier.manifests.checkpoints(RUN) if c.is_complete), default=0)
        except StoreNotFoundError:
            if self._floor:
                raise
            return None
        if newest < self._floor:
            raise NotFoundError(
                f"{self.location} has no release {self._floor}, which was read from it: the location was deleted or "
                "replaced. The model was not changed. Check the location, and create another Subscriber"
            )
        return newest if newest > self._floor or (newest and self._held is None) else None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a newer release is ready for :meth:`update`; return False after ``timeout_s`` seconds.

        Raises:
            AsymcheckError: as :meth:`update`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._changed:
                self._raise_failure()
                if self._prepared is not None or (self._thread is None and self.poll() is not None):
                    return True
                left = self._poll_s if deadline is None else min(self._poll_s, deadline - time.monotonic())
                if left <= 0:
                    return False
                self._changed.wait(left)

    def update(self, number: int | None = None) -> Update | None:
        """Update the weights to the newest release; return None if there is no newer one.

        With ``prefetch``, a release counts once it was fetched. With ``number``, update to this release, so that
        several subscribers have the same one; return None if the weights are of this release already.

        Raises:
            InvalidInputError: the weights are of a newer release than ``number``. Nothing was changed.
            StateMismatchError: the release has another architecture or dtype. Nothing was changed.
            InconsistentCheckpointError: all newer releases are damaged. Nothing was changed.
            PartialRestoreError: with one buffer, reading failed after some tensors were overwritten. They are a
                mixture until the next update.
            NotFoundError, RemoteUnreachableError, StorageError: see :meth:`poll`; NotFoundError also if there is no
                release ``number``. Nothing was changed.
        """
        with self._changed:
            self._raise_failure()
            if number is not None:
                if number == self.number:
                    return None
                self._check(number)
            prepared, self._prepared = self._prepared, None
            is_unread = number is not None or (self._thread is None and self.poll() is not None)
            is_asked = prepared is not None and number in (None, prepared.number)
            if (is_unread and not is_asked) or (prepared is not None and not self._is_ready(prepared)):
                prepared = self._prepare(number, overwrites=True)
            return None if prepared is None else self._install(prepared)

    def _check(self, number: int) -> None:
        """Raise if an update to a release is impossible."""
        if number < self._floor:
            raise InvalidInputError(f"release {number}: the weights are of release {self._floor}, which is newer")
        if self.poll() is None and self._store is None:
            raise NotFoundError(f"{self.location} has no release yet; publish release {number} first")

    def _is_ready(self, prepared: _Prepared) -> bool:
        """Tell whether a release was read for the present tensors, and nobody changed the weights that it keeps."""
        matched = {id(tensor) for weight in prepared.weights for tensor in (*weight.tensors, *weight.ties)}
        if matched != {id(tensor) for _, tensor in tensors_of(self._into)}:
            return False
        read = {weight.row.name for weight, _ in prepared.new or ()}
        others = (weight for weight in prepared.weights if weight.row.name not in read)
        return all(self._held is not None and self._held.has(weight) for weight in others)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @property
    def _tier(self) -> ReadTier:
        assert self._store is not None  # noqa: S101 - for the reader and mypy
        return self._store.resources.tier

    def _prepare(self, number: int | None = None, *, overwrites: bool) -> _Prepared:
        """Read and verify a release, by default the newest. Without ``overwrites``, change no tensor."""
        overlay: list[OpenPack] = []
        if self._held is not None:
            tensors = {name: weight.tensors[0] for name, weight in self._held.weights.items() if weight.tensors}
            overlay.append(HeldRelease(self._held.manifest, tensors))
        tier = OverlayTier(self._tier, overlay)
        with timed("subscribe"):
            loaded = read_first(tier, RUN, number, partial(self._read, overwrites))
        if not isinstance(loaded.state, _Prepared):
            raise InconsistentCheckpointError(
                f"{self.location}: no release after {self._floor} can be read, and the model was not changed:",
                loaded.skipped,
            )
        for reason in loaded.skipped:
            warn_user(f"{self.location}: skipped release {reason}", SkippedCheckpointWarning)
        return loaded.state

    def _read(self, overwrites: bool, resolved: Resolved) -> _Prepared | None:  # noqa: FBT001 - bound
        number, manifest = resolved.ref.step, resolved.manifests[0]
        if number < self._floor or (number == self._floor and self._held is not None):
            return None
        weights = match(self._into, manifest, f"release {number} of {self.location}")
        changed = [weight for weight in weights if self._held is None or not self._held.has(weight)]
        plan = ReadPlan({weight.demand(): _Discard() for weight in changed})
        prepared = _Prepared(number, manifest, weights, len(changed), _frame_bytes(resolved.sources, plan.fills))
        if self._fits(changed):
            prepared.new = self._read_anew(resolved, changed)
        elif overwrites:
            execute(plan, resolved)
            prepared.pause_s = self._overwrite(resolved, changed)
        return prepared

    def _read_anew(self, resolved: Resolved, changed: list[Weight]) -> list[tuple[Weight, torch.Tensor]]:
        """Read tensors into a second buffer, on the devices of the weights."""
        pairs: list[tuple[Weight, torch.Tensor]] = []
        for device in dict.fromkeys(weight.device for weight in changed):
            demands = {weight.row.name: (weight, weight.demand()) for weight in changed if weight.device == device}
            assembly = Assembly([demand for _, demand in demands.values()], device, resolved.sources)
            execute(assembly, resolved)
            pairs += [(weight, assembly.tensor(demand)) for weight, demand in demands.values()]
        return pairs

    def _overwrite(self, resolved: Resolved, changed: list[Weight]) -> float:
        """Fill the tensors of the consumer, after the release was verified; return the seconds."""
        began, self._held = time.perf_counter(), None
        assembly = Assembly([weight.demand(in_place=True) for weight in changed], torch.device("cpu"), resolved.sources)
        fetch_in_place(resolved, assembly)
        return time.perf_counter() - began

    def _fits(self, changed: list[Weight]) -> bool:
        """Tell whether a second buffer is to be used."""
        is_new = not all(weight.tensors for weight in changed)
        if is_new or self._buffering != "auto":
            return is_new or self._buffering == "double"
        for device in {weight.device for weight in changed}:
            needed = sum(weight.row.nbytes for weight in changed if weight.device == device)
            if device.type == "cuda":
                # The memory that the update before has replaced stays in the cache of torch, which uses it again.
                cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
                free: int | None = torch.cuda.mem_get_info(device)[0] + cached
            else:
                free = available_bytes()
            if free is not None and needed + _RESERVE_BYTES > free:
                return False
        return True

    def _install(self, prepared: _Prepared) -> Update:
        is_buffered = prepared.new is not None
        for weight, new in prepared.new or ():
            if not weight.tensors and isinstance(self._into, dict):
                weight.tensors.append(new)
                self._into.update(dict.fromkeys((weight.row.name, *weight.row.aliases), new))
        exchange = Exchange(prepared.new or (), copies=self._keep_addresses)
        if exchange.overwrites:
            # After an interrupted copy, the weights are a mixture, and the next update reads them again.
            self._held = None
        began = time.perf_counter()
        exchange.carry_out()
        pause = time.perf_counter() - began if is_buffered else prepared.pause_s or 0.0
        weights = {weight.row.name: weight for weight in prepared.weights}
        states = {name: weight.state for name, weight in weights.items()}
        self._held = _Held(prepared.number, prepared.manifest, weights, states)
        self._floor = prepared.number
        # Unmapping memory takes long, so the thread does it, if there is one.
        self._garbage = exchange.old if self._thread is not None else []
        self._changed.notify_all()
        step = int(prepared.manifest.header.metrics.get(TRAINING_STEP, -1))
        return Update(prepared.number, step, prepared.changed_tensors, prepared.fetched_bytes, pause, is_buffered)

    def _follow(self) -> None:
        """Prepare releases until the subscriber is closed."""
        while not self._is_closed:
            with self._changed:
                garbage, self._garbage = self._garbage, []
                held = self._held
                is_idle = self._prepared is not None or self._failure is not None
                if is_idle and not garbage:
                    self._changed.wait(self._poll_s)
            del garbage
            if is_idle:
                continue
            prepared = failure = None
            try:
                prepared = self._prepare(overwrites=False) if self.poll() is not None else None
            except BaseException as error:  # noqa: BLE001 - raised by the consumer
                failure = error
            with self._changed:
                # update(number) does not wait for this thread, and may have installed a newer release.
                if self._held is held:
                    self._prepared, self._failure = prepared, failure
                self._changed.notify_all()
                if prepared is None and not self._is_closed:
                    self._changed.wait(self._poll_s)

    def close(self) -> None:
        """Stop the thread, and close the location. The weights stay."""
        self._is_closed = True
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.result()
        if self._store is not None:
            self._store.close()

    def __exit__(self, *_error: object) -> None:
        """Close the subscriber."""
        self.close()


def _frame_bytes(sources: PartitionLocator, names: Iterable[Digest]) -> int:
    """Return the payload bytes that reading partitions with their bases needs, except those in memory."""

    def needed(copy: PartitionCopy) -> int:
        if isinstance(copy.pack, HeldRelease):
            return 0
        return copy.stored_length + sum(needed(base) for name in copy.bases() for base in sources.base_copies(name)[:1])

    return sum(needed(sources.copy(name)) for name in names)
