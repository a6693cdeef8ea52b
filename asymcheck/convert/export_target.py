"""Export targets: where a checkpoint may be written to, and how a complete export takes the place of an older one.

An export grows beside its target under a hidden name, and gets its name when it is complete. The hidden names say
which process they belong to, so that the next export removes what killed processes have left::

    .model.4711-8815-0123456789abcdef-01234567.partial       a draft of `model`, or what a draft has replaced
    .model.4711-8815-0123456789abcdef-01234567.partial.old   the folder `model` itself, while a draft takes its place
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from asymcheck.errors import InvalidInputError, OutOfSpaceError, ReadOnlyStoreError
from asymcheck.format.digest import sum8
from asymcheck.format.layout import DESCRIPTOR_NAME
from asymcheck.format.manifest import TensorRow
from asymcheck.storage.local_files import Files, translated
from asymcheck.storage.process_identity import is_dead, this_process
from asymcheck.types import Owner
from asymcheck.validation import check_no_uri

_FILES = Files()
_SAFETENSORS = ".safetensors"
_TORCH = (".pt", ".pth", ".bin")
# The suffix of a file. One that begins with a digit is part of a name like llama-3.1.
_A_SUFFIX = re.compile(r"\.[^\W\d_]\w*")
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_SHOWN = 6
_PARTIAL: Final = ".partial"
_OLD: Final = f"{_PARTIAL}.old"
_OWNED = re.compile(rf"([0-9]+)-([0-9]+)-([0-9a-f]+)-[0-9a-f]+({re.escape(_PARTIAL)}|{re.escape(_OLD)})", re.ASCII)


def format_of(path: Path) -> str:
    """Return the format that a name stands for: ``safetensors``, ``torch``, ``unknown``, or else ``folder``.

    An existing folder is a ``folder`` unless its suffix is a known one.
    """
    suffix = path.suffix.lower()
    if suffix == _SAFETENSORS:
        return "safetensors"
    if suffix in _TORCH:
        return "torch"
    return "unknown" if _A_SUFFIX.fullmatch(suffix) and not os.path.isdir(path) else "folder"


def is_store(path: Path) -> bool:
    """Tell whether ``path`` is a store."""
    check_no_uri(path)
    with translated("look at", path):
        return (path / DESCRIPTOR_NAME).exists()


def check_target(path: Path) -> str:
    """Return the format of a target.

    Raises:
        InvalidInputError: nothing can be written there, or only by replacing something that must stay.
    """
    check_no_uri(path)
    kind = format_of(path)
    if kind == "unknown":
        raise InvalidInputError(
            f"{path}: there is no writing {path.suffix} files; give a name that ends in "
            f"{', '.join((_SAFETENSORS, *_TORCH))}, or one without suffix for a folder"
        )
    resolved = Path(os.path.realpath(path))
    # A target is replaced as a whole, which is impossible for the working directory.
    if path.name in ("", "..") or Path.cwd().is_relative_to(resolved):
        raise InvalidInputError(f"{path} is no name for something new; give one, for instance {path / 'my-model'}")
    store = next((above for above in (resolved, *resolved.parents) if os.path.exists(above / DESCRIPTOR_NAME)), None)
    if store is not None:
        what = "is a store" if store == resolved else f"lies in the store {store}"
        raise InvalidInputError(f"{path} {what}, where only asymcheck's own files belong; name another place")
    if os.path.isdir(path) and kind != "folder":
        raise InvalidInputError(f"{path} is a folder, and a {path.suffix} file is to be written; give another name")
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise InvalidInputError(f"{path} is no file and no folder, so it is not replaced; give another name")
    if os.path.islink(path) and kind == "folder":
        raise InvalidInputError(
            f"{path} is a link, and no folder can take its place; name what it leads to: {resolved}"
        )
    if os.path.isfile(path) and kind == "folder":
        raise InvalidInputError(
            f"{path} is a file, and a name without .safetensors or .pt stands for a folder; give another name"
        )
    return kind


class TargetFile:
    """A file that tensors are written to, in any order, by several threads."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """Open ``path``, create it when it is missing, and make it at least ``size`` bytes long."""
        self.path = path
        with _written(path), translated("create", path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if size > os.fstat(self._descriptor).st_size:
                os.ftruncate(self._descriptor, size)

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Write ``data`` from byte ``start`` on."""
        _FILES.pwrite(self._descriptor, [memoryview(data)], start, self.path)

    def read(self, start: int, length: int) -> bytes:
        """Read back a range."""
        with translated("read", self.path):
            return os.pread(self._descriptor, length, start)

    def region(self, row: TensorRow, start: int) -> Region:
        """Return the place of a tensor, which begins at byte ``start``."""
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


@dataclasses.dataclass(frozen=True)
class Region:
    """The place of one tensor in a file."""

    file: TargetFile
    row: TensorRow
    start: int

    def put(self, start: int, data: memoryview) -> None:
        """Write the tensor's bytes from ``start`` on."""
        self.file.write(self.start + start, data)


class Draft:
    """A file or folder that gets its name when it is complete, so that nobody sees a half-written one."""

    def __init__(self, target: Path, *, overwrite: bool) -> None:
        """Prepare for ``target``, and remove what killed processes have left of it.

        Raises:
            InvalidInputError: it exists and ``overwrite`` is not given, or the folder above it does not exist.
        """
        self.target = target
        self._overwrite = overwrite
        self.path = _draft_of(target)
        self._files: list[TargetFile] = []
        self._bytes = 0
        with translated("look at", target):
            if not target.absolute().parent.is_dir():
                raise InvalidInputError(f"{target.parent} is not a folder; create it first")
            _clear(target)
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
        """Check that a new folder with files called ``names`` has every configuration, tokenizer and text of the old.

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
        """Begin a file: the target itself, or one called ``name`` in the target folder."""
        if name:
            with _written(self.path), translated("create", self.path):
                self.path.mkdir(exist_ok=True)
        # The files stay sparse until their bytes come, so the free space does not account for earlier ones.
        self._bytes += size
        free = _FILES.free_bytes(self.target.absolute().parent)
        if self._bytes > free:
            raise OutOfSpaceError(
                f"{self.target} needs {self._bytes} bytes at least, but only {free} are free; nothing was written"
            )
        file = TargetFile(self.path / name if name else self.path, size)
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
            with translated("look at", self.target):
                self._check_free()
            self.check_kept({file.path.name for file in self._files})
            with translated("rename", self.path):
                self._rename()
            _FILES.sync_directory(self.target.absolute().parent)
        finally:
            self.discard()

    def _rename(self) -> None:
        if not self.target.is_dir() or self.target.is_symlink():
            self.path.rename(self.target)
            return
        # A folder cannot be replaced in one step: the old one stays until the new one has its name.
        old = self.path.with_name(self.path.name.removesuffix(_PARTIAL) + _OLD)
        self.target.rename(old)
        try:
            self.path.rename(self.target)
        except BaseException:
            old.rename(self.target)
            raise
        # Under this name, the next export removes the old folder rather than give it back.
        old.rename(self.path)

    def discard(self) -> None:
        """Remove what was written, or what the export has replaced."""
        for file in self._files:
            file.close()
        self._files.clear()
        # An older checkpoint may be written in place of a damaged one.
        self._bytes = 0
        _remove(self.path)


class DraftSink:
    """The base of sinks that write a checkpoint, or one part of it, to a draft."""

    def __init__(self, draft: Draft, part: str | None) -> None:
        """Write to ``draft`` the part with this dotted name; None means the whole state."""
        self._draft, self._part = draft, part
        self.tensors = 0  # tensors written; tied ones count once
        self.nbytes = 0  # bytes of these tensors
        self.left_out: list[str] = []  # names of values that the format has no place for
        self.hints: list[str] = []  # reasons why other programs may not read it as expected, and remedies

    def finish(self) -> None:
        """Give the file or the folder its name."""
        self._draft.publish()

    def abandon(self) -> None:
        """Remove what was written."""
        self._draft.discard()


def _is_model_folder(folder: Path) -> bool:
    """Tell whether a folder may be replaced as a whole: it is empty, or holds weights and files, but no folders."""
    entries = list(folder.iterdir())
    weights = any(entry.name.endswith(_WEIGHTS) for entry in entries)
    return not entries or (weights and all(entry.is_file() for entry in entries))


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """Replace the advice in errors of writing ``path``, which is not part of a store.

    Raises:
        InvalidInputError: this user may not write there.
    """
    try:
        yield
    except ReadOnlyStoreError as error:
        raise InvalidInputError(
            f"{path.parent} cannot be written here ({error.__cause__}); name another place"
        ) from error


def make_temporary_folder(kind: str) -> Path:
    """Return a new folder in the temporary directory; remove those of this ``kind`` whose processes were killed."""
    target = Path(tempfile.gettempdir()) / kind
    _clear(target)
    folder = _draft_of(target)
    folder.mkdir(mode=0o700)
    return folder


def _draft_of(target: Path) -> Path:
    """Return the path of a new draft of ``target``, whose name identifies this process."""
    owner = this_process()
    mark = f"{owner.pid}-{owner.start_ticks}-{_place(owner)}-{os.urandom(4).hex()}"
    return target.with_name(f".{target.name}.{mark}{_PARTIAL}")


def _clear(target: Path) -> None:
    """Remove drafts of ``target`` whose processes were killed; rename it back if one of them had set it aside.

    Drafts of living processes stay, and so do those of other machines and containers, whose processes are unknown here.
    """
    for name in _FILES.list(target.absolute().parent):
        kind = _kind_of(name, target.name)
        left = target.with_name(name)
        if kind == _OLD and not os.path.lexists(target):
            # Another process may have done so just now.
            with translated("rename", left), contextlib.suppress(FileNotFoundError):
                left.rename(target)
        elif kind is not None:
            _remove(left)


def _remove(path: Path) -> None:
    """Remove a file or a folder as far as possible; it may be missing."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _kind_of(name: str, target: str) -> str | None:
    """Return the suffix of a name that a killed process left of ``target``; None for all other names."""
    prefix, own = f".{target}.", this_process()
    found = _OWNED.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
    if found is None or found[3] != _place(own):
        return None
    owner = Owner(int(found[1]), int(found[2]), own.boot_id, own.pid_namespace)
    return found[4] if is_dead(owner) else None


def _place(owner: Owner) -> str:
    """Return a digest of boot and PID namespace: only of processes that share both can be told whether they live."""
    return sum8(f"{owner.boot_id} {owner.pid_namespace}".encode()).hex()
