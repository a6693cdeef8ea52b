"""Rename the tensors of a nested state by regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from asymcheck.convert.part import SOURCE, leaves_of
from asymcheck.errors import InvalidInputError
from asymcheck.format.tree import Key, join_name
from asymcheck.restore.state_template import like_mapping
from asymcheck.state.typed_values import TypedValue

_Path = tuple[Key, ...]
Renames = tuple[tuple[re.Pattern[str], str], ...]
"""Patterns and replacements, as for ``re.sub``, which are applied in this order."""


def compile_renames(pairs: Iterable[tuple[str, str]]) -> Renames:
    """Compile patterns and replacements.

    Raises:
        InvalidInputError: a pattern or a replacement is invalid.
    """
    compiled = []
    for pattern, replacement in pairs:
        try:
            expression = re.compile(pattern)
            expression.sub(replacement, "")
        except (re.error, LookupError) as error:
            problem = f"invalid regular expression: {error}; see the documentation of Python's re.sub"
            raise InvalidInputError(f"cannot rename by {pattern!r} and {replacement!r}: {problem}") from error
        compiled.append((expression, replacement))
    return tuple(compiled)


def rename_tensors(state: object, renames: Renames, tensor_type: type) -> object:
    """Return a state with renamed tensors, which are leaves of this type. The rest of the state keeps its names.

    Names are the dotted names of tensors. A tensor whose renamed name leads to another mapping moves there. The
    metadata and files of an imported safetensors file keep their names. Typed values become their content.

    Raises:
        InvalidInputError: two tensors would have the same name, a name is impossible, a pattern matches no name, or the
            state is no mapping.
    """
    if not renames:
        return state
    state = _content(state)
    if not isinstance(state, dict):
        raise InvalidInputError("cannot rename: the tensors are not in a mapping, so they have no names; omit --rename")
    names: dict[str, _Path] = {}
    targets: dict[_Path, _Path] = {}
    unused = dict.fromkeys(pattern.pattern for pattern, _ in renames)
    for path, leaf in leaves_of(state):
        old = new = join_name(path)
        if isinstance(leaf, tensor_type) and path[0] != SOURCE:
            for pattern, replacement in renames:
                if pattern.search(new):
                    unused.pop(pattern.pattern, None)
                new = pattern.sub(replacement, new)
        if new != old:
            targets[path] = _target(path, new)
        other = names.setdefault(new, path)
        if other != path and (other in targets or path in targets):
            raise InvalidInputError(
                f"cannot rename: {join_name(other)} and {old} would both be named {new}; choose another pattern or "
                "replacement"
            )
    if unused:
        raise InvalidInputError(
            f"cannot rename: {next(iter(unused))!r} matches no name of a tensor; --dry-run lists the names"
        )
    moved: list[tuple[_Path, object, _Path]] = []
    renamed = _copied(state, (), targets, moved)
    _insert(renamed, moved)
    return renamed


def _insert(renamed: Any, moved: Iterable[tuple[_Path, object, _Path]]) -> None:  # noqa: ANN401 - a nested state
    """Add tensors that move to another mapping."""
    for target, leaf, path in moved:
        container = renamed
        for key in target[:-1]:
            container = container.setdefault(key, {}) if isinstance(container, dict) else None
        if not isinstance(container, dict) or target[-1] in container:
            raise InvalidInputError(
                f"cannot rename tensor {join_name(path)} to {join_name(target)}: another value has a part of this "
                "name; choose another replacement"
            )
        container[target[-1]] = leaf


def _content(value: object) -> object:
    """Return the content of a typed value, which is all that an export writes, and other values unchanged."""
    return value.content if isinstance(value, TypedValue) else value


def _copied(
    value: object, path: _Path, targets: dict[_Path, _Path], moved: list[tuple[_Path, object, _Path]]
) -> object:
    """Copy containers without renamed tensors, which are added to ``moved`` unless they stay in their mapping."""
    if isinstance(value, dict):
        copy = type(value)()
        for key, stored in value.items():
            below, item = (*path, key), _content(stored)
            target = targets.get(below)
            if target is None:
                content = _copied(item, below, targets, moved)
                lost_all = isinstance(item, dict) and item and not content
                if not lost_all:
                    copy[key] = content
            elif target[:-1] == path and target[-1] not in value:
                copy[target[-1]] = item
            else:
                moved.append((target, item, below))
        return like_mapping(value, copy)
    if type(value) in (list, tuple):
        for path_in_list in targets:
            if path_in_list[: len(path)] == path:
                raise InvalidInputError(
                    f"cannot rename tensor {join_name(path_in_list)}: it is in a list; choose a pattern that leaves it"
                )
    return value


def _target(path: _Path, new: str) -> _Path:
    """Return the path of a new name, with the keys of the old path at both ends where the names agree."""
    if not all(new.split(".")):
        raise InvalidInputError(
            f"cannot rename tensor {join_name(path)} to {new!r}: a part of the name is empty; "
            "choose another replacement"
        )
    start: list[Key] = []
    for key in path[:-1]:
        prefix = f"{join_name((key,))}."
        if not new.startswith(prefix):
            break
        new = new.removeprefix(prefix)
        start.append(key)
    if not start and len(path) > 1 and "." in new:
        first, new = new.split(".", 1)
        start.append(first)
    if new == join_name(path[len(start) :]):
        return (*start, *path[len(start) :])
    ends = (path[place:] for place in range(len(start) + 1, len(path)))
    end = next((end for end in ends if new.endswith(f".{join_name(end)}")), ())
    middle = new[: -len(join_name(end)) - 1] if end else new
    return (*start, middle, *end)
