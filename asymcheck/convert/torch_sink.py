"""Write files of ``torch.save`` without their tensors in memory.

``skip_data`` reserves space for the storages of a new file (see torch's notes on serialization). Their positions are
then read from the file. This is the only module that calls ``torch.save``.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from operator import attrgetter

import numpy as np
import torch

from asymcheck.convert.export_target import DraftSink, FileRegion, NewTensor, TargetFile
from asymcheck.convert.part import leaves_of
from asymcheck.convert.source_file import first_line
from asymcheck.convert.torch_file import data_start
from asymcheck.errors import InvalidInputError, StorageError
from asymcheck.format.manifest import TensorRow
from asymcheck.format.tree import join_name
from asymcheck.restore.read_plan import ByteTarget
from asymcheck.restore.state_template import RowRef, map_leaves
from asymcheck.state.dtypes import TORCH_DTYPES
from asymcheck.storage.local_files import translated

_CENTRAL = struct.Struct("<4s24xHHH12x")
_CENTRAL_CRC = 16
_DESCRIPTOR = b"PK\x07\x08"
_CHUNK = 8 << 20
_PROBE_BYTES = 1 << 16
# Smaller tensors get ordinary memory, because a process can have only 65,530 mappings.
_MAPPED_BYTES = 1 << 20
_MAP_NORESERVE = 0x4000


class TorchSink(DraftSink):
    """Sink that writes a file for ``torch.load(weights_only=True)``.

    Numpy arrays become tensors, and numpy scalars become Python numbers, because ``weights_only`` refuses both.
    """

    def begin(self, shape: object, tensors: Mapping[int, TensorRow]) -> Mapping[int, ByteTarget]:
        """Write the file with empty storages; return the regions of the storages."""
        hollow: dict[int, torch.Tensor] = {}
        shape = self._picked(shape).shape
        rows = {leaf.row: join_name(path) for path, leaf in leaves_of(shape) if isinstance(leaf, RowRef)}
        self.tensors = [NewTensor.of(name, tensors[row]) for row, name in rows.items()]
        if self._draft.is_dry_run:
            return {}

        def make(leaf: object) -> object:
            if isinstance(leaf, RowRef):
                return hollow.setdefault(leaf.row, hollow_tensor(tensors[leaf.row]))
            return leaf.item() if isinstance(leaf, np.generic) else leaf

        state = map_leaves(shape, make, attrgetter("content"))
        self._file = file = self._draft.file(size=sum(tensor.nbytes for tensor in self.tensors))
        # Given a path, torch would write the name of the draft, which differs in each export, into the file.
        with _writing(file), torch.serialization.skip_data(), file.path.open("r+b") as stream:
            torch.save(state, stream)
        with translated("read", file.path), zipfile.ZipFile(file.path) as archive, file.path.open("rb") as content:
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            # torch numbers storages in the order in which it finds them, which is that of `make`.
            starts = [data_start(file.path, members[f"data/{number}"], content) for number in range(len(hollow))]
        return {row: FileRegion(file, start) for row, start in zip(hollow, starts, strict=True)}

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
    except KeyError as error:
        # torch 2.5 cannot write the dtypes uint16, uint32 and uint64, which random number generators have.
        advice = "install a newer torch, or use .safetensors"
        raise InvalidInputError(
            f"torch {torch.__version__} could not write {file.path}: {error.args[0]}; {advice}"
        ) from error
    except RuntimeError as error:
        # Torch hides the error of the operating system. Another write raises that error again.
        with translated("access", file.path):
            end = file.path.stat().st_size
        file.write(end, bytes(_PROBE_BYTES))
        advice = "check the drive, or choose another path"
        raise StorageError(f"torch could not write {file.path}: {first_line(error)}; {advice}") from error


def hollow_tensor(row: TensorRow) -> torch.Tensor:
    """Return a tensor with reserved memory that is never touched."""
    dtype = TORCH_DTYPES.get(row.dtype)
    if dtype is None:
        raise InvalidInputError(
            f"tensor {row.name} has dtype {row.dtype}, which torch {torch.__version__} lacks; install a newer torch"
        )
    if row.nbytes < _MAPPED_BYTES:
        return torch.empty(row.shape, dtype=dtype, device="cpu")
    # The kernel refuses ordinary memory for a tensor that is larger than the memory of the machine.
    memory = mmap.mmap(-1, row.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=dtype).view(row.shape)


def _fill_checksums(file: TargetFile) -> None:
    """Write the missing CRC-32 of every member: in the directory and after the data (APPNOTE.TXT 4.3.9 and 4.3.12).

    Torch ignores checksums, but ``unzip`` and Python's ``zipfile`` check them.
    """
    with zipfile.ZipFile(file.path) as archive, file.path.open("rb") as content:
        position = archive.start_dir
        for member in archive.infolist():
            start = data_start(file.path, member, content)
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
