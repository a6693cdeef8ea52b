"""Mover: the executor of moves into packs: a partition is claimed, encoded as the policy says, and written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from asymcheck.codecs.encode import Encoded
from asymcheck.format.frame import FrameDescriptor
from asymcheck.pipeline.encoder import Base, Contents, Encoder
from asymcheck.pipeline.packing import Packing
from asymcheck.policies.moves import Tier
from asymcheck.tiers.nvme import PackWriter, SlotPool
from asymcheck.types import Digest

WritePlain = Callable[[PackWriter, FrameDescriptor], object]
"""Writes a partition as it is, from where it lies."""


class Mover:
    """Moves partitions of one save. Threads may call it together."""

    def __init__(self, packing: Packing, slots: SlotPool, encoder: Encoder, source: Tier) -> None:
        """Put partitions from ``source`` into ``packing``; ``slots`` lend memory for what is encoded."""
        self._packing, self._slots, self._encoder, self._source = packing, slots, encoder, source

    def put(
        self,
        name: Digest,
        plain: memoryview,
        contents: Contents | None,
        write_plain: WritePlain,
        bases: Sequence[Base] = (),
        shift: int = 0,
    ) -> bool:
        """Store a partition, unless this save or the store has it already; return whether it was written.

        Args:
            name: its digest.
            plain: its bytes.
            contents: what they mean; None for bytes of which that is not known, which are not encoded.
            write_plain: writes them as they are.
            bases: partitions that it may be decoded from, at most one for a codec.
            shift: payload shift of the frame, in bytes, if it is stored as it is.

        Raises:
            StorageError: the device refused.
        """
        if not self._packing.claim(name):
            return False
        encoded = None
        if contents is not None:
            usable = [base for base in bases if base.name != name]
            move = self._encoder.move(name, self._source, plain, contents, usable)
            if any(base.codec == move.codec and not self._relies(name, base) for base in usable):
                usable = [base for base in usable if base.codec != move.codec]
                move = self._encoder.move(name, self._source, plain, contents, usable)
                usable = [base for base in usable if base.codec != move.codec or self._relies(name, base)]
            encoded = self._encoder.carry_out(move, plain, contents, usable)
        descriptor = FrameDescriptor.identity(name, len(plain), shift) if encoded is None else encoded.descriptor
        with self._encoder.meter.write(descriptor.stored_length):
            self._packing.write(descriptor, write_plain if encoded is None else partial(self._write, encoded))
        return True

    def _relies(self, name: Digest, base: Base) -> bool:
        return self._packing.rely(name, base.name, base.codec)

    def _write(self, encoded: Encoded, writer: PackWriter, descriptor: FrameDescriptor) -> None:
        with self._slots.slot(descriptor.stored_length) as slot:
            encoded.write_to(slot.payload(descriptor.stored_length))
            writer.write(slot, descriptor)
