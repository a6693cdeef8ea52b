"""Folders of torch's DCP, as ``dcp.save(checkpoint_id=…)`` writes them; their tensors are read when captured.

The file ``.metadata`` is a pickle, and nothing in it is executed. This is the only module with an unpickler: where the
pickle names a class of DCP's descriptions, the unpickler puts a stand-in that only stores its arguments, and it refuses
every other name. Therefore no class, torch's included, is called with the content of the file.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from asymcheck.convert.source_file import SourceFile
from asymcheck.convert.torch_file import read_torch_slice
from asymcheck.errors import ForeignFileError, TruncatedError
from asymcheck.format.registry import DTYPE_BYTES, TREE_DEPTH_MAX
from asymcheck.format.tree import Key
from asymcheck.state.boxes import Box, Crossing, Region, tile
from asymcheck.state.dtypes import TORCH_NAMES
from asymcheck.state.leaves import TensorBytes, flat_bytes
from asymcheck.storage.local_files import translated

_METADATA = ".metadata"
# A tensor that is not stored in row-major order is a view of the mapped file.
_Piece = TensorBytes | torch.Tensor
_REWRITE = "save the checkpoint again, or load it with torch.distributed.checkpoint"
_REMEDY = (
    "fetch the folder again if it is damaged, or load it with torch.distributed.checkpoint, and store what that "
    "gives with Store.save()"
)
_ERRORS = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError),
    *(OverflowError, MemoryError, RecursionError, TruncatedError),
)


def is_dcp_folder(path: Path) -> bool:
    """Tell whether a folder is one of DCP."""
    if (path / _METADATA).is_file():
        return True
    if any(path.glob("*.distcp")):
        what = f"it has files of torch.distributed.checkpoint, but no {_METADATA}, which a save writes last"
        raise ForeignFileError(path, what, "fetch the folder again, or give one whose save was finished")
    return False


def read_dcp_folder(path: Path, opened: Callable[[Path], SourceFile]) -> object:
    """Return the state in a folder of DCP, nested as it was; ``opened`` opens its files, which stay open.

    Raises:
        ForeignFileError: it is damaged, or holds objects other than tensors, containers and plain values.
    """
    folder = _read_metadata(path / _METADATA)

    def read(name: str) -> object:
        if name in folder.tensors:
            return _tensor(name, folder.tensors[name], lambda place: opened(path / place.file))
        place = folder.values[name]
        return read_torch_slice(opened(path / place.file), place.offset, place.length)

    # The state is built of names first: mappings by number inside of values are not lists that DCP took apart.
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
    """Return a state that DCP took apart with its lists restored; a list with missing numbers stays a mapping.

    Numbers are missing where an empty mapping or list was, because DCP stores nothing for these.
    """
    if type(value) is not dict:
        return value
    items = {key: with_lists(item) for key, item in value.items()}
    if items and items.keys() == set(range(len(items))):
        return [items[index] for index in range(len(items))]
    return items


class _Place(NamedTuple):
    """A file of ``torch.save`` inside a file of the folder."""

    file: str
    offset: int
    length: int


class _Tensor(NamedTuple):
    """A tensor of the folder; together the pieces are all of it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[Box, _Place]]


class _Folder(NamedTuple):
    """The content of a folder by DCP's names, and the place of each name in the nested state."""

    tensors: dict[str, _Tensor]
    values: dict[str, _Place]
    paths: dict[str, tuple[Key, ...]]


def _tensor(name: str, tensor: _Tensor, opened: Callable[[_Place], SourceFile]) -> _Piece:
    pieces: list[tuple[Box, _Piece]] = []
    for box, place in tensor.pieces:
        file = opened(place)
        piece = read_torch_slice(file, place.offset, place.length)
        if not isinstance(piece, (TensorBytes, torch.Tensor)) or _form(piece) != (tensor.dtype, box.shape):
            raise ForeignFileError(file.path, f"{box} of {name} is not what the metadata says", _REWRITE)
        pieces.append((box, piece))
    return pieces[0][1] if len(pieces) == 1 else _Joined(tensor.dtype, tensor.shape, pieces)


def _form(piece: _Piece) -> tuple[str | None, tuple[int, ...]]:
    if isinstance(piece, TensorBytes):
        return piece.dtype, piece.shape
    # Sparse tensors, which files from before torch 1.6 may hold, have no bytes that could be read.
    return TORCH_NAMES.get(piece.dtype) if piece.layout == torch.strided else None, tuple(piece.shape)


class _Joined(TensorBytes):
    """A tensor whose pieces are stored in several places."""

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
        """Fill ``target``; of each piece, only the bytes that belong there are read."""
        flat = np.frombuffer(target, dtype=np.uint8)
        for crossing, piece in self._pieces:
            for region in crossing.regions(start, start + len(target)):
                # The bytes are contiguous in the piece: they are whole rows of it, or part of one row.
                if isinstance(piece, memoryview):
                    found = piece[region.target : region.target + region.nbytes]
                else:
                    found = memoryview(bytearray(region.nbytes))
                    piece.read(region.target, found)
                Region(0, region.source, region.shape, region.target_strides, region.source_strides).copy(found, flat)


class _StandIn:
    """Stores what a pickle says of an object."""

    def __init__(self, *_arguments: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def field(self, name: str) -> Any:  # noqa: ANN401 - whatever the file says
        return self.state.get(name) if isinstance(self.state, dict) else None


class _MetadataStandIn(_StandIn):
    pass


class _TensorStandIn(_StandIn):
    pass


_DESCRIPTIONS = "torch.distributed.checkpoint.metadata"
_STAND_INS: dict[tuple[str, str], Any] = {
    (_DESCRIPTIONS, "Metadata"): _MetadataStandIn,
    (_DESCRIPTIONS, "TensorStorageMetadata"): _TensorStandIn,
    **{
        (_DESCRIPTIONS, name): _StandIn
        for name in (
            *("BytesStorageMetadata", "MetadataIndex", "ChunkStorageMetadata", "TensorProperties", "StorageMeta"),
            "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StandIn,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _StandIn,
    ("collections", "OrderedDict"): OrderedDict,
    **{(module, name): _StandIn for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")},
    # A dtype has no state: it is pickled as the name torch.float32.
    **{("torch", str(dtype).removeprefix("torch.")): name for dtype, name in TORCH_NAMES.items()},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as the base class has it
        """Return a stand-in, for names of DCP's descriptions only."""
        found = _STAND_INS.get((module, name))
        if found is None:
            raise TruncatedError(f"it names {module}.{name}, which is no description of DCP and is never run")
        return found


def _read_metadata(path: Path) -> _Folder:
    """Read what a folder of DCP holds."""
    try:
        with translated("read", path), path.open("rb") as file:
            metadata: object = _Unpickler(file).load()
        return _folder_of(metadata)
    except _ERRORS as error:
        raise ForeignFileError(path, str(error) or type(error).__name__, _REMEDY) from error


def _folder_of(metadata: object) -> _Folder:
    if type(metadata) is not _MetadataStandIn:
        raise TruncatedError("it holds no metadata of DCP")
    places = {
        (index.field("fqn"), None if index.field("offset") is None else tuple(index.field("offset"))): _place(info)
        for index, info in metadata.field("storage_data").items()
    }
    tensors: dict[str, _Tensor] = {}
    values: dict[str, _Place] = {}
    for name, description in metadata.field("state_dict_metadata").items():
        if type(description) is _TensorStandIn:
            tensors[name] = _described(name, description, places)
        else:
            values[name] = places[name, None]
    planned = metadata.field("planner_data")
    known = planned if isinstance(planned, dict) else {}
    paths = {name: tuple(known.get(name, (name,))) for name in (*tensors, *values)}
    _check_paths(list(paths.values()))
    return _Folder(tensors, values, paths)


def _check_paths(paths: Sequence[tuple[Key, ...]]) -> None:
    """Check that each path leads to a place of its own; of two values in one place, one would be lost."""
    for path in paths:
        if not 0 < len(path) <= TREE_DEPTH_MAX or not all(type(key) in (str, int) for key in path):
            raise TruncatedError("a name of its state is no name")
    taken = set(paths)
    if len(taken) < len(paths) or any(path[:length] in taken for path in paths for length in range(1, len(path))):
        raise TruncatedError("two parts of its state have one place")


def _place(info: _StandIn) -> _Place:
    if info.field("transform_descriptors"):
        raise TruncatedError(f"its tensors went through {info.field('transform_descriptors')}")
    file, offset, length = (info.field(name) for name in ("relative_path", "offset", "length"))
    if type(file) is not str or Path(file).name != file or not _is_natural(offset) or not _is_natural(length):
        raise TruncatedError(f"it names {file!r:.100}, which is no file of the folder")
    return _Place(file, offset, length)


def _described(
    name: str, description: _StandIn, places: Mapping[tuple[str, tuple[int, ...] | None], _Place]
) -> _Tensor:
    shape = tuple(description.field("size"))
    # The dtype is the first part of the state of the properties, which releases before 2.3 kept as attributes.
    state = description.field("properties").state
    dtype = state["dtype"] if isinstance(state, dict) else state[0]
    pieces = []
    for chunk in description.field("chunks"):
        box = Box(shape, tuple(chunk.field("offsets")), tuple(chunk.field("sizes")))
        if not all(map(_is_natural, (*box.whole, *box.offset, *box.shape))) or not box.is_valid:
            raise TruncatedError(f"a part of {name} does not lie within it")
        pieces.append((box, places[name, box.offset]))
    boxes = [box for box, _ in pieces]
    whole = Box.of_whole(shape)
    # As many elements as the whole and none missing, so that no two pieces overlap.
    is_all = sum(box.elements for box in boxes) == whole.elements and tile(whole, boxes).missing is None
    if type(dtype) is not str or not is_all:
        raise TruncatedError(f"the parts of {name} are not all of it")
    return _Tensor(dtype, shape, pieces)


def _is_natural(value: object) -> bool:
    return type(value) is int and value >= 0
