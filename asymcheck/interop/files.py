"""Files of other formats: tensors read from them as they are captured, and tensors written to them as they come."""

from __future__ import annotations

import contextlib
import mmap
import os
import shlex
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import TracebackType

from asymcheck.errors import (
    ForeignFileError,
    InvalidInputError,
    NotFoundError,
    OutOfSpaceError,
    ReadOnlyStoreError,
)
from asymcheck.format.manifest import TensorRow
from asymcheck.interop.leftovers import aside, clear, draft_of, remove
from asymcheck.partition.leaves import TensorBytes
from asymcheck.tiers.files import Files, translated

_FILES = Files()
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_SHOWN = 6


class SourceFile:
    """A file that tensors are read from, and that must not change meanwhile.

    Threads share it. Close it, or use it in a ``with`` block.
    """

    def __init__(self, path: Path, on_read: Callable[[int], None] | None = None) -> None:
        """Open ``path``; ``on_read`` is told how many bytes each read has brought.

        Raises:
            NotFoundError: there is no such file.
            ForeignFileError: it is no regular file.
        """
        self.path = path
        self._on_read = on_read
        try:
            with translated("open", path):
                # Without O_NONBLOCK opening a named pipe waits for a writer, perhaps for ever.
                self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"{path} does not exist") from error
        status = self._status()
        self.size = status.st_size
        """Bytes of the file."""
        self._changed_ns = status.st_mtime_ns
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise ForeignFileError(path, "not a regular file", "give the file itself")

    def read(self, start: int, target: memoryview) -> None:
        """Fill ``target`` from byte ``start`` of the file on.

        Raises:
            ForeignFileError: the file ends before that, or has changed since it was opened.
        """
        count = _FILES.pread(self._descriptor, target, start, self.path)
        self.check()
        if count < len(target):
            raise ForeignFileError(self.path, f"it ends before byte {start + len(target)}", "fetch or write it again")
        if self._on_read is not None:
            self._on_read(count)

    def check(self) -> None:
        """See that what was read up to now is all of one state of the file.

        Raises:
            ForeignFileError: somebody has written to it since it was opened.
        """
        status = self._status()
        if (status.st_size, status.st_mtime_ns) != (self.size, self._changed_ns):
            raise ForeignFileError(self.path, "changed while it was read", "convert it again when nobody writes it")

    def _status(self) -> os.stat_result:
        with translated("look at", self.path):
            return os.fstat(self._descriptor)

    def fileno(self) -> int:
        """Return the descriptor, by which others can read the same file, whatever has its name now."""
        return self._descriptor

    def mapped(self, start: int, length: int) -> memoryview:
        """Return bytes of the file as memory; who has read them calls :meth:`check`.

        Raises:
            ValueError: the file ends before that.
        """
        first = start - start % mmap.ALLOCATIONGRANULARITY
        # Private, for torch takes no memory that cannot be written.
        whole = mmap.mmap(self._descriptor, start - first + length, access=mmap.ACCESS_COPY, offset=first)
        return memoryview(whole)[start - first :]

    def tensor(self, start: int, dtype: str, shape: tuple[int, ...]) -> TensorBytes:
        """Return the tensor whose elements lie in row-major order from byte ``start`` on."""
        return _FileTensor(self, start, dtype, shape)

    def close(self) -> None:
        """Close the file; closing twice is no error."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> SourceFile:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()


class _FileTensor(TensorBytes):
    def __init__(self, file: SourceFile, start: int, dtype: str, shape: tuple[int, ...]) -> None:
        super().__init__(dtype, shape)
        self._file = file
        self._start = start

    def read(self, start: int, target: memoryview) -> None:
        self._file.read(self._start + start, target)


class TargetFile:
    """A file that tensors are written to, in any order, by several threads."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """Open ``path``, create it when it is missing, and make it ``size`` bytes long at least."""
        self.path = path
        with _written(path), translated("create", path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if size > os.fstat(self._descriptor).st_size:
                os.ftruncate(self._descriptor, size)

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Write ``data`` from byte ``start`` on."""
        _FILES.pwrite(self._descriptor, [memoryview(data)], start, self.path)

    def read(self, start: int, length: int) -> bytes:
        """Read back."""
        with translated("read", self.path):
            return os.pread(self._descriptor, length, start)

    def region(self, row: TensorRow, start: int) -> Region:
        """Return what takes the bytes of a tensor, and puts them from byte ``start`` on."""
        return Region(self, row, start)

    def sync(self) -> None:
        """Make the content durable."""
        with translated("sync", self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; closing twice is no error."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class Region:
    """The place of one tensor in a file."""

    def __init__(self, file: TargetFile, row: TensorRow, start: int) -> None:
        """Put the bytes of ``row`` into ``file`` from byte ``start`` on."""
        self.row = row
        self._file = file
        self._start = start

    def put(self, start: int, data: memoryview) -> None:
        """Write the tensor's bytes from ``start`` on."""
        self._file.write(self._start + start, data)


class Draft:
    """A file or folder that gets its name when it is complete, so that nobody meets a half-written one.

    It grows beside its final place, under a name that ends in ``.partial``; what killed processes left of others for
    the same place is removed.
    """

    def __init__(self, target: Path, *, overwrite: bool) -> None:
        """Prepare for ``target``.

        Raises:
            InvalidInputError: it exists and ``overwrite`` is not given, or the folder above it does not exist.
        """
        self.target = target
        self._overwrite = overwrite
        self.path = draft_of(target)
        self._files: list[TargetFile] = []
        self._bytes = 0
        with translated("look at", target):
            if not target.absolute().parent.is_dir():
                raise InvalidInputError(f"{target.parent} is not a folder; create it first")
            clear(target)
            self._check_free()

    def _check_free(self) -> None:
        is_taken = self.target.is_symlink() or self.target.exists()
        if is_taken and not (self.target.is_dir() and not any(self.target.iterdir())) and not self._overwrite:
            raise InvalidInputError(f"{self.target} exists; give another name, or --overwrite to replace it")
        if is_taken and self.target.is_dir() and not _is_model_folder(self.target):
            raise InvalidInputError(
                f"{self.target} is a folder with more in it than a model, so it is not replaced; give another name"
            )

    def check_kept(self, names: Collection[str]) -> None:
        """See that a new folder with files called ``names`` replaces no configuration, tokenizer or text by nothing.

        Raises:
            InvalidInputError: files would be lost that are not weights.
        """
        if not self.target.is_dir():
            return
        with translated("list", self.target):
            there = sorted(entry.name for entry in self.target.iterdir())
        lost = [name for name in there if not name.endswith(_WEIGHTS) and name not in names]
        if lost:
            listed = ", ".join(lost[:_SHOWN]) + (" …" if len(lost) > _SHOWN else "")
            raise InvalidInputError(
                f"{self.target} is not replaced: the new folder would be without its {listed}. Take them along with "
                f"asymcheck restore --files-from {shlex.quote(str(self.target))}, move them away, or give another name"
            )

    def file(self, name: str = "", size: int = 0) -> TargetFile:
        """Begin a file: the target itself, or one called ``name`` in the target folder.

        Raises:
            OutOfSpaceError: the disk has less room than ``size`` bytes.
        """
        path = self.path / name if name else self.path
        if name:
            with _written(self.path), translated("create", self.path):
                self.path.mkdir(exist_ok=True)
        # The files are sparse until their bytes come, so what was begun before is not in what the disk says.
        self._bytes += size
        free = _FILES.free_bytes(self.target.absolute().parent)
        if self._bytes > free:
            raise OutOfSpaceError(
                f"{self.target} needs {self._bytes} bytes at least, but only {free} are free; nothing was written"
            )
        file = TargetFile(path, size)
        self._files.append(file)
        return file

    def publish(self) -> None:
        """Make everything durable and give it its name."""
        try:
            for file in self._files:
                file.sync()
                file.close()
            if self.path.is_dir():
                _FILES.sync_directory(self.path)
            self._replace()
            _FILES.sync_directory(self.target.absolute().parent)
        finally:
            self.discard()

    def _replace(self) -> None:
        with translated("look at", self.target):
            self._check_free()
        self.check_kept({file.path.name for file in self._files})
        with translated("rename", self.path):
            if self.target.is_dir() and not self.target.is_symlink():
                # A folder cannot be replaced in one step: the old one stays until the new one has its name.
                old = aside(self.path)
                self.target.rename(old)
                try:
                    self.path.rename(self.target)
                except BaseException:
                    old.rename(self.target)
                    raise
                # From here on it is not given back to who clears up, but removed.
                old.rename(self.path)
            else:
                self.path.rename(self.target)

    def discard(self) -> None:
        """Remove what was written, or what it has taken the place of."""
        for file in self._files:
            file.close()
        self._files.clear()
        # An older checkpoint may be written in place of a damaged one.
        self._bytes = 0
        remove(self.path)


def _is_model_folder(folder: Path) -> bool:
    """Tell whether a folder may be replaced as a whole: it is empty, or holds weights and files, but no folders."""
    entries = list(folder.iterdir())
    weights = any(entry.name.endswith(_WEIGHTS) for entry in entries)
    return not entries or (weights and all(entry.is_file() for entry in entries))


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """Give errors of writing ``path``, which lies in no store, advice that fits.

    Raises:
        InvalidInputError: this user may not write there.
    """
    try:
        yield
    except ReadOnlyStoreError as error:
        raise InvalidInputError(
            f"{path.parent} cannot be written here ({error.__cause__}); name another place"
        ) from error


@contextlib.contextmanager
def refused(path: Path, problem: Callable[[Exception], str], remedy: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn errors of a foreign library that reads ``path`` into one of the package's, in the words of ``problem``.

    Raises:
        ForeignFileError
    """
    try:
        yield
    except errors as error:
        raise ForeignFileError(path, problem(error), remedy) from error


def first_line(error: Exception) -> str:
    """Return what an error of a foreign library says, in one line that a sentence can go on from."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(" .;") if text else type(error).__name__
