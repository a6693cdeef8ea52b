"""Wholes: whether the parts that the ranks of one checkpoint saved make up all of their tensors (SPEC.md §10.5)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from asymcheck.errors import LimitError
from asymcheck.format.manifest import SCHEMA, Manifest
from asymcheck.partition.boxes import Box, tile

_COLUMNS = ("name", "aliases", "dtype", "global_shape", "offset", "shape")
_Key = tuple[str, str, tuple[int, ...]]
"""What parts of one tensor agree in: a name, the dtype, and the shape of the whole."""


class Wholes:
    """What the ranks of one checkpoint have of each tensor."""

    def __init__(self) -> None:
        """Begin with no rank."""
        self._whole: set[_Key] = set()
        # Of many ranks there are many parts: offset and shape of each, as bytes.
        self._parts: dict[_Key, bytearray] = {}
        self._aliases: dict[_Key, set[str]] = {}
        self._twice: set[str] = set()

    def add(self, manifest: Manifest) -> None:
        """Take what one rank has."""
        here: set[str] = set()
        columns = (manifest.columns[SCHEMA.get_field_index(name)].to_pylist() for name in _COLUMNS)
        for name, aliases, dtype, whole, offset, shape in zip(*columns, strict=True):
            names = dict.fromkeys([name, *aliases])
            self._twice |= here.intersection(names)
            here.update(names)
            keys = [(one, dtype, tuple(whole)) for one in names]
            if shape == whole:
                self._whole.update(keys)
                continue
            part = np.array([*offset, *shape], dtype=np.int64).tobytes()
            for key in keys:
                self._parts.setdefault(key, bytearray()).extend(part)
            self._aliases.setdefault(keys[0], set()).update(aliases)

    def lacking(self) -> Iterator[tuple[str, str]]:
        """Yield each tensor that cannot be put together, with what it lacks.

        Names that stand for several tensors of one rank say nothing about those of others.
        """
        for key, aliases in self._aliases.items():
            name, dtype, whole = key
            names = {name, *aliases}
            keys = [(one, dtype, whole) for one in names]
            if self._whole.isdisjoint(keys) and self._twice.isdisjoint(names):
                try:
                    missing = tile(Box.of_whole(whole), self._boxes(keys)).missing
                except LimitError as error:
                    yield name, str(error)
                else:
                    if missing is not None:
                        yield name, f"{missing} is in none of the parts that were saved"

    def _boxes(self, keys: list[_Key]) -> list[Box]:
        whole = keys[0][2]
        dims = len(whole)
        found = np.frombuffer(b"".join(self._parts[key] for key in keys), dtype=np.int64).reshape(-1, 2 * dims)
        parts: list[list[int]] = np.unique(found, axis=0).tolist()
        return [Box(whole, tuple(part[:dims]), tuple(part[dims:])) for part in parts]
