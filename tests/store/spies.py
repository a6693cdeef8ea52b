"""Count reads and writes below the store."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from asymcheck.storage.local_files import Files
from asymcheck.storage.nvme import PackFile, Slot


class FramesRead:
    """Plain lengths of the frames that were read."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    @property
    def count(self) -> int:
        """Number of frames."""
        return len(self.lengths)

    @property
    def total_bytes(self) -> int:
        """Plain bytes of all frames."""
        return sum(self.lengths)


@contextlib.contextmanager
def frames_read() -> Iterator[FramesRead]:
    """Record every frame that is read inside the `with` block."""
    seen = FramesRead()
    read_frame, read_payload = PackFile.read_frame, PackFile.read_payload

    def note_frame(self: PackFile, sequence: int, slot: Slot) -> memoryview:
        seen.lengths.append(int(self.entries[sequence]["plain_length"]))
        return read_frame(self, sequence, slot)

    def note_payload(
        self: PackFile, sequence: int, payload: memoryview, slot: Slot
    ) -> tuple[memoryview, memoryview, memoryview] | None:
        parts = read_payload(self, sequence, payload, slot)
        if parts is not None:
            seen.lengths.append(len(payload))
        return parts

    with (
        mock.patch.object(PackFile, "read_frame", note_frame),
        mock.patch.object(PackFile, "read_payload", note_payload),
    ):
        yield seen


class CountingFiles(Files):
    """Counts the bytes that pass through the file operations."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.written_bytes = 0

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> int:
        """Count and read."""
        count = super().pread(descriptor, buffers, offset, path)
        self.read_bytes += count
        return count

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
        """Count and write."""
        super().pwrite(descriptor, buffers, offset, path)
        self.written_bytes += sum(map(len, buffers))
