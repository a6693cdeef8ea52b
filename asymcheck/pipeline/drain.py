"""Drain: one capture's frames from the ring into packs, and its commit (SPEC.md §8.5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial

from asymcheck.errors import MissingPartitionError
from asymcheck.format.catalog import pin_key
from asymcheck.format.frame import FrameDescriptor, frame_length, payload_offset
from asymcheck.format.manifest import Manifest, ManifestHeader, elsewhere_bits, encode
from asymcheck.format.manifest_reader import check_manifest
from asymcheck.format.registry import ALIGNED_PAYLOAD_MIN_BYTES
from asymcheck.pipeline.commit import enter, finish, take_back
from asymcheck.pipeline.encoder import Base, Contents, Encoder
from asymcheck.pipeline.mover import Mover
from asymcheck.pipeline.packing import Packing
from asymcheck.pipeline.request import Place
from asymcheck.pipeline.rows import encoding_record
from asymcheck.tiers.nvme import Catalog, NvmeTier, PackWriter
from asymcheck.tiers.owners import hold, let_go
from asymcheck.types import CheckpointRef, Digest, SaveId

Placing = Callable[[ManifestHeader], Place]
"""Says where on the line a checkpoint goes; asked when all but its manifest is durable."""


class Drain:
    """Moves one capture. Threads may call :meth:`add` together; the rest is for one thread."""

    def __init__(self, tier: NvmeTier, catalog: Catalog, encoder: Encoder, save_id: SaveId, rank: int) -> None:
        """Store what the attempt ``save_id`` captured on ``rank``, as ``encoder`` says."""
        self._tier = tier
        self._catalog = catalog
        self._encoder = encoder
        self._rank = rank
        self._packing = Packing(tier, catalog)
        self._mover = Mover(self._packing, tier.slots, encoder, "dram")
        self._frames: dict[Digest, tuple[int, memoryview | None]] = {}
        self._pin = pin_key(save_id, rank)
        self._run = ""
        self._ref: CheckpointRef | None = None
        self._is_committed = False
        hold(self._pin)

    @property
    def written_bytes(self) -> int:
        """Payload bytes written; the rest was in the store already."""
        return self._packing.written_bytes

    @property
    def ref(self) -> CheckpointRef | None:
        """The checkpoint, once its manifest is there."""
        return self._ref if self._is_committed else None

    @property
    def new_bytes(self) -> int:
        """Bytes of the partitions that these are, before encoding."""
        return self._packing.new_bytes

    def expect(self, frame_bytes: int) -> None:
        """Say how many bytes of frames are to come, at most."""
        self._packing.expect(frame_bytes)

    def add(
        self,
        name: Digest,
        length: int,
        frame: memoryview,
        contents: Contents | None = None,
        bases: Sequence[Base] = (),
        *,
        keep: bool = True,
    ) -> bool:
        """Store a partition whose frame lies in the ring, unless the store has it already; return whether it had not.

        Without ``contents``, which say what its bytes mean, it is stored as it is; ``bases`` are what it may be decoded
        from. With ``keep`` the frame stays there until the commit, and may be read again.

        Raises:
            StorageError: the device refused; :meth:`abandon` comes next.
        """
        self._frames[name] = (length, frame if keep else None)
        return self._put(name, length, frame, contents, bases)

    def keep(self, name: Digest, length: int, frame: memoryview) -> None:
        """Say that the frame of a partition that was added stays in the ring until the commit."""
        self._frames[name] = (length, frame)

    def keep_none(self) -> None:
        """Say that no frame that was added stays in the ring."""
        self._frames = {name: (length, None) for name, (length, _) in self._frames.copy().items()}

    def reuse(self, name: Digest, length: int) -> None:
        """Take a partition that the store must have already.

        Raises:
            MissingPartitionError: it has not.
            StorageError, UnsupportedFormatError: a pack that may have it cannot be read now, or not by this program.
        """
        self._frames[name] = (length, None)
        self._reuse(name, f"partition {name.hex()} lies neither in the ring nor in the store")

    def _reuse(self, name: Digest, problem: str) -> None:
        if self._packing.claim(name):
            if self._packing.unread is not None:
                raise self._packing.unread
            raise MissingPartitionError(problem, name)

    def _put(
        self, name: Digest, length: int, frame: memoryview, contents: Contents | None, bases: Sequence[Base]
    ) -> bool:
        start = payload_offset(length)
        payload = frame[start : start + length]
        return self._mover.put(name, payload, contents, partial(self._write, payload), bases)

    def _write(self, payload: memoryview, writer: PackWriter, descriptor: FrameDescriptor) -> None:
        with self._tier.slots.slot(ALIGNED_PAYLOAD_MIN_BYTES) as slot:
            writer.write_in_place(payload, descriptor, slot)

    def enter(self) -> None:
        """Make what was added durable and let other ranks find it, before :meth:`commit`; more may be added then.

        Raises:
            StorageError: the device refused; :meth:`abandon` comes next.
        """
        enter(self._tier, self._catalog, self._packing, list(self._frames), self._pin, self._rewrite)

    def commit(
        self,
        captured: Manifest,
        placing: Placing,
        elsewhere: Container[Digest] = frozenset(),
        metrics: Mapping[str, float] | None = None,
    ) -> CheckpointRef:
        """Make the checkpoint of a manifest durable and visible, when all its frames were added.

        What is ``elsewhere``, another store of the job brings to where all are together. With ``metrics`` it gets
        these in the place of its own.

        Raises:
            StorageError: the device refused; nothing was committed. :meth:`abandon` comes next.
            StructureError: the manifest could not be read again; nothing was committed, either.
        """
        check_manifest(captured, "manifest of a capture")
        header = captured.header
        names = list(captured.partitions())
        packs = enter(self._tier, self._catalog, self._packing, names, self._pin, self._rewrite)
        place = placing(header)
        self._run, self._ref = header.run, CheckpointRef(place.generation, header.ref.step, header.ref.save_id)
        plan = {**header.plan, **encoding_record(self._encoder.reasons())}
        committed = dataclasses.replace(
            header,
            ref=self._ref,
            parent=place.parent,
            packs=tuple(packs),
            plan=plan,
            elsewhere=elsewhere_bits(names, elsewhere),
            metrics=header.metrics if metrics is None else metrics,
        )
        data = encode(captured, committed)
        name = self._tier.manifests.publish(header.run, self._ref, self._rank, header.world_size, data)
        finish(self._catalog, header.run, self._ref, name, len(data), self._pin)
        self._is_committed = True
        self._packing.abandon()
        let_go(self._pin)
        return self._ref

    def _rewrite(self, lost: set[Digest]) -> None:
        for name in lost:
            length, frame = self._frames[name]
            if frame is None:
                # Collection may have copied the partition into another pack.
                self._reuse(name, f"partition {name.hex()} was collected during a save that reuses it; save again")
                continue
            self._packing.expect(frame_length(length))
            self._put(name, length, frame, None, ())

    def abandon(self) -> None:
        """Leave nothing of a capture that failed, or is given up; of one that was committed, everything."""
        if self._is_committed:
            return
        take_back(self._tier, self._catalog, self._run, self._rank, self._ref, self._pin)
        self._packing.abandon()
        let_go(self._pin)
