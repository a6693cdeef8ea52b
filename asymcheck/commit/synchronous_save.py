"""Synchronous save: digest and write all partitions, and commit, while the caller waits."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from asymcheck.commit.encoder import Base, Contents, Encoder, contents_of, original_of
from asymcheck.commit.manifest_builder import ManifestBuilder, inline_bytes, manifest_header
from asymcheck.commit.save_request import LineagePosition, SaveRequest
from asymcheck.commit.transaction import CommitTransaction, WriteFrame
from asymcheck.config import StoreConfig
from asymcheck.errors import TornCaptureError, listed
from asymcheck.events import timed
from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor, frame_length
from asymcheck.format.manifest import manifest_of
from asymcheck.format.registry import ALIGNED_PAYLOAD_MIN_BYTES, BLOCK_BYTES, CODEC_BYTE_PLANES, CODEC_DELTA
from asymcheck.state.leaves import Leaf, copy_partition
from asymcheck.state.partition_plan import PLAN_KIND, Cut, Originals, Partition, cut
from asymcheck.state.walk import Columns, FlatState
from asymcheck.storage.gpu_staging import catch_up
from asymcheck.storage.nvme import Catalog, NvmeTier, PackWriter, Slot, run_with_slots
from asymcheck.types import CheckpointRef, Digest

_SAMPLE_STRIDE = 65_521
"""Stride of the bytes that are compared after a write. A prime covers all positions in an element."""
_JUDGED_BYTES = 16 << 20
"""Number of bytes of a tensor that show the size of its memory pages."""
_SHOWN = 4
"""Maximum number of tensors that an error names."""


@dataclasses.dataclass(frozen=True)
class KnownCut:
    """Cut of a state whose bytes are computed from stored partitions."""

    cut: Cut
    digests: Mapping[Partition, Digest]
    """Partitions whose digest is known. They are read only if the store lacks them."""


@dataclasses.dataclass(frozen=True)
class EarlierState:
    """A state in memory that the store has, too: its partitions are possible bases of the next state."""

    columns: Columns
    """Names, dtypes and shapes of the tensors."""
    leaves: Sequence[Leaf]
    """The tensors. Nothing may change them while a save uses them."""
    names: dict[Partition, Digest]

    @classmethod
    def of(cls, state: FlatState, config: StoreConfig) -> EarlierState:
        """Compute the digests of a state that was loaded."""
        plan = plan_of(state.columns, config)
        earlier = cls(state.columns, state.leaves, {})
        earlier.names.update({partition: digest(earlier.plain(partition)) for partition in plan.partitions})
        return earlier

    def plain(self, partition: Partition) -> memoryview:
        """Return the bytes of a partition, in place if possible."""
        first, *more = partition.pieces
        in_place = None if more else self.leaves[first.row].bytes_in_place(first.start, first.length)
        if in_place is None:
            in_place = memoryview(bytearray(partition.length))
            copy_partition(partition, self.leaves, in_place)
        return in_place

    def base(self, partition: Partition) -> Base:
        """Return a partition as the base of a difference."""
        return Base(CODEC_DELTA, self.names[partition], self.plain(partition))


def plan_of(columns: Columns, config: StoreConfig) -> Cut:
    """Return the partitions of a state that is saved at once."""
    return cut(columns.sizes, columns.groups, config, columns.widths)


class _Progress:
    """Partitions that one call of :meth:`Flusher.write` stores, with their digests so far."""

    def __init__(self, partitions: Sequence[Partition], leaves: Sequence[Leaf]) -> None:
        self.partitions = partitions
        self.digests: list[Digest | None] = [None] * len(partitions)
        self.originals = Originals(partitions, [leaf.dtype for leaf in leaves], [leaf.shape for leaf in leaves])
        self.copies: set[int] = set()
        """Numbers of partitions that may be rounded copies of others."""
        self._remaining = Counter(piece.row for partition in partitions for piece in partition.pieces)
        self._lock = threading.Lock()

    def completed_by(self, partition: Partition) -> Iterator[int]:
        """Count a stored partition. Yield the rows of tensors that are now stored as a whole."""
        for piece in partition.pieces:
            with self._lock:
                self._remaining[piece.row] -= 1
                is_complete = not self._remaining[piece.row]
            if is_complete:
                yield piece.row


class Flusher:
    """Writes partitions of one state on several threads."""

    def __init__(
        self,
        tier: NvmeTier,
        transaction: CommitTransaction,
        encoder: Encoder,
        leaves: Sequence[Leaf],
        known: Mapping[Partition, Digest],
        earlier: EarlierState | None = None,
    ) -> None:
        """Add partitions of ``leaves`` to ``transaction``; ``encoder`` decides whether to search for bases.

        The digests of partitions in ``known`` are known before their bytes are read. ``earlier`` is a state with the
        same tensors.
        """
        self._known, self._earlier = known, earlier
        self._encoder = encoder
        self._transaction = transaction
        self._dtypes = [leaf.dtype for leaf in leaves]
        self._tier = tier
        self._leaves = leaves
        self._direct: dict[int, memoryview | None] = {}

    def write(self, partitions: Sequence[Partition]) -> list[Digest]:
        """Digest all partitions and write those that the store lacks; return their digests in order.

        Raises:
            StorageError: the drive is full or failed.
            TornCaptureError: the state changed during the save.
        """
        self._transaction.expect(sum(frame_length(partition.length, BLOCK_BYTES - 1) for partition in partitions))
        progress = _Progress(partitions, self._leaves)
        if self._encoder.wants_bases:
            progress.copies = {
                number
                for number, partition in enumerate(partitions)
                if next(progress.originals.candidates(number), None) is not None
                and self._encoder.searches_original(self._contents(partition))
            }
        others = [number for number in range(len(partitions)) if number not in progress.copies]
        before = self._versions()
        # Possible rounded copies come last, when the digests of their originals are known.
        for numbers in (others, sorted(progress.copies)):
            run_with_slots(
                numbers,
                partial(self._store, progress),
                slots=self._tier.slots,
                payload_bytes=max((partitions[number].length for number in numbers), default=0),
                threads=self._tier.config.slots,
                name="flush",
            )
        changed = [leaf for leaf, a, b in zip(self._leaves, before, self._versions(), strict=True) if a != b]
        if changed:
            raise _torn(changed)
        return [name for name in progress.digests if name is not None]

    def _store(self, progress: _Progress, number: int, slot: Slot) -> None:
        """Digest a partition, and write it if the store lacks it. Release tensors that are complete."""
        partition = progress.partitions[number]
        known = self._known.get(partition)
        in_place = None if number in progress.copies else self._writable_in_place(partition)
        if known is not None:
            name = self._put_known(partition, number, slot, known)
        elif in_place is not None:
            name = self._put_in_place(partition, number, slot, in_place)
        else:
            name = self._put_copy(progress, number, slot)
        progress.digests[number] = name
        for row in progress.completed_by(partition):
            self._leaves[row].release()

    def _versions(self) -> list[int | None]:
        """Return the version counters of all tensors, which torch increments at each change."""
        sources = (leaf.source for leaf in self._leaves)
        return [
            source._version if isinstance(source, torch.Tensor) and not source.is_inference() else None
            for source in sources
        ]

    def _bytes_in_place(self, partition: Partition, start: int, length: int | None) -> memoryview | None:
        """Return the bytes of a partition of one piece in place; None if they are not contiguous.

        A contiguous copy would use the memory of the tensor once more until the end of the save.
        """
        (piece,) = partition.pieces
        start, length = piece.start + start, piece.length - start if length is None else length
        return self._leaves[piece.row].bytes_in_place(start, length)

    def _writable_in_place(self, partition: Partition) -> memoryview | None:
        """Return the bytes of a partition in place if they can be written from there; else None."""
        piece, *more = partition.pieces
        whole = None if more or partition.length < ALIGNED_PAYLOAD_MIN_BYTES else self._direct_memory(piece.row)
        if whole is None:
            return None
        in_place = whole[piece.start : piece.start + piece.length]
        is_congruent = self._tier.may_shift or not _shift_of(in_place)
        codecs = (CODEC_BYTE_PLANES,) if self._earlier is None else (CODEC_BYTE_PLANES, CODEC_DELTA)
        stays = is_congruent and self._encoder.stays_plain(partition.length, self._contents(partition), codecs)
        return in_place if stays else None

    def _direct_memory(self, row: int) -> memoryview | None:
        """Return the bytes of a tensor if writes from its memory are faster than copies; else None.

        Asked once for each tensor. Once for each partition took a tenth of a save, due to waits for the GIL.
        """
        if row not in self._direct:
            whole = self._leaves[row].bytes_in_place(0, self._leaves[row].nbytes)
            is_slow = whole is None or self._tier.needs_slot(whole[:_JUDGED_BYTES])
            self._direct[row] = None if is_slow else whole
        return self._direct[row]

    def _put_known(self, partition: Partition, number: int, slot: Slot, known: Digest) -> Digest:
        """Write a partition whose digest is known, if the store lacks it."""
        if self._transaction.claim(known):
            name, payload = self._copy(partition, number, slot)
            if name != known:
                raise _torn([self._leaves[partition.pieces[0].row]])
            identity = FrameDescriptor.identity(name, len(payload))
            self._transaction.write(identity, lambda writer, descriptor: writer.write(slot, descriptor))
        return known

    def _put_in_place(self, partition: Partition, number: int, slot: Slot, in_place: memoryview) -> Digest:
        """Digest a partition and write it without a copy; return the digest. Raise if the bytes changed meanwhile."""
        sample = np.frombuffer(in_place, dtype=np.uint8)[::_SAMPLE_STRIDE]
        before = sample.copy()
        with timed("digest", partition.length, lambda: {"partition": number}):
            name = digest(in_place)

        def write(writer: PackWriter, descriptor: FrameDescriptor) -> None:
            writer.write_in_place(in_place, descriptor, slot)

        self._put(partition, number, name, in_place, write, shift=_shift_of(in_place))
        if not np.array_equal(sample, before):
            raise _torn([self._leaves[partition.pieces[0].row]])
        return name

    def _put_copy(self, progress: _Progress, number: int, slot: Slot) -> Digest:
        """Copy a partition, digest the copy and write it, encoded if that saves bytes; return the digest."""
        partition = progress.partitions[number]
        # Memory that the next save uses as a base does not change, and needs no copy.
        is_kept = self._earlier is not None and len(partition.pieces) == 1
        kept = self._bytes_in_place(partition, 0, None) if is_kept else None
        name, payload = self._copy(partition, number, slot, kept)
        bases = []
        if number in progress.copies:
            dtype = self._leaves[partition.pieces[0].row].dtype
            original = original_of(payload, dtype, number, progress.originals, partial(self._read, progress))
            bases += [] if original is None else [original]
        if self._earlier is not None:
            bases.append(self._earlier.base(partition))

        def write(writer: PackWriter, descriptor: FrameDescriptor) -> None:
            if kept is not None:
                slot.fill(kept)
            writer.write(slot, descriptor)

        self._put(partition, number, name, payload, write, bases)
        return name

    def _read(
        self, progress: _Progress, number: int, start: int, length: int | None
    ) -> tuple[Digest, memoryview] | None:
        """Return the digest of a stored partition and some of its bytes, if both are known."""
        name = progress.digests[number]
        in_place = None if name is None else self._bytes_in_place(progress.partitions[number], start, length)
        return None if name is None or in_place is None else (name, in_place)

    def _copy(
        self, partition: Partition, number: int, slot: Slot, kept: memoryview | None = None
    ) -> tuple[Digest, memoryview]:
        payload = slot.payload(partition.length) if kept is None else kept
        if kept is None:
            with timed("copy", partition.length, lambda: {"partition": number}):
                copy_partition(partition, self._leaves, payload)
        # Digest now, while the bytes are in the cache of this core.
        with timed("digest", partition.length, lambda: {"partition": number}):
            return digest(payload), payload

    def _put(
        self,
        partition: Partition,
        number: int,
        name: Digest,
        plain: memoryview,
        write: WriteFrame,
        bases: Sequence[Base] = (),
        shift: int = 0,
    ) -> None:
        is_new, contents = True, self._contents(partition)
        with timed("write", partition.length, lambda: {"partition": number, "known": not is_new}):
            is_new = self._transaction.add(name, plain, contents, write, bases, shift)

    def _contents(self, partition: Partition) -> Contents:
        return contents_of(partition.pieces, self._leaves[partition.pieces[0].row].role, self._dtypes)


def _shift_of(in_place: memoryview) -> int:
    return np.frombuffer(in_place, dtype=np.uint8).ctypes.data % BLOCK_BYTES


def _torn(leaves: Sequence[Leaf]) -> TornCaptureError:
    names = listed([leaf.name for leaf in leaves], _SHOWN)
    return TornCaptureError(
        f"{names} changed during save(), so no checkpoint was made: do not change the state until save() returns"
    )


@dataclasses.dataclass(frozen=True)
class Saved:
    """A committed state."""

    ref: CheckpointRef
    state_bytes: int
    """Bytes of all tensors."""
    written_bytes: int
    """Payload bytes written, without partitions that the store already had."""
    state: EarlierState
    """The state, as a base of the next one."""


def save(
    tier: NvmeTier,
    catalog: Catalog,
    encoder: Encoder,
    state: FlatState,
    request: SaveRequest,
    placing: Callable[[], LineagePosition],
    *,
    known: KnownCut | None = None,
    earlier: EarlierState | None = None,
) -> Saved:
    """Store and commit a state.

    ``placing`` returns the position on the line of training. It is called once everything except the manifest is
    durable, so that no generation begins for a failed checkpoint. ``known`` replaces the canonical cut. ``earlier`` is
    ignored if its tensors differ in name, dtype or shape.

    Raises:
        StorageError: the drive is full or failed. Nothing was committed, and earlier checkpoints are untouched.
        StructureError: the manifest could not be parsed after encoding; nothing was committed.
    """
    leaves = state.leaves
    catch_up(leaf.source.device for leaf in leaves if isinstance(leaf.source, torch.Tensor))
    columns = state.columns
    plan = plan_of(columns, tier.config) if known is None else known.cut
    if earlier is not None and earlier.columns != columns:
        earlier = None
    try:
        with CommitTransaction(tier, catalog, encoder, request.save_id, request.rank) as transaction:
            flusher = Flusher(tier, transaction, encoder, leaves, {} if known is None else known.digests, earlier)
            names = flusher.write(plan.partitions)
            named = dict(zip(plan.partitions, names, strict=True))
            table = ManifestBuilder().columns(columns, plan, names, inline_bytes(leaves, plan))
            header = manifest_header(request, 1, {"number": 0, "kind": PLAN_KIND}, state.tree)
            ref = transaction.commit(
                manifest_of(header, table),
                placing,
                lambda lost: flusher.write([partition for partition, name in named.items() if name in lost]),
            )
    finally:
        for leaf in leaves:
            leaf.release()
    state_bytes = sum(leaf.nbytes for leaf in leaves)
    return Saved(ref, state_bytes, transaction.packing.written_bytes, EarlierState(columns, leaves, named))
