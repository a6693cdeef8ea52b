"""Fetch: frames read several at a time, every one checked in private memory before its bytes are handed on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from asymcheck.codecs.decode import decode
from asymcheck.errors import DamagedPartitionError, DigestMismatchError, FormatError, StorageError
from asymcheck.format.digest import digest as digest_of
from asymcheck.format.frame import check_frame
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.recovery.locate import Copy, Sources
from asymcheck.tiers.nvme import Slot, SlotPool
from asymcheck.types import Digest

Place = Callable[[Digest, memoryview], None]
"""Takes the checked plain bytes of a partition; called on worker threads; must not keep the view."""


def fetch(sources: Sources, digests: Sequence[Digest], place: Place, slots: SlotPool, threads: int) -> None:
    """Read partitions by several threads and hand each to ``place``, in no particular order.

    Raises:
        DamagedPartitionError: no copy of a partition is intact; the message names pack and frame.
        StorageError: the device refused.
    """
    todo: queue.SimpleQueue[Digest] = queue.SimpleQueue()
    for name in sources.in_reading_order(digests):
        todo.put(name)
    largest = max((_stored_length(sources.copy(name)) for name in digests), default=0)
    failures: list[BaseException] = []
    searching = threading.Lock()

    def work() -> None:
        try:
            with slots.slot(largest) as slot:
                while not failures:
                    try:
                        name = todo.get_nowait()
                    except queue.Empty:
                        return
                    place(name, _read_any(sources, name, slot, searching))
        except BaseException as error:  # noqa: BLE001 - carried to the calling thread, which raises it
            failures.append(error)

    workers = [threading.Thread(target=work, name=f"asymcheck-fetch-{i}") for i in range(min(threads, len(digests)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]


def _stored_length(copy: Copy) -> int:
    return int(copy.pack.entries[copy.sequence]["stored_length"])


def _read_any(sources: Sources, name: Digest, slot: Slot, searching: threading.Lock) -> memoryview:
    first = sources.copy(name)
    try:
        return read_checked(first, name, slot)
    except (FormatError, StorageError) as error:
        problems = [_problem(first, error)]
    with searching:
        others = sources.other_copies(name, first)
    for copy in others:
        try:
            return read_checked(copy, name, Slot(max(slot.payload_bytes, _stored_length(copy), BLOCK_BYTES)))
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
    plain = decode(descriptor, payload)
    if descriptor.digest != name or len(plain) != descriptor.plain_length or digest_of(plain) != name:
        raise DigestMismatchError(f"digest mismatch in {where}")
    return plain
