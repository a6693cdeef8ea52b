"""Detect torn captures: compare digests of the source, taken in ``step()``, with the captured bytes.

Tensors have marks: the version counter, which in-place operations raise, and the address. Writes through ``.data``, a
numpy view or another process leave the marks as they are, and only the bytes show them. The first captures digest all
bytes, because a loop that changes a tensor usually does so in each iteration. Each later capture digests another part.
The digests are compared with the captured bytes, and with the source at the fence. A change is therefore detected even
if the copy was made before the change. A device computes checksums instead (see :mod:`asymcheck.capture.device_sums`),
and those of the fence are compared after the next capture.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from asymcheck.capture.device_copy import Device, EagerCopies, Transfers
from asymcheck.capture.device_sums import DeviceSums, checksum
from asymcheck.config import Proof
from asymcheck.errors import CaptureWarning, TornCaptureError, listed, warn_user
from asymcheck.format.digest import digest
from asymcheck.state.leaves import Leaf, digest_pieces
from asymcheck.state.partition_plan import Partition
from asymcheck.types import Digest, SaveId

FIRST = 2
"""Number of fully digested captures, at the start and again after further tensors are deferred."""
ROUND = 16
"""Number of later captures that together digest all bytes."""
_REMEMBERED = 1024
"""Number of recent captures that can be reported as suspects later."""
_NAMED = 3
"""Maximum number of tensors that a message names."""


class SourceDigests:
    """Source digests of one capture, used by the training thread and the capture thread."""

    def __init__(
        self,
        names: Sequence[str],
        partitions: Sequence[Partition],
        transfers: Transfers,
        digests: Sequence[Digest | None],
    ) -> None:
        """Start without digests.

        ``names`` are those of the tensors, by row. ``digests`` are those of the partitions that are complete in the
        ring, by number.
        """
        self.names, self.partitions = names, partitions
        self._transfers, self._digests = transfers, digests
        self._leaves: dict[int, Leaf] = {}
        # For each partition in host memory, the digests of its pieces at the start of the capture.
        self._sources: dict[int, list[Digest]] = {}
        self._sums: dict[int, DeviceSums] = {}
        self._marks: dict[int, int] = {}
        self._torn: dict[int, None] = {}
        self._counted: set[int] = set()
        self._is_fenced = False
        self.before: dict[int, int] = {}
        """Number of the previous capture that compared each partition, by partition number."""
        self.unseen: set[int] = set()
        """Partitions whose bytes changed without a version change; earlier captures may be torn as well."""

    def mark(self, leaves: Sequence[Leaf], numbers: Iterable[int]) -> None:
        """Record versions and addresses of the tensors of partitions, and keep the tensors until the fence."""
        rows = {piece.row for number in numbers for piece in self.partitions[number].pieces}
        marked = {row: leaves[row] for row in rows}
        # Marks come first, because the capture thread may already compare those of early copies.
        self._marks = {row: _mark_of(leaf) for row, leaf in marked.items()}
        self._leaves = marked

    @property
    def marked(self) -> set[tuple[str, int]]:
        """Names and sizes of the tensors that have marks."""
        return {(self.names[row], leaf.nbytes) for row, leaf in self._leaves.items()}

    def take(self, numbers: Iterable[int], asides: EagerCopies) -> None:
        """Digest whole partitions. Those on one device are digested there, after its queued work."""
        on_device: dict[Device, list[int]] = {}
        on_host: list[int] = []
        for number in numbers:
            device, *others = self._transfers.devices_of(number)
            if device is not None and not others:
                on_device.setdefault(device, []).append(number)
                continue
            # A device failure is raised again by the code that waits for the copies.
            with contextlib.suppress(RuntimeError):
                self._transfers.catch_up(number)
            on_host.append(number)
        self._sources.update(self._digests_on_host(on_host))
        for device, there in on_device.items():
            sums = DeviceSums(device, {number: self.partitions[number].pieces for number in there})
            # A device without memory for the computation proves nothing in this capture.
            with contextlib.suppress(RuntimeError):
                sums.take(self._leaves, asides)
                self._sums.update(dict.fromkeys(there, sums))

    def __contains__(self, number: int) -> bool:
        """Return whether a partition has a source digest."""
        return number in self._sources or number in self._sums

    def check_marks(self, number: int) -> None:
        """Record the tensors of a partition as torn if their marks changed before the fence."""
        if number not in self:
            moved = self._moved({piece.row for piece in self.partitions[number].pieces})
            # Read the flag after the marks, because the fence sets the flag before any tensor may change.
            if moved and not self._is_fenced:
                self._torn.update(dict.fromkeys(moved))

    def _moved(self, rows: Iterable[int]) -> set[int]:
        leaves = self._leaves
        return {row for row in rows if (leaf := leaves.get(row)) is not None and self._marks[row] != _mark_of(leaf)}

    def check(self, number: int, payload: memoryview) -> None:
        """Compare the captured bytes of a partition with the source digests, and record torn tensors."""
        torn: Iterable[int] = ()
        if number in self._sums:
            torn = self._rows(number) if self._sums[number].at_start[number] != checksum(payload) else ()
        elif number in self._sources:
            parts = zip(self.partitions[number].parts(payload), self._sources[number], strict=True)
            torn = [piece.row for (piece, data), source in parts if digest(data) != source]
        for row in torn:
            self._torn[row] = None
            self._note_differing(number, row)

    def _rows(self, number: int) -> dict[int, None]:
        return dict.fromkeys(piece.row for piece in self.partitions[number].pieces)

    def _note_differing(self, number: int, row: int) -> None:
        if not self._moved([row]) and row not in self._counted:
            self.unseen.add(number)

    def fence(self, *, compare: bool) -> list[str]:
        """Release the tensors, and return the names of those that changed before the fence.

        With ``compare``, the bytes are compared as well as the marks.
        """
        if self._is_fenced:
            return []
        self._is_fenced = True
        changed: dict[int, None] = {}
        moved = self._counted = self._moved(self._marks)
        for number, partition in enumerate(self.partitions if moved else ()):
            rows = dict.fromkeys(piece.row for piece in partition.pieces if piece.row in moved)
            if rows and number not in self:
                changed.update(rows)
                # A pending device copy is only ordered after operations that were queued before.
                if self._digests[number] is None and self._transfers.is_on_device(number):
                    self._torn.update(rows)
        if compare:
            on_host = [number for number in self._sources if not self._transfers.is_on_device(number)]
            changed.update(self._differing(on_host))
        for sums in {*self._sums.values()} if compare else ():
            with contextlib.suppress(RuntimeError):
                sums.fence(self._leaves)
        # Replace the dict instead of clearing it, because the capture thread may be reading it.
        self._leaves = {}
        return [self.names[row] for row in changed]

    def late(self) -> list[str]:
        """Wait until devices have reached the fence; return the names of tensors that had changed there before."""
        changed: dict[int, None] = {}
        for sums in {*self._sums.values()}:
            with contextlib.suppress(RuntimeError):
                for number in sums.changed():
                    changed.update(self._rows(number))
                    for row in self._rows(number):
                        self._note_differing(number, row)
        self._sums = {}
        return [self.names[row] for row in changed]

    def _differing(self, numbers: Sequence[int]) -> dict[int, None]:
        """Return the rows of partitions in host memory that have other bytes than at the start of the capture."""
        rows: dict[int, None] = {}
        for number, digests in self._digests_on_host(numbers).items():
            pieces = self.partitions[number].pieces
            for piece, source, now in zip(pieces, self._sources[number], digests, strict=True):
                if now != source:
                    self._note_differing(number, piece.row)
                    rows[piece.row] = None
        for row in {row for number in numbers for row in self._rows(number)}:
            self._leaves[row].release()
        return rows

    def _digests_on_host(self, numbers: Sequence[int]) -> dict[int, list[Digest]]:
        """Return the digests of the pieces of partitions, as they are now."""
        pieces = [piece for number in numbers for piece in self.partitions[number].pieces]
        digests = iter(digest_pieces(pieces, self._leaves))
        return {number: [next(digests) for _ in self.partitions[number].pieces] for number in numbers}

    @property
    def torn(self) -> list[str]:
        """Names of the torn tensors."""
        # Copied at once, because the other thread may add rows.
        return [self.names[row] for row in tuple(self._torn)]


class TearDetector:
    """Tear detection across captures, with a record of tensors that change outside optimizers."""

    def __init__(self, proof: Proof) -> None:
        """Digest the share of the source that ``proof`` selects."""
        self._proof = proof
        self.changing: set[str] = set()
        """Names of tensors that changed outside an optimizer step and must not be deferred again."""
        self._warned: set[str] = set()
        self._lock, self._late_lock = threading.Lock(), threading.Lock()
        self.compared_s = 0.0
        """Seconds that fences spent comparing."""
        # The global generator belongs to the training.
        self._chance = random.Random()  # noqa: S311 - nothing secret is chosen
        self._partitions: Sequence[Partition] = ()
        self._marked: set[tuple[str, int]] = set()
        self._full = 0
        self._late: deque[SourceDigests] = deque()
        self._unwarned: deque[str] = deque()
        self._due: list[int] = []
        self._begun = 0
        self._proven: dict[int, int] = {}
        self._unproven: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        self._suspects: set[str] = set()

    def begin(
        self,
        source_digests: SourceDigests,
        save_id: SaveId,
        leaves: Sequence[Leaf],
        numbers: Sequence[int],
        asides: EagerCopies,
    ) -> None:
        """Take source digests for a capture of ``leaves`` whose partitions ``numbers`` are deferred."""
        if self._proof == "off":
            return
        self._begun += 1
        source_digests.mark(leaves, numbers)
        self._reset_for_plan(source_digests, numbers)
        part = list(numbers)
        if self._proof == "sampled" and not self._full:
            self._due = self._due or self._chance.sample(part, len(part))
            part, wanted = [], sum(self._partitions[number].length for number in numbers) / ROUND
            while self._due and wanted > 0:
                part.append(self._due.pop())
                wanted -= self._partitions[part[-1]].length
            self._unproven.append((self._begun, save_id.hex()))
        self._full = max(self._full - 1, 0)
        source_digests.before = {number: self._proven[number] for number in part}
        source_digests.take(part, asides)
        self._proven.update((number, self._begun) for number in part if number in source_digests)
        self._warn()

    def _reset_for_plan(self, source_digests: SourceDigests, numbers: Sequence[int]) -> None:
        """Reset the comparison if the plan differs from that of the previous capture."""
        if source_digests.partitions is self._partitions:
            return
        self._partitions = source_digests.partitions
        if not source_digests.marked <= self._marked:
            self._full = FIRST
        self._marked, self._due = source_digests.marked, []
        # With new partitions, only the oldest comparison holds for every partition.
        self._proven = dict.fromkeys(numbers, min(self._proven.values(), default=self._begun))

    def fence(self, source_digests: SourceDigests) -> None:
        """Release the tensors of a capture, and warn about tensors that changed before the fence."""
        began = time.perf_counter()
        # With "full", the captured bytes are compared anyway. Comparing the source would double the cost.
        # An optimizer of another thread must not step while bytes are compared.
        with self._lock:
            names = source_digests.fence(compare=self._proof == "sampled")
            self._suspect(source_digests)
            self._late.append(source_digests)
        self._unwarned.extend(names)
        self.compared_s += time.perf_counter() - began
        self._warn()

    def _warn(self) -> None:
        """Warn about changed tensors; for the training thread."""
        waiting: dict[str, None] = {}
        # The capture thread may add names at the same time.
        while self._unwarned:
            waiting[self._unwarned.popleft()] = None
        names = [name for name in waiting if name not in self._warned]
        if names:
            self._warned.update(names)
            self.changing.update(names)
            warn_user(
                f"tensor {listed(names, _NAMED)} changed after step() and before the next optimizer step, outside an "
                "optimizer: it is copied inside step() from now on, which takes longer. Change it before step(), or "
                "call fence() first",
                CaptureWarning,
            )

    def verdict(self, source_digests: SourceDigests, step: int) -> TornCaptureError | None:
        """Return the error for a torn capture of ``step``; None if no tear was detected."""
        # Its copies came after the fences of earlier captures.
        self._compare_late(source_digests)
        names = source_digests.torn
        self._suspect(source_digests)
        self.changing.update(names)
        if not names:
            return None
        return TornCaptureError(
            f"tensor {listed(names, _NAMED)} changed while step {step} was being captured, so that this checkpoint was "
            "given up. Only optimizers may change parameters and their state between two calls of step(); what "
            "changes them otherwise must come before step(), or call fence() first. What changed is copied inside "
            "step() from now on"
        )

    def settle(self) -> None:
        """Wait until devices have reached all fences, and warn about tensors that changed before; for the training."""
        self._compare_late(None)
        self._warn()

    def _compare_late(self, current: SourceDigests | None) -> None:
        """Compare what devices computed at the fences of captures before ``current``."""
        with self._late_lock:
            while self._late and self._late[0] is not current:
                earlier = self._late.popleft()
                # An error has named those that were torn.
                names = [name for name in earlier.late() if name not in self.changing]
                self.changing.update(names)
                self._unwarned.extend(names)
                self._suspect(earlier)

    def _suspect(self, source_digests: SourceDigests) -> None:
        """Record the captures that may be torn after a change without a version change."""
        # Copied at once, because the other thread may add partitions.
        unseen = tuple(source_digests.unseen)
        since = min((source_digests.before.get(number, self._begun) for number in unseen), default=self._begun)
        self._suspects.update(save_id for begun, save_id in tuple(self._unproven) if begun > since)

    @property
    def suspects(self) -> frozenset[str]:
        """Save ids of captures that may be torn."""
        return frozenset(self._suspects)

    def forget(self, suspects: frozenset[str]) -> None:
        """Remove suspects that were abandoned."""
        self._suspects -= suspects


def _mark_of(leaf: Leaf) -> int:
    source = leaf.source
    if not isinstance(source, torch.Tensor):
        return 0
    # An int is not tracked by the Python garbage collector. Inference tensors have no version counter.
    return (source.data_ptr() << 64) + (0 if source.is_inference() else source._version)
