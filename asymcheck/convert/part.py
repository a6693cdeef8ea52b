"""Selection of the part of a state that an export writes, with metadata and small files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asymcheck.errors import InvalidInputError, listed
from asymcheck.format.tree import Key, join_name
from asymcheck.restore.state_template import RowRef
from asymcheck.state.typed_values import TypedValue

MODEL = "model"  # key of the tensors in a checkpoint that was imported from a safetensors file or folder
SOURCE = "safetensors"  # key of a mapping with the ``metadata`` and ``files`` of the imported file or folder
TIED = "asymcheck.tied"
"""Key in safetensors metadata: JSON object that maps each alias of a tied tensor to its first name."""

_MISSING: Final = object()


@dataclasses.dataclass(frozen=True)
class Part:
    """Part of a state to write."""

    shape: object  # the part, with :class:`RowRef` in place of tensors
    metadata: Mapping[str, str]  # metadata of the imported file
    files: Mapping[str, RowRef]  # small files of the imported folder, by name
    top_keys: tuple[str, ...] = ()
    """Keys of the state that contain tensors, if the whole state was picked."""

    def rows_by_name(self) -> tuple[dict[str, int], dict[str, str]]:
        """Return the row of each tensor by name, and the aliases of tied tensors with their first names."""
        names: dict[str, int] = {}
        first: dict[int, str] = {}
        tied: dict[str, str] = {}
        for path, leaf in leaves_of(self.shape):
            if not isinstance(leaf, RowRef):
                continue
            name = join_name(path)
            if name in names or name in tied:
                raise InvalidInputError(
                    f"cannot write a safetensors file: two tensors would be named {name!r}; write a .pt file instead"
                )
            if leaf.row in first:
                tied[name] = first[leaf.row]
            else:
                first[leaf.row] = name
                names[name] = leaf.row
        return names, tied

    def plain_names(self) -> list[str]:
        """Return the names of plain values."""
        return [join_name(path) for path, leaf in leaves_of(self.shape) if not isinstance(leaf, RowRef)]


def pick(shape: object, part: str | None, *, tensors_only: bool = False) -> Part:
    """Return the part of a state with the dotted name ``part``; None means the whole state.

    By default, an imported checkpoint yields the content of the imported file.

    Raises:
        InvalidInputError: the part does not exist, or has no tensors although ``tensors_only`` is set.
    """
    requested = part
    source = shape.get(SOURCE) if isinstance(shape, dict) else None
    is_imported = _is_source(source)
    if part is None and is_imported and isinstance(shape, dict) and shape.keys() == {MODEL, SOURCE}:
        part = MODEL
    metadata: dict[str, str] = {}
    files: dict[str, RowRef] = {}
    # In an export of the whole state, metadata and files are ordinary values of the state.
    if isinstance(source, dict) and is_imported and part is not None and _is_within(part, MODEL):
        metadata, files = source["metadata"], source["files"]
    picked = shape if part is None else _descend(shape, part)
    if picked is _MISSING:
        raise _no_part("the checkpoint", part, shape)
    if tensors_only and requested is not None and not any(isinstance(leaf, RowRef) for _, leaf in leaves_of(picked)):
        raise InvalidInputError(f"part {requested!r} of the checkpoint has no tensors; write a .pt file instead")
    if tensors_only and part is not None and isinstance(picked, RowRef):
        picked = {part.rpartition(".")[2]: picked}
    return Part(picked, metadata, files, _top_keys(shape) if part is None else ())


def _no_part(whole: str, part: str | None, state: object) -> InvalidInputError:
    keys = [join_name((key,)) for key in state if type(key) in (str, int)] if isinstance(state, dict) else []
    return InvalidInputError(f"{whole} has no part {part!r}; it has {listed(keys) or 'no parts'}")


def _top_keys(shape: object) -> tuple[str, ...]:
    if not isinstance(shape, dict):
        return ()
    return tuple(
        join_name((key,))
        for key, value in shape.items()
        if not isinstance(value, RowRef) and any(isinstance(leaf, RowRef) for _, leaf in leaves_of(value))
    )


def _is_source(value: object) -> bool:
    """Tell whether a value holds the metadata and files of an imported file."""
    return (
        isinstance(value, dict)
        and value.keys() == {"metadata", "files"}
        and _is_by_name(value["metadata"], str)
        and _is_by_name(value["files"], RowRef)
    )


def small_files(shape: object) -> Mapping[str, RowRef]:
    """Return the small files of an imported model folder in a state, by name."""
    source = shape.get(SOURCE) if isinstance(shape, dict) else None
    return source["files"] if isinstance(source, dict) and _is_source(source) else {}


def _is_by_name(value: object, kind: type) -> bool:
    return isinstance(value, dict) and all(type(name) is str and type(item) is kind for name, item in value.items())


def _is_within(part: str, whole: str) -> bool:
    return part == whole or part.startswith(f"{whole}.")


def overlaps(name: str, parts: Iterable[str]) -> bool:
    """Tell whether the value with this dotted name is inside of a part, or contains one."""
    return any(_is_within(name, part) or _is_within(part, name) for part in parts)


def _descend(shape: object, name: str) -> object:
    for key, value in _items(shape):
        key_name = join_name((key,))
        if key_name == name:
            return value
        # Keys may contain dots, so every matching key is tried.
        if name.startswith(f"{key_name}."):
            descendant = _descend(value, name[len(key_name) + 1 :])
            if descendant is not _MISSING:
                return descendant
    # Keys of a module's state_dict() are dotted names: a part consists of the keys with this prefix.
    prefix = f"{name}."
    inside = {
        key_name[len(prefix) :]: value
        for key, value in _items(shape)
        if (key_name := join_name((key,))).startswith(prefix)
    }
    return inside or _MISSING


def _items(shape: object) -> Iterable[tuple[Key, object]]:
    if isinstance(shape, TypedValue):
        return _items(shape.content)
    if isinstance(shape, dict):
        return shape.items()
    return enumerate(shape) if type(shape) in (list, tuple) else ()  # type: ignore[arg-type]  # the type was just compared


def leaves_of(shape: object, path: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], object]]:
    """Yield every leaf of a nested state with its path."""
    if isinstance(shape, TypedValue):
        yield from leaves_of(shape.content, path)
    elif isinstance(shape, dict) or type(shape) in (list, tuple):
        for key, value in _items(shape):
            yield from leaves_of(value, (*path, key))
    else:
        yield path, shape


def keep_parts(path: Path, state: object, parts: Sequence[str]) -> object:
    """Return the parts of a state with these dotted names, under the same keys; without parts, the whole state.

    Raises:
        InvalidInputError: the file or folder ``path``, which has the state, lacks a part.
    """
    if not parts:
        return state
    found: set[str] = set()

    def kept(value: dict[Any, Any], above: tuple[Key, ...]) -> dict[Any, Any]:
        content = {}
        for key, item in value.items():
            if type(key) not in (str, int):
                continue
            name = join_name((*above, key))
            inside = [part for part in parts if _is_within(name, part)]
            found.update(inside)
            if inside:
                content[key] = item
            elif isinstance(item, dict) and any(_is_within(part, name) for part in parts):
                content[key] = kept(item, (*above, key))
        return content

    content = kept(state, ()) if isinstance(state, dict) else {}
    for part in parts:
        if part not in found:
            raise _no_part(str(path), part, state)
    return content


def encode_tied(tied: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata entry for tied tensors, or an empty mapping."""
    return {TIED: json.dumps(dict(sorted(tied.items())), ensure_ascii=False)} if tied else {}
