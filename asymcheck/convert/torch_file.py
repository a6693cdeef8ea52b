"""Read files of ``torch.save`` without their tensors in memory.

The pickle of a file is loaded with storages on the meta device, each with its key. The directory of the file, or in the
format before torch 1.6 the order of the storages, gives the position of each storage.
"""

from __future__ import annotations

import io
import itertools
import operator
import shlex
import struct
import sys
import threading
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import IO, Any, Final

import numpy as np
import torch

from asymcheck.convert.part import keep_parts
from asymcheck.convert.restricted_pickle import load_pickle, objects_max
from asymcheck.convert.source_file import SourceFile, first_line, refused
from asymcheck.errors import ForeignFileError, StructureError, TruncatedError, listed
from asymcheck.format.tree import join_name
from asymcheck.restore.state_template import map_leaves
from asymcheck.state.dtypes import TORCH_NAMES
from asymcheck.state.leaves import TensorBytes, flat_bytes

_REMEDY = "load the file in your own program, and save the result with Store.save()"
_FETCH = "fetch or write the file again"
_REWRITE = "load the file with torch.load() and write it again with torch.save()"
_UNCOMPRESSED = f"pack the archive again without compression (zip -0), or {_REWRITE}"

_LOCAL_MAGIC = b"PK\x03\x04"
_LOCAL = struct.Struct("<4s22xHH")
_ENCRYPTED = 1
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
_ELEMENTS: Final = struct.Struct("<q")  # number of elements before a storage in such a file
_LEGACY_BYTES_MAX: Final = 1 << 28  # maximum size of the pickles before the tensors in a file from before torch 1.6

_SUGGESTED = 8  # parts in an error message
_KEY = "_asymcheck_key"  # attribute of a storage without memory: its key in the file
_PICKLE = "data.pkl"
_BYTE_ORDER = "byteorder"

_PICKLE_MARK = b"\x80"
TORCH_MARKS: Final = (_LOCAL_MAGIC, _PICKLE_MARK)
"""First bytes of files of ``torch.save``."""
# Raised for files that were cut short or damaged.
_DAMAGE_ERRORS = (EOFError, KeyError, struct.error, zipfile.BadZipFile, zlib.error, TruncatedError)
_LOAD_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, StructureError)


class _StandIn:
    """Object in place of an object of another class, whose code is never loaded. It ignores all content."""

    name = ""  # dotted name of the class

    def __init__(self, *_arguments: object, **_named: object) -> None:
        pass

    def __call__(self, *_arguments: object) -> _StandIn:
        return self

    def _ignore(self, *_content: object) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = _ignore


def _bytes(text: str, _encoding: str) -> bytes:
    return text.encode("latin-1")


def _no_bytes() -> bytes:
    # Protocol 2 writes only empty bytes as a call of the class. With a number, the class would reserve memory.
    return b""


def _parameter(data: torch.Tensor, *_options: object) -> torch.Tensor:
    # A function that returned any argument could return a class, whose attributes the pickle could then change.
    if not isinstance(data, torch.Tensor):
        raise StructureError("a parameter is not a tensor")
    return data


def _tensor_of_type(
    function: Callable[..., object], kind: object, arguments: Sequence[object], _state: object
) -> object:
    # A tensor of another class, such as a quantized one, may need more than its elements.
    return kind() if isinstance(kind, type) and issubclass(kind, _StandIn) else function(*arguments)


_KNOWN: Mapping[str, Any] = {
    "_codecs.encode": _bytes,
    "builtins.bytes": _no_bytes,
    "builtins.complex": complex,
    "builtins.set": set,
    "collections.Counter": Counter,
    "collections.OrderedDict": OrderedDict,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    # Classes of tensors and storages are never called. A storage class stands for its dtype.
    **{name: name for name in ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")},
    **{f"torch.{name}": dtype for name, dtype in torch.storage._storage_type_to_dtype_map().items()},  # noqa: SLF001 - torch has no public name for it
    "torch.storage.UntypedStorage": torch.uint8,
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    # Only the functions that build a tensor from a storage are torch's own. Storages are on the meta device.
    **{
        f"torch._utils.{name}": getattr(torch._utils, name)  # noqa: SLF001 - the names are part of the format
        for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
    },
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _tensor_of_type,
}
"""Classes and functions that may occur in a file of ``torch.save``, by dotted name, or their replacements."""


def read_torch_file(
    file: SourceFile,
    start: int = 0,
    length: int | None = None,
    *,
    parts: Sequence[str] = (),
    stand_ins: Mapping[str, type] = MappingProxyType({}),
    name: str = "",
    keys: Callable[[object], bool] | None = None,
) -> object:
    """Return the state in a file of ``torch.save``; its tensors are read during the save.

    No code in the file is executed.

    Args:
        file: the file, or another file that contains it as a range.
        start: first byte of the range.
        length: bytes of the range; by default, up to the end of ``file``.
        parts: dotted names of the parts to return. Other parts may hold objects of any class.
        stand_ins: replacement classes, by the dotted names of classes in the file.
        name: dotted name of the content in a larger state, of which a user may name other parts.
        keys: tells whether a key of a mapping is wanted. The values of other keys may hold objects of any class.

    Raises:
        ForeignFileError: the file is damaged, or it holds objects other than tensors, containers and plain values.
        InvalidInputError: the file lacks a part.
    """
    length = file.size - start if length is None else length
    source: Any = _RangedFile(file, start, length)
    magic = source.read(len(_LOCAL_MAGIC))
    source.seek(0)
    if not magic.startswith(TORCH_MARKS):
        raise ForeignFileError(file.path, "not a file of torch.save(), or truncated", _FETCH)
    tensors: dict[tuple[object, ...], TensorBytes] = {}
    with (
        refused(file.path, first_line, _REMEDY, *_LOAD_ERRORS),
        refused(file.path, _damage, _FETCH, *_DAMAGE_ERRORS),
    ):
        archive = (Archive if magic == _LOCAL_MAGIC else _LegacyFile)(file.path, source, stand_ins)
        state: Any = archive.state
        if keys is not None:
            state = {key: value for key, value in state.items() if keys(key)}
        state = _supported_parts(file.path, state, length, parts, name)
        mapped = map_leaves(
            state,
            lambda leaf: _lazy_tensor(leaf, file, start, archive, tensors) if isinstance(leaf, torch.Tensor) else leaf,
        )
    claimed = sum(tensor.nbytes for tensor in tensors.values())
    if claimed > _EXPANSION_MAX * length + _EXPANDED_BYTES_MAX:
        problem = f"its tensors have {claimed:,} bytes, but the file has {length:,}: they are expanded views"
        raise ForeignFileError(file.path, problem, "clone these tensors before torch.save()")
    return mapped


def _supported_parts(path: Path, state: object, file_bytes: int, parts: Sequence[str], whole: str) -> object:
    """Return the parts of a state, or the whole state, if they hold no objects of unknown classes.

    Raises:
        ForeignFileError: they hold such an object.
        InvalidInputError: the file lacks a part.
    """
    kept = keep_parts(path, state, parts)
    name = _unknown_class(path, kept, file_bytes)
    if not name:
        return kept
    holder, advice = f"the part {listed(parts)}" if parts else "the file", ""
    if whole:
        holder, advice = f"the value {whole}", "pass --part to import only other parts, or "
    elif not parts and isinstance(state, dict):
        supported = [
            (not any(isinstance(leaf, torch.Tensor) for leaf in _leaves(path, value, file_bytes)), key)
            for key, value in state.items()
            if type(key) in (str, int) and not _unknown_class(path, value, file_bytes)
        ]
        supported.sort(key=operator.itemgetter(0))  # Parts with tensors come first.
        named = " ".join(f"--part {shlex.quote(join_name((key,)))}" for _, key in supported[:_SUGGESTED])
        advice = named and f"pass {named} to import only parts without such objects, or "
    raise ForeignFileError(
        path, f"{holder} holds a pickled object of {name}, which is never executed", f"{advice}{_REMEDY}"
    )


def _unknown_class(path: Path, state: object, file_bytes: int) -> str:
    """Return the dotted name of a class that has a stand-in in the state, or an empty string."""
    for leaf in _leaves(path, state, file_bytes):
        kind = leaf if isinstance(leaf, type) else type(leaf)
        if issubclass(kind, _StandIn):
            return kind.name
    return ""


def _leaves(path: Path, state: object, file_bytes: int) -> Iterator[object]:
    """Yield the values in nested containers.

    Raises:
        ForeignFileError: a file of this size cannot describe so many values, unless containers are shared or cyclic.
    """
    left = min(file_bytes, _VALUES_MAX) + _SHARED_VALUES_MAX
    stack = [state]
    while stack:
        value = stack.pop()
        left -= 1
        if left < 0:
            problem = "its containers contain each other, or expand to millions of values"
            raise ForeignFileError(path, problem, _REMEDY)
        if isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
        else:
            yield value


def _find_class(stand_ins: Mapping[str, type], module: str, name: str) -> Any:  # noqa: ANN401 - any class or function
    """Return the replacement of a class or function, by default a class of stand-ins."""
    dotted = f"{module}.{name}"
    known = stand_ins.get(dotted) or _KNOWN.get(dotted)
    return type("StandIn", (_StandIn,), {"name": dotted}) if known is None else known


def _storage(pid: Any) -> Any:  # noqa: ANN401 - any content of the file
    """Return the object with a persistent id: a storage, or a stand-in for a class of modules."""
    kind, *described = pid
    if kind == "module":
        return _find_class({}, "torch.nn", "Module")
    dtype, key, _location, elements = described[:4]
    storage = torch.UntypedStorage(elements * dtype.itemsize, device="meta")
    setattr(storage, _KEY, key)
    return SimpleNamespace(dtype=dtype, _untyped_storage=storage)


def _key_of(tensor: torch.Tensor) -> str:
    """Return the key of the storage of a tensor."""
    key: str = getattr(tensor.untyped_storage(), _KEY)
    return key


class _LegacyFile:
    """File of the format before torch 1.6: five pickles, then the storages, each after the number of its elements."""

    def __init__(self, path: Path, file: IO[bytes], stand_ins: Mapping[str, type]) -> None:
        """Read everything except the storages of ``file``.

        Raises:
            ForeignFileError: the pickle is too large, or the file was written with another byte order.
        """
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        pickles = io.BytesIO(file.read(min(size, _LEGACY_BYTES_MAX)))
        dtypes: dict[str, torch.dtype] = {}

        def storage(pid: Any) -> object:  # noqa: ANN401 - any content of the file
            if pid[0] == "storage":
                if any(view is not None for view in pid[5:]):
                    raise StructureError("it has views of storages, as before torch 0.4")
                dtypes[pid[2]] = pid[1]
            return _storage(pid)

        find = partial(_find_class, stand_ins)
        try:
            contents: list[Any] = [load_pickle(pickles, size, find, storage) for _ in range(_LEGACY_PICKLES)]
        except TruncatedError as error:
            if size > _LEGACY_BYTES_MAX:
                problem = f"its pickle is larger than {_LEGACY_BYTES_MAX:,} bytes"
                raise ForeignFileError(path, problem, _REWRITE) from error
            raise
        _magic, _protocol, system, self.state, keys = contents
        _check_byte_order(path, "little" if system["little_endian"] else "big")
        self._ranges: dict[str, tuple[int, int]] = {}
        position = pickles.tell()
        for key in keys:
            file.seek(position)
            (elements,) = _ELEMENTS.unpack(file.read(_ELEMENTS.size))
            start, length = position + _ELEMENTS.size, elements * dtypes[key].itemsize
            if not 0 <= length <= size - start:
                raise ForeignFileError(path, f"truncated: storage {key} goes beyond the end of the file", _FETCH)
            self._ranges[key] = start, length
            position = start + length

    def record_of(self, tensor: torch.Tensor) -> tuple[str, int, int]:
        """Return the name, the first byte and the length of the storage of a tensor."""
        key = _key_of(tensor)
        return (key, *self._ranges[key])


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


class Archive:
    """Zip archive that ``torch.save`` writes: its state, and the positions of its storages."""

    def __init__(self, path: Path, file: IO[bytes], stand_ins: Mapping[str, type]) -> None:
        """Read everything except the storages of ``file``, which must stay open.

        Raises:
            ForeignFileError: the file is damaged, or was written with another byte order.
            zipfile.BadZipFile, zlib.error, ValueError: the file is damaged.
        """
        self._path, self._file = path, file
        self._size = file.seek(0, io.SEEK_END)
        with zipfile.ZipFile(file) as packed:
            self._members = self._members_by_name(packed.infolist())
        order = self._content(_BYTE_ORDER) if _BYTE_ORDER in self._members else b"little"
        _check_byte_order(path, order.decode(errors="replace"))
        find = partial(_find_class, stand_ins)
        self.state = load_pickle(io.BytesIO(self._content(_PICKLE)), self._size, find, _storage)

    def record_of(self, tensor: torch.Tensor) -> tuple[str, int, int]:
        """Return the name, the first byte and the length of the record with the storage of a tensor."""
        name = f"data/{_key_of(tensor)}"
        member = self._members[name]
        if member.compress_type != zipfile.ZIP_STORED:
            raise ForeignFileError(self._path, f"record {name} is compressed", _UNCOMPRESSED)
        return name, self._start_of(name, member), member.compress_size

    def _start_of(self, name: str, member: zipfile.ZipInfo) -> int:
        start = data_start(self._path, member, self._file)
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
        if len(members) > objects_max(self._size):
            raise ForeignFileError(self._path, f"{len(members):,} records are too many for its size", _REMEDY)
        ordered = sorted(members, key=lambda member: member.header_offset)
        for member, following in itertools.pairwise(ordered):
            end = member.header_offset + _LOCAL.size + len(member.orig_filename) + member.compress_size
            if end > following.header_offset:
                raise ForeignFileError(
                    self._path, f"records {member.filename} and {following.filename} overlap", _FETCH
                )

    def _content(self, name: str) -> bytes:
        # The zipfile module requires checksums, but torch can write files without them.
        member = self._members[name]
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


def _check_byte_order(path: Path, order: str) -> None:
    if order != sys.byteorder:
        problem = f"its byte order is {order!r:.40}, but this machine is {sys.byteorder}-endian"
        raise ForeignFileError(path, problem, _REWRITE)


def data_start(path: Path, member: zipfile.ZipInfo, file: IO[bytes]) -> int:
    """Return the offset of a member's bytes in a zip file, from the local header of the member."""
    file.seek(member.header_offset)
    header = file.read(_LOCAL.size)
    if len(header) < _LOCAL.size or not header.startswith(_LOCAL_MAGIC):
        problem = f"{member.filename} is not at the offset in the zip directory"
        raise ForeignFileError(path, problem, _FETCH)
    _, name, extra = _LOCAL.unpack(header)
    return int(member.header_offset + _LOCAL.size + name + extra)


def _damage(error: Exception) -> str:
    return f"damaged or truncated ({first_line(error)})"


def _lazy_tensor(
    tensor: torch.Tensor,
    file: SourceFile,
    begin: int,
    archive: Archive | _LegacyFile,
    tensors: dict[tuple[object, ...], TensorBytes],
) -> object:
    """Return a lazy tensor for a tensor without memory, of an archive that begins at byte ``begin`` of ``file``."""
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
    """A tensor that is not a contiguous byte range of the file."""

    def __init__(self, tensor: torch.Tensor, file: SourceFile, start: int, extent: int) -> None:
        """Describe the layout of ``tensor``, whose bytes are in ``extent`` bytes of ``file`` from ``start`` on."""
        super().__init__(TORCH_NAMES[tensor.dtype], tuple(tensor.shape))
        self._layout = tensor
        self._file, self._start, self._extent = file, start, extent
        self._lock = threading.Lock()
        self._copy: torch.Tensor | None = None
        self._unread = self.nbytes

    def read(self, start: int, target: memoryview) -> None:
        """Fill ``target`` from a row-major copy, which is kept until all bytes were read."""
        with self._lock:
            copy = self._row_major() if self._copy is None else self._copy
            self._unread -= len(target)
            self._copy = copy if self._unread > 0 else None
            self._unread = self._unread if self._unread > 0 else self.nbytes
        np.copyto(np.frombuffer(target, dtype=np.uint8), copy[start : start + len(target)].numpy())
        self._file.check()
        self._file.count(len(target))

    def _row_major(self) -> torch.Tensor:
        """Return a copy of the bytes in row-major order."""
        layout = self._layout
        mapped = torch.frombuffer(self._file.mapped(self._start, self._extent), dtype=torch.uint8)
        # Torch crashes on elements that are not at a multiple of their size. Old files have storages at any offset.
        aligned = mapped.clone() if self._start % layout.element_size() else mapped
        view = aligned.view(layout.dtype).as_strided(layout.shape, layout.stride())
        return flat_bytes(view.conj() if layout.is_conj() else view)
