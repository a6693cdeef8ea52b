"""Range reads from complete files, which never change."""

from __future__ import annotations

from asymcheck.storage.remote.client_interface import FileSystem, Readable
from asymcheck.storage.slots import SlotPool


class OpenedFile:
    """Cache of an open file for repeated reads, if the client can keep files open."""

    def __init__(self) -> None:
        self.file: Readable | None = None


def read_range(
    client: FileSystem, path: str, offset: int, length: int, kept: OpenedFile, memory: SlotPool | None
) -> tuple[memoryview, int]:
    """Return ``length`` bytes from ``offset``, fewer at the end of the file, and the size of the file."""
    if (file := kept.file) is not None:
        try:
            return _read(file, offset, length, memory), file.size
        except Exception:  # noqa: BLE001 - blocks move and access tokens expire, so any error means to reopen the file
            kept.file = None
    with client.reading(path) as file:
        data = _read(file, offset, length, memory)
        if client.keeps_files:
            kept.file = file
        return data, file.size


def _read(file: Readable, offset: int, length: int, memory: SlotPool | None) -> memoryview:
    count = max(0, min(length, file.size - offset))
    data = memoryview(bytearray(count)) if memory is None else memory.lend(count)
    done = 0
    while done < count:
        more = file.read_into(data[done:], offset + done)
        if not more:
            break
        done += more
    return data[:done]
