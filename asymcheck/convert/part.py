"""The part of a checkpoint that is written to a file of another format, with metadata and small files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Final

from asymcheck.errors import InvalidInputError
from asymcheck.format.tree import Key, join_name
from asymcheck.restore.state_template import RowRef

MODEL = "model"  # key of the tensors in a checkpoint that was converted from a safetensors file or folder
SOURCE = "safetensors"  # key of everything else in it: a mapping with ``metadata`` and ``files``
TIED = "asymcheck.tied"
"""Key in the metadata of a safetensors file: JSON of further names of tied tensors, with their first names."""

_SHOWN = 8
_NOTHING: Final = object()


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a state to be written."""

    shape: object  # A part of the state, with :class:`RowRef` in the place of tensors
    metadata: Mapping[str, str]  # metadata of the file that the checkpoint was converted from
    files: Mapping[str, RowRef]  # small files of the folder that it was converted from, by name
    tops: tuple[str, ...] = ()
    """First parts of the tensors' dotted names, where the whole state was picked and is in parts."""

    def rows_by_name(self) -> tuple[dict[str, int], dict[str, str]]:
        """Return the row of each tensor by its name in the part, and further names of tied ones with the first name."""
        names: dict[str, int] = {}
        first: dict[int, str] = {}
        tied: dict[str, str] = {}
        for path, leaf in leaves_of(self.shape):
            if not isinstance(leaf, RowRef):
                continue
            name = join_name(path)
            if name in names or name in tied:
                raise InvalidInputError(f"two tensors are named {name!r} in a flat file; write a .pt file instead")
            if leaf.row in first:
                tied[name] = first[leaf.row]
            else:
                first[leaf.row] = name
                names[name] = leaf.row
        return names, tied

    def plain_names(self) -> list[str]:
        """Return the names of values that are no tensors."""
        return [join_name(path) for path, leaf in leaves_of(self.shape) if not isinstance(leaf, RowRef)]


def pick(shape: object, part: str | None, *, tensors_only: bool = False) -> Part:
    """Return the part of a state with the dotted name ``part``; None means the whole state.

    For a checkpoint that was converted from a file and not changed since, the default is the content of that file.

    Raises:
        InvalidInputError: the part does not exist, or has no tensors where the format takes ``tensors_only``.
    """
    named = part
    source = shape.get(SOURCE) if isinstance(shape, dict) else None
    is_converted = _is_source(source)
    if part is None and is_converted and isinstance(shape, dict) and shape.keys() == {MODEL, SOURCE}:
        part = MODEL
    metadata: dict[str, str] = {}
    files: dict[str, RowRef] = {}
    # Beside the model only: in a whole state, they are tensors and values like all others.
    if isinstance(source, dict) and is_converted and part is not None and _is_within(part, MODEL):
        metadata, files = source["metadata"], source["files"]
    found = shape if part is None else _descend(shape, part)
    if found is _NOTHING:
        tops = [join_name((key,)) for key in shape] if isinstance(shape, dict) else []
        raise InvalidInputError(f"the checkpoint has no part {part!r}; it has {', '.join(tops[:_SHOWN]) or 'no parts'}")
    if tensors_only and named is not None and not any(isinstance(leaf, RowRef) for _, leaf in leaves_of(found)):
        raise InvalidInputError(f"part {named!r} of the checkpoint has no tensors; a .pt file takes what it has")
    for name in files:
        if PurePosixPath(name).name != name or name == ".." or "\0" in name:
            raise InvalidInputError(f"the checkpoint holds a file with the name {name!r}, which leads out of a folder")
    return Part(found, metadata, files, _tops(shape) if part is None else ())


def _tops(shape: object) -> tuple[str, ...]:
    """Return the names of the parts of a state that have tensors in them; a single tensor is not a part."""
    if not isinstance(shape, dict):
        return ()
    return tuple(
        join_name((key,))
        for key, value in shape.items()
        if not isinstance(value, RowRef) and any(isinstance(leaf, RowRef) for _, leaf in leaves_of(value))
    )


def _is_source(value: object) -> bool:
    """Tell whether a value holds metadata and files of a converted file, rather than a part of a user's own state."""
    return (
        isinstance(value, dict)
        and value.keys() == {"metadata", "files"}
        and _is_by_name(value["metadata"], str)
        and _is_by_name(value["files"], RowRef)
    )


def _is_by_name(value: object, kind: type) -> bool:
    return isinstance(value, dict) and all(type(name) is str and type(one) is kind for name, one in value.items())


def _is_within(part: str, whole: str) -> bool:
    return part == whole or part.startswith(f"{whole}.")


def _descend(shape: object, name: str) -> object:
    """Return the value with a dotted name, or ``_NOTHING``."""
    for key, value in _items(shape):
        own = join_name((key,))
        if own == name:
            return value
        # Keys may contain dots, so every key that fits is tried.
        if name.startswith(f"{own}."):
            found = _descend(value, name[len(own) + 1 :])
            if found is not _NOTHING:
                return found
    # The keys of a module's state are dotted names, so that a part of it consists of the keys with this prefix.
    prefix = f"{name}."
    inside = {
        own[len(prefix) :]: value for key, value in _items(shape) if (own := join_name((key,))).startswith(prefix)
    }
    return inside or _NOTHING


def _items(shape: object) -> Iterable[tuple[Key, object]]:
    """Return the items of a container with their keys or indexes; nothing for other values."""
    if isinstance(shape, dict):
        return shape.items()
    return enumerate(shape) if type(shape) in (list, tuple) else ()  # type: ignore[arg-type]  # the type was just compared


def leaves_of(shape: object, path: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], object]]:
    """Yield every value that is not a container, with its path."""
    if isinstance(shape, dict) or type(shape) in (list, tuple):
        for key, value in _items(shape):
            yield from leaves_of(value, (*path, key))
    else:
        yield path, shape


def encode_tied(tied: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata entry for tied names; none when nothing is tied."""
    return {TIED: json.dumps(dict(sorted(tied.items())), ensure_ascii=False)} if tied else {}
