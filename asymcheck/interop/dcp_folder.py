"""Folders of torch's DCP, as ``dcp.save(checkpoint_id=…)`` writes them, whose tensors are read as they are captured.

The parts of a tensor that several ranks saved are put together; nothing in the folder is executed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asymcheck.errors import ForeignFileError
from asymcheck.format.registry import DTYPE_BYTES
from asymcheck.format.tree import Key
from asymcheck.interop.dcp_metadata import NAME, FolderTensor, read_metadata
from asymcheck.interop.files import SourceFile
from asymcheck.interop.torch_file import read_torch_slice
from asymcheck.partition.boxes import Box
from asymcheck.partition.leaves import TensorBytes

_REWRITE = "save the checkpoint again, or load it with torch.distributed.checkpoint"


def is_dcp_folder(path: Path) -> bool:
    """Tell whether a folder is one of DCP."""
    return (path / NAME).is_file()


def read_dcp_folder(path: Path, opened: Callable[[Path], SourceFile]) -> object:
    """Return the state in a folder of DCP, nested as it was; ``opened`` opens its files, which stay open.

    Raises:
        ForeignFileError: it is damaged, or holds objects other than tensors, containers and plain values.
    """
    folder = read_metadata(path)
    files: dict[str, SourceFile] = {}

    def file_of(name: str) -> SourceFile:
        if name not in files:
            files[name] = opened(path / name)
        return files[name]

    state: dict[Key, Any] = {}
    for name, tensor in folder.tensors.items():
        _put(state, folder.paths[name], _tensor(name, tensor, file_of))
    for name, place in folder.values.items():
        _put(state, folder.paths[name], read_torch_slice(file_of(place.file), place.offset, place.length))
    return _with_lists(state)


def _put(state: dict[Key, Any], path: Sequence[Key], value: object) -> None:
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value


def _with_lists(value: Any) -> Any:  # noqa: ANN401 - a nested state
    """Return a state whose mappings by number are lists again."""
    if type(value) is not dict:
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    if items and items.keys() == set(range(len(items))):
        return [items[index] for index in range(len(items))]
    return items


def _tensor(name: str, tensor: FolderTensor, file_of: Callable[[str], SourceFile]) -> TensorBytes:
    pieces = []
    for box, place in tensor.pieces:
        file = file_of(place.file)
        piece = read_torch_slice(file, place.offset, place.length)
        if not isinstance(piece, TensorBytes) or (piece.dtype, piece.shape) != (tensor.dtype, box.shape):
            raise ForeignFileError(file.path, f"{box} of {name} is not what the metadata says", _REWRITE)
        pieces.append((box, piece))
    if len(pieces) == 1:
        return pieces[0][1]
    return _Joined(tensor.dtype, tensor.shape, pieces)


class _Joined(TensorBytes):
    """A tensor whose parts lie in several places."""

    def __init__(self, dtype: str, shape: tuple[int, ...], pieces: Sequence[tuple[Box, TensorBytes]]) -> None:
        super().__init__(dtype, shape)
        self._pieces = pieces
        self._row_bytes = max(1, math.prod(shape[1:]) * DTYPE_BYTES[dtype])

    def read(self, start: int, target: memoryview) -> None:
        """Fill ``target``; only the rows of the first dimension that it is part of are read."""
        if not len(target):
            return
        width = DTYPE_BYTES[self.dtype]
        first, last = start // self._row_bytes, -(-(start + len(target)) // self._row_bytes)
        rows = np.empty((last - first, *self.shape[1:], width), dtype=np.uint8)
        for box, piece in self._pieces:
            begin, end = max(first, box.offset[0]), min(last, box.offset[0] + box.shape[0])
            if begin >= end or not piece.nbytes:
                continue
            found = np.empty((end - begin, *box.shape[1:], width), dtype=np.uint8)
            piece.read((begin - box.offset[0]) * (piece.nbytes // box.shape[0]), found.reshape(-1).data)
            place = [slice(begin - first, end - first)]
            place += [slice(at, at + size) for at, size in zip(box.offset[1:], box.shape[1:], strict=True)]
            rows[tuple(place)] = found
        skipped = start - first * self._row_bytes
        target[:] = rows.reshape(-1)[skipped : skipped + len(target)].data
