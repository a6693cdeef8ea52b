"""Export targets: check the path, write a draft, and rename the complete draft to the target.

A draft has a hidden name beside its target. The name identifies the writing process, so that the next export removes
drafts of killed processes::

    .model.4711-8815-0123456789abcdef-01234567.partial       a draft of `model`, or the replaced old version
    .model.4711-8815-0123456789abcdef-01234567.partial.old   the old folder `model`, while the draft replaces it
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asymcheck.errors import InvalidInputError, OutOfSpaceError, ReadOnlyStoreError, listed
from asymcheck.format.digest import sum8
from asymcheck.format.layout import DESCRIPTOR_NAME
from asymcheck.storage.local_files import Files, translated
from asymcheck.storage.process_identity import is_dead, this_process
from asymcheck.types import Owner, readable_size
from asymcheck.validation import check_no_uri

if TYPE_CHECKING:
    from asymcheck.convert.part import Part
    from asymcheck.convert.rename import Renames
    from asymcheck.format.manifest import TensorRow

_FILES = Files()
_SAFETENSORS = ".safetensors"
_TORCH = (".pt", ".pth", ".bin", ".ckpt")
# A suffix that begins with a digit belongs to a name such as llama-3.1.
_FILE_SUFFIX = re.compile(r"\.[^\W\d_]\w*")
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_PARTIAL: Final = ".partial"
_OLD: Final = f"{_PARTIAL}.old"
_OWNED = re.compile(rf"([0-9]+)-([0-9]+)-([0-9a-f]+)-[0-9a-f]+({re.escape(_PARTIAL)}|{re.escape(_OLD)})", re.ASCII)


def format_of(path: Path) -> str:
    """Return the format of a path: ``safetensors``, ``torch``, ``folder`` or ``unknown``.

    An existing folder is a ``folder``, unless its suffix is that of a file format.
    """
    suffix = path.suffix.lower()
    if suffix == _SAFETENSORS:
        return "safetensors"
    if suffix in _TORCH:
        return "torch"
    return "unknown" if _FILE_SUFFIX.fullmatch(suffix) and not os.path.isdir(path) else "folder"


def is_store(path: Path) -> bool:
    """Tell whether ``path`` is a store."""
    check_no_uri(path)
    with translated("access", path):
        return (path / DESCRIPTOR_NAME).exists()


def check_target(path: Path) -> str:
    """Check that an export may write to a path, and return its format.

    Raises:
        InvalidInputError: the path cannot be written, or an export must not replace it.
    """
    check_no_uri(path)
    kind = format_of(path)
    if kind == "unknown":
        raise InvalidInputError(
            f"cannot write {path}: {path.suffix} files are not supported; give a name that ends in "
            f"{', '.join((_SAFETENSORS, *_TORCH))}, or a name without suffix for a folder"
        )
    resolved = Path(os.path.realpath(path))
    # A target is replaced as a whole, which is impossible for the working directory.
    if path.name in ("", "..") or Path.cwd().is_relative_to(resolved):
        raise InvalidInputError(
            f"cannot write {path}: the path must name a new file or folder; give for example {path / 'my-model'}"
        )
    store = next((above for above in (resolved, *resolved.parents) if os.path.exists(above / DESCRIPTOR_NAME)), None)
    if store is not None:
        location = "a store" if store == resolved else f"inside the store {store}"
        raise InvalidInputError(f"cannot write {path}: the path is {location}; choose a path outside of the store")
    if os.path.isdir(path) and kind != "folder":
        raise InvalidInputError(
            f"cannot write {path}: a folder has this name; choose another name for the {path.suffix} file"
        )
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise InvalidInputError(f"cannot replace {path}: it is neither a file nor a folder; choose another name")
    if os.path.islink(path) and kind == "folder":
        raise InvalidInputError(
            f"cannot replace {path}: a folder cannot replace a symbolic link; give the target of the link: {resolved}"
        )
    if os.path.isfile(path) and kind == "folder":
        raise InvalidInputError(
            f"cannot write folder {path}: a file has this name; choose another name, or a name that ends in "
            ".safetensors or .pt"
        )
    return kind


class TargetFile:
    """A file to which several threads write tensors in any order."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """Open or create ``path``, and extend the file to at least ``size`` bytes."""
        self.path = path
        with _written(path), translated("create", path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            if size > os.fstat(self._descriptor).st_size:
                os.ftruncate(self._descriptor, size)

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Write ``data`` from byte ``start`` on."""
        _FILES.pwrite(self._descriptor, [memoryview(data)], start, self.path)

    def read(self, start: int, length: int) -> bytes:
        """Read a range of the file."""
        with translated("read", self.path):
            return os.pread(self._descriptor, length, start)

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
class FileRegion:
    """FileRegion of one tensor in a file, from byte ``start`` on."""

    file: TargetFile
    start: int

    def put(self, start: int, data: memoryview) -> None:
        """Write bytes of the tensor from ``start`` on."""
        self.file.write(self.start + start, data)


class Draft:
    """A new file or folder that is renamed to its target once it is complete."""

    def __init__(self, target: Path, *, overwrite: bool, is_dry_run: bool = False) -> None:
        """Prepare a draft of ``target``, and remove drafts of killed processes unless this is a dry run.

        Raises:
            InvalidInputError: the target exists and ``overwrite`` is not set, or its parent folder does not exist.
        """
        self.target = target
        self.is_dry_run = is_dry_run
        self._overwrite = overwrite
        self.path = _draft_of(target)
        self._files: list[TargetFile] = []
        self._bytes = 0
        with translated("access", target):
            if not target.absolute().parent.is_dir():
                raise InvalidInputError(f"cannot write {target}: {target.parent} is not a folder; create it first")
            if not is_dry_run:
                _clear(target)
            self._check_free()

    def _check_free(self) -> None:
        is_taken = self.target.is_symlink() or self.target.exists()
        if is_taken and not (self.target.is_dir() and not any(self.target.iterdir())) and not self._overwrite:
            raise InvalidInputError(f"{self.target} exists; choose another name, or pass --overwrite to replace it")
        if is_taken and self.target.is_dir() and not _is_model_folder(self.target):
            raise InvalidInputError(
                f"cannot replace {self.target}: the folder is not a model folder, or has sub-folders; "
                "choose another name"
            )

    def check_kept(self, names: Collection[str]) -> None:
        """Check that the new folder, with files ``names``, keeps all files of the old folder except weights.

        Raises:
            InvalidInputError: files other than weights would be lost.
        """
        if not self.target.is_dir():
            return
        with translated("list", self.target):
            existing = sorted(entry.name for entry in self.target.iterdir())
        lost = [name for name in existing if not name.endswith(_WEIGHTS) and name not in names]
        if lost:
            raise InvalidInputError(
                f"cannot replace {self.target}: the new folder would lack {listed(lost)}. Copy these files with "
                f"asymcheck restore --files-from {shlex.quote(str(self.target))}, move them, or choose another name"
            )

    def file(self, name: str = "", size: int = 0) -> TargetFile:
        """Create the target file, or the file ``name`` in the target folder."""
        if name:
            with _written(self.path), translated("create", self.path):
                self.path.mkdir(exist_ok=True)
        # Earlier files are still sparse, so the free space does not include them.
        self._bytes += size
        free = _FILES.free_bytes(self.target.absolute().parent)
        if self._bytes > free:
            raise OutOfSpaceError(
                f"cannot write {self.target}: it needs at least {readable_size(self._bytes)}, but only "
                f"{readable_size(free)} are free; free disk space, or choose another drive"
            )
        file = TargetFile(self.path / name if name else self.path, size)
        self._files.append(file)
        return file

    def publish(self) -> None:
        """Make the draft durable and rename it to the target."""
        try:
            for file in self._files:
                file.sync()
                file.close()
            if self.path.is_dir():
                _FILES.sync_directory(self.path)
            with translated("access", self.target):
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
        # A folder cannot be replaced atomically: the old folder stays until the draft has its name.
        old = self.path.with_name(self.path.name.removesuffix(_PARTIAL) + _OLD)
        self.target.rename(old)
        try:
            self.path.rename(self.target)
        except BaseException:
            old.rename(self.target)
            raise
        # Under this name, the next export removes the old folder instead of renaming it back.
        old.rename(self.path)

    def discard(self) -> None:
        """Remove the draft, or the old version that the draft has replaced."""
        for file in self._files:
            file.close()
        self._files.clear()
        # An older checkpoint may now be written instead of a damaged one.
        self._bytes = 0
        _remove(self.path)


@dataclasses.dataclass(frozen=True)
class NewTensor:
    """A tensor to write. Tied tensors are one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, name: str, row: TensorRow) -> NewTensor:
        """Return a stored tensor under a new name."""
        return cls(name, row.dtype, row.shape, row.nbytes)


class DraftSink:
    """Base of sinks that write a checkpoint, or one part of it, to a draft."""

    def __init__(self, draft: Draft, part: str | None, renames: Renames = ()) -> None:
        """Write the part with this dotted name to ``draft``; None means the whole state."""
        self._draft, self._part, self._renames = draft, part, renames
        self.tensors: list[NewTensor] = []  # tensors that are written
        self.left_out: list[str] = []  # names of plain values that the format cannot store
        self.hints: list[str] = []  # reasons why other programs may not read the output as expected, with remedies

    def _picked(self, shape: object, *, tensors_only: bool = False) -> Part:
        """Return the part to write, with renamed tensors."""
        # The command line imports this module, and must not load torch.
        from asymcheck.convert.part import pick
        from asymcheck.convert.rename import rename_tensors
        from asymcheck.restore.state_template import RowRef

        part = pick(shape, self._part, tensors_only=tensors_only)
        is_file = self._part is None and format_of(self._draft.target) != "folder"
        names = listed(list(part.files)) if is_file else ""
        self.hints = [f"left out {names}; export to a folder, whose name has no suffix, to keep them"] if names else []
        renamed = rename_tensors(part.shape, self._renames, RowRef)
        return dataclasses.replace(part, shape=renamed)

    def finish(self) -> None:
        """Rename the complete file or folder to its target."""
        if not self._draft.is_dry_run:
            self._draft.publish()

    def abandon(self) -> None:
        """Remove the draft."""
        self._draft.discard()


def _is_model_folder(folder: Path) -> bool:
    """Tell whether an export may replace a folder: the folder is empty, or has weights and no sub-folders."""
    entries = list(folder.iterdir())
    weights = any(entry.name.endswith(_WEIGHTS) for entry in entries)
    return not entries or (weights and all(entry.is_file() for entry in entries))


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """Replace the advice in errors of writing ``path``, which is outside of a store.

    Raises:
        ReadOnlyStoreError: the user has no permission to write.
    """
    try:
        yield
    except ReadOnlyStoreError as error:
        raise ReadOnlyStoreError(f"cannot write to {path.parent}: {error.__cause__}; choose another folder") from error


def make_temporary_folder(target: Path) -> Path:
    """Create a hidden folder beside ``target``; remove those of killed processes."""
    _clear(target)
    folder = _draft_of(target)
    with _written(folder), translated("create", folder):
        folder.mkdir(mode=0o700)
    return folder


def _draft_of(target: Path) -> Path:
    owner = this_process()
    mark = f"{owner.pid}-{owner.start_ticks}-{_host_digest(owner)}-{os.urandom(4).hex()}"
    return target.with_name(f".{target.name}.{mark}{_PARTIAL}")


def _clear(target: Path) -> None:
    """Remove drafts of ``target`` of killed processes; rename an old folder back if its replacement was interrupted.

    Drafts of running processes stay. So do drafts of other hosts and containers, whose processes are not visible.
    """
    for name in _FILES.list(target.absolute().parent.resolve()):
        kind = _kind_of(name, target.name)
        leftover = target.with_name(name)
        if kind == _OLD and not os.path.lexists(target):
            # Another process may rename the folder at the same time.
            with translated("rename", leftover), contextlib.suppress(FileNotFoundError):
                leftover.rename(target)
        elif kind is not None:
            _remove(leftover)


def _remove(path: Path) -> None:
    """Remove a file or folder if it exists, and ignore errors."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _kind_of(name: str, target: str) -> str | None:
    """Return the suffix of a draft name of ``target`` if its process was killed; None for all other names."""
    prefix, own = f".{target}.", this_process()
    match = _OWNED.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
    if match is None or match[3] != _host_digest(own):
        return None
    owner = Owner(int(match[1]), int(match[2]), own.boot_id, own.pid_namespace)
    return match[4] if is_dead(owner) else None


def _host_digest(owner: Owner) -> str:
    """Return a digest of boot id and PID namespace. Only processes that share both are visible to each other."""
    return sum8(f"{owner.boot_id} {owner.pid_namespace}".encode()).hex()
