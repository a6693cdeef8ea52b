"""A synchronous save by one rank: partitions are copied, digested and written while the caller waits.

When :func:`save` returns, the checkpoint is durable.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from asymcheck.commit.encoder import Base, Contents, Encoder, contents_of, original_of
from asymcheck.commit.manifest_builder import ManifestBuilder, inline_bytes, manifest_header
from asymcheck.commit.save_request import LineagePosition, SaveRequest
from asymcheck.commit.transaction import CommitTransaction
from asymcheck.errors import TornCaptureError
from asymcheck.events import timed
from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor, frame_length
from asymcheck.format.manifest import manifest_of
from asymcheck.format.registry import ALIGNED_PAYLOAD_MIN_BYTES, BLOCK_BYTES, CODEC_BYTE_PLANES, CODEC_DERIVED
from asymcheck.state.leaves import Leaf, copy_partition
from asymcheck.state.partition_plan import PLAN_KIND, Originals, Partition, cut
from asymcheck.state.walk import FlatState
from asymcheck.storage.gpu_staging import catch_up
from asymcheck.storage.nvme import Catalog, NvmeTier, PackWriter, Slot, run_with_slots
from asymcheck.types import CheckpointRef, Digest

_SAMPLE_STRIDE = 65_521
"""Bytes between those that are compared after a write; a prime, so that they are of all places in an element."""
_SHOWN = 4
"""Tensors that an error names."""


class Flusher:
    """Writes partitions of one state, several in flight."""

    def __init__(
        self, tier: NvmeTier, transaction: CommitTransaction, encoder: Encoder, leaves: Sequence[Leaf]
    ) -> None:
        """Add partitions of ``leaves`` to ``transaction``; ``encoder`` tells which bases to look for."""
        self._encoder = encoder
        self._transaction = transaction
        self._dtypes = [leaf.dtype for leaf in leaves]
        self._tier = tier
        self._leaves = leaves
        self._lock = threading.Lock()
        # Copies that run at once take memory bandwidth from each other and from the device; half of the cores are
        # enough to keep it busy.
        self._copying = threading.BoundedSemaphore(max(1, len(os.sched_getaffinity(0)) // 2))

    def write(self, partitions: Sequence[Partition]) -> list[Digest]:
        """Digest all partitions and write those that the store lacks; return their digests in order.

        Raises:
            StorageError: the device refused.
            TornCaptureError: the state changed meanwhile.
        """
        digests: list[Digest | None] = [None] * len(partitions)
        self._transaction.expect(sum(frame_length(partition.length, BLOCK_BYTES - 1) for partition in partitions))
        left = Counter(piece.row for partition in partitions for piece in partition.pieces)

        originals = Originals(partitions, self._dtypes, [leaf.shape for leaf in self._leaves])
        # What may be a copy comes last, when the digest of its original is known.
        copies = {
            number
            for number, partition in enumerate(partitions if self._encoder.wants_bases else ())
            if next(originals.candidates(number), None) is not None
            and self._encoder.looks_for(CODEC_DERIVED, self._contents(partition))
        }
        others = [number for number in range(len(partitions)) if number not in copies]

        def read(number: int, start: int, length: int | None) -> tuple[Digest, memoryview] | None:
            name = digests[number]
            lying = None if name is None else self._lying(partitions[number], start, length)
            return None if name is None or lying is None else (name, lying)

        def store(number: int, slot: Slot) -> None:
            partition = partitions[number]
            lying = None if number in copies else self._writable_in_place(partition)
            if lying is not None:
                digests[number] = self._put_in_place(partition, number, slot, lying)
            else:
                name, payload = self._copy(partition, number, slot)
                digests[number] = name
                dtype = self._dtypes[partition.pieces[0].row]
                base = original_of(payload, dtype, number, originals, read) if number in copies else None
                self._put(partition, number, slot, name, [] if base is None else [base])
            for piece in partition.pieces:
                with self._lock:
                    left[piece.row] -= 1
                if not left[piece.row]:
                    self._leaves[piece.row].release()

        before = self._versions()
        for numbers in (others, sorted(copies)):
            run_with_slots(
                numbers,
                store,
                slots=self._tier.slots,
                payload_bytes=max((partitions[number].length for number in numbers), default=0),
                threads=self._tier.config.slots,
                name="flush",
            )
        changed = [leaf for leaf, a, b in zip(self._leaves, before, self._versions(), strict=True) if a != b]
        if changed:
            raise _torn(changed)
        return [name for name in digests if name is not None]

    def _versions(self) -> list[int | None]:
        """Return the version counters of all tensors, which say when torch has changed one."""
        sources = (leaf.source for leaf in self._leaves)
        return [one._version if isinstance(one, torch.Tensor) and not one.is_inference() else None for one in sources]

    def _lying(self, partition: Partition, start: int, length: int | None) -> memoryview | None:
        """Return bytes of a partition of one piece where they lie; None if they do not lie there in order.

        To put them in order would take the memory of their tensor once more, until the end of the save.
        """
        (piece,) = partition.pieces
        start, length = piece.start + start, piece.length - start if length is None else length
        return self._leaves[piece.row].lying_bytes(start, length)

    def _writable_in_place(self, partition: Partition) -> memoryview | None:
        """Return the bytes of a partition where they lie, if they can be written from there; else None."""
        if partition.length < ALIGNED_PAYLOAD_MIN_BYTES or len(partition.pieces) > 1:
            return None
        lying = self._lying(partition, 0, None)
        is_congruent = lying is not None and (self._tier.may_shift or not _shift_of(lying))
        codecs = (CODEC_BYTE_PLANES,)
        stays = is_congruent and self._encoder.stays_plain(partition.length, self._contents(partition), codecs)
        return None if lying is None or not stays or self._tier.needs_slot(lying) else lying

    def _put_in_place(self, partition: Partition, number: int, slot: Slot, lying: memoryview) -> Digest:
        """Digest a partition and write it, with no copy; return the digest.

        Raises:
            TornCaptureError: its bytes changed meanwhile.
        """
        sample = np.frombuffer(lying, dtype=np.uint8)[::_SAMPLE_STRIDE]
        before = sample.copy()
        with self._copying, timed("digest", partition.length, lambda: {"partition": number}):
            name = digest(lying)
        is_new, contents = True, self._contents(partition)

        def write(writer: PackWriter, descriptor: FrameDescriptor) -> None:
            writer.write_in_place(lying, descriptor, slot)

        with timed("write", partition.length, lambda: {"partition": number, "known": not is_new}):
            is_new = self._transaction.add(name, lying, contents, write, shift=_shift_of(lying))
        if not np.array_equal(sample, before):
            raise _torn([self._leaves[partition.pieces[0].row]])
        return name

    def _copy(self, partition: Partition, number: int, slot: Slot) -> tuple[Digest, memoryview]:
        payload = slot.payload(partition.length)
        with self._copying:
            with timed("copy", partition.length, lambda: {"partition": number}):
                copy_partition(partition, self._leaves, payload)
            # At once, while it is in this core's cache.
            with timed("digest", partition.length, lambda: {"partition": number}):
                return digest(payload), payload

    def _put(self, partition: Partition, number: int, slot: Slot, name: Digest, bases: Sequence[Base]) -> None:
        is_new, contents = True, self._contents(partition)
        with timed("write", partition.length, lambda: {"partition": number, "known": not is_new}):
            is_new = self._transaction.add(name, slot.payload(partition.length), contents, partial(_write, slot), bases)

    def _contents(self, partition: Partition) -> Contents:
        return contents_of(partition.pieces, self._leaves[partition.pieces[0].row].role, self._dtypes)


def _shift_of(lying: memoryview) -> int:
    return np.frombuffer(lying, dtype=np.uint8).ctypes.data % BLOCK_BYTES


def _torn(leaves: Sequence[Leaf]) -> TornCaptureError:
    names = ", ".join(leaf.name for leaf in leaves[:_SHOWN])
    more = f" and {len(leaves) - _SHOWN} more" if len(leaves) > _SHOWN else ""
    return TornCaptureError(
        f"{names}{more} changed while the state was being saved, and no checkpoint was made: "
        "let nothing change the state until save() returns"
    )


def _write(slot: Slot, writer: PackWriter, descriptor: FrameDescriptor) -> None:
    writer.write(slot, descriptor)


def save(
    tier: NvmeTier,
    catalog: Catalog,
    encoder: Encoder,
    state: FlatState,
    request: SaveRequest,
    placing: Callable[[], LineagePosition],
) -> tuple[CheckpointRef, int, int]:
    """Store a state, encoded as ``encoder`` says, and commit it.

    Return the checkpoint, the bytes of all tensors, and the payload bytes written; the rest was in the store already.

    ``placing`` says where on the line it goes. It is asked when all but the manifest is durable: a generation that is
    opened for a checkpoint must not be opened for one that fails.

    Raises:
        StorageError: the device or file system refused. Nothing was committed, earlier checkpoints are untouched.
        StructureError: the manifest could not be read again; nothing was committed, either.
    """
    leaves = state.leaves
    catch_up(leaf.source.device for leaf in leaves if isinstance(leaf.source, torch.Tensor))
    columns = state.columns
    plan = cut(columns.sizes, columns.groups, tier.config, columns.widths)
    try:
        with CommitTransaction(tier, catalog, encoder, request.save_id, request.rank) as transaction:
            flusher = Flusher(tier, transaction, encoder, leaves)
            names = flusher.write(plan.partitions)
            named = list(zip(plan.partitions, names, strict=True))
            table = ManifestBuilder().columns(columns, plan, names, inline_bytes(leaves, plan))
            header = manifest_header(request, 1, {"number": 0, "kind": PLAN_KIND}, state.tree)
            ref = transaction.commit(
                manifest_of(header, table),
                placing,
                lambda lost: flusher.write([partition for partition, name in named if name in lost]),
            )
    finally:
        for leaf in leaves:
            leaf.release()
    return ref, sum(leaf.nbytes for leaf in leaves), transaction.packing.written_bytes
