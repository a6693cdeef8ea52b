"""Read folders of torch.distributed.checkpoint (DCP), as ``dcp.save(checkpoint_id=…)`` writes them.

The file ``.metadata`` is a pickle, and no code in it is executed. DCP's metadata classes are replaced by stand-ins that
only store their state, and all other names are refused. Therefore no class of torch is called with content of the file.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asymcheck.convert.part import overlaps
from asymcheck.convert.restricted_pickle import load_pickle
from asymcheck.convert.source_file import SourceFile
from asymcheck.convert.torch_file import read_torch_file
from asymcheck.errors import ForeignFileError, StructureError, TruncatedError
from asymcheck.format.registry import DTYPE_BYTES, TREE_DEPTH_MAX
from asymcheck.format.tree import Key, join_name
from asymcheck.restore.state_template import map_leaves
from asymcheck.state.boxes import Box, Crossing, Region, tile
from asymcheck.state.dtypes import TORCH_NAMES
from asymcheck.state.leaves import TensorBytes
from asymcheck.storage.local_files import translated

_METADATA = ".metadata"
_METADATA_BYTES_MAX = 1 << 30
_OBJECT_BYTES = 16
"""Bytes of metadata for each object; torch writes about 24."""
_REWRITE = "save the checkpoint again, or load it with torch.distributed.checkpoint"
_REMEDY = (
    "fetch the folder again if it is damaged, or load it with torch.distributed.checkpoint and save the result with "
    "Store.save()"
)
_ERRORS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, StructureError, TruncatedError)


def is_dcp_folder(path: Path) -> bool:
    """Tell whether a folder was written by DCP."""
    if (path / _METADATA).is_file():
        return True
    if any(path.glob("*.distcp")):
        problem = f"an unfinished torch.distributed.checkpoint: no {_METADATA}, which a save writes last"
        raise ForeignFileError(path, problem, "fetch the folder again, or give the folder of a finished save")
    return False


def read_dcp_folder(path: Path, opened: Callable[[Path], SourceFile], parts: Sequence[str] = ()) -> object:
    """Return the nested state in a DCP folder; ``opened`` opens its files.

    With ``parts``, all values outside of the parts with these dotted names are None, and are not read.

    Raises:
        ForeignFileError: the folder is damaged, or holds objects other than tensors, containers and plain values.
    """
    folder = _read_metadata(path / _METADATA)

    def read(name: Any) -> object:  # noqa: ANN401 - a leaf of the tree of names
        place = join_name(folder.paths[name])
        if parts and not overlaps(place, parts):
            return None
        if name in folder.tensors:
            return _tensor(name, folder.tensors[name], lambda entry: opened(path / entry.file))
        entry = folder.values[name]
        return read_torch_file(opened(path / entry.file), entry.offset, entry.length, name=place)

    # Lists are restored in a tree of names, so that mappings with integer keys inside of values are not changed.
    state: dict[Key, Any] = {}
    for name in (*folder.tensors, *folder.values):
        *parents, last = folder.paths[name]
        container = state
        for key in parents:
            container = container.setdefault(key, {})
        container[last] = name
    return map_leaves(with_lists(state), read)


def with_lists(value: Any) -> Any:  # noqa: ANN401 - a nested state
    """Return a state that DCP has flattened with its lists restored.

    A list that contained an empty mapping or list stays a mapping, because DCP does not store empty containers.
    """
    if type(value) is not dict:
        return value
    items = {key: with_lists(item) for key, item in value.items()}
    if items and items.keys() == set(range(len(items))):
        return [items[index] for index in range(len(items))]
    return items


class _Entry(NamedTuple):
    """A file of ``torch.save`` inside a file of the folder."""

    file: str
    offset: int
    length: int


class _Tensor(NamedTuple):
    """A tensor of the folder; together the pieces are all of it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[Box, _Entry]]


class _Folder(NamedTuple):
    """Content of a folder by DCP's names, and the path of each name in the nested state."""

    tensors: dict[str, _Tensor]
    values: dict[str, _Entry]
    paths: dict[str, tuple[Key, ...]]


def _tensor(name: str, tensor: _Tensor, opened: Callable[[_Entry], SourceFile]) -> TensorBytes:
    pieces: list[tuple[Box, TensorBytes]] = []
    for box, entry in tensor.pieces:
        file = opened(entry)
        piece = read_torch_file(file, entry.offset, entry.length)
        if not isinstance(piece, TensorBytes) or (piece.dtype, piece.shape) != (tensor.dtype, box.shape):
            raise ForeignFileError(file.path, f"{box} of {name} contradicts the metadata", _REWRITE)
        pieces.append((box, piece))
    return pieces[0][1] if len(pieces) == 1 else _Joined(tensor.dtype, tensor.shape, pieces)


class _Joined(TensorBytes):
    """A tensor that is stored in several pieces."""

    def __init__(self, dtype: str, shape: tuple[int, ...], pieces: Sequence[tuple[Box, TensorBytes]]) -> None:
        super().__init__(dtype, shape)
        whole, width = Box.of_whole(shape), DTYPE_BYTES[dtype]
        self._pieces = [(Crossing(whole, box, box, width), piece) for box, piece in pieces if box.elements]

    def read(self, start: int, target: memoryview) -> None:
        """Fill ``target``, and read only the needed bytes of each piece."""
        flat = np.frombuffer(target, dtype=np.uint8)
        for crossing, piece in self._pieces:
            for region in crossing.regions(start, start + len(target)):
                # The bytes are contiguous in the piece: whole rows, or a part of one row.
                data = memoryview(bytearray(region.nbytes))
                piece.read(region.target, data)
                Region(0, region.source, region.shape, region.target_strides, region.source_strides).copy(data, flat)


class _StandIn:
    """Object that stores the state of an object of DCP."""

    kind = ""  # name of the class

    def __init__(self, *_arguments: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def field(self, name: str) -> Any:  # noqa: ANN401 - any content of the file
        return self.state.get(name) if isinstance(self.state, dict) else None


_STAND_INS: dict[tuple[str, str], Any] = {
    **{
        (module, name): type(name, (_StandIn,), {"kind": name})
        for module, names in {
            "torch.distributed.checkpoint.metadata": (
                *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "MetadataIndex", "TensorProperties"),
                *("ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
            ),
            # Before torch 2.3.
            "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
            "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
            "torch.serialization": ("_get_layout",),
            "pathlib": ("PosixPath", "PurePosixPath"),
            "pathlib._local": ("PosixPath", "PurePosixPath"),
        }.items()
        for name in names
    },
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    # A dtype has no state: it is pickled as the name torch.float32.
    **{("torch", str(dtype).removeprefix("torch.")): name for dtype, name in TORCH_NAMES.items()},
}


def _find_class(module: str, name: str) -> Any:  # noqa: ANN401 - any stand-in
    """Return the stand-in of a metadata class of DCP, and refuse all other names."""
    stand_in = _STAND_INS.get((module, name))
    if stand_in is None:
        raise StructureError(f"it names {module}.{name}, which is not metadata of DCP and is never executed")
    return stand_in


def _read_metadata(path: Path) -> _Folder:
    try:
        with translated("read", path), path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > _METADATA_BYTES_MAX:
                raise StructureError(f"it is larger than {_METADATA_BYTES_MAX:,} bytes")
            content = file.read()
        return _folder_of(load_pickle(io.BytesIO(content), len(content), _find_class, object_bytes=_OBJECT_BYTES))
    except _ERRORS as error:
        raise ForeignFileError(path, str(error) or type(error).__name__, _REMEDY) from error


def _folder_of(metadata: object) -> _Folder:
    if not isinstance(metadata, _StandIn) or metadata.kind != "Metadata":
        raise StructureError("it does not hold metadata of DCP")
    entries = {
        (index.field("fqn"), None if index.field("offset") is None else _sizes(index.field("offset"))): _entry(info)
        for index, info in metadata.field("storage_data").items()
    }
    tensors: dict[str, _Tensor] = {}
    values: dict[str, _Entry] = {}
    for name, description in metadata.field("state_dict_metadata").items():
        if description.kind == "TensorStorageMetadata":
            tensors[name] = _described(name, description, entries)
        else:
            values[name] = entries[name, None]
    planner_data = metadata.field("planner_data")
    planned = planner_data if isinstance(planner_data, dict) else {}
    paths = {name: _sizes(planned.get(name, (name,))) for name in (*tensors, *values)}
    _check_paths(list(paths.values()))
    return _Folder(tensors, values, paths)


def _check_paths(paths: Sequence[tuple[Key, ...]]) -> None:
    """Check that no two values have the same path, because one of them would be lost."""
    for path in paths:
        if not 0 < len(path) <= TREE_DEPTH_MAX or not all(type(key) in (str, int) for key in path):
            raise StructureError("a name of its state is invalid")
    distinct = set(paths)
    if len(distinct) < len(paths) or any(path[:length] in distinct for path in paths for length in range(1, len(path))):
        raise StructureError("two values of its state have the same path")


def _entry(info: _StandIn) -> _Entry:
    if info.field("transform_descriptors"):
        raise StructureError(
            f"its files are transformed by {info.field('transform_descriptors')}, which is not supported"
        )
    file, offset, length = (info.field(name) for name in ("relative_path", "offset", "length"))
    if type(file) is not str or Path(file).name != file or not _is_natural(offset) or not _is_natural(length):
        raise StructureError(f"it names {file!r:.100}, which is not a file of the folder")
    return _Entry(file, offset, length)


def _described(
    name: str, description: _StandIn, entries: Mapping[tuple[str, tuple[int, ...] | None], _Entry]
) -> _Tensor:
    shape = _sizes(description.field("size"))
    # Properties are pickled as a tuple that begins with the dtype; before torch 2.3, as attributes.
    state = description.field("properties").state
    dtype = state["dtype"] if isinstance(state, dict) else state[0]
    pieces = []
    for chunk in description.field("chunks"):
        box = Box(shape, _sizes(chunk.field("offsets")), _sizes(chunk.field("sizes")))
        if not all(map(_is_natural, (*box.whole, *box.offset, *box.shape))) or not box.is_valid:
            raise StructureError(f"a piece of {name} is outside of the tensor")
        pieces.append((box, entries[name, box.offset]))
    boxes = [box for box, _ in pieces]
    whole = Box.of_whole(shape)
    # If the number of elements is right and none is missing, no two pieces overlap.
    is_complete = sum(box.elements for box in boxes) == whole.elements and tile(whole, boxes).missing is None
    if type(dtype) is not str or not is_complete:
        raise StructureError(f"the pieces of {name} do not cover the tensor")
    return _Tensor(dtype, shape, pieces)


def _sizes(values: Any) -> tuple[Any, ...]:  # noqa: ANN401 - any content of the file
    """Return a short sequence as a tuple. Many objects may share a long one, and each would copy it."""
    if len(values) > TREE_DEPTH_MAX:
        raise StructureError("a shape or a name of its state is invalid")
    return tuple(values)


def _is_natural(value: object) -> bool:
    return type(value) is int and value >= 0
