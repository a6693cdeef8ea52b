"""Sources of a merge: open checkpoints, and their tensors by name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from asymcheck.convert.part import small_files
from asymcheck.errors import (
    AsymcheckError,
    CheckpointNotFoundError,
    FormatError,
    InvalidInputError,
    RecoveryError,
    StateMismatchError,
    listed,
)
from asymcheck.format.manifest import Extent, TensorRow
from asymcheck.format.registry import DTYPE_BYTES
from asymcheck.inspect.diff import find_checkpoint
from asymcheck.merging.methods import Bytes
from asymcheck.replication.partial_copy import source_record
from asymcheck.restore.assemble import Assembly
from asymcheck.restore.frame_reader import read_any
from asymcheck.restore.read_plan import Demand, execute, naming_tensors, read_parts
from asymcheck.restore.reshard import box_of
from asymcheck.restore.resolve import Resolved, resolve_one
from asymcheck.restore.state_template import like_mapping, rows_in
from asymcheck.state.boxes import Box
from asymcheck.store import Store

_OPTIMIZER_ROLES = frozenset({"first_moment", "second_moment", "gradient", "rng"})
_OPTIMIZER_KEYS = frozenset({"state", "param_groups"})
_MASTERS = ("master", "master_param")
_HALF = ("bfloat16", "float16")
_SHOWN = 3
_SHARED_KEPT = 4
"""Partitions of a source with several tensors that are kept in memory."""

Span = tuple[object, ...]
"""Identity of stored bytes: equal spans have equal bytes."""


@dataclasses.dataclass(frozen=True)
class SourceName:
    """A checkpoint to merge."""

    store: Store
    """The store or remote location."""
    name: int | str
    """``STEP``, ``save:DIGITS`` or ``best:METRIC``, alone or after ``RUN@``."""


def named(store: Store, source: int | str | SourceName) -> SourceName:
    """Return the name of a source, which is in ``store`` unless its name says otherwise."""
    return source if isinstance(source, SourceName) else SourceName(store, source)


class Source:
    """An open checkpoint."""

    def __init__(self, store: Store, resolved: Resolved, pattern: str | None) -> None:
        """Select the tensors to merge: those that match ``pattern``, or without one all but optimizer state."""
        self.store, self.resolved = store, resolved
        self.parts, shape = read_parts(resolved.manifests, None, pattern or "*")
        kept = shape if pattern else _without_optimizer(shape, self._roles)
        if kept is None:
            raise InvalidInputError(
                f"{self}: weights and optimizer state cannot be distinguished; name the tensors to merge: tensors=GLOB"
            )
        self.shape: object = kept
        self.left_out: tuple[str, ...] = ()
        """First parts of the names of state that is not merged."""
        if isinstance(shape, dict) and isinstance(kept, dict):
            self.left_out = tuple(str(key) for key in shape if key not in kept)
        self.small_files = {ref.row for ref in small_files(kept).values()}
        """Numbers of the small files of an imported model folder."""
        self.tensors: dict[str, SourceTensor] = {}
        """Tensors to merge, by each of their names."""
        for number in rows_in(kept):
            tensor = SourceTensor(self, number)
            for name in (tensor.row.name, *tensor.row.aliases):
                other = self.tensors.setdefault(name, tensor)
                # Tensors of one name on several ranks are parts or replicas of one tensor.
                if other is not tensor and other.rank == tensor.rank:
                    raise InvalidInputError(
                        f"{self} has two tensors of the name {name}, which a merge cannot tell apart; merge tensors of "
                        "other names: tensors=GLOB"
                    )
        self._masters = self._find_masters()
        # Small tensors, which are read one after the other, share partitions.
        self._read_shared = functools.lru_cache(_SHARED_KEPT)(partial(read_any, resolved.sources))

    def __str__(self) -> str:
        """Return the name for errors."""
        return f"step {self.resolved.ref.step} of run {self.resolved.run!r} in {self.store.location}"

    def _roles(self, shape: object) -> set[str]:
        return {self.parts.row(number).role for number in rows_in(shape)}

    def _find_masters(self) -> dict[int, int]:
        """Return the float32 masters in the whole checkpoint by their weight, as far as names tell.

        A master belongs to the weight whose name has the longest end in common. If two weights have this end, such as
        those of a model and of its moving average, the master is not used.
        """
        weights: dict[tuple[str, tuple[int, ...]], set[int]] = {}
        masters: list[tuple[str, tuple[int, ...], int]] = []
        for number in rows_in(read_parts(self.resolved.manifests, None, "*")[1]):
            row = self.parts.row(number)
            stem, _, last = row.name.rpartition(".")
            if last in _MASTERS and row.dtype == "float32":
                masters.append((stem, row.global_shape, number))
            elif row.dtype in _HALF and row.role not in _OPTIMIZER_ROLES:
                for name in (row.name, *row.aliases):
                    for end in (name, name.partition(".")[2]):
                        weights.setdefault((end, row.global_shape), set()).add(number)
        found: dict[int, int] = {}
        for stem, shape, number in masters:
            end = stem
            while end and (end, shape) not in weights:
                end = end.partition(".")[2]
            owners = weights[end, shape] if end else ()
            if len(owners) == 1:
                found.setdefault(min(owners), number)
        return found

    def tensor(self, row: TensorRow) -> SourceTensor:
        """Return the tensor for a row of the newest source: the float32 master if there is one.

        Raises:
            StateMismatchError: the checkpoint has no such tensor, or several, or the shape differs.
        """
        names = (row.name, *row.aliases)
        every = dict.fromkeys(self.tensors[name] for name in names if name in self.tensors)
        if not every:
            raise StateMismatchError(f"{self} has no tensor {row.name}; merge checkpoints of one architecture")
        found, *others = every
        span = found.span(0, found.row.nbytes)
        if any(other.rank == found.rank and other.span(0, other.row.nbytes) != span for other in others):
            raise StateMismatchError(
                f"{listed(names, _SHOWN)} are one tensor in the last source, but several in {self}; merge checkpoints "
                "of one architecture"
            )
        if found.row.global_shape != row.global_shape:
            raise StateMismatchError(
                f"tensor {row.name} has shape {list(found.row.global_shape)} in {self}, but {list(row.global_shape)} "
                "in the last source; merge checkpoints of one architecture"
            )
        master = self._masters.get(found.number)
        return found if master is None else SourceTensor(self, master)

    def check_names(self, newest: Source) -> None:
        """Check that this checkpoint has no tensor, except for small files, that the newest source lacks.

        Raises:
            StateMismatchError: it has.
        """
        extra = [
            tensor.row.name
            for tensor in dict.fromkeys(self.tensors.values())
            if tensor.number not in self.small_files
            and newest.tensors.keys().isdisjoint((tensor.row.name, *tensor.row.aliases))
        ]
        if extra:
            raise StateMismatchError(
                f"{self} has {listed(extra, _SHOWN)}, which {newest} lacks; merge checkpoints of one architecture"
            )

    def read(self, demand: Demand) -> Bytes:
        """Read bytes of this checkpoint."""
        assembly = Assembly([demand], torch.device("cpu"), self.resolved.sources)
        execute(assembly, self.resolved)
        data: Bytes = assembly.tensor(demand).numpy()
        return data

    def read_extents(self, extents: Iterable[Extent], held: contextlib.ExitStack) -> Bytes:
        """Read parts of partitions, in the memory of slots that ``held`` gives back."""
        parts: list[Bytes] = []
        sources = self.resolved.sources
        with naming_tensors(self.resolved):
            for extent in extents:
                if extent.length == extent.partition_length:
                    slot = sources.tier.slots.slot(sources.copy(extent.digest).stored_length)
                    plain = read_any(sources, extent.digest, held.enter_context(slot))
                else:
                    plain = self._read_shared(extent.digest)
                parts.append(np.frombuffer(plain, np.uint8, extent.length, extent.offset))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def record(self, weight: float | None) -> dict[str, object]:
        """Describe the checkpoint in the manifest of the merged one."""
        return source_record(self.store.resources.tier, self.resolved.run, self.resolved.ref, weight)

    def is_deleted(self) -> bool:
        """Tell whether the checkpoint was deleted in the meantime; False if the store cannot be read."""
        with contextlib.suppress(AsymcheckError):
            manifests = self.resolved.sources.tier.manifests
            return not manifests.listing(self.resolved.run, self.resolved.ref).manifests
        return False


def _without_optimizer(shape: object, roles: Callable[[object], set[str]]) -> object | None:
    """Return the part of a shape with weights; None if nothing is left.

    Optimizer state is a mapping with ``state`` and ``param_groups``, or a tensor whose role is that of a moment, a
    gradient or a random number generator. Entries without tensors are left out of a mapping with optimizer state.
    """
    found = roles(shape)
    if not found or _is_optimizer(shape):
        return None
    if not found & _OPTIMIZER_ROLES and not _has_optimizer(shape):
        return shape
    if not isinstance(shape, dict):
        return None
    kept = {key: part for key, value in shape.items() if (part := _without_optimizer(value, roles)) is not None}
    return like_mapping(shape, kept) if kept else None


def _is_optimizer(shape: object) -> bool:
    return isinstance(shape, dict) and shape.keys() >= _OPTIMIZER_KEYS


def _has_optimizer(shape: object) -> bool:
    items = shape.values() if isinstance(shape, dict) else shape if isinstance(shape, (list, tuple)) else ()
    return _is_optimizer(shape) or any(map(_has_optimizer, items))


class SourceTensor:
    """A whole tensor of a source, of which ranges are read."""

    def __init__(self, source: Source, number: int) -> None:
        """Describe the tensor with a number in ``source``."""
        self.source, self.number = source, number
        self.row = source.parts.row(number)
        self.rank = source.parts.rank_of(number)
        self.width = DTYPE_BYTES[self.row.dtype]
        box = source.parts.whole(number)
        self.is_whole = box_of(self.row) == box
        """Whether one rank saved the whole tensor."""
        self._whole = box

    def span(self, start: int, length: int) -> Span:
        """Return the identity of the stored bytes of a range."""
        if not self.is_whole:
            return (id(self), start)
        if self.row.inline is not None:
            return (self.row.dtype, self.row.inline)
        parts = ((item.digest, item.offset, item.length) for item in self._extents(start, length))
        return (self.row.dtype, *parts)

    def _extents(self, start: int, length: int) -> Iterator[Extent]:
        position = 0
        for extent in self.row.extents:
            first, last = max(start, position), min(start + length, position + extent.length)
            if first < last:
                yield dataclasses.replace(extent, offset=extent.offset + first - position, length=last - first)
            position += extent.length

    def read(self, start: int, length: int, held: contextlib.ExitStack) -> Bytes:
        """Return the bytes of a range, verified; they are valid until ``held`` is closed.

        Raises:
            DamagedPartitionError: no copy of a partition is intact.
        """
        if self.is_whole and self.row.inline is None:
            return self.source.read_extents(self._extents(start, length), held)
        box, first = _box_around(self._whole, start, length, self.width)
        demand = Demand.of(self.source.parts, self.number, box)
        # Bytes, because this version of torch may lack the dtype.
        demand.row = dataclasses.replace(demand.row, dtype="uint8", shape=(demand.row.nbytes,))
        return self.source.read(demand)[start - first : start - first + length]


def _box_around(whole: Box, start: int, length: int, width: int) -> tuple[Box, int]:
    """Return a box of whole rows that has a range of bytes, and the first byte of the box."""
    dim = next((place for place, size in enumerate(whole.whole) if size > 1), 0)
    if not whole.whole:
        return whole, 0
    step = math.prod(whole.whole[dim + 1 :]) * width
    first, last = start // step, -(-(start + length) // step)
    rest = len(whole.whole) - dim - 1
    offset = (*(0,) * dim, first, *(0,) * rest)
    return Box(whole.whole, offset, (*whole.whole[:dim], last - first, *whole.whole[dim + 1 :])), first * step


@contextlib.contextmanager
def opened(names: Sequence[SourceName], run: str, pattern: str | None) -> Iterator[list[Source]]:
    """Open the sources of a merge, in order.

    Raises:
        CheckpointNotFoundError: a checkpoint does not exist, or was deleted while it was read.
        InvalidInputError: a name is invalid, or the glob matches nothing.
        InconsistentCheckpointError, MissingPartitionError, FormatError: a checkpoint is damaged.
    """
    sources: list[Source] = []
    with contextlib.ExitStack() as stack:
        for item in names:
            tier = stack.enter_context(item.store.resources.source())
            listing, _ = find_checkpoint(tier, item.name, run)
            resolved = resolve_one(tier, listing, whole=True)
            stack.enter_context(resolved.sources)
            sources.append(Source(item.store, resolved, pattern))
        try:
            yield sources
        except (FormatError, RecoveryError) as error:
            deleted = [source for source in sources if source.is_deleted()]
            if deleted:
                raise CheckpointNotFoundError(
                    f"{deleted[0]} was deleted while it was merged; nothing was saved"
                ) from error
            raise
