"""Filling a given state in place: which existing tensors take which rows, and what is put back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from asymcheck.errors import InvalidInputError, PartialRestoreError, StateMismatchError, UnsupportedValueError
from asymcheck.format.manifest import Manifest
from asymcheck.format.tree import Key, join_name
from asymcheck.partition.leaves import identity_key, make_leaf
from asymcheck.recovery.objects import misfits
from asymcheck.recovery.shape import RowRef, rows_in, with_tensors
from asymcheck.types import Stateful

_SHOWN = 20
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(np.generic, torch.Size, torch.dtype, torch.device),
)
"""Values that are replaced by what is stored in their place."""

Finish = Callable[[Mapping[int, torch.Tensor]], object]
"""Called with the filled tensors.

Puts plain values and loaded objects in place and returns the value for the container above.
"""


class Filler:
    """Matches a given state with a stored one, before a byte is overwritten."""

    def __init__(self, state: object, shape: object, manifest: Manifest, tensors: str = "*") -> None:
        """Match ``state`` with the stored ``shape``, of which the glob ``tensors`` was selected.

        Raises:
            StateMismatchError: lists everything that does not fit.
        """
        self.existing: dict[int, list[torch.Tensor]] = {}
        """Tensors to be filled in place, by row."""
        self.rows: dict[int, None] = {}
        """All rows that are needed."""
        self._stored = manifest.rows(range(len(manifest)))
        self._taken: dict[object, int] = {}
        self._problems: list[str] = []
        fillable = isinstance(state, (torch.Tensor, np.ndarray, Mapping, list, tuple, Stateful))
        empty = isinstance(state, (Mapping, list, tuple)) and not state and rows_in(shape)
        if not fillable or empty or isinstance(state, type):
            raise InvalidInputError(f"into={state!r:.100}: give a state whose tensors are to be filled")
        self._stored_where = "the checkpoint" + (f", or not in the selection {tensors!r}" if tensors != "*" else "")
        self._finish = self._match(state, shape, ())
        if self._problems:
            shown = "\n  ".join(self._problems[:_SHOWN])
            more = f"\n  … and {len(self._problems) - _SHOWN} more" if len(self._problems) > _SHOWN else ""
            raise StateMismatchError(
                f"the given state does not fit the checkpoint; nothing was overwritten:\n  {shown}{more}"
            )

    def finish(self, tensors: Mapping[int, torch.Tensor]) -> object:
        """Put plain values in place, call ``load_state_dict`` where it belongs, in order; return the state.

        Raises:
            PartialRestoreError: an object refused its state.
        """
        return self._finish(tensors)

    def _match(self, current: object, stored: object, path: tuple[Key, ...]) -> Finish:
        if isinstance(current, (torch.Tensor, np.ndarray)):
            self._match_tensor(current, stored, path)
            return lambda _tensors: current
        if isinstance(current, Stateful) and not isinstance(current, (Mapping, type)):
            return self._match_stateful(current, stored, path)
        if isinstance(current, dict):
            return self._match_mapping(current, stored, path)
        if type(current) in (list, tuple):
            return self._match_sequence(current, stored, path)  # type: ignore[arg-type]  # the type was just compared
        if not isinstance(current, _PLAIN):
            name = join_name(path) or "<root>"
            self._problems.append(f"{name}: {type(current).__qualname__} cannot be filled; give None to have it made")
        self.rows.update(dict.fromkeys(rows_in(stored)))
        return lambda tensors: with_tensors(stored, tensors)

    def _match_tensor(self, current: torch.Tensor | np.ndarray, stored: object, path: tuple[Key, ...]) -> None:
        name = join_name(path)
        if not isinstance(stored, RowRef):
            self._problems.append(f"{name}: a tensor is given, but {type(stored).__name__} is stored")
            return
        problem = self._obstacle(current, stored.row) or self._take(current, stored.row)
        if problem:
            self._problems.append(f"{name}: {problem}")

    def _obstacle(self, current: torch.Tensor | np.ndarray, row: int) -> str:
        """Say why a tensor cannot be filled where it is, or nothing."""
        try:
            given = make_leaf(current, "", "")
        except UnsupportedValueError as error:
            return error.reason
        wanted = self._stored[row]
        if (given.dtype, given.shape) != (wanted.dtype, wanted.shape):
            return f"{given.dtype} {list(given.shape)} is given, but {wanted.dtype} {list(wanted.shape)} is stored"
        strides = current.strides if isinstance(current, np.ndarray) else current.stride()
        if given.nbytes and any(size > 1 and stride == 0 for size, stride in zip(current.shape, strides, strict=True)):
            return "the given tensor is expanded: several of its elements are one"
        if isinstance(current, np.ndarray):
            if not current.flags.writeable:
                return "the given array is read-only"
            if any(stride < 0 or stride % current.itemsize for stride in strides):
                return f"the given array has strides {list(strides)}, which torch cannot express"
        return ""

    def _take(self, current: torch.Tensor | np.ndarray, row: int) -> str:
        """Note that a tensor is to be filled; say why not when its memory takes another row already."""
        tensor = torch.from_numpy(current) if isinstance(current, np.ndarray) else current
        key = identity_key(tensor)
        other = self._taken.get(key)
        if other not in (None, row):
            return f"is the same memory as {self._stored[other].name}, which is another tensor in the checkpoint"
        self.rows[row] = None
        if other is None:
            self.existing.setdefault(row, []).append(tensor)
        if key is not None:
            self._taken[key] = row
        return ""

    def _match_stateful(self, current: Stateful, stored: object, path: tuple[Key, ...]) -> Finish:
        if not isinstance(stored, dict):
            self._problems.append(
                f"{join_name(path)}: an object with load_state_dict() is given, but {type(stored).__name__} is stored"
            )
            return lambda _tensors: current
        state = current.state_dict()
        name = join_name(path)
        self._problems += [
            ".".join(filter(None, (name, problem))) for problem in misfits(current, stored, self._stored)
        ]
        self.rows.update(dict.fromkeys(rows_in(stored)))
        self._match_loosely(state, stored)

        def finish(tensors: Mapping[int, torch.Tensor]) -> object:
            try:
                current.load_state_dict(with_tensors(stored, tensors))  # type: ignore[arg-type]  # a dict, as checked above
            except Exception as error:
                what = f"{name or '<root>'}: load_state_dict() of {type(current).__qualname__} refused what is stored"
                raise PartialRestoreError(f"{what}: {error}", (), None) from error
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
            _ = self._obstacle(current, stored.row) or self._take(current, stored.row)

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
                self._problems.append(f"{join_name((*path, key))}: is not in {self._stored_where}")

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
