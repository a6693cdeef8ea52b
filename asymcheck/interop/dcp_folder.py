"""Folders of torch's DCP, as ``dcp.save(checkpoint_id=…)`` writes them, whose tensors are read as they are captured.

The parts of a tensor that several ranks saved are put together; nothing in the folder is executed.
"""

from __future__ import annotations

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
from asymcheck.partition.boxes import Box, Crossing, Region
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
        whole, width = Box.of_whole(shape), DTYPE_BYTES[dtype]
        self._pieces = [
            (
                Crossing(whole, box, box, width),
                flat_bytes(piece).numpy().data if isinstance(piece, torch.Tensor) else piece,
            )
            for box, piece in pieces
            if box.elements
        ]

    def read(self, start: int, target: memoryview) -> None:
        """Fill ``target``; of each part only the bytes that belong there are read."""
        flat = np.frombuffer(target, dtype=np.uint8)
        for crossing, piece in self._pieces:
            for region in crossing.regions(start, start + len(target)):
                # In the part its bytes follow each other, for they are whole rows there, or lie in one.
                if isinstance(piece, memoryview):
                    found = piece[region.target : region.target + region.nbytes]
                else:
                    found = memoryview(bytearray(region.nbytes))
                    piece.read(region.target, found)
                Region(0, region.source, region.shape, region.target_strides, region.source_strides).copy(found, flat)
