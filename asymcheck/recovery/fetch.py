"""Fetch: frames read several at a time, every one checked in private memory before its bytes are handed on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from asymcheck.codecs.decode import decode
from asymcheck.errors import DamagedPartitionError, DigestMismatchError, FormatError, StorageError
from asymcheck.format.digest import digest as digest_of
from asymcheck.format.frame import check_frame
from asymcheck.format.pack import check_entry
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.recovery.locate import Copy, Sources
from asymcheck.tiers.nvme import Slot, SlotPool, work_off
from asymcheck.types import Digest

Place = Callable[[Digest, memoryview], None]
"""Takes the checked plain bytes of a partition; called on worker threads; must not keep the view."""


def fetch(sources: Sources, digests: Sequence[Digest], place: Place, slots: SlotPool, threads: int) -> None:
    """Read partitions by several threads and hand each to ``place``, in no particular order.

    Raises:
        DamagedPartitionError: no copy of a partition is intact; the message names pack and frame.
        StorageError: the device refused.
    """
    searching = threading.Lock()

    def read(name: Digest, slot: Slot) -> None:
        place(name, read_any(sources, name, slot, searching))

    work_off(
        sources.in_reading_order(digests),
        read,
        slots=slots,
        payload_bytes=sources.largest(digests),
        threads=threads,
        name="fetch",
    )


def stored_length(copy: Copy) -> int:
    """Return the bytes of payload of a copy's frame."""
    return int(copy.pack.entries[copy.sequence]["stored_length"])


def read_any(sources: Sources, name: Digest, slot: Slot, searching: threading.Lock) -> memoryview:
    """Read a partition from the first of its copies that is intact and return its plain bytes, in ``slot`` as a rule.

    ``searching`` keeps threads that share ``sources`` from looking for further copies together.

    Raises:
        DamagedPartitionError: no copy is intact; the message names packs and frames.
    """
    first = sources.copy(name)
    try:
        return read_checked(first, name, slot)
    except (FormatError, StorageError) as error:
        problems = [_problem(first, error)]
    with searching:
        others = sources.other_copies(name, first)
    for copy in others:
        try:
            return read_checked(copy, name, Slot(max(slot.payload_bytes, stored_length(copy), BLOCK_BYTES)))
        except (FormatError, StorageError) as error:
            problems.append(_problem(copy, error))
    raise DamagedPartitionError("; ".join(problems), name)


def _problem(copy: Copy, error: Exception) -> str:
    """Say what is wrong with a copy; an error of the device does not know which frame it hit."""
    return f"{copy}: {error}" if isinstance(error, StorageError) else str(error)


def read_checked(copy: Copy, name: Digest, slot: Slot) -> memoryview:
    """Read one frame and return its plain bytes, which have the digest ``name``.

    Raises:
        FormatError: of the kind that fits.
        StorageError: the device refused.
    """
    where = str(copy)
    frame = copy.pack.read_frame(copy.sequence, slot)
    descriptor, payload = check_frame(frame, copy.pack.header.pack_id, copy.sequence, where)
    check_entry(copy.pack.entries[copy.sequence], descriptor, where)
    plain = decode(descriptor, payload)
    if descriptor.digest != name or len(plain) != descriptor.plain_length or digest_of(plain) != name:
        raise DigestMismatchError(f"digest mismatch in {where}")
    return plain
