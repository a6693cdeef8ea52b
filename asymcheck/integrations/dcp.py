"""torch.distributed.checkpoint: a storage writer and a storage reader, so that its callers change one line.

A checkpoint is an ordinary one of the store. The coordinator chooses a save id, DCP's own exchange of plans brings it
to the other ranks, and each rank commits its part under it. Shards of tensors and plain values keep the nesting from
which DCP took them; nothing is pickled. A reader tells DCP that every tensor is one piece, and assembles the pieces
that DCP asks for from the shards that were saved.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from asymcheck.config import DEFAULT_RUN
from asymcheck.convert.dcp_folder import with_lists
from asymcheck.convert.torch_file import value_file
from asymcheck.errors import (
    InconsistentCheckpointError,
    InvalidInputError,
    SkippedCheckpointWarning,
    UnsupportedValueError,
    warn_user,
)
from asymcheck.format.tree import Key, join_name
from asymcheck.restore.assemble import Assembly
from asymcheck.restore.load import fetch_in_place
from asymcheck.restore.read_plan import Demand
from asymcheck.restore.reshard import ShardSet
from asymcheck.restore.resolve import Resolved
from asymcheck.restore.state_template import RowRef, rows_in, with_tensors
from asymcheck.state.boxes import Box
from asymcheck.state.dtypes import TORCH_DTYPES
from asymcheck.state.shards import TensorShard
from asymcheck.storage.interfaces import ReadTier
from asymcheck.store import Store
from asymcheck.types import Checkpoint, CheckpointRef, Part

_CPU = torch.device("cpu")
_COLLECTIVES = "ranks agree on a checkpoint in DCP's exchange of plans: leave use_collectives=True"
_CACHED = "DCP caches its plans: give the planner enable_plan_caching=False"
_Path = tuple[Key, ...]


class _StoreUser:
    """The part that writer and reader share: a checkpoint is named by its store, not by a ``checkpoint_id``."""

    def __init__(self, store: Store, run: str) -> None:
        if not isinstance(store, Store):
            raise InvalidInputError(f"store {store!r:.100}: give what Store.open(location) returned")
        self._store = store
        self._run = run
        self.checkpoint: Checkpoint | None = None  # the checkpoint that this rank has saved or is reading, if any

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Refuse a ``checkpoint_id`` other than the location of the store; without one, DCP does not call this."""
        if checkpoint_id is not None and os.fspath(checkpoint_id) != str(self._store.location):
            raise InvalidInputError(
                f"checkpoint_id={checkpoint_id!r:.100} chooses nothing in store {self._store.location}: leave it out, "
                f"and say which checkpoint by {type(self).__name__}(store, step=…)"
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: the store is given, not named by a ``checkpoint_id``."""
        return False


class AsymcheckWriter(_StoreUser, StorageWriter):
    """Saves what DCP plans: ``dcp.save(state, storage_writer=AsymcheckWriter(store, step=step))``.

    Make a new one for each checkpoint: store, run and step say which it is. All ranks write to stores at one location.
    ``dcp.async_save`` takes it as well, with its threads; a process of its own cannot share the store.
    """

    def __init__(
        self, store: Store, *, step: int, run: str = DEFAULT_RUN, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Save to ``store`` as :meth:`asymcheck.Store.save` does.

        Raises:
            InvalidInputError: that is no opened store.
        """
        super().__init__(store, run)
        self._step = step
        self._metrics = metrics

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, FBT001 - torch's way
        """Refuse a second use, and a save without collectives, in which ranks cannot agree."""
        if self.checkpoint is not None:
            raise InvalidInputError(
                f"this writer has saved step {self._step} of run {self._run!r}: make a new one for each checkpoint"
            )
        if kwargs.get("use_collectives") is False:
            raise InvalidInputError(_COLLECTIVES)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its part of one checkpoint, with one save id for all."""
        save_id = f"{time.time_ns():016x}{secrets.token_hex(8)}"
        if not all(plan.usable for plan in plans):
            raise InvalidInputError(_CACHED)
        return [
            dataclasses.replace(plan, storage_data=Part(rank, len(plans), save_id)) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save this rank's part, which is durable when this returns.

        Raises:
            InvalidInputError: the planner is not supported, because it caches plans or does not flatten mappings.
            UnsupportedValueError, StorageError: see :meth:`asymcheck.Store.save`.
        """
        if getattr(planner, "_enable_plan_caching", False):
            raise InvalidInputError(_CACHED)
        if not isinstance(plan.storage_data, Part):
            raise InvalidInputError(_COLLECTIVES)
        state = _state_of(plan, planner)
        self.checkpoint = self._store.save(
            state, step=self._step, run=self._run, metrics=self._metrics, part=plan.storage_data
        )
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: a checkpoint is complete as soon as the part of every rank is committed."""


def _state_of(plan: SavePlan, planner: SavePlanner) -> dict[str, object]:
    """Return the state that a rank saves, in the nesting from which the planner took it."""
    paths: Mapping[str, tuple[str | int, ...]] = getattr(planner, "mappings", {})
    state: dict[Key, Any] = {}
    for item in plan.items:
        name = item.index.fqn
        *above, last = paths.get(name, (name,))
        place = state
        for key in above:
            place = place.setdefault(key, {})
        if last in place:
            raise UnsupportedValueError(name, "this rank holds several parts of one tensor; give it one DTensor")
        place[last] = _value(item, planner)
    only = isinstance(plan.storage_data, Part) and plan.storage_data.world_size == 1
    # With several ranks, each has only some of the items of a list.
    return with_lists(state) if only else state  # type: ignore[return-value]  # DCP's top keys are strings


def _value(item: WriteItem, planner: SavePlanner) -> object:
    if item.type == WriteItemType.BYTE_IO:
        look_up: Callable[[object], object] | None = getattr(planner, "lookup_object", None)
        if look_up is None:
            raise InvalidInputError(
                f"the planner {type(planner).__name__} pickles values; derive it from DefaultSavePlanner"
            )
        value = look_up(item.index)
        if not _is_one(value):
            # The store would take it apart, so that it could not be found under this name.
            raise InvalidInputError(
                f"the planner {type(planner).__name__} takes {item.index.fqn} for one value, with all that is in it; "
                "give it flatten_state_dict=True"
            )
        return value
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor) or item.tensor_data is None:
        raise InvalidInputError(f"the planner {type(planner).__name__} makes no tensor of {item.index.fqn}")
    box = Box(tuple(item.tensor_data.size), tuple(item.tensor_data.chunk.offsets), tuple(tensor.shape))
    return tensor.detach() if box == Box.of_whole(box.whole) else TensorShard(tensor.detach(), box.whole, box.offset)


class AsymcheckReader(_StoreUser, StorageReader):
    """Loads what DCP asks for: ``dcp.load(state, storage_reader=AsymcheckReader(store))``.

    Any number of ranks may read what any number saved, and with other placements. Checkpoints need not have been saved
    by DCP: its name of a tensor is the dotted name in the state.
    """

    def __init__(self, store: Store, *, step: int | None = None, run: str = DEFAULT_RUN) -> None:
        """Read from ``store`` the checkpoint of ``step``; without one, the newest consistent one.

        Raises:
            InvalidInputError: that is no opened store.
        """
        super().__init__(store, run)
        self._step = step
        self._ref: CheckpointRef | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ANN401 - torch's way
        """Choose the checkpoint, and describe it.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError: see :meth:`asymcheck.Store.load`.

        Warns:
            SkippedCheckpointWarning: a newer checkpoint was passed over.
        """
        restored = self._store.read(self._describe, self._step, run=self._run)
        for reason in restored.skipped:
            warn_user(f"run {self._run!r}: passed over {reason}", SkippedCheckpointWarning)
        self.checkpoint = restored.checkpoint
        metadata = restored.state
        assert isinstance(metadata, Metadata)  # noqa: S101 - what _describe made
        return metadata

    def _describe(self, _tier: ReadTier, resolved: Resolved) -> Metadata:
        self._ref = resolved.ref
        parts = ShardSet(resolved.manifests)
        leaves = _leaves_of(parts)
        described = {name: _describe(parts, leaf) for name, (_, leaf) in leaves.items()}
        return Metadata(described, planner_data={name: path for name, (path, _) in leaves.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, FBT001 - torch's way
        """Do nothing: all ranks read in the same way."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the checkpoint that this rank has found to its plan."""
        return dataclasses.replace(plan, storage_data=self._ref)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse different checkpoints, which ranks find when another one is saved at the same time."""
        found = {plan.storage_data for plan in plans}
        if len(found) > 1:
            named = ", ".join(sorted(map(str, found)))
            raise InconsistentCheckpointError(f"ranks found different checkpoints ({named}): give all the same step=")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank's plan, every byte verified.

        Raises:
            InconsistentCheckpointError, PartialRestoreError: see :meth:`asymcheck.Store.load`.
        """
        ref = self._ref
        assert ref is not None  # noqa: S101 - metadata comes first

        def read(tier: ReadTier, resolved: Resolved) -> None:
            if resolved.ref != ref:
                message = f"{ref} is gone, and {resolved.ref} in its place: load again"
                raise InconsistentCheckpointError(message)
            _read(tier, resolved, plan, planner)

        self._store.read(read, ref.step, run=self._run)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _leaves_of(parts: ShardSet) -> dict[str, tuple[_Path, object]]:
    """Return the values of a checkpoint and their paths by DCP's names; the first rank with a name decides."""
    found: dict[str, tuple[_Path, object]] = {}
    for shape in parts.shapes():
        for path, leaf in _leaves(shape, ()):
            found.setdefault(join_name(path), (path, leaf))
    return found


def _describe(parts: ShardSet, leaf: object) -> TensorStorageMetadata | BytesStorageMetadata:
    """Describe a tensor as one piece, whatever shards were saved."""
    if not isinstance(leaf, RowRef) or leaf.as_array:
        return BytesStorageMetadata()
    row = parts.row(leaf.row)
    size = torch.Size(row.global_shape)
    piece = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=TORCH_DTYPES[row.dtype]), size, [piece])


def _leaves(value: object, path: _Path) -> Iterator[tuple[_Path, object]]:
    """Yield the values that DCP's rules of flattening give a name."""
    if _is_one(value):
        yield path, value
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value)  # type: ignore[arg-type]  # what is not one is a mapping or a list
    for key, item in items:
        yield from _leaves(item, (*path, key))


def _is_one(value: object) -> bool:
    """Tell whether DCP leaves a value as it is."""
    if isinstance(value, list):
        return all(_is_one(item) and not _is_tensor(item) for item in value)
    return not isinstance(value, Mapping)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, RowRef) and not value.as_array)


def _read(tier: ReadTier, resolved: Resolved, plan: LoadPlan, planner: LoadPlanner) -> None:
    """Read tensors in place, and put the other values in place."""
    parts = ShardSet(resolved.manifests)
    leaves = _leaves_of(parts)
    # A list, because two items may ask for the same box.
    wanted: list[tuple[ReadItem, torch.Tensor, Demand]] = []
    values: list[tuple[ReadItem, object, dict[int, Demand]]] = []
    for item in plan.items:
        _, leaf = leaves[item.storage_index.fqn]
        if item.type == LoadItemType.BYTE_IO:
            inside = {number: Demand.of(parts, number, parts.whole(number)) for number in rows_in(leaf)}
            values.append((item, leaf, inside))
        elif isinstance(leaf, RowRef):
            target = planner.resolve_tensor(item).detach()
            box = Box(parts.row(leaf.row).global_shape, tuple(item.storage_offsets), tuple(item.lengths))
            demand = Demand.of(parts, leaf.row, box)
            if TORCH_DTYPES[demand.row.dtype] == target.dtype:
                demand.existing.append(target)
            wanted.append((item, target, demand))
    demands = [*(demand for *_, demand in wanted), *(one for *_, some in values for one in some.values())]
    assembly = Assembly(demands, _CPU, resolved.sources)
    fetch_in_place(tier, resolved, assembly)
    for item, target, demand in wanted:
        if not demand.existing:
            target.copy_(assembly.tensor(demand))
        planner.commit_tensor(item, target)
    for item, leaf, inside in values:
        tensors = {number: assembly.tensor(demand) for number, demand in inside.items()}
        # DCP unpickles this file, which was made of a plain value just now.
        planner.load_bytes(item, value_file(with_tensors(leaf, tensors)))
