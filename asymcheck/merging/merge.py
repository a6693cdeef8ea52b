"""Merge checkpoints in bounded memory: tensors are computed partition by partition while they are saved."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from asymcheck.commit.save_request import SaveRequest
from asymcheck.commit.synchronous_save import KnownCut, save
from asymcheck.config import DEFAULT_RUN, StoreConfig
from asymcheck.errors import FormatError, InvalidInputError, RecoveryError, StorageError
from asymcheck.format.layout import check_run
from asymcheck.format.manifest import Manifest
from asymcheck.format.registry import DTYPE_BYTES
from asymcheck.merging import methods
from asymcheck.merging.methods import BLOCK_ELEMENTS, Angle, Block, Bytes, MergeSettings, Threshold
from asymcheck.merging.sources import Source, SourceName, SourceTensor, named, opened
from asymcheck.replication.pull import check_derived_run
from asymcheck.restore.resolve import read_manifests
from asymcheck.restore.state_template import rows_in, with_tensors
from asymcheck.state.leaves import Leaf, TensorBytes
from asymcheck.state.partition_plan import Cut, Partition, Piece, cut
from asymcheck.state.walk import Columns, flatten
from asymcheck.storage.nvme import NvmeTier, run_with_slots
from asymcheck.store import Store
from asymcheck.training_services import place
from asymcheck.types import Checkpoint, CheckpointRef, Digest, Progress, ProgressMeter
from asymcheck.validation import check_step

MERGED_RUN = "merged"
"""Default name of the run for merged checkpoints."""
_MEMORY_BYTES = 256 << 20
"""Bytes of sources that all threads together keep in memory."""


@dataclasses.dataclass(frozen=True)
class Merged:
    """Result of a merge."""

    checkpoint: Checkpoint
    """The new checkpoint."""
    method: str
    """Name of the method."""
    sources: tuple[Mapping[str, object], ...]
    """Store id, run, step, generation, save id and weight of each source, oldest first."""
    base: Mapping[str, object] | None
    """The base checkpoint, without a weight."""
    settings: Mapping[str, object]
    """Further settings of the method."""
    tensors: int
    """Number of tensors. Tied tensors count once."""
    reused_bytes: int
    """Bytes of partitions that are equal in all sources, and were neither read nor written."""
    masters: int
    """Number of 16-bit tensors that were computed from float32 masters."""
    left_out: tuple[str, ...]
    """First parts of the names of state that was not merged, such as ``optimizer``."""
    duplicate_of: str | None
    """Save id of an earlier checkpoint of this step with equal sources, settings and bytes; None if there is none."""


def merge(  # noqa: PLR0913 - options of the command
    store: Store,
    steps: Sequence[int | str | SourceName],
    *,
    method: str = "mean",
    base: int | str | SourceName | None = None,
    run: str = DEFAULT_RUN,
    to_run: str = MERGED_RUN,
    step: int | None = None,
    tensors: str | None = None,
    progress: Progress | None = None,
    **settings: object,
) -> Merged:
    """Merge the weights of checkpoints, and save the result in a run of its own, without optimizer state.

    Every byte that is read is verified. Floating-point tensors are accumulated in float64 in the order of ``steps``,
    and rounded once, to nearest even, to the dtype of the last source. Integers and plain values are those of the last
    source. Tied tensors are merged once. A 16-bit weight is computed from its float32 master if a tensor of the
    checkpoint has the name of the weight and ``.master`` or ``.master_param``. Memory does not depend on the size of
    the model, except for tensors of which several ranks have shards.

    Args:
        store: the store for the result, on a local drive.
        steps: the sources, oldest first: a step, ``"save:"`` and the first digits of a save id, either after
            ``"RUN@"``, or a :class:`asymcheck.merging.sources.SourceName` for another store.
        method: ``mean``, ``ema``, ``wsm``, ``lawa``, ``weighted``, ``slerp``, ``ties`` or ``dare``;
            :meth:`asymcheck.merging.methods.MergeSettings.coefficients` has the formulas.
        base: for ``ties`` and ``dare``, the checkpoint from which the sources were trained.
        run: the run of names without ``"RUN@"``.
        to_run: the run of the result, which has no other checkpoints than merged ones.
        step: the step of the result, by default that of the last source.
        tensors: a glob of the names to merge, by default all tensors that are not optimizer state.
        progress: callback with the bytes done and the bytes to merge.
        settings: ``weights``, ``alpha``, ``schedule``, ``t``, ``density``, ``scale`` and ``seed``, see
            :class:`asymcheck.merging.methods.MergeSettings`.

    Raises:
        InvalidInputError: a setting belongs to another method, or does not fit the number of sources.
        StateMismatchError: the checkpoints are of different architectures.
        CheckpointNotFoundError: a source does not exist, or was deleted during the merge.
        InconsistentCheckpointError, MissingPartitionError, DamagedPartitionError, FormatError: a source is damaged.
        StorageError: the drive is full or failed.

    In every case, nothing was committed, and the store keeps everything that it had.
    """
    known = {field.name for field in dataclasses.fields(MergeSettings)}
    if unknown := settings.keys() - known:
        raise InvalidInputError(f"unknown setting {min(unknown)!r}; choose from {', '.join(sorted(known))}")
    chosen = MergeSettings(method, **settings)  # type: ignore[arg-type]  # checked by name above, and by value below
    chosen.check(len(steps), has_base=base is not None)
    chosen.check_used(name for name, value in settings.items() if value is not None)
    tier = store.resources.writable()
    check_run(to_run)
    names = [named(store, item) for item in (*steps, *([] if base is None else [base]))]
    with opened(names, run, tensors) as every:
        merging = _Merge(every[: len(steps)], every[len(steps) :], chosen, tier)
        check_derived_run(tier, to_run)
        newest = merging.sources[-1].resolved.ref.step
        request = SaveRequest(to_run, newest if step is None else check_step(step), {}, merged=merging.record())
        return merging.save(store, request, progress)


class _Merge:
    """One merge of open sources."""

    def __init__(
        self, sources: Sequence[Source], base: Sequence[Source], settings: MergeSettings, tier: NvmeTier
    ) -> None:
        self.sources, self._base, self._settings, self._tier = sources, base, settings, tier
        self._weights = settings.coefficients(len(sources))
        _check_order(sources, settings.method)
        newest = sources[-1]
        for source in (*sources[:-1], *base):
            source.check_names(newest)
        made: dict[int, MergedTensor] = {}
        for number in rows_in(newest.shape):
            row = newest.parts.row(number)
            own = newest.tensors[row.name]
            # A configuration or a log may have another length in each source.
            is_file = number in newest.small_files
            inputs = [own] if is_file else [source.tensor(row) for source in (*sources, *base)]
            made[number] = MergedTensor(own, inputs, settings, self._weights)
        self._state = with_tensors(newest.shape, made)
        self._tensors = list(made.values())

    def record(self) -> dict[str, object]:
        """Return the key ``merged`` of the manifest."""
        sources, base = self._records()
        return {"method": self._settings.method, "sources": sources, "base": base, **self._settings.used()}

    def _records(self) -> tuple[list[dict[str, object]], dict[str, object] | None]:
        """Describe the sources with their weights, and the base if there is one."""
        # A mean has shares as weights, task vectors are not divided by the sum of theirs.
        divisor = 1.0 if self._settings.uses_base else math.fsum(self._weights)
        sources = [source.record(weight / divisor) for source, weight in zip(self.sources, self._weights, strict=True)]
        return sources, next((source.record(None) for source in self._base), None)

    def save(self, store: Store, request: SaveRequest, progress: Progress | None) -> Merged:
        """Compute and save all tensors."""
        tier, settings = self._tier, self._settings
        flat = flatten(self._state)
        known = known_cut(flat.leaves, flat.columns, tier.config)
        reused = sum(partition.length for partition in known.digests)
        report = ProgressMeter(progress, sum(flat.columns.sizes) - reused)
        most = max((partition.length for partition in known.cut.partitions), default=1)
        largest = max(
            (min(_MEMORY_BYTES, most // item.width * item.element_bytes) for item in self._tensors), default=1
        )
        permits = threading.BoundedSemaphore(max(1, _MEMORY_BYTES // max(1, largest)))
        # Short operations of numpy in many threads wait for the lock of the interpreter: twice the CPU time with eight.
        turns = threading.BoundedSemaphore(max(1, len(os.sched_getaffinity(0)) // 2))
        for tensor in self._tensors:
            tensor.prepare(permits, turns, report.add)
        self._measure()
        catalog, encoder = store.resources.catalog(), store.resources.encoder
        placing = partial(place, tier, request.run, None)
        saved = save(tier, catalog, encoder, flat, request, placing, known=known)
        sources, base = self._records()
        return Merged(
            checkpoint=Checkpoint.of(
                request.run, saved.ref, 1, {}, saved.state_bytes, written_bytes=saved.written_bytes
            ),
            method=settings.method,
            sources=tuple(sources),
            base=base,
            settings=settings.used(),
            tensors=len(self._tensors),
            reused_bytes=reused,
            masters=sum(tensor.has_master for tensor in self._tensors),
            left_out=self.sources[-1].left_out,
            duplicate_of=_duplicate_of(tier, request.run, saved.ref),
        )

    def _measure(self) -> None:
        """Make the first pass over all tensors."""
        run_with_slots(
            self._tensors,
            lambda tensor, _slot: tensor.measure(),
            slots=self._tier.slots,
            payload_bytes=0,
            threads=self._tier.config.slots if self._settings.method in ("slerp", "ties") else 1,
            name="merge",
        )


def _duplicate_of(tier: NvmeTier, run: str, ref: CheckpointRef) -> str | None:
    """Return the save id of the newest earlier checkpoint of the same step and content; None if there is none."""
    listings = [listing for listing in tier.manifests.checkpoints(run) if listing.ref.step == ref.step]
    manifests: dict[CheckpointRef, Manifest] = {}
    for listing in listings if len(listings) > 1 else ():
        # The merge is committed, so a damaged manifest is no reason to fail.
        with contextlib.suppress(FormatError, RecoveryError, StorageError):
            manifests[listing.ref] = read_manifests(tier, listing)[0]
    new = manifests.pop(ref, None)
    equal = [earlier for earlier, manifest in manifests.items() if new is not None and _is_same(manifest, new)]
    return max(equal).save_id.hex() if equal else None


def _is_same(a: Manifest, b: Manifest) -> bool:
    return (a.header.merged, a.header.tree, a.columns) == (b.header.merged, b.header.tree, b.columns)


def _check_order(sources: Sequence[Source], method: str) -> None:
    runs = {(source.store.location, source.resolved.run) for source in sources}
    steps = [source.resolved.ref.step for source in sources]
    if method in ("ema", "wsm") and len(runs) == 1 and steps != sorted(steps):
        raise InvalidInputError(f"method {method} weights checkpoints by age; give the steps in ascending order")


class MergedTensor(TensorBytes):
    """A tensor that is computed from those of the sources when it is saved. Thread-safe after :meth:`prepare`."""

    def __init__(
        self, newest: SourceTensor, inputs: Sequence[SourceTensor], settings: MergeSettings, weights: Sequence[float]
    ) -> None:
        """Merge ``inputs``: the tensors of the sources, and that of the base if there is one.

        The dtype is that of ``newest``, from which tensors that cannot be averaged are copied. These need no other
        input.
        """
        super().__init__(newest.row.dtype, newest.row.global_shape)
        self.newest, self._inputs, self._settings = newest, inputs, settings
        self._weights = tuple(weights)
        self._thresholds: list[float] = []
        self._doubled = 2 if self.dtype.startswith("complex") else 1
        self._is_mergeable = all(methods.is_mergeable(item.row.dtype) for item in (newest, *inputs))
        self._is_short = not any(item.row.dtype in ("float64", "complex128") for item in inputs)
        self.has_master = self._is_mergeable and inputs[len(weights) - 1] is not newest
        """Whether the newest source has a float32 master."""
        self.width = DTYPE_BYTES[self.dtype]
        self.element_bytes = sum(item.width for item in inputs)
        """Bytes of one element in all inputs."""

    def prepare(self, permits: threading.Semaphore, turns: threading.Semaphore, report: Callable[[int], None]) -> None:
        """Read with ``permits``, compute in ``turns``, and report the bytes that are done."""
        self._permits, self._turns, self._report = permits, turns, report

    def is_equal(self, start: int, length: int) -> bool:
        """Tell whether a range needs no merge, because it has the same stored bytes in all inputs."""
        if not self._is_mergeable:
            return True
        if start % self.width or length % self.width:
            return False
        if self._settings.method == "slerp":
            # The weights are those of the whole tensor, and their sum is not 1.
            start, length = 0, self.nbytes
        ranges = ((item, item.width, start // self.width, length // self.width) for item in self._inputs)
        return len({item.span(first * width, count * width) for item, width, first, count in ranges}) == 1

    def measure(self) -> None:
        """Make the first pass over the tensor, if its method needs one: angles of SLERP, or thresholds of TIES."""
        count = self.nbytes // self.width
        if not count:
            return
        if self._settings.method == "slerp" and not self.is_equal(0, self.nbytes):
            angle = Angle()
            for _, (x, y) in self._blocks(0, count):
                angle.add(x, y)
            self._weights = angle.coefficients(self._settings.t)
        elif self._settings.method == "ties" and not self.is_equal(0, self.nbytes):
            searches = [Threshold(self._settings.density, count * self._doubled) for _ in self._weights]
            for _ in range(2):
                for _, (*values, base) in self._blocks(0, count):
                    for search, value in zip(searches, values, strict=True):
                        search.add(methods.task_vector(value, base))
                self._thresholds = [search.end_pass() for search in searches]

    def read(self, start: int, target: memoryview) -> None:
        """Fill ``target`` with the merged bytes from ``start`` on."""
        merged, length = np.frombuffer(target, dtype=np.uint8), len(target)
        if self.is_equal(start, length):
            with contextlib.ExitStack() as held:
                merged[:] = self.newest.read(start, length, held)
        else:
            first, last = start // self.width, -(-(start + length) // self.width)
            for at, values in self._blocks(first, last):
                data = methods.narrow(self._merged(at, values), self.dtype)
                # A partition of another writer may begin inside of an element.
                place = at * self.width - start
                low, high = max(0, -place), min(len(data), length - place)
                merged[place + low : place + high] = data[low:high]
        self._report(length)

    def _merged(self, first: int, values: Sequence[Block]) -> Block:
        """Merge elements from ``first`` on: the values of the sources, and those of the base."""
        settings, weights = self._settings, self._weights
        if settings.method == "slerp":
            return methods.combined(values, weights)
        if not settings.uses_base:
            return methods.linear(values, weights, is_short=self._is_short)
        *values, base = values
        if settings.method == "ties":
            return methods.ties(base, values, weights, self._thresholds, settings.scale)
        at, name, density = first * self._doubled, self.newest.row.name, settings.density
        masks = [
            methods.random_mask(settings.seed, name, source, at, len(base), density) for source in range(len(values))
        ]
        return methods.dare(base, values, weights, masks, density, settings.scale)

    def _blocks(self, first: int, last: int) -> Iterator[tuple[int, list[Block]]]:
        """Yield blocks of elements: the number of the first one, and the values of all inputs."""
        most = max(BLOCK_ELEMENTS, _MEMORY_BYTES // self.element_bytes)
        for start in range(first, last, most):
            count = min(most, last - start)
            with self._permits, contextlib.ExitStack() as held:
                stored = [item.read(start * item.width, count * item.width, held) for item in self._inputs]
                with self._turns:
                    for at in range(0, count, BLOCK_ELEMENTS):
                        part = slice(at, min(count, at + BLOCK_ELEMENTS))
                        yield (
                            start + at,
                            [_values(item, data, part) for item, data in zip(self._inputs, stored, strict=True)],
                        )


def _values(item: SourceTensor, data: Bytes, part: slice) -> Block:
    return methods.widen(data[part.start * item.width : part.stop * item.width], item.row.dtype)


def known_cut(leaves: Sequence[Leaf], columns: Columns, config: StoreConfig) -> KnownCut:
    """Cut a merged state like its newest source, so that unchanged partitions are found by their digests."""
    inline: list[int] = []
    others: list[int] = []
    pieces: dict[tuple[Digest, int], list[tuple[int, Piece, int]]] = {}
    seen: Counter[tuple[Digest, int]] = Counter()
    for number, leaf in enumerate(leaves):
        source = leaf.source
        row = source.newest.row if isinstance(source, MergedTensor) and source.newest.is_whole else None
        if row is None:
            others.append(number)
        elif row.inline is not None:
            inline.append(number)
        else:
            start = 0
            for extent in row.extents:
                # Tensors with equal bytes share a partition of the source, but perhaps not of the result.
                place = extent.digest, extent.offset
                key = extent.digest, seen[place]
                seen[place] += 1
                piece = Piece(number, start, extent.length)
                pieces.setdefault(key, []).append((extent.offset, piece, extent.partition_length))
                start += extent.length
    partitions, digests = [], {}
    for (name, _), parts in pieces.items():
        parts.sort(key=lambda part: part[0])
        partition = Partition(tuple(piece for _, piece, _ in parts))
        partitions.append(partition)
        if partition.length == parts[0][2] and all(_is_equal(leaves, piece) for piece in partition.pieces):
            digests[partition] = name
    rest = cut(columns.sizes, columns.groups, config, columns.widths, others)
    return KnownCut(Cut((*inline, *rest.inline), (*partitions, *rest.partitions)), digests)


def _is_equal(leaves: Sequence[Leaf], piece: Piece) -> bool:
    source = leaves[piece.row].source
    return isinstance(source, MergedTensor) and source.is_equal(piece.start, piece.length)
