"""Filling a given state in place: which existing tensors take which bytes, and what is put back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from asymcheck.errors import InvalidInputError, RefusedStateError, StateMismatchError, UnsupportedValueError
from asymcheck.format.manifest import TensorRow
from asymcheck.format.tree import Key, join_name
from asymcheck.restore.assemble import Assembly
from asymcheck.restore.read_plan import Demand
from asymcheck.restore.reshard import ShardSet
from asymcheck.restore.state_dict_check import PipelineStages, misfits, parameters_of, state_for, with_counters
from asymcheck.restore.state_template import RowRef, merge, rows_in, select_each, with_tensors
from asymcheck.state.boxes import Box
from asymcheck.state.leaves import identity_key, make_leaf
from asymcheck.state.shards import Distributed, TensorShard, is_dtensor, like, shard_of
from asymcheck.types import Stateful

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_SHOWN = 20
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(np.generic, torch.Size, torch.dtype, torch.device),
)
"""Values that are replaced by what is stored in their place."""

Finish = Callable[[Assembly], object]
"""Called with the filled tensors.

Puts plain values and loaded objects in place and returns the value for the container above.
"""
_Given = torch.Tensor | np.ndarray | TensorShard
_Tensors = dict[int, Finish]
"""Results for stored tensors, by their numbers."""


class InPlaceFill:
    """Matches a given state with a stored one, before a byte is overwritten."""

    def __init__(self, state: object, parts: ShardSet, tensors: str = "*", *, grows: bool = False) -> None:
        """Match ``state`` with what is stored, of which the glob ``tensors`` is selected.

        A state that ``grows`` gets back what its mappings lack, but for the outermost, of which it may be a part.

        Raises:
            StateMismatchError: lists everything that does not fit, or was not saved.
        """
        self._parts = parts
        self._grows = grows
        self._demands: dict[tuple[int, Box], Demand] = {}
        self._taken: dict[object, tuple[int, Box]] = {}
        self._problems: list[str] = []
        self._stages = PipelineStages(parts.rank_of)
        stored = select_each(parts.shapes(), tensors)
        fillable = isinstance(state, (torch.Tensor, np.ndarray, TensorShard, Mapping, list, tuple, Stateful))
        empty = isinstance(state, (Mapping, list, tuple)) and not state and any(map(rows_in, stored))
        if not fillable or empty or isinstance(state, type):
            raise InvalidInputError(f"into={state!r:.100}: give a state whose tensors are to be filled")
        self._stored_where = "the checkpoint" + (f", or not in the selection {tensors!r}" if tensors != "*" else "")
        self._finish = self._match(state, stored, ())
        self._problems += self._stages.problems()
        if self._problems:
            shown = "\n  ".join(self._problems[:_SHOWN])
            more = f"\n  … and {len(self._problems) - _SHOWN} more" if len(self._problems) > _SHOWN else ""
            fits = all(problem.endswith(tuple(parts.gaps)) for problem in self._problems)
            what = "the checkpoint lacks parts of tensors" if fits else "the given state does not fit the checkpoint"
            raise StateMismatchError(f"{what}; nothing was overwritten:\n  {shown}{more}")

    @property
    def demands(self) -> list[Demand]:
        """The demands of the state."""
        return list(self._demands.values())

    def finish(self, assembly: Assembly) -> object:
        """Put plain values in place, call ``load_state_dict`` where it belongs, in order; return the state.

        Raises:
            RefusedStateError: an object did.
        """
        return self._finish(assembly)

    # What ranks have in one place is a sequence: the own comes first, and it is never empty.

    def _match(self, current: object, stored: Sequence[object], path: tuple[Key, ...]) -> Finish:
        if isinstance(current, (torch.Tensor, np.ndarray, TensorShard)):
            self._match_tensor(current, stored, path)
            return lambda _assembly: current
        if isinstance(current, Stateful) and not isinstance(current, (Mapping, type)):
            return self._match_stateful(current, stored, path)
        if isinstance(current, dict):
            return self._match_mapping(current, stored, path)
        if type(current) in (list, tuple):
            return self._match_sequence(current, stored, path)  # type: ignore[arg-type]  # the type was just compared
        if not isinstance(current, _PLAIN):
            self._refuse(path, f"{type(current).__qualname__} cannot be filled; give None to have it made")
        return self._made(merge(stored), path)

    def _refuse(self, path: tuple[Key, ...], problem: str) -> None:
        self._problems.append(f"{join_name(path) or '<root>'}: {problem}")

    def _made(self, shape: object, path: tuple[Key, ...]) -> Finish:
        """Make what is stored anew, its tensors too."""
        tensors = self._want(shape, path, {})
        return lambda assembly: _put_in(shape, tensors, assembly)

    def _want(self, shape: object, path: tuple[Key, ...], tensors: _Tensors) -> _Tensors:
        """Want all tensors of a shape that are not in ``tensors`` yet, whole; return what each becomes."""
        for number in rows_in(shape):
            if number not in tensors:
                try:
                    tensors[number] = _tensor_of(self._demand(number, self._parts.whole(number)))
                except StateMismatchError as error:
                    self._refuse(path, f"tensor {self._parts.row(number).name}: {error}")
        return tensors

    def _demand(self, number: int, box: Box) -> Demand:
        """Want a box of a tensor.

        Raises:
            StateMismatchError: it cannot be had.
        """
        if (number, box) not in self._demands:
            self._demands[number, box] = Demand.of(self._parts, number, box)
        return self._demands[number, box]

    def _match_tensor(self, current: _Given, stored: Sequence[object], path: tuple[Key, ...]) -> None:
        ref = next((one for one in stored if isinstance(one, RowRef)), None)
        if ref is None:
            self._refuse(path, f"a tensor is given, but {type(stored[0]).__name__} is stored")
            return
        try:
            self._take(current, ref.row)
        except UnsupportedValueError as error:
            self._refuse(path, error.reason)
        except StateMismatchError as error:
            self._refuse(path, str(error))

    def _take(self, current: _Given, number: int) -> None:
        """Note that a tensor is to be filled.

        Raises:
            StateMismatchError, UnsupportedValueError: it cannot be filled where it is.
        """
        if isinstance(current, torch.Tensor) and is_lazy(current):
            raise StateMismatchError("has no shape yet; give its module, not only its state")
        shard = _shard(current)
        local = shard.local if isinstance(shard, TensorShard) else shard
        box = shard.box if isinstance(shard, TensorShard) else Box.of_whole(tuple(shard.shape))
        problem = _obstacle(local, box, self._parts.row(number))
        if problem:
            raise StateMismatchError(problem)
        tensor = torch.from_numpy(local) if isinstance(local, np.ndarray) else local
        key = identity_key(tensor)
        other = self._taken.get(key)
        if other not in (None, (number, box)):
            name = self._parts.row(other[0]).name
            raise StateMismatchError(f"is the same memory as {name}, which is another tensor in the checkpoint")
        demand = self._demand(number, box)
        if other is None:
            demand.existing.append(tensor)
        if key is not None:
            self._taken[key] = number, box

    def _match_stateful(self, current: Stateful, stored: Sequence[object], path: tuple[Key, ...]) -> Finish:
        name = join_name(path)
        mappings = [one for one in stored if isinstance(one, dict)]
        if not mappings:
            self._refuse(path, f"an object with load_state_dict() is given, but {type(stored[0]).__name__} is stored")
            return lambda _assembly: current
        state = current.state_dict()
        shape = with_counters(state_for(current, mappings, state), state)
        self._problems += [
            ".".join(filter(None, (name, problem))) for problem in misfits(current, shape, self._parts.row)
        ]
        if isinstance(current, torch.nn.Module):
            self._stages.add_module(name, current, state, mappings)
        elif isinstance(current, torch.optim.Optimizer):
            self._stages.add_optimizer(name, current, shape)
        tensors: _Tensors = {}
        self._match_loosely(state, shape, tensors)
        self._match_parameters(current, shape, tensors)
        self._want(shape, path, tensors)

        def finish(assembly: Assembly) -> object:
            try:
                current.load_state_dict(_put_in(shape, tensors, assembly))  # type: ignore[arg-type]  # a dict, as checked above
            except Exception as error:
                what = f"{name or '<root>'}: load_state_dict() of {type(current).__qualname__} refused what is stored"
                raise RefusedStateError(f"{what}: {error}", (), None) from error
            return current

        return finish

    def _match_loosely(self, current: object, stored: object, tensors: _Tensors) -> None:
        # Inside such an object only what fits exactly is filled in place; the object itself judges the rest.
        if isinstance(current, dict) and isinstance(stored, dict):
            for key, value in current.items():
                if key in stored:
                    self._match_loosely(value, stored[key], tensors)
        elif type(current) is list and type(stored) is list:
            for value, item in zip(current, stored, strict=False):
                self._match_loosely(value, item, tensors)
        elif isinstance(current, (torch.Tensor, TensorShard)) and isinstance(stored, RowRef) and not stored.as_array:
            with contextlib.suppress(StateMismatchError, UnsupportedValueError):
                self._take(current, stored.row)
                tensors.setdefault(stored.row, lambda _assembly: current)

    def _match_parameters(self, current: Stateful, stored: Mapping[Key, object], tensors: _Tensors) -> None:
        # State that a fresh optimizer does not have yet is cut as its parameter is.
        for lacking, part in current.missing(stored) if isinstance(current, Distributed) else ():
            if isinstance(lacking, RowRef) and self._parts.row(lacking.row).global_shape == part.global_shape:
                with contextlib.suppress(StateMismatchError):
                    tensors.setdefault(lacking.row, _tensor_of(self._demand(lacking.row, part.box)))
        for ref, parameter in parameters_of(current, stored):
            if ref.row in tensors or not is_dtensor(parameter) or ref.as_array:
                continue
            if self._parts.row(ref.row).global_shape == tuple(parameter.shape):
                with contextlib.suppress(StateMismatchError):
                    tensors[ref.row] = _part_like(parameter, self._demand(ref.row, shard_of(parameter, "").box))

    def _match_mapping(self, current: dict[Key, object], stored: Sequence[object], path: tuple[Key, ...]) -> Finish:
        mappings = [one for one in stored if isinstance(one, dict)]
        if not mappings:
            self._refuse(path, f"a mapping is given, but {type(stored[0]).__name__} is stored")
            return lambda _assembly: current
        finishes = {}
        for key, value in current.items():
            found = [one[key] for one in mappings if key in one]
            if found:
                finishes[key] = self._match(value, found, (*path, key))
            else:
                self._refuse((*path, key), f"is not in {self._stored_where}")
        if self._grows and path:
            # Of what ranks have, the own counts: what others have besides is theirs.
            for key in mappings[0]:
                if key in current:
                    continue
                shapes = [one[key] for one in mappings if key in one]
                finishes[key] = self._made(merge(shapes), (*path, key))

        def finish(assembly: Assembly) -> object:
            for key, part in finishes.items():
                current[key] = part(assembly)
            return current

        return finish

    def _match_sequence(
        self, current: list[object] | tuple[object, ...], stored: Sequence[object], path: tuple[Key, ...]
    ) -> Finish:
        alike = [one for one in stored if isinstance(one, (list, tuple)) and _is_like(one, current)]
        if not alike:
            return self._match_other_sequence(current, stored, path)
        finishes = [
            self._match(value, items, (*path, i)) for i, (value, *items) in enumerate(zip(current, *alike, strict=True))
        ]

        def finish(assembly: Assembly) -> object:
            values = [part(assembly) for part in finishes]
            if isinstance(current, tuple):
                return tuple(values)
            current[:] = values
            return current

        return finish

    def _match_other_sequence(
        self, current: list[object] | tuple[object, ...], stored: Sequence[object], path: tuple[Key, ...]
    ) -> Finish:
        """Replace a list of plain values by one of another length: a history that has grown."""
        found = next((one for one in stored if type(one) is type(current)), None)
        may_be = self._grows and isinstance(found, list)
        if not may_be or not isinstance(current, list) or not all(map(_is_plain, current)):
            there = f"a {type(found).__name__} of {len(found)}" if isinstance(found, (list, tuple)) else "no such"
            self._refuse(path, f"a {type(current).__name__} of {len(current)} is given, but {there} is stored")
            return lambda _assembly: current
        make = self._made(found, path)

        def finish(assembly: Assembly) -> object:
            current[:] = make(assembly)  # type: ignore[call-overload]  # a list, as it was stored
            return current

        return finish


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN)


def _is_like(one: Sequence[object], other: Sequence[object]) -> bool:
    return type(one) is type(other) and len(one) == len(other)


def _put_in(shape: object, tensors: _Tensors, assembly: Assembly) -> object:
    return with_tensors(shape, {number: make(assembly) for number, make in tensors.items()})


def _tensor_of(demand: Demand) -> Finish:
    return lambda assembly: assembly.tensor(demand)


def _part_like(parameter: DTensor, demand: Demand) -> Finish:
    return lambda assembly: like(parameter, assembly.tensor(demand))


def _shard(current: _Given) -> _Given:
    """Return the part of a tensor that is here, of one that ranks share.

    Raises:
        UnsupportedValueError: what is here is no part.
    """
    if isinstance(current, torch.Tensor) and is_dtensor(current):
        return shard_of(current, "")
    if isinstance(current, TensorShard) and not current.box.is_valid:
        raise UnsupportedValueError("", f"the given shard {current.box} does not lie within its whole tensor")
    return current


def _obstacle(current: torch.Tensor | np.ndarray, box: Box, stored: TensorRow) -> str:
    """Say why a tensor cannot be filled where it is, or nothing.

    Raises:
        UnsupportedValueError: no tensor of this kind can be stored.
    """
    given = make_leaf(current, "", "")
    if (given.dtype, box.whole) != (stored.dtype, stored.global_shape):
        return f"{given.dtype} {list(box.whole)} is given, but {stored.dtype} {list(stored.global_shape)} is stored"
    strides = current.strides if isinstance(current, np.ndarray) else current.stride()
    if given.nbytes and any(size > 1 and stride == 0 for size, stride in zip(current.shape, strides, strict=True)):
        return "the given tensor is expanded: several of its elements are one"
    if isinstance(current, np.ndarray):
        if not current.flags.writeable:
            return "the given array is read-only"
        if any(stride < 0 or stride % current.itemsize for stride in strides):
            return f"the given array has strides {list(strides)}, which torch cannot express"
    return ""
