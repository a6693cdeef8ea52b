"""Flatten consecutive states of one training, based on the previous one.

Saves wait for this. From step to step, a state usually keeps its structure, and its tensors keep their memory. Then
all tensors are compared together instead of described one by one, which takes half of the time. A state that differs in
more than plain values and addresses of tensors is walked again. The result always equals that of
:func:`asymcheck.state.walk.flatten`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter, eq, ne

import torch

from asymcheck.errors import UnsupportedValueError
from asymcheck.format.tree import Node
from asymcheck.state.boxes import Box
from asymcheck.state.leaves import PLAIN_TENSORS, Leaf, Source, identity_key
from asymcheck.state.shards import is_dtensor, is_laid_out
from asymcheck.state.walk import Called, Columns, FlatState, Walker

_GETTERS: tuple[Callable[[torch.Tensor], object], ...] = (
    # Compared first, because other layouts have no strides. Quantized tensors have their own dtypes.
    attrgetter("layout"),
    attrgetter("is_nested"),
    attrgetter("dtype"),
    attrgetter("device"),
    attrgetter("shape"),
    torch.Tensor.stride,
    torch.Tensor.is_neg,
)


class Flattener:
    """Flattener for the states of one training. For one thread at a time; keeps no tensors."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._columns: Columns | None = None

    def flatten(self, state: object) -> FlatState:
        """Return the result of :func:`~asymcheck.state.walk.flatten`."""
        called: Called = {}
        flat = None if self._known is None else self._known.flatten(state, called)
        if flat is None:
            walker = Walker(called)
            flat = walker.flatten(state)
            # Only a structure that returns is worth the time, which is likely after two occurrences.
            self._known = _Known(flat, walker) if flat.columns == self._columns else None
        self._columns = flat.columns
        return flat


class _Known:
    """Description of the last state, without its tensors. Most lists have one entry for each occurrence of a tensor."""

    def __init__(self, flat: FlatState, walker: Walker) -> None:
        """Describe a state, which ``walker`` has walked."""
        self._columns = flat.columns
        self._keys = [leaf.key for leaf in flat.leaves]
        self.places, self.nodes = walker.places, walker.nodes
        self.layouts, self.mappings = walker.layouts, walker.mappings
        self._rows: list[int] = [row for _, row in walker.nodes]
        first: dict[int, int] = {}
        for number, row in enumerate(self._rows):
            first.setdefault(row, number)
        self._firsts = [*first.values()]  # first occurrence of each row
        tensors, self._others = _split(walker.sources)
        # Only complex tensors can be conjugated, and dtypes are compared first.
        is_complex = any(tensor.is_complex() for tensor in tensors)
        self._getters = (*_GETTERS, torch.Tensor.is_conj) if is_complex else _GETTERS
        self._properties = [[*map(get, tensors)] for get in self._getters]
        self._addresses = [*map(_address, walker.sources)]

    def flatten(self, state: object, called: Called) -> FlatState | None:
        """Flatten a state; return None if its structure differs."""
        recorder = _Recorder(called, self)
        try:
            tree = recorder.node(state, None, 0)
        except UnsupportedValueError:
            # A walk finds the same error, unless the error comes from another number of tensors.
            return None
        tensors, others = _split(recorder.sources)
        if recorder.places != self.places or others != self._others or not self._have_properties(tensors):
            return None
        if not self._take_addresses(recorder.sources):
            return None
        self.mappings = recorder.mappings
        columns, sources = self._columns, map(recorder.sources.__getitem__, self._firsts)
        described = (columns.dtypes, columns.shapes, columns.sizes, columns.groups, columns.boxes, columns.aliases)
        return FlatState(tree, [*map(Leaf, sources, columns.names, *described, self._keys)], columns)

    def _have_properties(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tell whether tensors have the same properties that determine their identity keys, except addresses.

        Properties are compared without storing new ones, because thousands of new shapes can trigger the garbage
        collector.
        """
        return PLAIN_TENSORS.issuperset(map(type, tensors)) and all(
            all(map(eq, known, map(get, tensors))) for known, get in zip(self._properties, self._getters, strict=True)
        )

    def _take_addresses(self, sources: Sequence[Source]) -> bool:
        """Note the addresses of tensors; return False if a moved tensor shares its memory with another one."""
        before, now = self._addresses, [*map(_address, sources)]
        moved = [number for number, has_moved in enumerate(map(ne, before, now)) if has_moved]
        if moved:
            users = Counter(before), Counter(now)
            if any(users[0][before[number]] > 1 or users[1][now[number]] > 1 for number in moved):
                return False
        for number in moved:
            self._keys[self._rows[number]] = identity_key(sources[number])
        self._addresses = now
        return True


def _split(sources: Sequence[Source]) -> tuple[list[torch.Tensor], list[object]]:
    """Return the tensors of torch, and a description of the other sources."""
    tensors = [source for source in sources if isinstance(source, torch.Tensor)]
    others = [(number, source) for number, source in enumerate(sources) if not isinstance(source, torch.Tensor)]
    return tensors, [(number, type(source), source.dtype, source.shape) for number, source in others]


def _address(source: Source) -> int:
    """Return the address of a tensor; for other sources, the id of the object."""
    return source.data_ptr() if isinstance(source, torch.Tensor) else -id(source)


class _Recorder(Walker):
    """Walk that records tensors instead of describing them."""

    def __init__(self, called: Called, known: _Known) -> None:
        super().__init__(called)
        self._nodes = iter(known.nodes)
        # Nodes that are still the same are used again, because many new lists trigger Python's garbage collector.
        self._known_mappings = known.mappings
        self._known_layouts = known.layouts

    def _shard(self, value: object, name: str) -> Node:
        box, layout = self._known_layouts.get(len(self.sources), (None, ()))
        if box is None or not is_dtensor(value) or not is_laid_out(value, layout):
            return super()._shard(value, name)
        # With gradients, to_local() would create a new tensor for autograd.
        with torch.no_grad():
            return self._tensor(value.to_local(), name, box)

    def _tensor(self, value: Source, name: str, box: Box | None = None) -> Node:
        self.sources.append(value)
        self.places.append((name, self._group, box))
        return next(self._nodes, None)
