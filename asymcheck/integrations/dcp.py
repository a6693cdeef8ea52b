"""Storage writer and storage reader for torch.distributed.checkpoint (DCP).

A checkpoint is an ordinary checkpoint of the store. The coordinator chooses a save id, and DCP's exchange of plans
sends the id to the other ranks. Each rank commits its part under this id. Tensor shards and plain values are saved in
the nested state from which DCP has flattened them. Nothing is pickled. The reader describes every tensor to DCP as a
single piece, and assembles the requested pieces from the saved shards.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
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
from asymcheck.events import timed
from asymcheck.format.tree import Key, join_name
from asymcheck.restore.assemble import Assembly
from asymcheck.restore.load import fetch_in_place, read_first
from asymcheck.restore.read_plan import Demand
from asymcheck.restore.reshard import ShardSet
from asymcheck.restore.resolve import Resolved
from asymcheck.restore.state_template import RowRef, rows_in, with_tensors
from asymcheck.state.boxes import Box
from asymcheck.state.dtypes import TORCH_DTYPES
from asymcheck.state.shards import TensorShard
from asymcheck.storage.interfaces import ReadTier
from asymcheck.store import Store
from asymcheck.types import Checkpoint, CheckpointRef, Part, Restored

_CPU = torch.device("cpu")
_COLLECTIVES = (
    "cannot save without collectives: ranks agree on a save id in DCP's exchange of plans; pass use_collectives=True"
)
_CACHED = "cached plans are not supported; pass enable_plan_caching=False to the planner"
_Path = tuple[Key, ...]


class _StoreUser:
    """Base of writer and reader. The store, not a ``checkpoint_id``, identifies a checkpoint."""

    def __init__(self, store: Store, run: str) -> None:
        if not isinstance(store, Store):
            raise InvalidInputError(f"store {store!r:.100} is not a Store; pass the result of Store.open()")
        self._store = store
        self._run = run
        self.checkpoint: Checkpoint | None = None  # the checkpoint that this rank has saved or reads

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Refuse a ``checkpoint_id`` other than the location of the store."""
        if checkpoint_id is not None and os.fspath(checkpoint_id) != str(self._store.location):
            raise InvalidInputError(
                f"checkpoint_id={checkpoint_id!r:.100} is not supported by store {self._store.location}; leave it out, "
                f"and select the checkpoint by {type(self).__name__}(store, step=…)"
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False, because the store is not identified by a ``checkpoint_id``."""
        return False


class AsymcheckWriter(_StoreUser, StorageWriter):
    """Storage writer: ``dcp.save(state, storage_writer=AsymcheckWriter(store, step=step))``.

    Create a new writer for each checkpoint. All ranks open the store at the same location. ``dcp.async_save`` is
    supported with threads, but not with processes, because another process cannot share the store.
    """

    def __init__(
        self, store: Store, *, step: int, run: str = DEFAULT_RUN, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Prepare a save to ``store``, with the arguments of :meth:`asymcheck.Store.save`.

        Raises:
            InvalidInputError: ``store`` is not an opened store.
        """
        super().__init__(store, run)
        self._step = step
        self._metrics = metrics

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, FBT001 - signature of torch
        """Refuse a second use, and a save without collectives."""
        if self.checkpoint is not None:
            raise InvalidInputError(
                f"this writer has already saved step {self._step} of run {self._run!r}; create a new writer for each "
                "checkpoint"
            )
        if kwargs.get("use_collectives") is False:
            raise InvalidInputError(_COLLECTIVES)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign each rank its part of the checkpoint, with the same save id for all ranks."""
        save_id = f"{time.time_ns():016x}{secrets.token_hex(8)}"
        if not all(plan.usable for plan in plans):
            raise InvalidInputError(_CACHED)
        return [
            dataclasses.replace(plan, storage_data=Part(rank, len(plans), save_id)) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save this rank's part, and return once the part is durable.

        Raises:
            InvalidInputError: the planner caches plans, or does not flatten mappings.
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
        """Do nothing, because a checkpoint is complete once every rank has committed its part."""


def _state_of(plan: SavePlan, planner: SavePlanner) -> dict[str, object]:
    paths: Mapping[str, tuple[str | int, ...]] = getattr(planner, "mappings", {})
    state: dict[Key, Any] = {}
    for item in plan.items:
        name = item.index.fqn
        *parents, last = paths.get(name, (name,))
        container = state
        for key in parents:
            container = container.setdefault(key, {})
        if last in container:
            raise UnsupportedValueError(name, "this rank holds several shards of a tensor; pass one DTensor per tensor")
        container[last] = _value(item, planner)
    is_single = isinstance(plan.storage_data, Part) and plan.storage_data.world_size == 1
    # With several ranks, each rank may have only some items of a list.
    return with_lists(state) if is_single else state  # type: ignore[return-value]  # DCP's top keys are strings


def _value(item: WriteItem, planner: SavePlanner) -> object:
    if item.type == WriteItemType.BYTE_IO:
        look_up: Callable[[object], object] | None = getattr(planner, "lookup_object", None)
        if look_up is None:
            raise InvalidInputError(
                f"planner {type(planner).__name__} pickles values, which is not supported; derive the planner from "
                "DefaultSavePlanner"
            )
        value = look_up(item.index)
        if not _is_leaf(value):
            # The store would flatten the value, and a load would not find it under this name.
            raise InvalidInputError(
                f"planner {type(planner).__name__} does not flatten the mapping {item.index.fqn}; pass "
                "flatten_state_dict=True"
            )
        return value
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor) or item.tensor_data is None:
        raise InvalidInputError(
            f"planner {type(planner).__name__} does not resolve {item.index.fqn} to a tensor; use DefaultSavePlanner"
        )
    box = Box(tuple(item.tensor_data.size), tuple(item.tensor_data.chunk.offsets), tuple(tensor.shape))
    return tensor.detach() if box == Box.of_whole(box.whole) else TensorShard(tensor.detach(), box.whole, box.offset)


class AsymcheckReader(_StoreUser, StorageReader):
    """Storage reader: ``dcp.load(state, storage_reader=AsymcheckReader(store))``.

    The number of ranks and the placements may differ from those of the save. The checkpoint need not have been saved by
    DCP: DCP's name of a tensor is the dotted name in the state.
    """

    def __init__(self, store: Store, *, step: int | None = None, run: str = DEFAULT_RUN) -> None:
        """Prepare to read the checkpoint of ``step``, by default the newest consistent checkpoint.

        Raises:
            InvalidInputError: ``store`` is not an opened store.
        """
        super().__init__(store, run)
        self._step = step
        self._ref: CheckpointRef | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ANN401 - signature of torch
        """Resolve the checkpoint, and return its metadata.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError: see :meth:`asymcheck.Store.load`.

        Warns:
            SkippedCheckpointWarning: a newer checkpoint was skipped.
        """
        restored = self._read(self._metadata, self._step)
        for reason in restored.skipped:
            warn_user(f"run {self._run!r}: skipped {reason}", SkippedCheckpointWarning)
        self.checkpoint = restored.checkpoint
        metadata = restored.state
        assert isinstance(metadata, Metadata)  # noqa: S101 - result of _metadata
        return metadata

    def _read(self, read: Callable[[ReadTier, Resolved], object], step: int | None) -> Restored:
        resources, run = self._store.resources, self._run
        which = resources.checked(run, step)
        with timed("restore", 0, lambda: {"run": run}):
            return resources.read(
                lambda source: read_first(source, run, which, partial(read, source)), is_newest=which is None
            )

    def _metadata(self, _tier: ReadTier, resolved: Resolved) -> Metadata:
        self._ref = resolved.ref
        parts = ShardSet(resolved.manifests)
        leaves = _leaves_of(parts)
        described = {name: _describe(parts, leaf) for name, (_, leaf) in leaves.items()}
        return Metadata(described, planner_data={name: path for name, (path, _) in leaves.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, FBT001 - signature of torch
        """Do nothing, because all ranks read in the same way."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the resolved checkpoint of this rank to its plan."""
        return dataclasses.replace(plan, storage_data=self._ref)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse plans of different checkpoints, which a concurrent save may cause."""
        refs = {plan.storage_data for plan in plans}
        if len(refs) > 1:
            listed = ", ".join(sorted(map(str, refs)))
            raise InconsistentCheckpointError(
                f"ranks resolved different checkpoints ({listed}); pass the same step= on all ranks"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank's plan, and verify every byte.

        Raises:
            InconsistentCheckpointError, PartialRestoreError: see :meth:`asymcheck.Store.load`.
        """
        ref = self._ref
        assert ref is not None  # noqa: S101 - DCP reads the metadata first

        def read(tier: ReadTier, resolved: Resolved) -> None:
            if resolved.ref != ref:
                raise InconsistentCheckpointError(f"{ref} was replaced by {resolved.ref} during the load; load again")
            _read(tier, resolved, plan, planner)

        self._read(read, ref.step)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _leaves_of(parts: ShardSet) -> dict[str, tuple[_Path, object]]:
    """Return the paths and values of a checkpoint by DCP's names. The first rank with a name decides."""
    leaves: dict[str, tuple[_Path, object]] = {}
    for shape in parts.shapes():
        for path, leaf in _leaves(shape, ()):
            leaves.setdefault(join_name(path), (path, leaf))
    return leaves


def _describe(parts: ShardSet, leaf: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(leaf, RowRef) or leaf.as_array:
        return BytesStorageMetadata()
    row = parts.row(leaf.row)
    size = torch.Size(row.global_shape)
    piece = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=TORCH_DTYPES[row.dtype]), size, [piece])


def _leaves(value: object, path: _Path) -> Iterator[tuple[_Path, object]]:
    """Yield the values that DCP gives a name when it flattens a state."""
    if _is_leaf(value):
        yield path, value
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value)  # type: ignore[arg-type]  # a mapping or a list
    for key, item in items:
        yield from _leaves(item, (*path, key))


def _is_leaf(value: object) -> bool:
    """Tell whether DCP does not flatten a value."""
    if isinstance(value, list):
        return all(_is_leaf(item) and not _is_tensor(item) for item in value)
    return not isinstance(value, Mapping)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, RowRef) and not value.as_array)


def _read(tier: ReadTier, resolved: Resolved, plan: LoadPlan, planner: LoadPlanner) -> None:
    """Read tensors in place, and hand plain values to the planner."""
    parts = ShardSet(resolved.manifests)
    leaves = _leaves_of(parts)
    # Two items may request the same box, so this is a list.
    wanted: list[tuple[ReadItem, torch.Tensor, Demand]] = []
    values: list[tuple[ReadItem, object, dict[int, Demand]]] = []
    for item in plan.items:
        _, leaf = leaves[item.storage_index.fqn]
        if item.type == LoadItemType.BYTE_IO:
            demands_of_value = {row: Demand.of(parts, row, parts.whole(row)) for row in rows_in(leaf)}
            values.append((item, leaf, demands_of_value))
        elif isinstance(leaf, RowRef):
            target = planner.resolve_tensor(item).detach()
            box = Box(parts.row(leaf.row).global_shape, tuple(item.storage_offsets), tuple(item.lengths))
            demand = Demand.of(parts, leaf.row, box)
            if TORCH_DTYPES[demand.row.dtype] == target.dtype:
                demand.existing.append(target)
            wanted.append((item, target, demand))
    demands = [*(demand for *_, demand in wanted), *(demand for *_, inner in values for demand in inner.values())]
    assembly = Assembly(demands, _CPU, resolved.sources)
    fetch_in_place(tier, resolved, assembly)
    for item, target, demand in wanted:
        if not demand.existing:
            target.copy_(assembly.tensor(demand))
        planner.commit_tensor(item, target)
    for item, leaf, inner in values:
        tensors = {row: assembly.tensor(demand) for row, demand in inner.items()}
        # DCP unpickles this file. It is safe, because it was just created from a plain value.
        planner.load_bytes(item, value_file(with_tensors(leaf, tensors)))
