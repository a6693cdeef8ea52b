"""Commit transactions: the only way to make a checkpoint on the drive (SPEC.md §B2, steps 1 to 5).

A save, a background capture, the adoption of a ring and a pull each run one transaction per rank and checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial

from asymcheck.codecs.encode import Encoded
from asymcheck.commit.encoder import Base, Contents, Encoder
from asymcheck.commit.pack_builder import PackBuilder
from asymcheck.commit.save_request import LineagePosition
from asymcheck.errors import AsymcheckError, MissingPartitionError, StorageError
from asymcheck.events import emit
from asymcheck.format import registry
from asymcheck.format.catalog_records import manifest_key, pin_key
from asymcheck.format.frame import FrameDescriptor, frame_length, payload_offset
from asymcheck.format.manifest import Manifest, elsewhere_bits, encode
from asymcheck.format.manifest_reader import check_manifest
from asymcheck.storage.nvme import Catalog, CheckpointFiles, NvmeTier, PackWriter
from asymcheck.storage.process_identity import hold, let_go, this_process
from asymcheck.storage.reachability import is_manifest_deleted
from asymcheck.types import CheckpointRef, Digest, PackId, SaveId

WriteFrame = Callable[[PackWriter, FrameDescriptor], object]
"""Write a plain partition from its memory."""


class CommitTransaction(contextlib.AbstractContextManager["CommitTransaction"]):
    """One rank's part of one checkpoint, from partitions to a published manifest.

    Threads may call :meth:`add`, :meth:`claim` and :meth:`write` together. The other methods are for one thread.
    Call :meth:`abort` after any failure, or use a ``with`` block, which does.
    Methods raise StorageError if the drive is full or fails.
    """

    def __init__(self, tier: NvmeTier, catalog: Catalog, encoder: Encoder, save_id: SaveId, rank: int) -> None:
        """Start the part of ``rank`` in the save ``save_id``; ``encoder`` encodes partitions."""
        self.packing = PackBuilder(tier, catalog)
        """Written packs and reused partitions."""
        self._tier, self._catalog, self._encoder = tier, catalog, encoder
        self._rank, self._pin = rank, pin_key(save_id, rank)
        self._published: tuple[str, CheckpointRef] | None = None
        self._entry: bytes | None = None
        self._is_committed = False
        hold(self._pin)

    def __exit__(self, *_error: object) -> None:
        """Abort, unless the checkpoint was committed."""
        self.abort()

    def expect(self, frame_bytes: int) -> None:
        """Announce the maximum number of frame bytes that follow."""
        self.packing.expect(frame_bytes)

    def claim(self, name: Digest) -> bool:
        """Return whether a partition must be written: the store lacks it, and nobody claimed it before."""
        return self.packing.claim(name)

    def add(
        self,
        name: Digest,
        plain: memoryview,
        contents: Contents | None,
        write_plain: WriteFrame,
        bases: Sequence[Base] = (),
        shift: int = 0,
    ) -> bool:
        """Claim a partition, encode it and write it; return whether it was written.

        ``contents`` is None for unknown bytes, which are stored plain. ``write_plain`` writes a plain partition.
        ``bases`` has at most one possible base per codec. ``shift`` is the shift of an unencoded payload in bytes.
        """
        if not self.claim(name):
            return False
        encoded = None if contents is None else self._encoded(name, plain, contents, bases)
        if encoded is None:
            self.write(FrameDescriptor.identity(name, len(plain), shift), write_plain)
        else:
            self.write(encoded.descriptor, partial(self._write_encoded, encoded))
        return True

    def write(self, descriptor: FrameDescriptor, write: WriteFrame) -> None:
        """Write the frame of a claimed partition."""
        with self._encoder.meter.measure(descriptor.stored_length):
            self.packing.write(descriptor, write)

    def _encoded(self, name: Digest, plain: memoryview, contents: Contents, bases: Sequence[Base]) -> Encoded | None:
        def relies_on(base: Base) -> bool:
            return self.packing.rely(name, base.name, base.codec)

        usable = [base for base in bases if base.name != name]
        choice = self._encoder.choose(plain, contents, usable)
        if any(base.codec == choice.codec and not relies_on(base) for base in usable):
            usable = [base for base in usable if base.codec != choice.codec]
            choice = self._encoder.choose(plain, contents, usable)
            usable = [base for base in usable if base.codec != choice.codec or relies_on(base)]
        return self._encoder.encode(name, choice, plain, contents, usable)

    def _write_encoded(self, encoded: Encoded, writer: PackWriter, descriptor: FrameDescriptor) -> None:
        with self._tier.slots.slot(descriptor.stored_length) as slot:
            encoded.write_to(slot.payload(descriptor.stored_length))
            writer.write(slot, descriptor)

    def seal(self, names: Collection[Digest], rewrite: Callable[[set[Digest]], object]) -> None:
        """Make the packs durable, enter them in the catalog and pin them: steps 2 and 3.

        Args:
            names: every partition of the checkpoint.
            rewrite: function that stores partitions again whose packs garbage collection has freed.

        Raises:
            StorageError: the drive failed, or garbage collection freed partitions repeatedly.
            MissingPartitionError: one of ``names`` was never added.
        """
        attempts = self._tier.config.commit_attempts
        for _ in range(attempts):
            self.packing.seal()
            gone = self._pin_packs()
            if not gone:
                self.packing.close()
                _check_stored(names, self.packing)
                return
            rewrite(set(self.packing.take_back(gone)))
        raise StorageError(
            f"cannot commit to store {self._tier.root}: garbage collection removed partitions {attempts} times "
            "during one save; save again"
        )

    def _pin_packs(self) -> list[PackId]:
        """Pin all packs; if reused packs are missing, return them instead."""
        packing, reused = self.packing, self.packing.needed_packs()
        with self._catalog.write() as transaction:
            gone = [pack_id for pack_id in reused if transaction.pack_state(pack_id) != registry.PACK_LIVE]
            for name, location in packing.written.items():
                transaction.put_location(name, location)
            for pack_id, header in packing.packs.items():
                transaction.put_pack(pack_id, registry.PACK_LIVE, header.frame_count, header.pack_length)
            transaction.put_pin(self._pin, this_process(), {*packing.packs, *reused} - set(gone))
        emit("catalog.pinned", self._pin.hex())
        return gone

    def commit(
        self,
        captured: Manifest,
        place: Callable[[], LineagePosition],
        rewrite: Callable[[set[Digest]], object],
        elsewhere: Container[Digest] = frozenset(),
        metrics: Mapping[str, float] | None = None,
    ) -> CheckpointRef:
        """Seal all packs and publish the manifest, which makes the checkpoint durable and visible.

        Args:
            captured: the manifest, without packs and parent; its generation is replaced.
            place: returns generation and parent. It is called once everything except the manifest is durable, so that
                no generation begins for a failed checkpoint.
            rewrite: see :meth:`seal`.
            elsewhere: partitions that another store of the job pushes.
            metrics: replace those of ``captured``.

        Raises:
            StorageError: the drive is full or failed; nothing was committed.
            StructureError: the manifest could not be parsed after encoding; nothing was committed.
        """
        check_manifest(captured, "manifest of a capture")
        header, names = captured.header, list(captured.partitions())
        self.seal(names, rewrite)
        placed = place()
        ref = CheckpointRef(placed.generation, header.ref.step, header.ref.save_id)
        # The reasons for codecs are informative only.
        reasons = self._encoder.reasons()
        committed = dataclasses.replace(
            header,
            ref=ref,
            parent=placed.parent,
            packs=tuple(sorted({at.pack_id for at in self.packing.written.values()} | self.packing.needed_packs())),
            plan={**header.plan, **({"encoding": reasons} if reasons else {})},
            elsewhere=elsewhere_bits(names, elsewhere),
            metrics=header.metrics if metrics is None else metrics,
        )
        self.publish(header.run, ref, header.world_size, encode(captured, committed))
        return ref

    def publish(
        self, run: str, ref: CheckpointRef, world_size: int, data: bytes, *, keep_existing: bool = False
    ) -> None:
        """Write the manifest and enter it in the catalog, which drops the pin: steps 4 and 5.

        With ``keep_existing``, :meth:`abort` keeps a manifest that was published before.
        """
        if not (keep_existing and self._tier.manifests.listing(run, ref).has(self._rank)):
            self._published = run, ref
        name = self._tier.manifests.publish(run, ref, self._rank, world_size, data)
        self._entry = manifest_key(run, ref, name)
        with self._catalog.write() as transaction:
            transaction.put_manifest(self._entry, len(data))
            transaction.delete("pins", self._pin)
        emit("catalog.committed", str(ref))
        self._is_committed = True
        self._release()

    def revoke(self) -> None:
        """Let :meth:`abort` remove a committed manifest of a checkpoint that will never be complete."""
        self._is_committed = False

    def abort(self) -> None:
        """Remove the manifest of a failed save, and leave its packs to garbage collection.

        After a commit this does nothing.
        """
        if self._is_committed:
            return
        if self._published is not None:
            with contextlib.suppress(AsymcheckError, FileNotFoundError):
                self._tier.manifests.withdraw(*self._published, self._rank)
        # The first failure is reported. The pin expires when this process ends.
        with contextlib.suppress(AsymcheckError), self._catalog.write() as transaction:
            # The packs of a manifest that cannot be removed stay.
            if self._published is None or not self._tier.manifests.listing(*self._published).has(self._rank):
                transaction.delete("pins", self._pin)
                if self._entry is not None:
                    transaction.delete("manifests", self._entry)
        self._release()

    def _release(self) -> None:
        self.packing.abandon()
        let_go(self._pin)


def _check_stored(names: Collection[Digest], packing: PackBuilder) -> None:
    missing = [name for name in names if name not in packing.written and name not in packing.reused]
    if missing:
        raise MissingPartitionError(f"partition {missing[0].hex()} was not stored; nothing was committed")


class RingTransaction(CommitTransaction):
    """Transaction of a capture whose frames are in the ring (SPEC.md §B9)."""

    def __init__(self, tier: NvmeTier, catalog: Catalog, encoder: Encoder, save_id: SaveId, rank: int) -> None:
        super().__init__(tier, catalog, encoder, save_id, rank)
        self._frames: dict[Digest, tuple[int, memoryview | None]] = {}

    def add_frame(
        self,
        name: Digest,
        length: int,
        frame: memoryview,
        contents: Contents | None = None,
        bases: Sequence[Base] = (),
    ) -> bool:
        """Add a partition of the ring as :meth:`add` does; return whether it was written."""
        self._frames.setdefault(name, (length, None))
        start = payload_offset(length)
        payload = frame[start : start + length]
        return self.add(name, payload, contents, partial(self._write_in_place, payload), bases)

    def keep(self, name: Digest, length: int, frame: memoryview) -> None:
        """Note that the frame of an added partition stays in the ring until the commit, and may be read again."""
        self._frames[name] = (length, frame)

    def keep_none(self) -> None:
        """Note that no added frame stays in the ring."""
        # Cleared in place, because other threads add frames.
        for name, (length, _) in self._frames.copy().items():
            self._frames[name] = (length, None)

    def reuse(self, name: Digest, length: int) -> None:
        """Reuse a partition of the store.

        Raises:
            MissingPartitionError: the store does not have the partition.
            StorageError, UnsupportedFormatError: a pack that may have the partition cannot be read.
        """
        self._frames[name] = (length, None)
        self._reuse(name, f"partition {name.hex()} is neither in the ring nor in the store")

    def _reuse(self, name: Digest, problem: str) -> None:
        if self.claim(name):
            if self.packing.unread is not None:
                raise self.packing.unread
            raise MissingPartitionError(problem, name)

    def _write_in_place(self, payload: memoryview, writer: PackWriter, descriptor: FrameDescriptor) -> None:
        with self._tier.slots.slot(registry.ALIGNED_PAYLOAD_MIN_BYTES) as slot:
            writer.write_in_place(payload, descriptor, slot)

    def seal_frames(self) -> None:
        """Make all added partitions durable, so that other ranks can reuse them. More may be added later."""
        self.seal(list(self._frames), self._rewrite)

    def commit_capture(
        self,
        captured: Manifest,
        place: Callable[[], LineagePosition],
        elsewhere: Container[Digest] = frozenset(),
        metrics: Mapping[str, float] | None = None,
    ) -> CheckpointRef:
        """Commit the capture when all its frames were added; see :meth:`commit`."""
        return self.commit(captured, place, self._rewrite, elsewhere, metrics)

    def _rewrite(self, lost: set[Digest]) -> None:
        for name in lost:
            length, frame = self._frames[name]
            if frame is None:
                # Garbage collection may have copied the partition into another pack.
                self._reuse(name, f"partition {name.hex()} was collected during a save that reuses it; save again")
                continue
            self.expect(frame_length(length))
            self.add_frame(name, length, frame)


def remove(tier: NvmeTier, catalog: Catalog, listing: CheckpointFiles) -> None:
    """Delete a checkpoint durably (SPEC.md §B4). Garbage collection frees what only this checkpoint needed."""
    tier.manifests.remove(listing.run, listing.ref)
    keys = [manifest_key(listing.run, listing.ref, name) for name in listing.manifests]
    with catalog.write() as transaction:
        # A pull may have restored a manifest in the meantime.
        for key in keys:
            if is_manifest_deleted(tier, key):
                transaction.delete("manifests", key)
