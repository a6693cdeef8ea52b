"""Flattener: takes the states of one training apart, one after another, by what the one before was like.

A save waits for this. From step to step a state keeps its structure as a rule, and its tensors their memory: then keys
are compared a mapping at a time, and tensors all together, which takes a quarter of the time of a walk. What that finds
is what :func:`asymcheck.partition.state.flatten` would find: a state that differs in more than plain values and the
memory of single tensors is walked anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from operator import attrgetter, eq
from typing import Any, cast

import torch

from asymcheck.partition.leaves import PLAIN_TENSORS, Leaf, Source, identity_key
from asymcheck.partition.shards import TensorShard, is_dtensor, is_laid_out, layout_of
from asymcheck.partition.state import Called, Columns, FlatState, Walker
from asymcheck.partition.template import Walk, template_of

_GETTERS: tuple[Callable[[torch.Tensor], object], ...] = (
    # First, for others have no shapes or strides that could be asked for. Quantized ones have dtypes of their own.
    attrgetter("layout"),
    attrgetter("is_nested"),
    attrgetter("dtype"),
    attrgetter("device"),
    attrgetter("shape"),
    torch.Tensor.stride,
    torch.Tensor.is_neg,
)


class Flattener:
    """Takes states apart; for one thread at a time. It keeps no tensor."""

    def __init__(self) -> None:
        """Begin without a state."""
        self._known: _Known | None = None
        self._columns: Columns | None = None

    def flatten(self, state: object) -> FlatState:
        """Do what :func:`~asymcheck.partition.state.flatten` does.

        Raises:
            UnsupportedValueError: something cannot be stored; names its path.
        """
        called: Called = {}
        flat = None if self._known is None else self._known.flatten(state, called)
        if flat is None:
            walker = Walker(called)
            tree = walker.node(state, None, 0)
            flat = FlatState(tree, walker.leaves, Columns.of(walker.leaves))
            # What has come twice may come again: to remember what is otherwise each time takes longer than to walk it.
            self._known = _Known(flat, walker.visits) if flat.columns == self._columns else None
        self._columns = flat.columns
        return flat


class _Known:
    """What the last state was like."""

    def __init__(self, flat: FlatState, visits: Sequence[tuple[object, int]]) -> None:
        """Take a state that was walked; ``visits`` are its tensors where they were met, with their rows."""
        self._template = template_of(flat.tree, None, 0)
        self._columns = flat.columns
        self._keys = [leaf.key for leaf in flat.leaves]
        self._rows = [row for _, row in visits]
        first = {row: visit for visit, row in reversed([*enumerate(self._rows)])}
        self._firsts = [first[row] for row in range(len(flat.leaves))]
        self._is_each_once = len(visits) == len(flat.leaves)
        self._odd = {
            number: (type(given), layout_of(given) if is_dtensor(given) else None)
            for number, (given, _) in enumerate(visits)
            if type(given) not in PLAIN_TENSORS
        }
        # A tensor that was met before is the same as then, but for what decides nothing here.
        sources = [flat.leaves[row].source for row in self._rows]
        self._kinds = _Kinds([source for source in sources if isinstance(source, torch.Tensor)])
        self._places = [*map(_place, sources)]

    def flatten(self, state: object, called: Called) -> FlatState | None:
        """Take a state apart; None when it is not like this one."""
        walk = Walk(called)
        tree = self._template.take(walk, state)
        if not walk.is_as_before:
            return None
        # Once, and not for each of a thousand DTensors: without, their parts are made anew, to lead autograd through.
        with torch.no_grad() if self._odd else contextlib.nullcontext():
            resolved = {number: self._resolved(number, walk.visits[number], called) for number in self._odd}
        sources = walk.visits
        for number, source in resolved.items():
            sources[number] = source
        tensors = [source for source in sources if isinstance(source, torch.Tensor)] if self._odd else sources
        if any(source is None for source in resolved.values()) or not self._kinds.are_those_of(tensors):
            return None
        known = cast("list[Source]", sources)
        places = [*map(_place if self._odd else torch.Tensor.data_ptr, known)]  # type: ignore[arg-type]  # all are tensors
        if places != self._places and not self._have_moved(places, known):
            return None
        return FlatState(tree, self._leaves(known), self._columns)

    def _resolved(self, number: int, given: object, called: Called) -> object:
        """Return the source of a tensor that is none of torch's plain ones; None unless all else of it is as it was."""
        kind, layout = self._odd[number]
        if type(given) is not kind:
            return None
        if layout is not None and is_dtensor(given) and is_laid_out(given, layout):
            # The shape of the part is compared with all others: together they say which part it is.
            return given.to_local()
        columns, row = self._columns, self._rows[number]
        if isinstance(given, TensorShard):
            return given.local if given.box == columns.boxes[row] else None
        walker = Walker(called, columns.groups[row])
        walker.node(given, columns.names[row], 1)
        # What is of the kind of a tensor is one leaf.
        (leaf,) = walker.leaves
        known = (columns.dtypes[row], columns.shapes[row], columns.boxes[row], columns.sizes[row])
        return leaf.source if (leaf.dtype, leaf.shape, leaf.box, leaf.nbytes) == known else None

    def _leaves(self, sources: list[Source]) -> list[Leaf]:
        columns = self._columns
        firsts = sources if self._is_each_once else [sources[visit] for visit in self._firsts]
        described = (columns.dtypes, columns.shapes, columns.sizes, columns.groups, columns.boxes, columns.aliases)
        return [*map(Leaf, firsts, columns.names, *described, self._keys)]

    def _have_moved(self, places: list[int], sources: Sequence[Source]) -> bool:
        """Note that tensors lie elsewhere, and that is all: each had its memory for itself, and has it now."""
        moved = {number for number, (old, new) in enumerate(zip(self._places, places, strict=True)) if old != new}
        stayed = {place for number, place in enumerate(places) if number not in moved}
        gone, come = [self._places[number] for number in moved], [places[number] for number in moved]
        if len({*gone}) < len(moved) or len({*come}) < len(moved) or not stayed.isdisjoint((*gone, *come)):
            return False
        for number in moved:
            self._keys[self._rows[number]] = identity_key(sources[number])
        self._places = places
        return True


def _place(source: Source) -> int:
    """Return where a tensor begins in memory; of what lies in none that torch knows, which object it is."""
    return source.data_ptr() if isinstance(source, torch.Tensor) else -id(source)


class _Kinds:
    """All that makes up the identity keys of tensors but their places, and what decides whether they can be stored.

    It is compared one thing after another, and as it comes: to keep thousands of shapes at once can set off the
    collector.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take tensors that were stored: they are dense, and not nested."""
        # Only complex numbers are conjugated, and dtypes are compared before.
        is_complex = any(tensor.is_complex() for tensor in tensors)
        self._getters = (*_GETTERS, torch.Tensor.is_conj) if is_complex else _GETTERS
        self._known = [[*map(get, tensors)] for get in self._getters]
        self._count = len(tensors)

    def are_those_of(self, tensors: Sequence[Any]) -> bool:
        """Tell whether others have the same, each for itself."""
        return (
            len(tensors) == self._count
            and PLAIN_TENSORS.issuperset(map(type, tensors))
            and all(
                all(map(eq, known, map(get, tensors))) for known, get in zip(self._known, self._getters, strict=True)
            )
        )
