"""Re-encoding: what lies plain on a fast drive is encoded on its way to a slower place, where that is there sooner."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from asymcheck.errors import UNKNOWING, AsymcheckError
from asymcheck.format import registry
from asymcheck.format.frame import FrameDescriptor
from asymcheck.format.manifest import Manifest
from asymcheck.format.pack import ENTRY_DTYPE, entry_of
from asymcheck.migration.choice import Chooser, Frame
from asymcheck.migration.meaning import Meaning
from asymcheck.pipeline.encoder import Base, Encoder
from asymcheck.recovery.fetch import read_plain
from asymcheck.recovery.locate import Needs, Sources
from asymcheck.recovery.resolve import read_manifests
from asymcheck.tiers.manifests import CheckpointFiles
from asymcheck.tiers.reading import ReadTier
from asymcheck.tiers.slots import Slot
from asymcheck.types import Digest


@dataclasses.dataclass(frozen=True)
class Older:
    """A checkpoint before the one that is sent, which lies on both sides."""

    manifests: Sequence[Manifest]
    """Of all its ranks; none where there is no such checkpoint."""
    sources: Sources | None
    """Where its partitions lie here."""


@contextlib.contextmanager
def older_of(here: ReadTier, listing: CheckpointFiles | None, encoder: Encoder) -> Iterator[Older]:
    """Open what deltas may be made against; nothing where there is none, or where it is not worth it."""
    if listing is None or not encoder.wants_bases:
        yield Older((), None)
        return
    try:
        manifests = read_manifests(here, listing)
        hints = dict.fromkeys(pack_id for manifest in manifests for pack_id in manifest.header.packs)
        sources = Sources(here, Needs.of_manifests(manifests), hints, must_be_complete=False)
    except UNKNOWING:
        raise
    except AsymcheckError:
        # Deleted meanwhile, or damaged: it is of no use as a base, and no reason not to send the other one.
        yield Older((), None)
        return
    with sources:
        yield Older(manifests, sources)


class Reencoder:
    """Encodes the frames of one checkpoint for the place where they go. Thread-safe."""

    def __init__(self, encoder: Encoder, meaning: Meaning, chooser: Chooser, older: Older) -> None:
        """Decide with ``encoder``; ``chooser`` knows what is there, ``older`` what it may be encoded against."""
        self._encoder = encoder
        self._meaning = meaning
        self._chooser = chooser
        self._older = older

    def encoded(self, frame: Frame, slot: Slot) -> Frame:
        """Return a frame as it is to be sent, in memory, or the same where it goes as it lies.

        Raises:
            DamagedPartitionError: it cannot be read.
        """
        contents = self._meaning.contents(frame.name) if frame.is_plain else None
        if contents is None:
            return frame
        base = self._base(frame.name)
        codecs = [registry.CODEC_BYTE_PLANES, *([] if base is None else [registry.CODEC_DELTA])]
        if self._encoder.stays_plain(frame.stored, contents, codecs):
            return frame
        descriptor = frame.read(slot)
        plain = slot.payload(descriptor.stored_length)
        bases = [] if base is None else self._read(base, len(plain))
        move = self._encoder.move(frame.name, "nvme", plain, contents, bases)
        encoded = self._encoder.carry_out(move, plain, contents, bases)
        return frame if encoded is None else _in_memory(frame.name, encoded.descriptor, encoded.payload())

    def _base(self, name: Digest) -> Digest | None:
        """Return the older state of a partition, when it is here and there, and no chain of deltas becomes too long."""
        base = None if self._chooser.carries_deltas(name) else self._meaning.older(name)
        if base is None or self._older.sources is None or self._older.sources.find(base) is None:
            return None
        return base if self._chooser.can_be_base(base) else None

    def _read(self, base: Digest, length: int) -> list[Base]:
        sources = self._older.sources
        copy = None if sources is None else sources.find(base)
        if sources is None or copy is None:
            return []
        try:
            plain = read_plain(sources, base, copy)
        except UNKNOWING:
            raise
        except AsymcheckError:
            # Damaged, or deleted meanwhile.
            return []
        return [Base(registry.CODEC_DELTA, base, plain)] if len(plain) == length else []


def _in_memory(name: Digest, descriptor: FrameDescriptor, payload: bytes) -> Frame:
    def read(slot: Slot) -> FrameDescriptor:
        slot.fill(payload)
        return descriptor

    return Frame(name, np.array([entry_of(descriptor, 0)], dtype=ENTRY_DTYPE)[0], read)
