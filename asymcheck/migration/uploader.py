"""Uploader: frames cut into packs, several of which are made and written at the same time."""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial

from asymcheck.errors import GivenUpError
from asymcheck.format.frame import FrameDescriptor, frame_length
from asymcheck.migration.reencode import Reencoder
from asymcheck.migration.transfer_plan import Frame
from asymcheck.migration.transfer_stats import Moved
from asymcheck.policies.batching import FlushFacts, stream_batch_bytes
from asymcheck.threads import together
from asymcheck.tiers.remote import RemoteTier, plan_pack
from asymcheck.tiers.slots import Slot
from asymcheck.types import PackId, Progress

_LEAST_BYTES = 64 << 20
"""Smaller packs are not made for the sake of more streams."""
_PROBE_BYTES = 32 << 20
"""So much goes ahead of the rest while nobody knows what the location takes, for by that it is encoded or not."""
_MAKE_BYTES_PER_S = 1e9
"""What one stream is given, as long as that was not measured."""


class Uploader:
    """Uploads the packs of one checkpoint."""

    def __init__(
        self, there: RemoteTier, total: int, moved: Moved, progress: Progress | None, reencoder: Reencoder | None
    ) -> None:
        """Send ``total`` bytes of payload to ``there``, encoded by ``reencoder`` if there is one."""
        self._there = there
        self._config = there.config.remote
        self._packs = there.uploader()
        self._reencoder = reencoder
        self._total = total
        self._moved = moved
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()
        self._one_was_written = threading.Event()
        self._in_memory = threading.Semaphore(self._config.uploads)
        self._stopped = False

    def send(self, frames: Sequence[Frame]) -> set[PackId]:
        """Write packs with these frames, several at the same time; return their ids."""
        # Beside those that are written, as many wait for the location to complete them.
        return self._send_groups(self._groups(frames), min(2 * self._config.uploads, len(frames)))

    def send_in_order(self, frames: Sequence[Frame]) -> set[PackId]:
        """Write packs with these frames, one after the other; return their ids."""
        return self._send_groups(iter(_cut(frames, self._pack_bytes(frames, 1))), min(1, len(frames)))

    def _groups(self, frames: Sequence[Frame]) -> Iterator[Sequence[Frame]]:
        """Cut frames into packs; while nobody knows what the location takes, the second waits for the first."""
        uploads = self._config.uploads
        count = 0
        if self._config.compression == "auto" and self._there.pace.write_bytes_per_s is None:
            count = _fitting(frames, min(_PROBE_BYTES, self._pack_bytes(frames, uploads)))
        if 0 < count < len(frames):
            yield frames[:count]
            frames = frames[count:]
            self._one_was_written.wait()
        yield from _cut(frames, self._pack_bytes(frames, uploads))

    def _pack_bytes(self, frames: Sequence[Frame], uploads: int) -> int:
        """Return the size of packs for which all of it is there soonest."""
        pace, piece = self._there.pace, self._config.piece_bytes
        limit = self._config.pack_bytes
        if self._reencoder is not None:
            # What is encoded lies in memory until it is sent.
            limit = min(limit, max(self._config.encoded_bytes // uploads, 1))
        facts = FlushFacts(
            volume_bytes=sum(frame_length(frame.stored) for frame in frames),
            latency_s=pace.close_s,
            chunk_bytes=piece,
            chunk_s=piece / (pace.make_bytes_per_s or _MAKE_BYTES_PER_S),
            write_bytes_per_s=pace.write_bytes_per_s or _MAKE_BYTES_PER_S,
        )
        return stream_batch_bytes(facts, uploads, _LEAST_BYTES, limit)

    def _send_groups(self, groups: Iterator[Sequence[Frame]], threads: int) -> set[PackId]:
        taking, made = threading.Lock(), list[PackId]()

        def work() -> None:
            while not self._stopped:
                with taking:
                    group = next(groups, None)
                if group is None:
                    return
                made.append(self._send_pack(group))

        # The threads end with the process, whatever the location does: a missing answer must not hold the exit.
        together(work, threads, "push", self._stop)
        return set(made)

    def _stop(self) -> None:
        self._stopped = True
        # Whoever waits for that looks whether it goes on.
        self._one_was_written.set()

    def _send_pack(self, group: Sequence[Frame]) -> PackId:
        with contextlib.ExitStack() as held:
            if self._reencoder is not None:
                held.enter_context(self._in_memory)
            began = time.perf_counter()
            frames = self._encoded(group)
            if all(map(operator.is_, frames, group)):
                held.close()
            return self._upload(group, frames, time.perf_counter() - began)

    def _upload(self, group: Sequence[Frame], frames: Sequence[Frame], encoding_s: float) -> PackId:
        """Send a group, as its ``frames`` are to be sent."""
        spent = [encoding_s]
        plan = plan_pack([frame.entry for frame in frames])
        header, _ = self._packs.upload(plan, partial(self._read, frames, spent), self._sent, self._one_was_written.set)
        stored = sum(frame.stored for frame in frames)
        self._there.pace.made(stored, sum(spent))
        with self._lock:
            self._moved.packs += 1
            self._moved.moved_bytes += stored
            self._moved.plain_bytes += sum(frame.stored for frame in group)
            self._moved.moved_partitions += len(frames)
        return header.pack_id

    def _encoded(self, group: Sequence[Frame]) -> Sequence[Frame]:
        if self._reencoder is None:
            return group
        slot = Slot(max(frame.stored for frame in group))
        frames = []
        for frame in group:
            self._check_going_on()
            frames.append(self._reencoder.encoded(frame, slot))
        with self._lock:
            self._total -= sum(frame.stored for frame in group) - sum(frame.stored for frame in frames)
        return frames

    def _check_going_on(self) -> None:
        if self._stopped:
            raise GivenUpError("another upload of the same push has failed")

    def _read(self, frames: Sequence[Frame], spent: list[float], number: int, slot: Slot) -> FrameDescriptor:
        self._check_going_on()
        began = time.perf_counter()
        descriptor = frames[number].read(slot)
        spent.append(time.perf_counter() - began)
        return descriptor

    def _sent(self, count: int) -> None:
        if self._progress is not None:
            with self._lock:
                # What is sent again after a failure counts again; it is for the eye.
                self._done = min(self._done + count, self._total)
                self._progress(self._done, self._total)


def _fitting(frames: Sequence[Frame], size: int) -> int:
    """Return how many of the first frames have ``size`` bytes together, one at least."""
    room = size
    for count, frame in enumerate(frames):
        room -= frame_length(frame.stored)
        if room < 0:
            return max(count, 1)
    return len(frames)


def _cut(frames: Sequence[Frame], size: int) -> list[list[Frame]]:
    """Cut frames into packs of at most ``size`` bytes, or one frame."""
    groups: list[list[Frame]] = []
    room = 0
    for frame in frames:
        length = frame_length(frame.stored)
        if not groups or length > room:
            groups.append([])
            room = size
        groups[-1].append(frame)
        room -= length
    return groups
