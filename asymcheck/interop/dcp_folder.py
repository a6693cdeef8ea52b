"""Folders of torch's DCP, as ``dcp.save(checkpoint_id=…)`` writes them, whose tensors are read as they are captured.

The parts of a tensor that several ranks saved are put together; nothing in the folder is executed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asymcheck.errors import ForeignFileError
from asymcheck.format.registry import DTYPE_BYTES
from asymcheck.format.tree import Key
from asymcheck.interop.dcp_metadata import NAME, FolderTensor, read_metadata
from asymcheck.interop.files import SourceFile
from asymcheck.interop.torch_file import read_torch_slice
from asymcheck.partition.boxes import Box
from asymcheck.partition.dtypes import TORCH_NAMES
from asymcheck.partition.leaves import TensorBytes, flat_bytes

# A tensor that does not lie in row-major order is a view of the mapped file.
_Piece = TensorBytes | torch.Tensor
_REWRITE = "save the checkpoint again, or load it with torch.distributed.checkpoint"


def is_dcp_folder(path: Path) -> bool:
    """Tell whether a folder is one of DCP.

    Raises:
        ForeignFileError: it is what a killed save has left of one.
    """
    if (path / NAME).is_file():
        return True
    if any(path.glob("*.distcp")):
        what = f"it has files of torch.distributed.checkpoint, but no {NAME}, which a save writes last"
        raise ForeignFileError(path, what, "fetch the folder again, or give one whose save was finished")
    return False


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

    def read(name: str) -> object:
        if name in folder.tensors:
            return _tensor(name, folder.tensors[name], file_of)
        place = folder.values[name]
        return read_torch_slice(file_of(place.file), place.offset, place.length)

    # Of names at first: what a value holds was not taken apart, so its mappings by number are none of lists.
    state: dict[Key, Any] = {}
    for name in (*folder.tensors, *folder.values):
        *above, last = folder.paths[name]
        place = state
        for key in above:
            place = place.setdefault(key, {})
        place[last] = name
    return _filled(with_lists(state), read)


def _filled(state: Any, read: Callable[[str], object]) -> object:  # noqa: ANN401 - a nested state of names
    if type(state) is dict:
        return {key: _filled(item, read) for key, item in state.items()}
    return [_filled(item, read) for item in state] if type(state) is list else read(state)


def with_lists(value: Any) -> Any:  # noqa: ANN401 - a nested state
    """Return what DCP took apart with its lists as lists; one in which numbers are missing stays a mapping.

    They are missing where an empty mapping or list was, of which DCP keeps nothing.
    """
    if type(value) is not dict:
        return value
    items = {key: with_lists(item) for key, item in value.items()}
    if items and items.keys() == set(range(len(items))):
        return [items[index] for index in range(len(items))]
    return items


def _tensor(name: str, tensor: FolderTensor, file_of: Callable[[str], SourceFile]) -> _Piece:
    pieces: list[tuple[Box, _Piece]] = []
    for box, place in tensor.pieces:
        file = file_of(place.file)
        piece = read_torch_slice(file, place.offset, place.length)
        if not isinstance(piece, (TensorBytes, torch.Tensor)) or _form(piece) != (tensor.dtype, box.shape):
            raise ForeignFileError(file.path, f"{box} of {name} is not what the metadata says", _REWRITE)
        pieces.append((box, piece))
    if len(pieces) == 1:
        return pieces[0][1]
    return _Joined(tensor.dtype, tensor.shape, pieces)


def _form(piece: _Piece) -> tuple[str | None, tuple[int, ...]]:
    if isinstance(piece, TensorBytes):
        return piece.dtype, piece.shape
    # Sparse tensors, which files of before torch 1.6 may hold, have no bytes to be read.
    return TORCH_NAMES.get(piece.dtype) if piece.layout == torch.strided else None, tuple(piece.shape)


class _Joined(TensorBytes):
    """A tensor whose parts lie in several places."""

    def __init__(self, dtype: str, shape: tuple[int, ...], pieces: Sequence[tuple[Box, _Piece]]) -> None:
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
            low, high, form = begin - box.offset[0], end - box.offset[0], (end - begin, *box.shape[1:], width)
            if isinstance(piece, torch.Tensor):
                found = flat_bytes(piece[low:high]).numpy().reshape(form)
            else:
                found = np.empty(form, dtype=np.uint8)
                piece.read(low * (piece.nbytes // box.shape[0]), found.reshape(-1).data)
            place = [slice(begin - first, end - first)]
            place += [slice(at, at + size) for at, size in zip(box.offset[1:], box.shape[1:], strict=True)]
            rows[tuple(place)] = found
        skipped = start - first * self._row_bytes
        target[:] = rows.reshape(-1)[skipped : skipped + len(target)].data
