"""Files of ``torch.save``: read with ``weights_only=True`` and written, without their tensors in memory.

Which bytes each tensor has is learned from torch itself: loaded under ``FakeTensorMode``, a storage knows its offset;
saved under ``skip_data``, a file has room for its storages, to be filled later (both are in torch's notes on
serialization). This is the one module that calls ``torch.save`` and ``torch.load``.
"""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import pickle
import re
import struct
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from asymcheck.errors import ForeignFileError, InvalidInputError, StorageError
from asymcheck.format.manifest import TensorRow
from asymcheck.format.registry import DTYPE_BYTES
from asymcheck.interop.files import Draft, SourceFile, TargetFile, first_line, refused
from asymcheck.interop.ranged import RangedFile
from asymcheck.interop.torch_archive import Record, TorchArchive
from asymcheck.interop.zip_members import MAGIC, fill_checksums
from asymcheck.partition.dtypes import TORCH_DTYPES, TORCH_NAMES
from asymcheck.partition.leaves import TensorBytes, flat_bytes
from asymcheck.recovery.assemble import ByteTarget
from asymcheck.recovery.shape import RowRef, replace_rows
from asymcheck.recovery.stream import Outline
from asymcheck.tiers.files import translated

_REMEDY = "load it in a program of your own, and store what that gives with Store.save()"
_FETCH = "fetch or write it again"
_NEWER = "install a newer torch, or use .safetensors"
# Below this, memory for a tensor that is never touched costs less than a mapping, of which a process has 65,530.
_MAPPED_BYTES = 1 << 20
_MAP_NORESERVE = 0x4000
_PICKLE_MARK = b"\x80"
_PROBE_BYTES = 1 << 16
_PICKLED = re.compile(r"Unsupported (?:global|class|operand).{0,20}?GLOBAL (\S+)")
_UNREAD = re.compile(r"WeightsUnpickler error:\s*(.+)")
_ADVICE = " In PyTorch 2.6"
# Where Module.state_dict() hangs the versions of its modules.
_METADATA = "_metadata"
_LOAD_ERRORS = (
    *(pickle.UnpicklingError, RuntimeError, ValueError, TypeError, LookupError, EOFError, AttributeError),
    *(ArithmeticError, AssertionError, struct.error, zipfile.BadZipFile, zlib.error),
)
# What a file that was cut short or damaged looks like to those who read it.
_DAMAGE_ERRORS = (EOFError, KeyError, struct.error, zipfile.BadZipFile, zlib.error)


def read_torch_file(file: SourceFile, stand_ins: Mapping[str, type] | None = None) -> object:
    """Return the state in a file of ``torch.save``; its tensors are read from ``file`` when they are captured.

    Nothing in the file is executed. A file in the format before torch 1.6 is read into memory. Where the file names a
    class that is in ``stand_ins``, by module and name, the object is one of the class given there.

    Raises:
        ForeignFileError: torch cannot read it, or it holds objects other than tensors, containers and plain values.
    """
    if not stand_ins:
        return read_torch_slice(file, 0, file.size)
    safe_globals = getattr(torch.serialization, "safe_globals", None)
    if safe_globals is None:
        raise ForeignFileError(file.path, f"torch {torch.__version__} reads no classes that are named to it", _NEWER)
    with safe_globals([(kind, name) for name, kind in stand_ins.items()]):
        return read_torch_slice(file, 0, file.size)


def read_torch_slice(file: SourceFile, start: int, length: int) -> object:
    """Do as :func:`read_torch_file` does with a file of ``torch.save`` that lies within another one.

    Raises:
        ForeignFileError: as there.
    """
    source: Any = _part(file, start, length)
    magic = source.read(len(MAGIC))
    source.seek(0)
    # So a pickle begins, with the number of its protocol. Of anything else torch would say that it may be trusted.
    if magic != MAGIC and not magic.startswith(_PICKLE_MARK):
        raise ForeignFileError(file.path, "it is no file of torch.save(), or was cut short", _FETCH)
    with (
        refused(file.path, _problem, _REMEDY, *_LOAD_ERRORS),
        refused(file.path, _damage, _FETCH, *_DAMAGE_ERRORS),
    ):
        if magic != MAGIC:
            return torch.load(source, map_location="cpu", weights_only=True)
        archive = TorchArchive(file.path, source)
        known: dict[tuple[object, ...], object] = {}
        return _replace(_faked(archive), lambda tensor: _in_file(tensor, file, start, archive, known))


def _faked(archive: TorchArchive) -> object:
    """Return the state in a file, with tensors that have no memory."""
    with FakeTensorMode():
        return torch.load(archive.outline, map_location="cpu", weights_only=True)


def _record_of(tensor: torch.Tensor, path: Path, archive: TorchArchive) -> Record:
    """Return where the storage of a faked tensor lies in the file.

    Raises:
        ForeignFileError: nowhere, or this torch does not say.
    """
    start: int | None = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if start is None:
        raise ForeignFileError(path, f"torch {torch.__version__} cannot say where its tensors lie", _NEWER)
    return archive.record(start)


def _part(file: SourceFile, start: int, length: int) -> RangedFile:
    """Return a part of a file, as a file."""

    def read_at(offset: int, count: int) -> bytes:
        data = bytearray(count)
        file.read(start + offset, memoryview(data))
        return bytes(data)

    return RangedFile(max(0, min(length, file.size - start)), read_at)


def _problem(error: Exception) -> str:
    """Say what torch found in the file; its own words are advice to trust the file, on many lines."""
    named = _PICKLED.search(str(error))
    if named is not None:
        return f"it holds a pickled object of {named[1]}, which is never run"
    unread = _UNREAD.search(str(error))
    if unread is not None:
        return f"torch.load(weights_only=True) does not read it ({unread[1].rstrip(' .')})"
    return first_line(error).partition(_ADVICE)[0].rstrip(" .")


def _damage(error: Exception) -> str:
    return f"it is damaged or was cut short ({first_line(error)})"


def _in_file(
    tensor: torch.Tensor, file: SourceFile, begin: int, archive: TorchArchive, known: dict[tuple[object, ...], object]
) -> object:
    plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_neg()
    if tensor.dtype not in TORCH_NAMES or not plain:
        kind = "quantized" if tensor.is_quantized else "negated by a flag" if tensor.is_neg() else tensor.layout
        raise ForeignFileError(file.path, f"it holds a tensor of {tensor.dtype} that is {kind}", _REMEDY)
    record = _record_of(tensor, file.path, archive)
    offset = int(tensor.storage_offset() * tensor.element_size())
    extent = _extent(tensor)
    if extent and offset + extent > record.length:
        raise ForeignFileError(file.path, f"it holds a tensor that is larger than its storage {record.name}", _FETCH)
    start = begin + record.start + offset
    # The same view of the same storage is one tied tensor, so it is one object in the state.
    key = (start, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj())
    if key not in known:
        if tensor.numel() == 0 or (tensor.is_contiguous() and not tensor.is_conj()):
            known[key] = file.tensor(start, TORCH_NAMES[tensor.dtype], tuple(tensor.shape))
        else:
            known[key] = _View(tensor, file, start, extent)
    return known[key]


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


class _View(TensorBytes):
    """A tensor that is no plain byte range of the file: a view of the mapped file."""

    def __init__(self, tensor: torch.Tensor, file: SourceFile, start: int, extent: int) -> None:
        super().__init__(TORCH_NAMES[tensor.dtype], tuple(tensor.shape))
        mapped = torch.frombuffer(file.mapped(start, extent), dtype=torch.uint8)
        view = mapped.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        self._view = view.conj() if tensor.is_conj() else view
        self._file = file
        self._lock = threading.Lock()
        self._copy: torch.Tensor | None = None
        self._left = self.nbytes

    def read(self, start: int, target: memoryview) -> None:
        """Fill ``target`` from a copy in order, which is kept until all of it was read."""
        with self._lock:
            copy = flat_bytes(self._view) if self._copy is None else self._copy
            self._left -= len(target)
            self._copy = copy if self._left > 0 else None
            self._left = self._left if self._left > 0 else self.nbytes
        np.copyto(np.frombuffer(target, dtype=np.uint8), copy[start : start + len(target)].numpy())
        self._file.check()


def _replace(value: object, make: Callable[[torch.Tensor], object]) -> object:
    if isinstance(value, torch.Tensor):
        return make(value)
    if type(value) in (dict, OrderedDict):
        items = ((key, _replace(item, make)) for key, item in value.items())  # type: ignore[attr-defined]  # the type was just compared
        if not isinstance(value, OrderedDict):
            return dict(items)
        ordered: Any = OrderedDict(items)
        metadata = getattr(value, _METADATA, None)
        if metadata is not None:
            setattr(ordered, _METADATA, metadata)
        return ordered
    if type(value) in (list, tuple):
        return type(value)(_replace(item, make) for item in value)  # type: ignore[call-arg, attr-defined]  # the type was just compared
    return value


class TorchSink:
    """Writes a checkpoint, or one part of it, into a file that ``torch.load(weights_only=True)`` reads.

    Numpy arrays become tensors and numpy scalars Python numbers, for ``weights_only`` refuses both.
    """

    def __init__(self, draft: Draft, pick: Callable[[object], object]) -> None:
        """Write to ``draft`` what ``pick`` returns of a checkpoint's shape."""
        self._draft = draft
        self._pick = pick
        self.tensors = 0
        """Tensors written."""
        self.nbytes = 0
        """Bytes of them."""

    def begin(self, outline: Outline) -> Mapping[int, ByteTarget]:
        """Write the file with empty storages; return their places."""
        # Not in every torch that the package works with.
        skip_data = getattr(torch.serialization, "skip_data", None)
        if skip_data is None:
            raise InvalidInputError(f"torch {torch.__version__} cannot write .pt files part by part; {_NEWER}")
        shape = self._pick(outline.shape)
        hollow: dict[int, torch.Tensor] = {}
        order: list[int] = []

        def make(ref: RowRef) -> object:
            order.append(ref.row)
            return hollow.setdefault(ref.row, _hollow(outline.tensors[ref.row]))

        state = _plain_numbers(replace_rows(shape, make))
        file = self._draft.file(size=sum(outline.tensors[row].nbytes for row in set(order)))
        with _writing(file), skip_data():
            torch.save(state, file.path)
        with translated("read", file.path), file.path.open("rb") as written:
            archive = TorchArchive(file.path, written)
            places = dict(zip(order, _tensors_in(_faked(archive)), strict=True))
            starts = {row: _record_of(place, file.path, archive).start for row, place in places.items()}
        self.tensors, self.nbytes = len(places), sum(outline.tensors[row].nbytes for row in places)
        self._file = file
        return {row: file.region(outline.tensors[row], start) for row, start in starts.items()}

    def finish(self) -> None:
        """Enter the checksums and give the file its name."""
        try:
            fill_checksums(self._file)
        except BaseException:
            self.abandon()
            raise
        self._draft.publish()

    def abandon(self) -> None:
        """Remove the file."""
        self._draft.discard()


@contextlib.contextmanager
def _writing(file: TargetFile) -> Iterator[None]:
    """Turn errors of ``torch.save`` into the package's.

    Raises:
        OutOfSpaceError, StorageError
    """
    try:
        with translated("write", file.path):
            yield
    except RuntimeError as error:
        # Torch does not hand on what the operating system said, so that is asked once more.
        with translated("look at", file.path):
            end = file.path.stat().st_size
        file.write(end, bytes(_PROBE_BYTES))
        advice = "check the device, or name another place"
        raise StorageError(f"torch could not write {file.path}: {first_line(error)}; {advice}") from error


def _hollow(row: TensorRow) -> torch.Tensor:
    """Return a tensor whose memory is never touched, so that there need not be any."""
    dtype = TORCH_DTYPES.get(row.dtype)
    if dtype is None:
        raise InvalidInputError(f"tensor {row.name} has dtype {row.dtype}, which torch {torch.__version__} lacks")
    length = math.prod(row.shape) * DTYPE_BYTES[row.dtype]
    if length < _MAPPED_BYTES:
        return torch.empty(row.shape, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=dtype).view(row.shape)


def _plain_numbers(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        for key in value:
            value[key] = _plain_numbers(value[key])
        return value
    if type(value) in (list, tuple):
        return type(value)(_plain_numbers(item) for item in value)  # type: ignore[call-arg, attr-defined]  # the type was just compared
    return value


def value_file(value: object) -> io.BytesIO:
    """Return a plain value as a file that ``torch.load`` reads, for who takes values in no other form."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
