"""The ``.metadata`` file of torch's DCP, read without running anything that it names.

The file is a pickle. This is the one module that has an unpickler: where the pickle names a class, the unpickler puts
a stand-in that only keeps what it is given, and any other name than those of DCP's own descriptions is refused. So
neither torch's classes nor anything else is called with what the file says.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asymcheck.errors import ForeignFileError, TruncatedError
from asymcheck.format.registry import TREE_DEPTH_MAX
from asymcheck.format.tree import Key
from asymcheck.partition.boxes import Box, tile
from asymcheck.partition.dtypes import TORCH_NAMES
from asymcheck.tiers.files import translated

NAME = ".metadata"
"""By this file a folder of DCP is known."""
_REMEDY = (
    "fetch the folder again if it is damaged, or load it with torch.distributed.checkpoint, and store what that "
    "gives with Store.save()"
)
_ERRORS = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(UnicodeDecodeError, OverflowError, MemoryError, RecursionError),
)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a file of ``torch.save`` lies in a file of the folder."""

    file: str
    """Name of the file."""
    offset: int
    """Where it begins there."""
    length: int
    """Its bytes."""


@dataclasses.dataclass(frozen=True)
class FolderTensor:
    """A tensor of the folder."""

    dtype: str
    """The format's name of the dtype."""
    shape: tuple[int, ...]
    """Shape of the whole."""
    pieces: tuple[tuple[Box, Place], ...]
    """The parts that were saved, and where."""


@dataclasses.dataclass(frozen=True)
class Folder:
    """What a folder of DCP holds."""

    tensors: Mapping[str, FolderTensor]
    """Tensors by DCP's name."""
    values: Mapping[str, Place]
    """Other values by DCP's name."""
    paths: Mapping[str, tuple[Key, ...]]
    """Where each stood in the nested state."""


class _StandIn:
    """Keeps what a pickle says of an object."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state

    def field(self, name: str) -> Any:  # noqa: ANN401 - whatever the file says
        """Return an attribute; None when there is none."""
        state = getattr(self, "state", None)
        return state.get(name) if isinstance(state, dict) else None


class _Metadata(_StandIn):
    pass


class _Tensor(_StandIn):
    pass


class _Value(_StandIn):
    pass


class _Index(_StandIn):
    pass


_DESCRIPTIONS = "torch.distributed.checkpoint.metadata"
_STAND_INS: dict[tuple[str, str], Any] = {
    (_DESCRIPTIONS, "Metadata"): _Metadata,
    (_DESCRIPTIONS, "TensorStorageMetadata"): _Tensor,
    (_DESCRIPTIONS, "BytesStorageMetadata"): _Value,
    (_DESCRIPTIONS, "MetadataIndex"): _Index,
    **{
        (_DESCRIPTIONS, name): _StandIn
        for name in ("ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StandIn,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _StandIn,
    ("collections", "OrderedDict"): OrderedDict,
    **{(module, name): _StandIn for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")},
    # A dtype is named as torch.float32 is: it has no state.
    **{("torch", str(dtype).removeprefix("torch.")): name for dtype, name in TORCH_NAMES.items()},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as the base class has it
        """Return a stand-in, for names of DCP's descriptions only."""
        found = _STAND_INS.get((module, name))
        if found is None:
            raise _refusal(module, name)
        return found


def _refusal(module: str, name: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"it names {module}.{name}, which is no description of DCP and is never run")


def read_metadata(folder: Path) -> Folder:
    """Read what a folder of DCP holds.

    Raises:
        ForeignFileError: the file is damaged, names what is no description, or describes what cannot be read.
    """
    path = folder / NAME
    try:
        with translated("read", path), path.open("rb") as file:
            metadata: object = _Unpickler(file).load()
        return _folder_of(metadata)
    except (*_ERRORS, TruncatedError) as error:
        raise ForeignFileError(path, str(error) or type(error).__name__, _REMEDY) from error


def _folder_of(metadata: object) -> Folder:
    if type(metadata) is not _Metadata:
        raise TruncatedError("it holds no metadata of DCP")
    places = {
        (index.field("fqn"), None if index.field("offset") is None else tuple(index.field("offset"))): _place(info)
        for index, info in metadata.field("storage_data").items()
    }
    tensors: dict[str, FolderTensor] = {}
    values: dict[str, Place] = {}
    for name, description in metadata.field("state_dict_metadata").items():
        if type(description) is _Tensor:
            tensors[name] = _tensor(name, description, places)
        else:
            values[name] = places[name, None]
    planned = metadata.field("planner_data")
    known = planned if isinstance(planned, dict) else {}
    paths = {name: tuple(known.get(name, (name,))) for name in (*tensors, *values)}
    _check_paths(list(paths.values()))
    return Folder(tensors, values, paths)


def _check_paths(paths: Sequence[tuple[Key, ...]]) -> None:
    """See that each leads to a place of its own; of two values in one place, one would be lost."""
    for path in paths:
        if not 0 < len(path) <= TREE_DEPTH_MAX or not all(type(key) in (str, int) for key in path):
            raise TruncatedError("a name of its state is no name")
    taken = set(paths)
    if len(taken) < len(paths) or any(path[:length] in taken for path in paths for length in range(1, len(path))):
        raise TruncatedError("two parts of its state have one place")


def _place(info: _StandIn) -> Place:
    if info.field("transform_descriptors"):
        raise TruncatedError(f"its tensors went through {info.field('transform_descriptors')}")
    file, offset, length = (info.field(name) for name in ("relative_path", "offset", "length"))
    if type(file) is not str or Path(file).name != file or not _is_natural(offset) or not _is_natural(length):
        raise TruncatedError(f"it names {file!r:.100}, which is no file of the folder")
    return Place(file, offset, length)


def _tensor(
    name: str, description: _StandIn, places: Mapping[tuple[str, tuple[int, ...] | None], Place]
) -> FolderTensor:
    shape = tuple(description.field("size"))
    # A dtype comes first in the state of the properties, which releases before 2.3 kept as attributes.
    properties = description.field("properties")
    state = properties.state
    dtype = state["dtype"] if isinstance(state, dict) else state[0]
    pieces = []
    for chunk in description.field("chunks"):
        box = Box(shape, tuple(chunk.field("offsets")), tuple(chunk.field("sizes")))
        if not all(map(_is_natural, (*box.whole, *box.offset, *box.shape))) or not box.is_valid:
            raise TruncatedError(f"a part of {name} does not lie within it")
        pieces.append((box, places[name, box.offset]))
    boxes = [box for box, _ in pieces]
    whole = Box.of_whole(shape)
    # As many elements as the whole, and none missing: so no two parts overlap.
    is_all = sum(box.elements for box in boxes) == whole.elements and tile(whole, boxes).missing is None
    if type(dtype) is not str or not is_all:
        raise TruncatedError(f"the parts of {name} are not all of it")
    return FolderTensor(dtype, shape, tuple(pieces))


def _is_natural(value: object) -> bool:
    return type(value) is int and value >= 0
