"""Read files of ``torch.save`` with ``weights_only=True``, and write them without their tensors in memory.

Torch reports where the bytes of each tensor are stored. A storage that is loaded on the meta device (in older releases:
under ``FakeTensorMode``) has its offset, and ``skip_data`` reserves space for the storages of a saved file (see torch's
notes on serialization). This is the only module that calls ``torch.save`` and ``torch.load``.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
import mmap
import pickle
import re
import shlex
import struct
import sys
import threading
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np
import torch

from asymcheck.convert.export_target import DraftSink, FileRegion, TargetFile
from asymcheck.convert.part import keep_parts, leaves_of
from asymcheck.convert.pickle_limits import PickleScan, scan_pickle, tensors_max, without_appends
from asymcheck.convert.source_file import SourceFile, first_line, refused
from asymcheck.errors import ForeignFileError, InvalidInputError, StorageError, listed
from asymcheck.format.manifest import TensorRow
from asymcheck.format.registry import DTYPE_BYTES
from asymcheck.format.tree import join_name
from asymcheck.restore.read_plan import ByteTarget
from asymcheck.restore.state_template import RowRef
from asymcheck.restore.tensor_stream import CheckpointOutline
from asymcheck.state.dtypes import TORCH_DTYPES, TORCH_NAMES
from asymcheck.state.leaves import TensorBytes, flat_bytes
from asymcheck.state.typed_values import TypedValue
from asymcheck.storage.local_files import translated

_REMEDY = "load the file in your own program, and save the result with Store.save()"
_FETCH = "fetch or write the file again"
_REWRITE = "load the file with torch.load() and write it again with torch.save()"
_UNCOMPRESSED = f"pack the archive again without compression (zip -0), or {_REWRITE}"
_NEWER = "install a newer torch, or use .safetensors"

_LOCAL_MAGIC = b"PK\x03\x04"
_LOCAL = struct.Struct("<4s22xHH")
_CENTRAL = struct.Struct("<4s24xHHH12x")
_CENTRAL_CRC = 16
_DESCRIPTOR = b"PK\x07\x08"
_ENCRYPTED = 1
_CHUNK = 8 << 20
_EXPANSION_MAX: Final = 4
_EXPANDED_BYTES_MAX: Final = 1 << 26  # bytes that expanded views may have in a small file
_VALUES_MAX: Final = 50_000_000
_SHARED_VALUES_MAX: Final = 1_000_000  # values that shared containers may repeat
_INFLATED_BYTES_MAX: Final = 1 << 28
"""Maximum size of a compressed record. Pickles are far smaller, because each tensor has its own record."""
_INFLATION_MAX: Final = 8
"""Maximum bytes of a compressed record per byte of the file, beyond :data:`_INFLATED_SMALL`."""
_INFLATED_SMALL: Final = 1 << 24
_LEGACY_PICKLES: Final = 5
_LEGACY_BYTES_MAX: Final = 1 << 28  # maximum size of the pickles before the tensors in a file from before torch 1.6

_OFFSET = "_checkpoint_offset"  # attribute of a storage without memory: its offset in the file
_SUGGESTED = 4  # parts in an error message
_FOLDER = "archive/"
_PICKLE = "data.pkl"
_BYTE_ORDER = "byteorder"
_COPIED = (_PICKLE, "version", ".data/version")
# Torch would compute the offsets of storages from these records. Without them, torch reads the offsets from the file.
_LEFT_OUT = (".format_version", ".storage_alignment")

# Smaller tensors get ordinary memory, because a process can have only 65,530 mappings.
_MAPPED_BYTES = 1 << 20
_MAP_NORESERVE = 0x4000
_PROBE_BYTES = 1 << 16
_METADATA = "_metadata"  # the attribute in which ``Module.state_dict()`` keeps the versions of modules

_PICKLE_MARK = b"\x80"
TORCH_MARKS: Final = (_LOCAL_MAGIC, _PICKLE_MARK)
"""First bytes of files of ``torch.save``."""
_PICKLED = re.compile(r"nsupported (?:(?:global|class|operand).{0,20}?)?GLOBAL (\S+)")
_UNREAD = re.compile(r"WeightsUnpickler error:\s*(.+)")
_ADVICE = " In PyTorch 2.6"
# Raised for files that were cut short or damaged.
_DAMAGE_ERRORS = (EOFError, KeyError, struct.error, zipfile.BadZipFile, zlib.error)
_LOAD_ERRORS = (
    *(pickle.UnpicklingError, RuntimeError, ValueError, TypeError, LookupError, AttributeError),
    *(ArithmeticError, AssertionError),
)


class _Inert(type):
    """Class of the classes of stand-ins.

    Torch sets items only of objects whose class is equal to dict, and calls only objects that are equal to an allowed
    class. A bound method is pickled as a call of the result of getattr, so that stand-ins are called, too.
    """

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is dict or isinstance(other, cls)

    __hash__ = type.__hash__
    name = ""  # dotted name of the class


class _StandIn(metaclass=_Inert):
    """Object that stands for an object of a class that is never loaded; it ignores all content."""

    name = ""

    def __init__(self, *_arguments: object) -> None:
        pass

    def __setstate__(self, _state: object) -> None:
        pass

    def __setitem__(self, _key: object, _value: object) -> None:
        pass

    def __call__(self, *_arguments: object) -> _StandIn:
        return self


def read_torch_file(file: SourceFile, stand_ins: Mapping[str, type] | None = None, parts: Sequence[str] = ()) -> object:
    """Return the state in a file of ``torch.save``; its tensors are read during the save.

    No code in the file is executed. A file in the format before torch 1.6 is read into memory.

    Args:
        file: the file.
        stand_ins: replacement classes, by the dotted names of classes in the file.
        parts: dotted names of the parts to return. Other parts may hold objects of any class.

    Raises:
        ForeignFileError: torch cannot read the file, or it holds objects other than tensors, containers and plain
            values.
        InvalidInputError: the file lacks a part.
    """
    with _replaced(file.path, stand_ins or {}):
        return read_torch_slice(file, 0, file.size, parts)


@contextlib.contextmanager
def _replaced(path: Path, stand_ins: Mapping[str, type]) -> Iterator[None]:
    """Let torch load the stand-ins in place of classes with these dotted names."""
    if not stand_ins:
        yield
        return
    safe_globals = getattr(torch.serialization, "safe_globals", None)
    if safe_globals is None:
        raise ForeignFileError(
            path, f"torch {torch.__version__} has no safe_globals(), which reading this file requires", _NEWER
        )
    with safe_globals([(kind, name) for name, kind in stand_ins.items()]):
        yield


def read_torch_slice(file: SourceFile, start: int, length: int, parts: Sequence[str] = ()) -> object:
    """Return the state, or some parts of it, in a file of ``torch.save`` that is a range of another file."""
    source: Any = _RangedFile(file, start, length)
    magic = source.read(len(_LOCAL_MAGIC))
    source.seek(0)
    # A pickle begins with this mark. For other files, the error of torch would advise to trust the file.
    if not magic.startswith(TORCH_MARKS):
        raise ForeignFileError(file.path, "not a file of torch.save(), or truncated", _FETCH)
    with (
        refused(file.path, _problem, _REMEDY, *_LOAD_ERRORS),
        refused(file.path, _damage, _FETCH, *_DAMAGE_ERRORS),
    ):
        if magic != _LOCAL_MAGIC:
            classes = _scan_legacy(file.path, source, length)
            outline = _ScannedPickle(file.path, length, lambda _: _load_legacy(source), classes)
            state = outline.load(parts)
            leaves = {id(leaf): leaf for leaf in outline.leaves(state)}
            _check_claim(file.path, (leaf.nbytes for leaf in leaves.values() if isinstance(leaf, torch.Tensor)), length)
            return state
        archive = _Archive(file.path, source)
        tensors: dict[tuple[object, ...], TensorBytes] = {}

        def replaced(leaf: object) -> object:
            return _lazy_tensor(leaf, file, start, archive, tensors) if isinstance(leaf, torch.Tensor) else leaf

        state = _ScannedPickle(file.path, length, archive.load_faked, archive.classes).load(parts)
        mapped = _map_leaves(state, replaced)
        _check_claim(file.path, (tensor.nbytes for tensor in tensors.values()), length)
        return mapped


def _load_legacy(source: IO[bytes]) -> object:
    source.seek(0)
    return torch.load(source, map_location="cpu", weights_only=True)


class _ScannedPickle(NamedTuple):
    """A file whose pickle was scanned."""

    path: Path
    file_bytes: int
    load_all: Callable[[bool], object]  # called with True if classes have stand-ins
    classes: frozenset[str]  # dotted names in the pickle

    def load(self, parts: Sequence[str]) -> object:
        """Return the parts of the state, or the whole state.

        Raises:
            ForeignFileError: the parts hold an object of a class that is not supported.
            InvalidInputError: the file lacks a part.
        """
        if parts:
            state = keep_parts(self.path, self._load_with_stand_ins(), parts)
            if name := self._unsupported(state):
                problem = f"the part {listed(parts)} holds a pickled object of {name}, which is never executed"
                raise ForeignFileError(self.path, problem, _REMEDY)
            return state
        try:
            state = self.load_all(False)
        except pickle.UnpicklingError as error:
            if not (supported := self._supported_parts()):
                raise
            options = " ".join(f"--part {shlex.quote(name)}" for name in supported)
            remedy = f"pass {options} to import only parts without such objects, or {_REMEDY}"
            raise ForeignFileError(self.path, _problem(error), remedy) from error
        self._unsupported(state)  # refuses endless containers; the state has no stand-ins
        return state

    def _load_with_stand_ins(self) -> object:
        with _replaced(self.path, {name: _Inert("Inert", (_StandIn,), {"name": name}) for name in self.classes}):
            return self.load_all(True)

    def _unsupported(self, state: object) -> str:
        """Return the dotted name of a class that has a stand-in in the state, or an empty string."""
        return next((leaf.name for leaf in self.leaves(state) if isinstance(leaf, (_StandIn, _Inert))), "")

    def _supported_parts(self) -> list[str]:
        """Return the first names of parts that have tensors and no objects of other classes."""
        try:
            state = self._load_with_stand_ins()
            parts = state.items() if isinstance(state, dict) else ()
            return [
                join_name((key,))
                for key, value in parts
                if type(key) in (str, int)
                and not self._unsupported(value)
                and any(isinstance(leaf, torch.Tensor) for leaf in self.leaves(value))
            ][:_SUGGESTED]
        except (*_LOAD_ERRORS, *_DAMAGE_ERRORS, ForeignFileError):
            return []

    def leaves(self, state: object) -> Iterator[object]:
        """Yield the values in nested containers.

        Raises:
            ForeignFileError: a file of this size cannot describe so many values, unless containers are shared or
                cyclic.
        """
        left = min(self.file_bytes, _VALUES_MAX) + _SHARED_VALUES_MAX
        stack = [state]
        while stack:
            value = stack.pop()
            left -= 1
            if left < 0:
                problem = "its containers contain each other, or expand to millions of values"
                raise ForeignFileError(self.path, problem, _REMEDY)
            if isinstance(value, dict):
                stack.extend(value.values())
            elif isinstance(value, (list, tuple)):
                stack.extend(value)
            else:
                yield value


def _check_scan(path: Path, content: bytes, start: int, file_bytes: int) -> PickleScan:
    """Scan a pickle before it is loaded, and raise if loading costs more than a file of this size justifies."""
    scan = scan_pickle(content, start, file_bytes)
    if scan.problem:
        raise ForeignFileError(path, scan.problem, _REMEDY)
    return scan


def _scan_legacy(path: Path, source: IO[bytes], length: int) -> frozenset[str]:
    """Scan the pickles at the start of a file from before torch 1.6; return the names of their classes."""
    content = source.read(min(length, _LEGACY_BYTES_MAX))
    source.seek(0)
    end, classes = 0, frozenset[str]()
    for _ in range(_LEGACY_PICKLES):
        scan = _check_scan(path, content, end, length)
        if not scan.is_whole and length > len(content):
            raise ForeignFileError(path, f"its pickle is larger than {len(content):,} bytes", _REWRITE)
        end, classes = scan.end, classes | scan.classes
    return classes


def _check_claim(path: Path, sizes: Iterable[int], file_bytes: int) -> None:
    """Raise if tensors have far more bytes than the file, because views of one storage are expanded or overlap."""
    claimed = sum(sizes)
    if claimed > _EXPANSION_MAX * file_bytes + _EXPANDED_BYTES_MAX:
        problem = f"its tensors have {claimed:,} bytes, but the file has {file_bytes:,}: they are expanded views"
        raise ForeignFileError(path, problem, "clone these tensors before torch.save()")


class _RangedFile(io.RawIOBase):
    """File object for a range of a file."""

    def __init__(self, file: SourceFile, start: int, length: int) -> None:
        self._file, self._start = file, start
        self._size = max(0, min(length, file.size - start))
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset)
        return self._at

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401 - as the base class has it
        target = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        if target:
            self._file.read(self._start + self._at, target)
        self._at += len(target)
        return len(target)

    def readall(self) -> bytes:
        return self.read(max(0, self._size - self._at)) or b""


class _Archive:
    """Zip archive that ``torch.save`` writes: its pickle and the offsets of its storages.

    Without memory for storages, torch computes the offsets of storages from the layout of its own writer. If another
    program, such as ``zip``, has packed the archive again, these offsets are wrong, without any error. Therefore torch
    loads an outline: the same pickle with empty storages. The offset of a storage in the outline identifies its record,
    and the directory of the file gives the real offset of the record.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        """Read everything except the storages of ``file``, which must stay open.

        Raises:
            ForeignFileError: the file is damaged, or was written with another byte order.
            zipfile.BadZipFile, zlib.error, ValueError: the file is damaged.
        """
        self._path, self._file = path, file
        self._size = file.seek(0, io.SEEK_END)
        with zipfile.ZipFile(file) as packed:
            members = self._members_by_name(packed.infolist())
        self._check_byte_order(members)
        content = {name: self._content(name, members[name]) for name in _COPIED if name in members}
        self._scan = _check_scan(path, content[_PICKLE], 0, self._size)
        self.classes = self._scan.classes
        content[_BYTE_ORDER] = sys.byteorder.encode()
        self._by_name, self._copied = members, content
        self._members: dict[int, tuple[str, zipfile.ZipInfo]] = {}

    def load_faked(self, has_stand_ins: bool = False) -> object:  # noqa: FBT001, FBT002 - the only argument
        """Return the state in the file, with tensors without memory."""
        outline = self._outlined(
            without_appends(self._copied[_PICKLE], self._scan.foreign_appends)
            if has_stand_ins
            else self._copied[_PICKLE]
        )
        if _meta_has_offsets():
            return torch.load(outline, map_location="meta", weights_only=True)
        from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

        with FakeTensorMode():
            return torch.load(outline, map_location="cpu", weights_only=True)

    def _outlined(self, pickled: bytes) -> io.BytesIO:
        """Return the outline with this pickle, and note the offsets of its storages."""
        content = self._copied | {_PICKLE: pickled}
        names = [name for name in self._by_name | content if name not in _LEFT_OUT]
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as outline:
            for name in names:
                outline.writestr(_FOLDER + name, content.get(name, b""))
        starts = [_data_start(self._path, member, file) for member in outline.infolist()]
        self._members = {
            start: (name, self._by_name[name])
            for start, name in zip(starts, names, strict=True)
            if name in self._by_name
        }
        file.seek(0)
        return file

    def record_of(self, tensor: torch.Tensor) -> tuple[str, int, int]:
        """Return the name, the first byte and the length of the record with the storage of a faked tensor."""
        start: int | None = getattr(tensor.untyped_storage(), _OFFSET, None)
        if start is None:
            raise ForeignFileError(
                self._path, f"torch {torch.__version__} does not report the offsets of tensors", _NEWER
            )
        name, member = self._members[start]
        if member.compress_type != zipfile.ZIP_STORED:
            raise ForeignFileError(self._path, f"record {name} is compressed", _UNCOMPRESSED)
        return name, self._start_of(name, member), member.compress_size

    def _start_of(self, name: str, member: zipfile.ZipInfo) -> int:
        start = _data_start(self._path, member, self._file)
        if start + member.compress_size > self._size:
            raise ForeignFileError(self._path, f"truncated: record {name} goes beyond the end of the file", _FETCH)
        if member.flag_bits & _ENCRYPTED:
            raise ForeignFileError(self._path, f"record {name} is encrypted", "decrypt the file first")
        return start

    def _members_by_name(self, members: Sequence[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
        """Return the members of the folder that torch reads, which is the folder of the first member."""
        if members and min(member.header_offset for member in members):
            # Python skips data before the archive, which could be another file of torch.
            raise ForeignFileError(self._path, "its zip directory describes another archive", _FETCH)
        self._check_layout(members)
        folder = members[0].filename.partition("/")[0] + "/" if members else ""
        inside = [member for member in members if member.filename.startswith(folder) and not member.is_dir()]
        by_name = {member.filename.removeprefix(folder): member for member in inside}
        # Torch ignores the case of names.
        if len({name.lower() for name in by_name}) < len(inside):
            raise ForeignFileError(self._path, "two records have the same name", _REWRITE)
        if _PICKLE not in by_name:
            raise ForeignFileError(self._path, f"no record {_PICKLE}, so torch.save() did not write the file", _FETCH)
        return by_name

    def _check_layout(self, members: Sequence[zipfile.ZipInfo]) -> None:
        """Refuse too many records, and records that share bytes, which make a small file look large."""
        if len(members) > tensors_max(self._size):
            raise ForeignFileError(self._path, f"{len(members):,} records are too many for its size", _REMEDY)
        ordered = sorted(members, key=lambda member: member.header_offset)
        for member, following in itertools.pairwise(ordered):
            end = member.header_offset + _LOCAL.size + len(member.orig_filename) + member.compress_size
            if end > following.header_offset:
                raise ForeignFileError(
                    self._path, f"records {member.filename} and {following.filename} overlap", _FETCH
                )

    def _check_byte_order(self, members: dict[str, zipfile.ZipInfo]) -> None:
        """Refuse files of another byte order, because torch would swap bytes. The default is little-endian."""
        content = self._content(_BYTE_ORDER, members[_BYTE_ORDER]) if _BYTE_ORDER in members else b"little"
        order = content.decode(errors="replace")
        if order != sys.byteorder:
            problem = f"its byte order is {order!r:.40}, but this machine is {sys.byteorder}-endian"
            raise ForeignFileError(self._path, problem, _REWRITE)

    def _content(self, name: str, member: zipfile.ZipInfo) -> bytes:
        # The zipfile module requires checksums, but torch can write files without them.
        self._file.seek(self._start_of(name, member))
        data = self._file.read(member.compress_size)
        if member.compress_type == zipfile.ZIP_STORED:
            return data
        if member.compress_type != zipfile.ZIP_DEFLATED:
            raise ForeignFileError(self._path, f"record {name} has a compression that torch does not support", _FETCH)
        if member.file_size > min(_INFLATED_BYTES_MAX, _INFLATED_SMALL + _INFLATION_MAX * self._size):
            problem = f"compressed record {name} has {member.file_size} uncompressed bytes"
            raise ForeignFileError(self._path, problem, _UNCOMPRESSED)
        # In a hostile file, a few bytes can expand to more than the memory.
        stream = zlib.decompressobj(-zlib.MAX_WBITS)
        content = stream.decompress(data, member.file_size + 1)
        if len(content) != member.file_size or not stream.eof:
            raise ForeignFileError(self._path, f"the length of record {name} contradicts the zip directory", _FETCH)
        return content


@functools.cache
def _meta_has_offsets() -> bool:
    """Tell whether this torch reports offsets for ``map_location="meta"``, which is several times as fast."""
    tensor = torch.load(value_file(torch.zeros(1)), map_location="meta", weights_only=True)
    return hasattr(tensor.untyped_storage(), _OFFSET)


def _data_start(path: Path, member: zipfile.ZipInfo, file: IO[bytes]) -> int:
    """Return the offset of a member's bytes in a zip file, from the local header of the member."""
    file.seek(member.header_offset)
    header = file.read(_LOCAL.size)
    if len(header) < _LOCAL.size or not header.startswith(_LOCAL_MAGIC):
        problem = f"{member.filename} is not at the offset in the zip directory"
        raise ForeignFileError(path, problem, _FETCH)
    _, name, extra = _LOCAL.unpack(header)
    return int(member.header_offset + _LOCAL.size + name + extra)


def _problem(error: Exception) -> str:
    """Return the cause of an error of torch, without torch's advice to trust the file."""
    pickled = _PICKLED.search(str(error))
    if pickled is not None:
        return f"the file holds a pickled object of {pickled[1]}, which is never executed"
    unreadable = _UNREAD.search(str(error))
    if unreadable is not None:
        return f"torch.load(weights_only=True) cannot read the file ({unreadable[1].rstrip(' .')})"
    return first_line(error).partition(_ADVICE)[0].rstrip(" .")


def _damage(error: Exception) -> str:
    return f"damaged or truncated ({first_line(error)})"


def _lazy_tensor(
    tensor: torch.Tensor,
    file: SourceFile,
    begin: int,
    archive: _Archive,
    tensors: dict[tuple[object, ...], TensorBytes],
) -> object:
    """Return a lazy tensor for a faked tensor of an archive that begins at byte ``begin`` of ``file``."""
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_neg()
    if tensor.dtype not in TORCH_NAMES or not is_plain:
        kind = "quantized" if tensor.is_quantized else "negated by a flag" if tensor.is_neg() else tensor.layout
        raise ForeignFileError(file.path, f"a tensor of {tensor.dtype} is {kind}, which is not supported", _REMEDY)
    name, start, length = archive.record_of(tensor)
    offset = int(tensor.storage_offset() * tensor.element_size())
    extent = 0  # from the first byte of the tensor to its last
    if tensor.numel():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = int(1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()
    if extent and offset + extent > length:
        raise ForeignFileError(file.path, f"a tensor is larger than its storage {name}", _FETCH)
    start += begin + offset
    # Equal views of one storage are a tied tensor, which must be the same object in the state.
    key = (start, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj())
    if key not in tensors:
        if tensor.numel() == 0 or (tensor.is_contiguous() and not tensor.is_conj()):
            tensors[key] = file.tensor(start, TORCH_NAMES[tensor.dtype], tuple(tensor.shape))
        else:
            tensors[key] = _View(tensor, file, start, extent)
    return tensors[key]


class _View(TensorBytes):
    """A tensor that is not a contiguous byte range of the file, as a view of the mapped file."""

    def __init__(self, tensor: torch.Tensor, file: SourceFile, start: int, extent: int) -> None:
        super().__init__(TORCH_NAMES[tensor.dtype], tuple(tensor.shape))
        mapped = torch.frombuffer(file.mapped(start, extent), dtype=torch.uint8)
        view = mapped.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        self._view = view.conj() if tensor.is_conj() else view
        self._file = file
        self._lock = threading.Lock()
        self._copy: torch.Tensor | None = None
        self._unread = self.nbytes

    def read(self, start: int, target: memoryview) -> None:
        """Fill ``target`` from a row-major copy, which is kept until all bytes were read."""
        with self._lock:
            copy = flat_bytes(self._view) if self._copy is None else self._copy
            self._unread -= len(target)
            self._copy = copy if self._unread > 0 else None
            self._unread = self._unread if self._unread > 0 else self.nbytes
        np.copyto(np.frombuffer(target, dtype=np.uint8), copy[start : start + len(target)].numpy())
        self._file.check()


def _map_leaves(value: Any, make: Callable[[object], object]) -> Any:  # noqa: ANN401 - a nested state
    if type(value) in (dict, OrderedDict, Counter):
        copy = type(value)({key: _map_leaves(item, make) for key, item in value.items()})
        if hasattr(value, _METADATA):
            setattr(copy, _METADATA, getattr(value, _METADATA))
        return copy
    if isinstance(value, TypedValue):
        return _map_leaves(value.content, make)
    if type(value) in (list, tuple):
        return type(value)(_map_leaves(item, make) for item in value)
    return make(value)


class TorchSink(DraftSink):
    """Sink that writes a file for ``torch.load(weights_only=True)``.

    Numpy arrays become tensors, and numpy scalars become Python numbers, because ``weights_only`` refuses both.
    """

    def begin(self, outline: CheckpointOutline) -> Mapping[int, ByteTarget]:
        """Write the file with empty storages; return the regions of the storages."""
        # The oldest supported versions of torch have no skip_data.
        skip_data = getattr(torch.serialization, "skip_data", None)
        if skip_data is None:
            raise InvalidInputError(f"torch {torch.__version__} cannot stream tensors into .pt files; {_NEWER}")
        hollow: dict[int, torch.Tensor] = {}
        order: list[int] = []
        shape = self._picked(outline.shape).shape
        rows = {leaf.row: join_name(path) for path, leaf in leaves_of(shape) if isinstance(leaf, RowRef)}
        self.names = [(name, outline.tensors[row]) for row, name in rows.items()]
        self.tensors, self.nbytes = len(rows), sum(row.nbytes for _, row in self.names)
        if self._draft.is_dry_run:
            return {}

        def make(leaf: object) -> object:
            if isinstance(leaf, RowRef):
                order.append(leaf.row)
                return hollow.setdefault(leaf.row, _hollow(outline.tensors[leaf.row]))
            return leaf.item() if isinstance(leaf, np.generic) else leaf

        state = _map_leaves(shape, make)
        self._file = file = self._draft.file(size=self.nbytes)
        with _writing(file), skip_data():
            torch.save(state, file.path)
        with translated("read", file.path), file.path.open("rb") as written:
            archive = _Archive(file.path, written)
            leaves: list[object] = []
            _map_leaves(archive.load_faked(), leaves.append)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            starts = {row: archive.record_of(tensor)[1] for row, tensor in zip(order, tensors, strict=True)}
        return {row: FileRegion(file, start) for row, start in starts.items()}

    def finish(self) -> None:
        """Write the checksums, and rename the file to its target."""
        if self._draft.is_dry_run:
            return
        try:
            _fill_checksums(self._file)
        except BaseException:
            self.abandon()
            raise
        super().finish()


@contextlib.contextmanager
def _writing(file: TargetFile) -> Iterator[None]:
    try:
        with translated("write", file.path):
            yield
    except RuntimeError as error:
        # Torch hides the error of the operating system. Another write raises that error again.
        with translated("access", file.path):
            end = file.path.stat().st_size
        file.write(end, bytes(_PROBE_BYTES))
        advice = "check the drive, or choose another path"
        raise StorageError(f"torch could not write {file.path}: {first_line(error)}; {advice}") from error


def _hollow(row: TensorRow) -> torch.Tensor:
    """Return a tensor with reserved memory that is never touched."""
    dtype = TORCH_DTYPES.get(row.dtype)
    if dtype is None:
        raise InvalidInputError(
            f"tensor {row.name} has dtype {row.dtype}, which torch {torch.__version__} lacks; install a newer torch"
        )
    length = math.prod(row.shape) * DTYPE_BYTES[row.dtype]
    if length < _MAPPED_BYTES:
        return torch.empty(row.shape, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=dtype).view(row.shape)


def _fill_checksums(file: TargetFile) -> None:
    """Write the missing CRC-32 of every member: in the directory and after the data (APPNOTE.TXT 4.3.9 and 4.3.12).

    Torch ignores checksums, but ``unzip`` and Python's ``zipfile`` check them.
    """
    with zipfile.ZipFile(file.path) as archive, file.path.open("rb") as content:
        position = archive.start_dir
        for member in archive.infolist():
            start = _data_start(file.path, member, content)
            end = start + member.file_size
            if member.CRC == 0 and member.file_size:
                value = 0
                for offset in range(start, end, _CHUNK):
                    value = zlib.crc32(file.read(offset, min(_CHUNK, end - offset)), value)
                checksum = struct.pack("<I", value)
                file.write(position + _CENTRAL_CRC, checksum)
                if file.read(end, 4) == _DESCRIPTOR:
                    file.write(end + 4, checksum)
            _, name, extra, comment = _CENTRAL.unpack(file.read(position, _CENTRAL.size))
            position += _CENTRAL.size + name + extra + comment


def value_file(value: object) -> io.BytesIO:
    """Return a plain value as a file for ``torch.load``."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file
