"""Measure the limit of the workload ``hdfs``: hdfs-native itself puts and gets files of given sizes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hdfs_native

_OPTIONS = {"dfs.client.block.write.replace-datanode-on-failure.best-effort": "true"}


class RawClient:
    """The client with as many streams and the same piece size as a push or a restore, one file per stream."""

    def __init__(self, url: str, streams: int, piece_bytes: int) -> None:
        """Connect to the HDFS at ``url``."""
        self._client: Any = hdfs_native.Client(url, _OPTIONS)
        self._streams, self._piece_bytes = streams, piece_bytes

    def put(self, folder: str, paths: Sequence[Path]) -> float:
        """Copy each file to a file in the folder; return the seconds until all files are closed."""
        self._client.mkdirs(folder, create_parent=True)

        def put_one(number: int) -> None:
            # The client is fast only for bytes objects, so pass bytes.
            with (
                paths[number].open("rb", buffering=0) as source,
                self._client.create(f"{folder}/{number}", hdfs_native.WriteOptions(create_parent=False)) as file,
            ):
                while piece := source.read(self._piece_bytes):
                    file.write(piece)

        return self._timed(put_one, len(paths))

    def put_from_memory(self, folder: str, data: bytes, sizes: Sequence[int]) -> float:
        """Write files of these sizes, each the beginning of ``data``; return the seconds until all files are closed."""
        self._client.mkdirs(folder, create_parent=True)
        # Slice the data before the timed part.
        pieces = [data[start : start + self._piece_bytes] for start in range(0, max(sizes), self._piece_bytes)]

        def put_one(number: int) -> None:
            remaining = sizes[number]
            with self._client.create(f"{folder}/{number}", hdfs_native.WriteOptions(create_parent=False)) as file:
                for piece in pieces:
                    file.write(piece if len(piece) <= remaining else piece[:remaining])
                    remaining -= min(remaining, len(piece))
                    if not remaining:
                        break

        return self._timed(put_one, len(sizes))

    def get(self, folder: str, sizes: Sequence[int]) -> float:
        """Read files in pieces, as the client returns them, and discard the bytes; return the seconds."""

        def get_one(path: str, start: int, count: int) -> None:
            self._client.read(path).read_range(start, count)

        return self._get(folder, sizes, get_one)

    def get_by_packets(self, folder: str, sizes: Sequence[int]) -> float:
        """Read files packet by packet into reused memory, and open each file once: the fastest known method.

        Reading a whole piece at once copies it twice, into memory that the allocator may have to map first.
        """
        per_thread, opened = threading.local(), dict[str, Any]()

        def get_one(path: str, start: int, count: int) -> None:
            if not hasattr(per_thread, "memory"):
                per_thread.memory = memoryview(bytearray(self._piece_bytes))
            if path not in opened:
                opened[path] = self._client.read(path)
            done = 0
            for packet in opened[path].read_range_stream(start, count):
                per_thread.memory[done : done + len(packet)] = packet
                done += len(packet)

        return self._get(folder, sizes, get_one)

    def _get(self, folder: str, sizes: Sequence[int], get_one: Callable[[str, int, int], None]) -> float:
        pieces = [
            (f"{folder}/{number}", start, min(self._piece_bytes, size - start))
            for number, size in enumerate(sizes)
            for start in range(0, size, self._piece_bytes)
        ]
        return self._timed(lambda number: get_one(*pieces[number]), len(pieces))

    def _timed(self, work: Callable[[int], None], count: int) -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(self._streams) as pool:
            list(pool.map(work, range(count)))
        return time.perf_counter() - began

    def put_file(self, path: str, data: bytes) -> None:
        """Write one file."""
        with self._client.create(path, hdfs_native.WriteOptions(create_parent=True)) as file:
            for start in range(0, len(data), self._piece_bytes):
                file.write(data[start : start + self._piece_bytes])

    def sizes(self, folder: str) -> list[int]:
        """Return the bytes of each file in a folder and its subfolders."""
        return [found.length for found in self._client.list_status(folder, True) if not found.isdir]

    def remove(self, folder: str) -> None:
        """Remove a folder and its contents."""
        self._client.delete(folder, recursive=True)
