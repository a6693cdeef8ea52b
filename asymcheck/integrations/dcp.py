"""Storage writer and storage reader for torch.distributed.checkpoint (DCP).

A checkpoint is an ordinary checkpoint of the store. The coordinator chooses a save id, and DCP's exchange of plans
sends the id to the other ranks. Each rank commits its part under this id. Tensor shards and plain values are saved in
the nested state from which DCP has flattened them. Nothing is pickled. The reader describes every tensor to DCP as a
single piece, and assembles the requested pieces from the saved shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import _storage_utils
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

from asymcheck.commit.save_request import new_save_id
from asymcheck.config import DEFAULT_RUN, StoreConfig
from asymcheck.convert.dcp_folder import with_lists
from asymcheck.convert.torch_sink import value_file
from asymcheck.errors import (
    InconsistentCheckpointError,
    InvalidInputError,
    RanksError,
    StateDifferenceWarning,
    StateMismatchError,
    listed,
    warn_user,
)
from asymcheck.events import timed
from asymcheck.format.spans import named_spans, spans_of
from asymcheck.format.tree import Key, join_name
from asymcheck.integrations.dcp_uri import CheckpointURI, is_checkpoint_uri
from asymcheck.restore.assemble import Assembly
from asymcheck.restore.load import fetch_in_place, read_first
from asymcheck.restore.read_plan import Demand
from asymcheck.restore.reshard import ShardSet
from asymcheck.restore.resolve import Resolved, warn_of_skipped
from asymcheck.restore.state_template import RowRef, rows_in, with_tensors
from asymcheck.state.boxes import Box
from asymcheck.state.dtypes import TORCH_DTYPES
from asymcheck.state.names import matches
from asymcheck.state.shards import TensorShard
from asymcheck.store import Store
from asymcheck.types import Checkpoint, CheckpointRef, Part, Restored
from asymcheck.validation import check_flag, check_glob

_CPU = torch.device("cpu")
_COLLECTIVES = (
    "cannot save without collectives: ranks agree on a save id in DCP's exchange of plans; pass use_collectives=True"
)
_CACHED = "another storage writer has cached plans for this planner; pass enable_plan_caching=False to the planner"
_CACHES = (
    "_cached_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
    "_cached_final_save_plan",
)
_NAMED = 4
"""Number of names in a message about differences."""
_Path = tuple[Key, ...]


def register() -> None:
    """Let DCP accept checkpoint ids such as ``asymcheck:///path/of/store?run=RUN/step-100``, in this process.

    torch chooses between two classes of its own, and has no interface to add a third. This function therefore replaces
    the names of these two classes in ``torch.distributed.checkpoint._storage_utils``. All other checkpoint ids are
    handled as before. fsspec learns to list the checkpoints of a run. A second call changes nothing.

    Raises:
        InvalidInputError: this release of torch has no such names.
    """
    for name, ours in (("FileSystemWriter", AsymcheckWriter), ("FileSystemReader", AsymcheckReader)):
        default = getattr(_storage_utils, name, None)
        if default is None:
            raise InvalidInputError(
                f"torch {torch.__version__} chooses storage in another way than torch 2.5 to 2.15; pass "
                f"{ours.__name__}(uri) as storage_writer or storage_reader"
            )
        if not isinstance(default, _Choice):
            setattr(_storage_utils, name, _Choice(ours, default))
    from fsspec import register_implementation

    register_implementation("asymcheck", "asymcheck.integrations.dcp_listing.CheckpointListing", clobber=True)


class _Choice:
    """Replacement of one of torch's storage classes, which creates an object of either class."""

    def __init__(self, ours: type[AsymcheckWriter | AsymcheckReader], default: Any) -> None:  # noqa: ANN401 - class of torch
        self._ours = ours
        self._default = default

    def validate_checkpoint_id(self, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_checkpoint_uri(checkpoint_id) or self._default.validate_checkpoint_id(checkpoint_id)

    def __call__(self, checkpoint_id: str | os.PathLike[str]) -> StorageWriter | StorageReader:
        chosen: Any = self._ours if is_checkpoint_uri(checkpoint_id) else self._default
        storage: StorageWriter | StorageReader = chosen(checkpoint_id)
        return storage


class _StoreUser:
    """Base of writer and reader, which use an opened store, or open the store of a URI while they need it."""

    def __init__(self, store: Store | str | os.PathLike[str], run: str, step: int | None) -> None:
        self._store = store if isinstance(store, Store) else None
        self._ref: CheckpointRef | None = None
        self._config: StoreConfig | None = None
        self.checkpoint: Checkpoint | None = None  # the checkpoint that this rank has saved or reads
        if isinstance(store, Store):
            self._uri, self._config = CheckpointURI(store.location, run, step), store.resources.tier.config
        elif not is_checkpoint_uri(store):
            raise InvalidInputError(f"store {store!r:.100} is not a Store; pass the result of Store.open()")
        elif step is not None or run != DEFAULT_RUN:
            raise InvalidInputError(f"{store!s:.200} already names run and step; leave out run= and step=")
        else:
            self._uri = CheckpointURI.parse(store)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Select the checkpoint of a URI. Refuse a ``checkpoint_id`` of another store, or of a folder."""
        location = self._uri.location
        if checkpoint_id is None or os.fspath(checkpoint_id) == location:
            return
        uri = CheckpointURI.parse(checkpoint_id) if is_checkpoint_uri(checkpoint_id) else None
        if uri is None or os.path.realpath(uri.location) != os.path.realpath(location):
            raise InvalidInputError(
                f"checkpoint_id={checkpoint_id!r:.100} is not supported by store {location}; leave it out, and select "
                f"the checkpoint by {type(self).__name__}(store, step=…)"
            )
        self._uri = uri
        self.checkpoint = None

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Store]:
        if self._store is not None:
            yield self._store
        else:
            writes = isinstance(self, StorageWriter)
            with Store.open(self._uri.location, create=writes, read_only=not writes, config=self._config) as store:
                yield store

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the store, which another process opens by its location."""
        return {**self.__dict__, "_store": None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether a ``checkpoint_id`` is the URI of a checkpoint."""
        return is_checkpoint_uri(checkpoint_id)


class AsymcheckWriter(_StoreUser, StorageWriter):
    """Storage writer: ``dcp.save(state, storage_writer=AsymcheckWriter(store, step=step))``.

    Create a new writer for each checkpoint. All ranks open the store at the same location. ``dcp.async_save`` is
    supported with threads and with processes, which open the store themselves.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        step: int | None = None,
        run: str = DEFAULT_RUN,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Prepare a save to ``store``, with the arguments of :meth:`asymcheck.Store.save`.

        ``store`` may also be a URI such as ``asymcheck:///path/of/store?run=RUN/step-100``, instead of run and step.
        A missing store is then created.

        Raises:
            InvalidInputError: ``store`` is neither an opened store nor a valid URI.
        """
        super().__init__(store, run, step)
        self._metrics = metrics

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, FBT001 - signature of torch
        """Refuse a second use, and a save without collectives."""
        uri = self._uri
        if self.checkpoint is not None:
            raise InvalidInputError(
                f"this writer has already saved step {uri.step} of run {uri.run!r}; create a new writer for each "
                "checkpoint"
            )
        if uri.step is None:
            raise InvalidInputError(
                f"cannot save to store {uri.location}: no step is given; pass step=, or end the URI with the step, "
                f"as in asymcheck://{uri.location}?run={uri.run}/step-100"
            )
        if kwargs.get("use_collectives") is False:
            raise InvalidInputError(_COLLECTIVES)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign each rank its parts of the checkpoint, with the same save id for all ranks.

        A rank with several shards of one tensor, as in Megatron-Core, gets as many parts.
        """
        save_id = new_save_id().hex()
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise InvalidInputError(_CACHED)
        counts = [max(Counter(item.index.fqn for item in plan.items).values(), default=1) for plan in plans]
        firsts = itertools.accumulate(counts, initial=0)
        return [
            dataclasses.replace(plan, storage_data=[Part(first + i, sum(counts), save_id) for i in range(count)])
            for plan, first, count in zip(plans, firsts, counts, strict=False)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save this rank's parts, and return once they are durable.

        Raises:
            InvalidInputError: the planner does not flatten mappings.
            UnsupportedValueError, StorageError: see :meth:`asymcheck.Store.save`.
        """
        _drop_cached_plans(planner)
        run, step = self._uri.run, self._uri.step
        assert step is not None  # noqa: S101 - checked in set_up_storage_writer
        parts: list[Part] = plan.storage_data
        states = _states_of(plan, planner, len(parts))
        if len(parts) == parts[0].world_size == 1:
            # With several parts, each may have only some items of a list.
            states = [with_lists(states[0])]
        with self._opened() as store:
            for part, state in zip(parts, states, strict=True):
                self.checkpoint = store.save(state, step=step, run=run, metrics=self._metrics, part=part)
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that the store has the parts of all ranks, which make the checkpoint complete. For the coordinator.

        Raises:
            RanksError: some ranks have saved another step, or into another store.
        """
        saved = self.checkpoint
        assert saved is not None  # noqa: S101 - the coordinator has written its part before
        with self._opened() as store:
            listing = store.resources.tier.manifests.listing(saved.run, saved.ref)
        # Without manifests, another process has deleted the checkpoint in the meantime.
        if listing.manifests and listing.missing_ranks:
            raise RanksError(
                f"step {saved.step} of run {saved.run!r} cannot be restored: store {self._uri.location} lacks the "
                f"parts of {named_spans(spans_of(listing.missing_ranks))}. On all ranks, open the store at one "
                "location, and pass the same step and run"
            )


def _drop_cached_plans(planner: SavePlanner) -> None:
    """Remove plans that DCP keeps for the next save, because they contain the save id of this save."""
    for cache in _CACHES if getattr(planner, "_enable_plan_caching", False) else ():
        getattr(SavePlanner, cache, {}).pop(getattr(planner, "_cached_plans_key", None), None)


def _states_of(plan: SavePlan, planner: SavePlanner, count: int) -> list[dict[Key, Any]]:
    """Return the state of each part. The shards of one tensor are in different parts."""
    paths: Mapping[str, tuple[str | int, ...]] = getattr(planner, "mappings", {})
    states: list[dict[Key, Any]] = [{} for _ in range(count)]
    seen: Counter[str] = Counter()
    for item in plan.items:
        name = item.index.fqn
        *parents, last = paths.get(name, (name,))
        container = states[seen[name]]
        seen[name] += 1
        for key in parents:
            container = container.setdefault(key, {})
        container[last] = _value(item, planner)
    return states


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
        return value.getvalue() if isinstance(value, io.BytesIO) else value
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

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        step: int | None = None,
        run: str = DEFAULT_RUN,
        tensors: str = "*",
        strict: bool = False,
    ) -> None:
        """Prepare to read the checkpoint of ``step``, by default the newest consistent checkpoint.

        Args:
            store: an opened store, or a URI such as ``asymcheck:///path/of/store?run=RUN/step-100`` instead of step and
                run.
            step: the step.
            run: name of the run.
            tensors: a glob of the dotted names to load, for instance ``"model.*"``. Differences between the checkpoint
                and the given state are not reported for other names.
            strict: raise StateMismatchError instead of a StateDifferenceWarning.

        Raises:
            InvalidInputError: ``store`` is neither an opened store nor a valid URI.
        """
        check_glob(tensors)
        super().__init__(store, run, step)
        self._tensors = tensors
        self._strict = check_flag("strict", strict)
        self._stored = _Stored()

    # Without keyword arguments: DCP would take them for metadata by rank, and try a failed read again as such.
    def read_metadata(self) -> Metadata:
        """Resolve the checkpoint, and return its metadata.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError: see :meth:`asymcheck.Store.load`.

        Warns:
            SkippedCheckpointWarning: a newer checkpoint was skipped.
        """
        restored = self._read(self._metadata, self._uri.step)
        warn_of_skipped(self._uri.location, self._uri.run, restored.skipped)
        self.checkpoint = restored.checkpoint
        metadata = restored.state
        assert isinstance(metadata, Metadata)  # noqa: S101 - result of _metadata
        return metadata

    def _read(self, read: Callable[[Resolved], object], step: int | None) -> Restored:
        run = self._uri.run
        with self._opened() as store, timed("restore", 0, lambda: {"run": run}):
            which = store.resources.checked(run, step)
            return store.resources.read(lambda source: read_first(source, run, which, read), is_newest=which is None)

    def _metadata(self, resolved: Resolved) -> Metadata:
        self._ref = resolved.ref
        parts = ShardSet(resolved.manifests)
        leaves = _leaves_of(parts)
        self._stored = _Stored((name, _describe(parts, leaf)) for name, (_, leaf) in leaves.items())
        return Metadata(self._stored, planner_data={name: path for name, (path, _) in leaves.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, FBT001 - signature of torch
        """Do nothing, because all ranks read in the same way."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the resolved checkpoint of this rank, and the names that it lacks, to the plan."""
        return dataclasses.replace(plan, storage_data=(self._ref, sorted(self._stored.missing)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Compare the plans of all ranks with each other and with the checkpoint.

        Raises:
            InconsistentCheckpointError: the ranks have resolved different checkpoints, due to a concurrent save.
            StateMismatchError: with ``strict``, the state of all ranks and the checkpoint have different names.

        Warns:
            StateDifferenceWarning: as above, without ``strict``.
        """
        refs = {plan.storage_data[0] for plan in plans}
        if len(refs) > 1:
            names = listed(sorted(map(str, refs)))
            raise InconsistentCheckpointError(
                f"ranks resolved different checkpoints ({names}); pass the same step= on all ranks"
            )
        self._compare(
            {item.storage_index.fqn for plan in plans for item in plan.items},
            {name for plan in plans for name in plan.storage_data[1]},
        )
        return plans

    def _compare(self, requested: set[str], missing: set[str]) -> None:
        """Report all differences of names at once, before anything is read."""
        # An option of the URI counts in addition to the same argument of the reader.
        pattern = self._uri.tensors if self._tensors == "*" else self._tensors
        unused = [name for name, entry in self._stored.items() if name not in requested and not _is_empty(entry)]
        found = []
        for one, other, result, every in (
            ("stored", "requested", "is lost", unused),
            ("requested", "stored", "keeps its value", sorted(missing)),
        ):
            names = [name for name in every if matches(pattern, [name])]
            if names:
                entries = f"{one} entry" if len(names) == 1 else f"{one} entries"
                found.append(f"{len(names):,} {entries} not {other}: each {result} ({listed(names, _NAMED)})")
        if found:
            message = (
                f"{self._ref} of run {self._uri.run!r} and the given state differ: {'; '.join(found)}. A new "
                "optimizer, for example, has no state before its first step. To load a part, pass tensors=GLOB, such "
                "as 'model.*'"
            )
            if self._strict or self._uri.strict:
                raise StateMismatchError(message)
            warn_user(message, StateDifferenceWarning)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank's plan, and verify every byte.

        Raises:
            InconsistentCheckpointError, PartialRestoreError: see :meth:`asymcheck.Store.load`.
        """
        ref = self._ref
        assert ref is not None  # noqa: S101 - DCP reads the metadata first

        def read(resolved: Resolved) -> None:
            if resolved.ref != ref:
                raise InconsistentCheckpointError(f"{ref} was replaced by {resolved.ref} during the load; load again")
            _read(resolved, plan, planner)

        self._read(read, ref.step)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _Stored(dict[str, TensorStorageMetadata | BytesStorageMetadata]):
    """Entries of a checkpoint. Records the names that a planner looks up and that are not stored."""

    def __init__(self, entries: Iterable[tuple[str, TensorStorageMetadata | BytesStorageMetadata]] = ()) -> None:
        super().__init__(entries)
        self.missing: set[str] = set()

    def __contains__(self, name: object) -> bool:
        found = super().__contains__(name)
        if not found:
            self.missing.add(str(name))
        return found


def _is_empty(entry: TensorStorageMetadata | BytesStorageMetadata) -> bool:
    """Tell whether an entry is a tensor without elements, which DCP does not request."""
    return isinstance(entry, TensorStorageMetadata) and 0 in entry.size


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


def _read(resolved: Resolved, plan: LoadPlan, planner: LoadPlanner) -> None:
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
    fetch_in_place(resolved, assembly)
    for item, target, demand in wanted:
        if not demand.existing:
            target.copy_(assembly.tensor(demand))
        planner.commit_tensor(item, target)
    given: Mapping[str, object] = getattr(planner, "state_dict", {})
    for item, leaf, inner in values:
        tensors = {row: assembly.tensor(demand) for row, demand in inner.items()}
        value = with_tensors(leaf, tensors)
        if isinstance(value, bytes) and isinstance(given.get(item.dest_index.fqn), io.BytesIO):
            value = io.BytesIO(value)
        # DCP unpickles this file. It is safe, because it was just created from a plain value.
        planner.load_bytes(item, value_file(value))
