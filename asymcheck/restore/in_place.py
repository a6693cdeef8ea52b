"""Restore in place: match a given state with a stored one, fill its tensors, and set its values."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from asymcheck.errors import InvalidInputError, RefusedStateError, StateMismatchError, UnsupportedValueError, listed
from asymcheck.format.manifest import TensorRow
from asymcheck.format.tree import Key, join_name
from asymcheck.restore.assemble import Assembly
from asymcheck.restore.read_plan import Demand
from asymcheck.restore.reshard import ShardSet
from asymcheck.restore.state_dict_check import (
    Lacking,
    PipelineStages,
    differences,
    misfits,
    parameters_of,
    state_for,
    with_classes,
)
from asymcheck.restore.state_template import (
    ABSENT,
    RowRef,
    map_leaves,
    merge,
    rows_in,
    select_each,
    with_names_of,
    with_tensors,
)
from asymcheck.state.boxes import Box
from asymcheck.state.leaves import PLAIN_TENSORS, identity_key, make_leaf
from asymcheck.state.names import did_you_mean
from asymcheck.state.shards import Distributed, TensorShard, is_dtensor, like, locals_of, shard_of
from asymcheck.state.typed_values import (
    CLASSES,
    IMMUTABLE,
    TypedValue,
    build,
    instances_in,
    is_nested,
    misfit,
    typed_value,
    with_class,
    without_class,
)
from asymcheck.state.walk import is_to_be_called
from asymcheck.state.zero_redundancy import local_part, share_options
from asymcheck.types import Stateful, is_stateful

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_SHOWN = 20
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(np.generic, torch.Size, torch.dtype, torch.device),
    *IMMUTABLE,
)
"""Types of values that stored values replace."""

_LISTED = 4

Finish = Callable[[Assembly], object]
"""Set plain values and load objects, given the filled tensors; return the value for the container above."""
_Given = torch.Tensor | np.ndarray | TensorShard
_Tensors = dict[int, Finish]  # results by tensor number


class InPlaceFill:
    """Match of a given state with a stored one, made before any byte is overwritten."""

    def __init__(
        self,
        state: object,
        parts: ShardSet,
        tensors: str = "*",
        *,
        grows: bool = False,
        returns: bool = False,
        merges: bool = False,
        reshards: bool = False,
        name: str = "the checkpoint",
    ) -> None:
        """Match ``state`` with the part of the stored state that the glob ``tensors`` selects.

        With ``grows``, stored entries are added to mappings that lack them, except to the outermost one, because the
        given state may be a part of the stored one. With ``returns``, the same training has saved the state: plain
        values that it added or replaced later are removed or replaced, and so are tensors that replaced a None.
        With ``merges``, created values have the entries of all ranks instead of those of the own rank. With
        ``reshards``, another number of ranks has saved the state, so each rank may have other tensors. ``name`` names
        the checkpoint in errors.

        Raises:
            StateMismatchError: lists all entries that do not fit, or were not saved.
        """
        self._state = state
        self._parts = parts
        self._grows, self._returns, self._merges, self._reshards = grows, returns, merges, reshards
        self._demands: dict[tuple[int, Box], Demand] = {}
        self._taken: dict[object, tuple[int, Box]] = {}
        self._problems: list[str] = []
        self.differences: list[str] = []  # between the given and the stored state, which torch accepts in silence
        self.omissions: list[str] = []  # stored values that a partial state lacks
        self.loaded: list[str] = []  # names of the tensors that load_state_dict() has got
        self._stages = PipelineStages(parts.own, parts.rank_of)
        stored = select_each(parts.shapes(), tensors)
        fillable = isinstance(state, (torch.Tensor, np.ndarray, TensorShard, Mapping, list, tuple))
        fillable |= is_stateful(state) or (typed_value(state) is not None and not isinstance(state, _PLAIN))
        # With several ranks, one of them may have nothing to save.
        is_empty = isinstance(state, (Mapping, list, tuple)) and not state and not reshards and rows_in(stored[0])
        if not fillable or is_empty or isinstance(state, type):
            raise InvalidInputError(f"into={state!r:.100}: give a state with tensors to fill")
        self._stored_where = "the checkpoint" + (f", or not in the selection {tensors!r}" if tensors != "*" else "")
        self._optimizers: list[Callable[[], None]] = []  # functions that match optimizers
        self._numbers: dict[int, int] = {}  # tensor numbers of parameters, by the id of the parameter
        self.finish = self._match(state, stored, ())
        """Sets plain values and calls ``load_state_dict()`` in order. Raises RefusedStateError if an object refuses."""
        while self._optimizers:
            self._optimizers.pop(0)()
        self._problems += self._stages.problems()
        if self._problems:
            shown = "\n  ".join(self._problems[:_SHOWN])
            more = f"\n  … and {len(self._problems) - _SHOWN} more" if len(self._problems) > _SHOWN else ""
            gaps = tuple(parts.gaps)
            fits = all(problem.endswith(gaps) for problem in self._problems)
            what = f"{name} lacks parts of tensors" if fits else f"the given state does not fit {name}"
            advice = "Build the objects as they were saved, choose another run, or load what fits: load(tensors=…)"
            advice = "" if fits else f". {advice}"
            error = StateMismatchError(f"{what}; nothing was overwritten{advice}:\n  {shown}{more}")
            error.lacking = tuple(
                problem for problem in self._problems if isinstance(problem, Lacking) or problem.endswith(gaps)
            )
            raise error

    @property
    def demands(self) -> list[Demand]:
        """Boxes of stored tensors that the state needs."""
        return list(self._demands.values())

    # ``stored`` has the entries of all ranks at one path; it is never empty, and starts with the own rank.

    def _match(self, current: object, stored: Sequence[object], path: tuple[Key, ...]) -> Finish:
        stored = [value for value in stored if value is not ABSENT]
        if not stored:
            return self._refuse(path, Lacking(f"is not in {self._stored_where}"))
        problems = len(self._problems)
        finish = self._match_in_place(current, stored, path)
        if self._returns and len(self._problems) > problems and path:
            shape = self._created_from(stored)
            if _is_plain(current, with_data=shape is None) and not rows_in(shape):
                del self._problems[problems:]
                return self._made(shape, path)
        return finish

    def _match_in_place(self, current: object, stored: Sequence[object], path: tuple[Key, ...]) -> Finish:
        if isinstance(current, (torch.Tensor, np.ndarray, TensorShard)) and not is_nested(current):
            return self._match_tensor(current, stored, path)
        if is_to_be_called(current):
            if not isinstance(current, torch.optim.Optimizer):
                return self._match_stateful(current, stored, path)
            # The ranks that stored its parameters are known once all modules are matched.
            made: list[Finish] = []
            self._optimizers.append(lambda: made.append(self._match_stateful(current, stored, path)))
            return lambda assembly: made[0](assembly)  # noqa: PLW0108 - the list is still empty
        parts = None if isinstance(current, _PLAIN) and not isinstance(current, Enum) else typed_value(current)
        if parts is not None and parts.kind != "defaultdict":
            return self._match_typed(current, parts, stored, path)
        if isinstance(current, dict):
            return self._match_mapping(current, _contents(stored), path)
        if type(current) in (list, tuple):
            return self._match_sequence(current, _contents(stored), path)  # type: ignore[arg-type]  # the type was just compared
        if not isinstance(current, _PLAIN):
            self._refuse(path, f"{type(current).__qualname__} cannot be filled; give None to create it")
        shape = self._created_from(stored)
        if isinstance(current, frozenset):
            self._check_members(shape, path)
        return self._made(shape, path)

    @functools.cached_property
    def _instances(self) -> dict[str, object]:
        return instances_in(self._state)

    def _check_members(self, shape: object, path: tuple[Key, ...]) -> None:
        """Refuse a stored set whose members cannot be restored, because their values alone would differ from them."""
        unknown = without_class(with_class(shape, self._instances))
        if unknown:
            advice = "add a member of the class to the given state, or give None to get the values of members"
            self._refuse(path, f"the stored set has {listed(unknown)}, of which no class is given; {advice}")

    def _refuse(self, path: tuple[Key, ...], problem: str) -> Finish:
        """Note a problem. The result is never called, because a state with problems is refused as a whole."""
        self._problems.append(type(problem)(f"{join_name(path) or '<root>'}: {problem}"))
        return lambda _assembly: None

    def _created_from(self, stored: Sequence[object]) -> object:
        """Return the shape of a value to create. Other ranks may have other values at its place."""
        return merge(stored) if self._merges else stored[0]

    def _made(self, shape: object, path: tuple[Key, ...]) -> Finish:
        """Create a stored value, including its tensors, with the classes of instances in the given state."""
        shape = map_leaves(shape, typed=lambda value: with_class(value, self._instances))
        if self._grows:
            self._note_unknown(shape, path)
        tensors = self._want(shape, path, {})
        return lambda assembly: _put_in(shape, tensors, assembly)

    def _note_unknown(self, shape: object, path: tuple[Key, ...]) -> None:
        """Note classes of which the given state has no instance, if a training is to continue without them."""
        names: dict[str, None] = {}

        def note(value: TypedValue) -> TypedValue:
            if value.kind in CLASSES and value.like is None:
                names[str(value.parameter)] = None
            return value

        map_leaves(shape, typed=note)
        if names:
            unknown = f"{join_name(path) or '<root>'}: the given state has no instance of {listed([*names], _LISTED)}"
            made = "a dict of the fields replaces a namedtuple or dataclass, and the value replaces an Enum member"
            self.differences.append(f"{unknown}: {made}; put an instance of the class into the given state")

    def _want(self, shape: object, path: tuple[Key, ...], tensors: _Tensors) -> _Tensors:
        """Demand all tensors of a shape that are not in ``tensors``, whole; return the results by number."""
        for number in rows_in(shape):
            if number not in tensors:
                try:
                    tensors[number] = _tensor_of(self._demand(number, self._parts.whole(number)))
                except StateMismatchError as error:
                    self._refuse(path, f"tensor {self._parts.row(number).name}: {error}")
        return tensors

    def _demand(self, number: int, box: Box) -> Demand:
        """Demand a box of a tensor.

        Raises:
            StateMismatchError: parts of the box were not saved.
        """
        if (number, box) not in self._demands:
            self._demands[number, box] = Demand.of(self._parts, number, box)
        return self._demands[number, box]

    def _match_tensor(self, current: _Given, stored: Sequence[object], path: tuple[Key, ...]) -> Finish:
        ref = next((value for value in stored if isinstance(value, RowRef)), None)
        if ref is None:
            return self._refuse(path, f"a tensor is given, but {_noun(stored[0])} is stored")
        try:
            self._take(current, ref.row)
        except UnsupportedValueError as error:
            return self._refuse(path, error.reason)
        except StateMismatchError as error:
            return self._refuse(path, str(error))
        return lambda _assembly: current

    def _take(self, current: _Given, number: int) -> None:
        """Demand that a tensor is filled in place.

        Raises:
            StateMismatchError, UnsupportedValueError: the tensor cannot be filled in place.
        """
        if isinstance(current, torch.Tensor) and is_lazy(current):
            raise StateMismatchError("has no shape yet; give the module instead of its state")
        local, box = _shard(current)
        problem = _obstacle(local, box, self._parts.row(number))
        if problem:
            raise StateMismatchError(problem)
        tensor = torch.from_numpy(local) if isinstance(local, np.ndarray) else local
        # As in a save, where two arrays of the same memory are different tensors. They are compared after the fill.
        key = identity_key(local)
        other = self._taken.get(key)
        if other not in (None, (number, box)):
            name = self._parts.row(other[0]).name
            raise StateMismatchError(f"shares its memory with {name}, but both are different tensors in the checkpoint")
        demand = self._demand(number, box)
        if other is None:
            demand.existing.append(tensor)
        if key is not None:
            self._taken[key] = number, box

    def _match_typed(
        self, current: object, parts: TypedValue, stored: Sequence[object], path: tuple[Key, ...]
    ) -> Finish:
        found = next((value for value in stored if isinstance(value, TypedValue)), None)
        if found is None:
            return self._refuse(path, f"a {parts.kind} is given, but {_noun(stored[0])} is stored")
        if problem := misfit(current, parts, found):
            return self._refuse(path, problem)
        if parts.kind == "set":
            self._check_members(found, path)
        contents = [value.content for value in stored if isinstance(value, TypedValue) and value.kind == found.kind]
        items = parts.content
        # Objects are never replaced, because only their state is stored.
        may_move = parts.kind == "deque" and not any(map(is_to_be_called, items))
        # A set, an Enum member or a nested tensor is restored as a whole, and a deque of another length, too.
        is_whole = parts.kind in ("set", "enum", "nested-tensor") or (may_move and not _is_like(items, contents[0]))
        problems = len(self._problems)
        make = None if is_whole else self._match(items, contents, path)
        if make is None or (self._grows and may_move and len(self._problems) > problems):
            # In a training, the items of a deque move, so that two items at one place may differ in type or shape.
            del self._problems[problems:]
            make = self._made(self._created_from(contents), path)

        def finish(assembly: Assembly) -> object:
            value = dataclasses.replace(found, content=make(assembly), like=current)
            try:
                return build(value)
            except RefusedStateError as error:
                raise RefusedStateError(f"{join_name(path) or '<root>'}: {error}", (), None) from error

        return finish

    def _savers(self, parameter: torch.nn.Parameter) -> Container[int]:
        """Return the ranks that stored a parameter, but none if the own rank did.

        If the state lacks the parameter, a DTensor may have moved from any rank.
        """
        number = self._number_of(parameter)
        is_new = number is not None or self._merges or self._reshards or is_dtensor(parameter)
        return self._parts.savers(number) if is_new else ()

    def _number_of(self, parameter: torch.nn.Parameter) -> int | None:
        """Return the number of the tensor that is restored into a parameter; None if the state lacks the parameter."""
        (local,) = locals_of([parameter])
        key = identity_key(local) if type(local) in PLAIN_TENSORS else None
        number, _ = self._taken.get(key, (None, None))
        return self._numbers.get(id(parameter), number)

    def _unconverted(self, current: Stateful) -> set[int]:
        """Return the ids of the parameters of an optimizer that are restored with the dtype of the checkpoint."""
        groups = current.param_groups if isinstance(current, torch.optim.Optimizer) else []
        pairs = [(parameter, self._number_of(parameter)) for group in groups for parameter in group["params"]]
        return {
            id(parameter)
            for parameter, number in pairs
            if number is not None and f"torch.{self._parts.row(number).dtype}" == str(parameter.dtype)
        }

    def _match_stateful(self, current: Stateful, stored: Sequence[object], path: tuple[Key, ...]) -> Finish:
        name = join_name(path)
        mappings = [value for value in stored if isinstance(value, dict)]
        if not mappings:
            return self._refuse(path, f"an object with load_state_dict() is given, but {_noun(stored[0])} is stored")
        given, current = current, local_part(current)
        state = current.state_dict()
        if isinstance(current, torch.nn.Module):
            mappings = [with_names_of(state, mapping) for mapping in mappings]
        fitting = [key for key, part in mappings[0].items() if isinstance(part, dict) and state.keys() <= part.keys()]
        if not path and state and fitting and state.keys().isdisjoint(mappings[0]):
            return self._refuse(path, f"an object is given that fits {fitting[0]!r}: give {{{fitting[0]!r}: …}}")
        instances = functools.cache(lambda: instances_in(self._state, state))
        shape = with_classes(state_for(current, mappings, state, self._savers, self._parts.rank_of), state, instances)
        self._problems += [
            type(problem)(".".join(filter(None, (name, problem))))
            for problem in misfits(current, shape, self._parts.row, self._stored_where)
        ]
        self.differences += [
            f"{name or '<root>'}: {difference}" for difference in differences(current, shape, self._parts.row)
        ]
        if isinstance(current, torch.nn.Module):
            self._stages.add_module(name, current, state, mappings)
            for key, parameter in current.named_parameters(remove_duplicate=False):
                if isinstance(ref := shape.get(key), RowRef):
                    self._check_tied(self._numbers.get(id(parameter), ref.row), ref.row)
                    self._numbers[id(parameter)] = ref.row
        elif isinstance(current, torch.optim.Optimizer):
            self._stages.add_optimizer(name, current, shape)
        tensors: _Tensors = {}
        self._match_loosely(state, shape, tensors)
        self._match_parameters(current, state, shape, tensors)
        self._want(shape, path, tensors)
        if self._grows:
            self._note_unknown(shape, path)
        unconverted = self._unconverted(current)

        def finish(assembly: Assembly) -> object:
            restored: Any = _put_in(shape, tensors, assembly)
            # The object copies the tensors that could not be filled in place, for instance those of another dtype.
            self.loaded += [self._parts.row(number).name for number in tensors]
            try:
                current.load_state_dict(restored)
            except Exception as error:
                what = f"{name or '<root>'}: load_state_dict() of {type(current).__qualname__} refused the stored state"
                raise RefusedStateError(f"{what}: {error}", (), None) from error
            if isinstance(current, torch.optim.Optimizer):
                _undo_casts(current, restored, unconverted)
            share_options(given)
            return given

        return finish

    def _check_tied(self, first: int, second: int) -> None:
        """Note that a module has one parameter for two stored tensors, unless their stored bytes are the same."""
        one, other = self._parts.row(first), self._parts.row(second)
        # Tensors of one name on several ranks are replicas.
        are_replicas = not {one.name, *one.aliases}.isdisjoint((other.name, *other.aliases))
        if not are_replicas and (one.inline, one.extents) != (other.inline, other.extents):
            tied = f"{one.name} and {other.name} are one tensor in the given state, but two in the checkpoint"
            self.differences.append(f"{tied}: the second one is used")

    def _match_loosely(self, current: object, stored: object, tensors: _Tensors) -> None:
        # Inside such an object, only exact matches are filled in place. The object itself checks the rest.
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

    def _match_parameters(
        self, current: Stateful, state: Mapping[str, object], stored: Mapping[Key, object], tensors: _Tensors
    ) -> None:
        # State that a fresh optimizer lacks is sharded like its parameter, and so is a weight of another dtype.
        for lacking, part in current.missing(stored) if isinstance(current, Distributed) else ():
            if isinstance(lacking, RowRef) and self._parts.row(lacking.row).global_shape == part.global_shape:
                with contextlib.suppress(StateMismatchError):
                    tensors.setdefault(lacking.row, _tensor_of(self._demand(lacking.row, part.box)))
        for ref, parameter in parameters_of(current, state, stored):
            if ref.row in tensors or ref.as_array or self._parts.row(ref.row).global_shape != tuple(parameter.shape):
                continue
            with contextlib.suppress(StateMismatchError, UnsupportedValueError):
                if is_dtensor(parameter):
                    tensors[ref.row] = _part_like(parameter, self._demand(ref.row, shard_of(parameter, "").box))
                elif not parameter.is_contiguous():
                    tensors[ref.row] = _laid_out_like(parameter, self._demand(ref.row, self._parts.whole(ref.row)))

    def _match_mapping(self, current: dict[Key, object], stored: Sequence[object], path: tuple[Key, ...]) -> Finish:
        mappings = [value for value in stored if isinstance(value, dict)]
        if not mappings:
            return self._refuse(path, f"a mapping is given, but {_noun(stored[0])} is stored")
        finishes, added = {}, []
        for key, value in current.items():
            values = [mapping[key] for mapping in mappings if key in mapping]
            if values:
                finishes[key] = self._match(value, values, (*path, key))
            elif self._returns and _is_plain(value):
                added.append(key)
            else:
                advice = did_you_mean(key, mappings[0], current)
                later = "; add it to the state after the restore" if self._grows and not advice else ""
                self._refuse((*path, key), Lacking(f"is not in {self._stored_where}{advice}{later}"))
        if not (self._grows and path) and (unused := [key for key in mappings[0] if key not in current]):
            where = f"{join_name(path)}: " if path else ""
            # Nobody asks for a part of a state with an empty mapping, so this is reported even if not strict.
            problems = self.differences if self._grows or not current else self.omissions
            advice = (
                "" if self._grows or current or not path else "; give None instead of an empty mapping to create it"
            )
            problems.append(f"{where}stored, but not in the given state: {listed(unused)}{advice}")
        if self._grows and path:
            for key, shape in self._added(current, mappings, path):
                finishes[key] = self._made(shape, (*path, key))

        def finish(assembly: Assembly) -> object:
            for key in added:
                del current[key]
            for key, part in finishes.items():
                current[key] = part(assembly)
            if path:
                _put_in_order(current, mappings[0])
            return current

        return finish

    def _added(
        self, current: dict[Key, object], mappings: Sequence[dict[Key, object]], path: tuple[Key, ...]
    ) -> Iterator[tuple[Key, object]]:
        """Yield the entries of the own rank that a mapping lacks."""
        has_objects = not self._reshards and any(map(is_to_be_called, current.values()))
        for key in mappings[0]:
            shapes = [mapping[key] for mapping in mappings if key in mapping]
            if key in current:
                continue
            if self._reshards and any(map(rows_in, shapes)):
                # Another rank may train these tensors now. A second copy of them would become outdated.
                if len(shapes) < len(mappings):
                    continue
                if not self._parts.is_whole:
                    lacking = Lacking("is not in the given state, and parts of some ranks are missing")
                    self._refuse((*path, key), lacking)
            shape = self._created_from(shapes)
            if has_objects and _is_state_of_object(shape):
                problem = "a module or an optimizer is stored, but not given; add it before the restore"
                self.differences.append(f"{join_name((*path, key))}: {problem}")
            yield key, shape

    def _match_sequence(
        self, current: list[object] | tuple[object, ...], stored: Sequence[object], path: tuple[Key, ...]
    ) -> Finish:
        sequences = [value for value in stored if isinstance(value, (list, tuple))]
        alike = [value for value in sequences if _is_like(value, current)]
        # If only the sequence of another rank has this length, it must not replace that of the own rank.
        if not alike or alike[0] is not sequences[0]:
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
        """Replace a list of plain values by one of another length, or extend a shorter list of other values."""
        value = next((value for value in stored if type(value) is type(current)), None)
        if not (self._grows and isinstance(current, list) and isinstance(value, list)):
            given = f"a {type(current).__name__} of {len(current)}"
            kept = f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else "no such"
            advice = "; give None to create it" if value is not None and path else ""
            return self._refuse(path, f"{given} is given, but {kept} is stored{advice}")
        is_plain = all(map(_is_plain, current))
        surplus = len(current) - len(value)
        if (not is_plain and surplus > 0) or (surplus < 0 and any(map(is_to_be_called, current))):
            problem = f"a list of {len(current)} is given, but a list of {len(value)} is stored"
            advice = f"remove the last {surplus}" if surplus > 0 else f"append {-surplus}"
            return self._refuse(path, f"{problem}; {advice} before the restore")
        kept_items = 0 if is_plain else len(current)
        alike = [item[:kept_items] for item in stored if isinstance(item, list) and _is_like(item, value)]
        fill = self._match_sequence(current, alike, path) if kept_items else None
        make = self._made(value[kept_items:], path)

        def finish(assembly: Assembly) -> object:
            if fill is not None:
                fill(assembly)
            current[kept_items:] = make(assembly)  # type: ignore[call-overload]  # a list, as it was stored
            return current

        return finish


def _contents(stored: Sequence[object]) -> list[object]:
    """Return stored values, with the contents of typed values: a dict can be filled from a defaultdict."""
    return [value.content if isinstance(value, TypedValue) else value for value in stored]


def _is_state_of_object(stored: object) -> bool:
    """Tell whether a stored value is the state of a module or an optimizer."""
    return isinstance(stored, dict) and (hasattr(stored, "_metadata") or stored.keys() == {"state", "param_groups"})


def _put_in_order(current: dict[Key, object], stored: Mapping[Key, object]) -> None:
    """Give the restored entries of a mapping their stored order, on which caches rely."""
    order = [key for key in stored if key in current]
    if order != [key for key in current if key in stored]:
        for key in order:
            current[key] = current.pop(key)


def _noun(stored: object) -> str:
    if isinstance(stored, RowRef):
        return "a tensor"
    return f"a {stored.kind}" if isinstance(stored, TypedValue) else type(stored).__name__


def _is_plain(value: object, *, with_data: bool = False) -> bool:
    """Tell whether a value consists of plain values, and ``with_data`` of tensors that no optimizer changes."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item, with_data=with_data) for item in value)
    if with_data and (isinstance(value, np.ndarray) or (type(value) is torch.Tensor and not value.requires_grad)):
        return True
    return isinstance(value, _PLAIN) and not isinstance(value, Enum)


def _is_like(a: Sequence[object], b: Sequence[object]) -> bool:
    return type(a) is type(b) and len(a) == len(b)


def _put_in(shape: object, tensors: _Tensors, assembly: Assembly) -> object:
    return with_tensors(shape, {number: make(assembly) for number, make in tensors.items()})


def _undo_casts(optimizer: torch.optim.Optimizer, restored: Mapping[str, Any], unconverted: Container[int]) -> None:
    """Set state of an optimizer that torch changed: strings, containers, and tensors of another dtype.

    ``unconverted`` has the ids of parameters with the dtype of the checkpoint. If a parameter has got another dtype,
    torch gives its state this dtype, too.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    numbers = [number for group in restored["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        values = restored["state"].get(number)
        if isinstance(values, dict):
            loaded, keep_dtypes = optimizer.state[parameter], id(parameter) in unconverted
            loaded.update({key: _uncast(values.get(key), value, keep_dtypes) for key, value in loaded.items()})


def _uncast(stored: Any, loaded: Any, keep_dtypes: bool) -> Any:  # noqa: ANN401, FBT001 - any value of an optimizer
    """Return a loaded value with the stored strings and containers, and with its dtypes if they are to be kept."""
    if isinstance(stored, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return stored.to(loaded.device) if keep_dtypes and stored.dtype != loaded.dtype else loaded
    if type(stored) is str:
        return stored
    if isinstance(stored, dict) and isinstance(loaded, dict):
        mapping = stored.copy()
        mapping.update({key: _uncast(stored.get(key), value, keep_dtypes) for key, value in loaded.items()})
        return mapping
    if type(stored) in (list, tuple, deque) and _is_like(stored, loaded):
        items = [_uncast(*pair, keep_dtypes) for pair in zip(stored, loaded, strict=True)]
        return deque(items, stored.maxlen) if isinstance(stored, deque) else type(stored)(items)
    return loaded


def _tensor_of(demand: Demand) -> Finish:
    return lambda assembly: assembly.tensor(demand)


def _laid_out_like(parameter: torch.Tensor, demand: Demand) -> Finish:
    """Give a tensor the strides of its parameter. Fused optimizers on the CPU pair elements by their addresses."""

    def make(assembly: Assembly) -> torch.Tensor:
        tensor = assembly.tensor(demand)
        return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    return make


def _part_like(parameter: DTensor, demand: Demand) -> Finish:
    return lambda assembly: like(parameter, assembly.tensor(demand))


def _shard(current: _Given) -> tuple[torch.Tensor | np.ndarray, Box]:
    """Return the local data of a tensor, and the box of the data in the whole tensor.

    Raises:
        UnsupportedValueError: the local data is not a valid shard.
    """
    if isinstance(current, torch.Tensor) and is_dtensor(current):
        current = shard_of(current, "")
    if not isinstance(current, TensorShard):
        return current, Box.of_whole(tuple(current.shape))
    if not current.box.is_valid:
        raise UnsupportedValueError("", f"the given shard {current.box} is not inside of its whole tensor")
    return current.local, current.box


def _obstacle(current: torch.Tensor | np.ndarray, box: Box, stored: TensorRow) -> str:
    """Return the reason why a tensor cannot be filled in place; empty if it can.

    Raises:
        UnsupportedValueError: tensors of this kind cannot be stored.
    """
    given = make_leaf(current, "", "")
    if (given.dtype, box.whole) != (stored.dtype, stored.global_shape):
        return f"{given.dtype} {list(box.whole)} is given, but {stored.dtype} {list(stored.global_shape)} is stored"
    strides = current.strides if isinstance(current, np.ndarray) else current.stride()
    if given.nbytes and any(size > 1 and stride == 0 for size, stride in zip(current.shape, strides, strict=True)):
        return "the given tensor is expanded, so several elements share one memory location"
    if isinstance(current, np.ndarray):
        if not current.flags.writeable:
            return "the given array is read-only"
        if any(stride < 0 or stride % current.itemsize for stride in strides):
            return f"the given array has strides {list(strides)}, which torch cannot express"
    return ""
