"""Foreign files whose tensors are read lazily, during the save."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from asymcheck.errors import ForeignFileError, NotFoundError, StructureError
from asymcheck.format.record import parse_json
from asymcheck.state.leaves import TensorBytes
from asymcheck.storage.local_files import OPEN_SOURCE, Files, translated

_FILES = Files()


class SourceFile(contextlib.AbstractContextManager["SourceFile"]):
    """A file that several threads read tensors from.

    Reads raise ForeignFileError if the file is too short, or has changed since it was opened.
    """

    def __init__(self, path: Path, on_read: Callable[[int], None] | None = None) -> None:
        """Open ``path``; ``on_read`` is called with the number of bytes of each read.

        Raises:
            NotFoundError: the file does not exist.
            ForeignFileError: ``path`` is not a regular file.
        """
        self.path = path
        self._on_read = on_read
        try:
            with translated(OPEN_SOURCE, path):
                # Without O_NONBLOCK, opening a named pipe blocks until a writer opens it.
                self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"{path} does not exist") from error
        status = self._status()
        self.size = status.st_size  # bytes of the file
        self._changed_ns = status.st_mtime_ns
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise ForeignFileError(path, "not a regular file", "give a regular file")

    def read(self, start: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes of the file from ``start`` on."""
        count = _FILES.pread(self._descriptor, [target], start, self.path)
        self.check()
        if count < len(target):
            raise ForeignFileError(
                self.path, f"the file ends before byte {start + len(target)}", "fetch or write the file again"
            )
        self.count(count)

    def count(self, nbytes: int) -> None:
        """Report that so many bytes of tensors were read."""
        if self._on_read is not None:
            self._on_read(nbytes)

    def read_bytes(self, start: int, length: int) -> bytes:
        """Read a range of the file."""
        data = bytearray(length)
        self.read(start, memoryview(data))
        return bytes(data)

    def read_json(self, start: int, length: int, what: str, remedy: str) -> object:
        """Parse a range of the file as JSON. ``what`` is its name in errors."""
        text = self.read_bytes(start, length)
        try:
            return parse_json(text, what)
        except StructureError as error:
            # The error is not chained, because its cause would keep the whole text, up to 100 MB, in memory.
            raise ForeignFileError(self.path, str(error), remedy) from None

    def check(self) -> None:
        """Check that the file has not changed since it was opened."""
        status = self._status()
        if (status.st_size, status.st_mtime_ns) != (self.size, self._changed_ns):
            raise ForeignFileError(
                self.path, "the file changed while it was read", "convert it again when no process writes it"
            )

    def _status(self) -> os.stat_result:
        with translated("access", self.path):
            return os.fstat(self._descriptor)

    def mapped(self, start: int, length: int) -> memoryview:
        """Map a range of the file into memory; call :meth:`check` after reading the range.

        Each mapping keeps a file descriptor open, so map only the range that is being read.
        """
        # Reading beyond the end of a file that has become shorter would kill the process.
        self.check()
        first = start - start % mmap.ALLOCATIONGRANULARITY
        with translated("map", self.path):
            # The mapping is private and writable, because torch requires writable memory.
            whole = mmap.mmap(self._descriptor, start - first + length, access=mmap.ACCESS_COPY, offset=first)
        return memoryview(whole)[start - first :]

    def tensor(self, start: int, dtype: str, shape: tuple[int, ...]) -> TensorBytes:
        """Return a lazy tensor whose elements are stored in row-major order from byte ``start`` on."""
        return _FileTensor(self, start, dtype, shape)

    def close(self) -> None:
        """Close the file; closing twice is no error."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __exit__(self, *_error: object) -> None:
        self.close()


class _FileTensor(TensorBytes):
    def __init__(self, file: SourceFile, start: int, dtype: str, shape: tuple[int, ...]) -> None:
        super().__init__(dtype, shape)
        self._file, self._start = file, start

    def read(self, start: int, target: memoryview) -> None:
        self._file.read(self._start + start, target)


@contextlib.contextmanager
def refused(path: Path, problem: Callable[[Exception], str], remedy: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn errors of a library that reads ``path`` into ForeignFileError."""
    try:
        yield
    except errors as error:
        raise ForeignFileError(path, problem(error), remedy) from error


def first_line(error: Exception) -> str:
    """Return the first line of an error message, without final punctuation."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(" .;") if text else type(error).__name__
