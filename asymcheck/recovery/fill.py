"""Filling a given state in place: which existing tensors take which rows, and what is put back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from asymcheck.errors import StateMismatchError
from asymcheck.format.manifest import Manifest
from asymcheck.format.tree import Key, join_name
from asymcheck.partition.dtypes import TORCH_NAMES, numpy_name
from asymcheck.recovery.shape import RowRef, rows_in, with_tensors
from asymcheck.types import Stateful

_SHOWN = 20

Finish = Callable[[Mapping[int, torch.Tensor]], object]
"""Called with the filled tensors.

Puts plain values and loaded objects in place and returns the value for the container above.
"""


class Filler:
    """Matches a given state with a stored one, before a byte is overwritten."""

    def __init__(self, state: object, shape: object, manifest: Manifest) -> None:
        """Match ``state`` with the stored ``shape``.

        Raises:
            StateMismatchError: lists everything that does not fit.
        """
        self.existing: dict[int, list[torch.Tensor]] = {}
        """Tensors to be filled in place, by row."""
        self.rows: dict[int, None] = {}
        """All rows that are needed."""
        self._manifest = manifest
        self._problems: list[str] = []
        self._finish = self._match(state, shape, ())
        if self._problems:
            shown = "\n  ".join(self._problems[:_SHOWN])
            more = f"\n  … and {len(self._problems) - _SHOWN} more" if len(self._problems) > _SHOWN else ""
            raise StateMismatchError(
                f"the given state does not fit the checkpoint; nothing was overwritten:\n  {shown}{more}"
            )

    def finish(self, tensors: Mapping[int, torch.Tensor]) -> object:
        """Put plain values in place, call ``load_state_dict`` where it belongs, in order; return the state."""
        return self._finish(tensors)

    def _match(self, current: object, stored: object, path: tuple[Key, ...]) -> Finish:
        if isinstance(current, (torch.Tensor, np.ndarray)):
            self._match_tensor(current, stored, path)
            return lambda _tensors: current
        if isinstance(current, Stateful) and not isinstance(current, Mapping):
            return self._match_stateful(current, stored, path)
        if isinstance(current, dict):
            return self._match_mapping(current, stored, path)
        if type(current) in (list, tuple):
            return self._match_sequence(current, stored, path)  # type: ignore[arg-type]  # the type was just compared
        self.rows.update(dict.fromkeys(rows_in(stored)))
        return lambda tensors: with_tensors(stored, tensors)

    def _match_tensor(self, current: torch.Tensor | np.ndarray, stored: object, path: tuple[Key, ...]) -> None:
        name = join_name(path)
        if not isinstance(stored, RowRef):
            self._problems.append(f"{name}: a tensor is given, but {type(stored).__name__} is stored")
            return
        row = self._manifest.row(stored.row)
        dtype = numpy_name(current.dtype) if isinstance(current, np.ndarray) else TORCH_NAMES.get(current.dtype)
        if (dtype, tuple(current.shape)) != (row.dtype, row.shape):
            self._problems.append(
                f"{name}: {dtype} {list(current.shape)} is given, but {row.dtype} {list(row.shape)} is stored"
            )
            return
        self._take(stored.row, torch.from_numpy(current) if isinstance(current, np.ndarray) else current)

    def _take(self, row: int, tensor: torch.Tensor) -> None:
        self.rows[row] = None
        known = self.existing.setdefault(row, [])
        if all(tensor is not other for other in known):
            known.append(tensor)

    def _match_stateful(self, current: Stateful, stored: object, path: tuple[Key, ...]) -> Finish:
        if not isinstance(stored, dict):
            self._problems.append(
                f"{join_name(path)}: an object with load_state_dict() is given, but {type(stored).__name__} is stored"
            )
            return lambda _tensors: current
        self.rows.update(dict.fromkeys(rows_in(stored)))
        self._match_loosely(current.state_dict(), stored)

        def finish(tensors: Mapping[int, torch.Tensor]) -> object:
            current.load_state_dict(with_tensors(stored, tensors))  # type: ignore[arg-type]  # a dict, as checked above
            return current

        return finish

    def _match_loosely(self, current: object, stored: object) -> None:
        # Inside such an object only what fits exactly is filled in place; the object itself judges the rest.
        if isinstance(current, dict) and isinstance(stored, dict):
            for key, value in current.items():
                if key in stored:
                    self._match_loosely(value, stored[key])
        elif type(current) is list and type(stored) is list:
            for value, item in zip(current, stored, strict=False):
                self._match_loosely(value, item)
        elif isinstance(current, torch.Tensor) and isinstance(stored, RowRef) and not stored.as_array:
            row = self._manifest.row(stored.row)
            if (TORCH_NAMES.get(current.dtype), tuple(current.shape)) == (row.dtype, row.shape):
                self._take(stored.row, current)

    def _match_mapping(self, current: dict[Key, object], stored: object, path: tuple[Key, ...]) -> Finish:
        if not isinstance(stored, dict):
            self._problems.append(
                f"{join_name(path) or '<root>'}: a mapping is given, but {type(stored).__name__} is stored"
            )
            return lambda _tensors: current
        finishes = {}
        for key, value in current.items():
            if key in stored:
                finishes[key] = self._match(value, stored[key], (*path, key))
            else:
                self._problems.append(f"{join_name((*path, key))}: is not in the checkpoint")

        def finish(tensors: Mapping[int, torch.Tensor]) -> object:
            for key, part in finishes.items():
                current[key] = part(tensors)
            return current

        return finish

    def _match_sequence(
        self, current: list[object] | tuple[object, ...], stored: object, path: tuple[Key, ...]
    ) -> Finish:
        if type(stored) is not type(current) or len(stored) != len(current):
            self._problems.append(
                f"{join_name(path)}: a {type(current).__name__} of {len(current)} is given, but another is stored"
            )
            return lambda _tensors: current
        finishes = [
            self._match(value, item, (*path, i)) for i, (value, item) in enumerate(zip(current, stored, strict=True))
        ]

        def finish(tensors: Mapping[int, torch.Tensor]) -> object:
            values = [part(tensors) for part in finishes]
            if isinstance(current, tuple):
                return tuple(values)
            current[:] = values
            return current

        return finish
