"""Compare two checkpoints: changed tensors with the norms of their differences, and changed values.

Tensors with equal digests are not read. Other tensors are streamed, with a few partitions in memory at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from asymcheck.errors import DamagedPartitionError, InvalidInputError, MissingPartitionError
from asymcheck.format import layout
from asymcheck.format.manifest import Extent, Manifest, TensorRow
from asymcheck.format.registry import DTYPE_BYTES
from asymcheck.inspect.history import describe_by, known_line
from asymcheck.inspect.norms import NormSums, TensorNorms, without_norms
from asymcheck.inspect.values import plain_values, shortened
from asymcheck.restore.frame_reader import read_any
from asymcheck.restore.partition_locator import Hints, PartitionLocator, PartitionSet
from asymcheck.restore.resolve import find_readable, named_checkpoint, needed_by, read_manifests
from asymcheck.state.names import in_order, matches, no_match, unique_name
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.types import Checkpoint, Digest, Progress, ProgressMeter
from asymcheck.validation import parse_which

# Small enough that torch converts a block in this thread. Measured: on busy cores, its thread pool is tens of times
# slower.
_BLOCK_ELEMENTS = 1 << 15
_KEPT = 3
"""Number of partitions in the cache: one for each of the two tensors, and one that they share with the next tensors."""

_Read = Callable[[Digest], memoryview]
"""Return the verified bytes of a partition."""


@dataclasses.dataclass(frozen=True)
class TensorChange:
    """A tensor that differs between checkpoints A and B. Dtype and shape are None where the tensor does not exist."""

    name: str
    aliases: tuple[str, ...]
    """Further names of the tensor; in both checkpoints, if both have the tensor."""
    rank: int
    role: str
    change: str
    """``added``, ``removed``, ``shape``, ``dtype``, ``value``, or ``layout`` (the rank has another part of the tensor).

    An added or removed alias of a tensor in both checkpoints has 0 bytes. ``undecided`` occurs only without norms, if
    the tensor is in other partitions than before and shares them with other tensors.
    """
    dtype_a: str | None
    dtype_b: str | None
    shape_a: tuple[int, ...] | None
    """Shape of the whole tensor in A."""
    shape_b: tuple[int, ...] | None
    bytes_a: int
    bytes_b: int
    shared_bytes: int
    """Bytes of the tensor in B (in A if it was removed) in partitions of both checkpoints.

    An inline tensor counts if the other checkpoint has an inline tensor with the same bytes.
    """
    norms: TensorNorms | None
    """Norms of the difference; None if not requested, or if the shapes or parts differ."""


@dataclasses.dataclass(frozen=True)
class ValueChange:
    """A plain value that differs between two checkpoints."""

    name: str
    """Dotted name in the state, after the rank if there are several ranks."""
    a: str | None
    """The value in A as text, shortened in the middle; None if A has no such value."""
    b: str | None


@dataclasses.dataclass(frozen=True)
class CheckpointDiff:
    """Difference between two checkpoints."""

    a: Checkpoint
    b: Checkpoint
    other_saves_a: tuple[str, ...]
    """Save ids of other checkpoints of the step of A, if A was named by a step."""
    other_saves_b: tuple[str, ...]
    tensors: tuple[TensorChange, ...]
    """The changed tensors, by name."""
    unchanged_tensors: int
    unchanged_bytes: int
    """Bytes of the unchanged tensors in B."""
    values: tuple[ValueChange, ...]
    """The changed plain values, by name."""
    unchanged_values: int
    bytes_a: int
    bytes_b: int
    shared_bytes: int
    """Bytes of tensors of B in partitions that A needs, too, and that are stored once.

    Equal inline bytes count, too, although each manifest stores a copy.
    """


def compare(
    tier: ReadTier,
    a: int | str,
    b: int | str,
    *,
    run: str,
    tensors: str = "*",
    norms: bool = True,
    progress: Progress | None = None,
) -> CheckpointDiff:
    """Compare two checkpoints, named as for :func:`find_checkpoint`.

    ``tensors`` is a glob for names of tensors and plain values. Total bytes include all tensors.

    Raises:
        InvalidInputError, CheckpointNotFoundError: A or B is not the name of one checkpoint, the glob matches nothing,
            or the numbers of ranks differ.
        InconsistentCheckpointError, FormatError: a manifest is missing or damaged.
        MissingPartitionError, DamagedPartitionError: a partition to read has no intact copy.
    """
    side_a, side_b = (Side(tier, *find_checkpoint(tier, name, run)) for name in (a, b))
    return _Comparison(tier, side_a, side_b, tensors).result(norms=norms, progress=progress)


@dataclasses.dataclass(frozen=True)
class _Pair:
    rank: int
    names: tuple[str, ...]
    a: TensorRow
    b: TensorRow

    @property
    def kind(self) -> str:
        """Kind of the change, if there is one."""
        if self.a.global_shape != self.b.global_shape:
            return "shape"
        if (self.a.shape, self.a.offset) != (self.b.shape, self.b.offset):
            return "layout"
        return "dtype" if self.a.dtype != self.b.dtype else "value"

    @property
    def has_same_bytes(self) -> bool:
        """Whether the manifests show that the tensor is unchanged."""
        if self.kind != "value" or self.a.inline != self.b.inline:
            return False
        return list(map(_byte_range, self.a.extents)) == list(map(_byte_range, self.b.extents))

    @property
    def is_comparable(self) -> bool:
        """Whether the tensors can be compared element by element."""
        if self.kind == "dtype":
            return not without_norms((self.a.dtype, self.b.dtype))
        return self.kind == "value"

    @property
    def kind_without_reading(self) -> str:
        """Kind of the change according to the manifests."""
        if self.kind != "value" or (self.a.inline is not None and self.b.inline is not None):
            return self.kind
        # Different digests prove a change if a partition holds the same range of this tensor, and nothing else.
        digests = dict(_whole_partitions(self.a))
        is_changed = any(digests.get(span, digest) != digest for span, digest in _whole_partitions(self.b))
        return self.kind if is_changed else "undecided"


def _byte_range(extent: Extent) -> tuple[Digest, int, int]:
    return extent.digest, extent.offset, extent.length


def _whole_partitions(row: TensorRow) -> Iterator[tuple[tuple[int, int], Digest]]:
    """Yield the range in the tensor (start and length) and the digest of each partition that holds only this tensor."""
    start = 0
    for extent in row.extents:
        if extent.length == extent.partition_length:
            yield (start, extent.length), extent.digest
        start += extent.length


def _change(
    rank: int,
    names: tuple[str, ...],
    role: str,
    change: str,
    a: TensorRow | None,
    b: TensorRow | None,
    shared: int,
    norms: TensorNorms | None = None,
) -> TensorChange:
    dtype_a, shape_a, bytes_a = (None, None, 0) if a is None else (a.dtype, a.global_shape, a.nbytes)
    dtype_b, shape_b, bytes_b = (None, None, 0) if b is None else (b.dtype, b.global_shape, b.nbytes)
    sides = dtype_a, dtype_b, shape_a, shape_b, bytes_a, bytes_b
    return TensorChange(names[0], names[1:], rank, role, change, *sides, shared, norms)


class _Comparison:
    def __init__(self, tier: ReadTier, a: Side, b: Side, pattern: str) -> None:
        self.tier, self.a, self.b, self.pattern = tier, a, b, pattern
        if len(a.manifests) != len(b.manifests):
            ranks = f"{a.ref} was saved by {len(a.manifests)} ranks and {b.ref} by {len(b.manifests)} ranks"
            raise InvalidInputError(f"cannot compare checkpoints of different numbers of ranks: {ranks}; restore both")
        self.changed: list[TensorChange] = []
        self.unchanged: list[TensorRow] = []
        names = [name for side in (a, b) for _, name in (*side.rows, *side.values)]
        if pattern != "*" and not matches(pattern, names):
            raise no_match(pattern, names, "either checkpoint", "they have")

    def result(self, *, norms: bool, progress: Progress | None) -> CheckpointDiff:
        self._note_unpaired()
        to_read = []
        for pair in self._pairs():
            if pair.has_same_bytes:
                self.unchanged.append(pair.b)
            elif norms and pair.is_comparable:
                to_read.append(pair)
            else:
                self._note(pair, pair.kind_without_reading)
        if to_read:
            self._read(to_read, progress)
        values, unchanged_values = self._values()
        a, b = self.a, self.b
        return CheckpointDiff(
            a=a.checkpoint,
            b=b.checkpoint,
            other_saves_a=a.other_saves,
            other_saves_b=b.other_saves,
            tensors=tuple(sorted(self.changed, key=lambda change: (change.rank, in_order(change.name)))),
            unchanged_tensors=len(self.unchanged),
            unchanged_bytes=sum(row.nbytes for row in self.unchanged),
            values=values,
            unchanged_values=unchanged_values,
            bytes_a=a.checkpoint.state_bytes,
            bytes_b=b.checkpoint.state_bytes,
            shared_bytes=sum(a.shared_bytes_of(row) for *_, row in b.tensors),
        )

    def _note_unpaired(self) -> None:
        for side, other, change in ((self.a, self.b, "removed"), (self.b, self.a, "added")):
            for rank, names, row in side.tensors:
                unpaired = tuple(name for name in names if (rank, name) not in other.rows)
                if unpaired and matches(self.pattern, unpaired):
                    # An alias has no additional bytes.
                    shared = other.shared_bytes_of(row) if unpaired == names else 0
                    changed_row = row if unpaired == names else dataclasses.replace(row, nbytes=0)
                    a, b = (changed_row, None) if change == "removed" else (None, changed_row)
                    self.changed.append(_change(rank, unpaired, row.role, change, a, b, shared))

    def _pairs(self) -> list[_Pair]:
        """Return the tensors of both checkpoints. A tensor whose tied names were untied is in several pairs."""
        pairs: dict[tuple[int, int], _Pair] = {}
        for (rank, name), b in self.b.rows.items():
            a = self.a.rows.get((rank, name))
            if a is not None:
                pair = pairs.get((id(a), id(b)))
                names = (*pair.names, name) if pair else (name,)
                pairs[id(a), id(b)] = _Pair(rank, names, a, b)
        return [pair for pair in pairs.values() if matches(self.pattern, pair.names)]

    def _note(self, pair: _Pair, change: str, norms: TensorNorms | None = None) -> None:
        shared = self.a.shared_bytes_of(pair.b)
        self.changed.append(_change(pair.rank, pair.names, pair.b.role, change, pair.a, pair.b, shared, norms))

    def _read(self, pairs: Sequence[_Pair], progress: Progress | None) -> None:
        partitions: dict[Digest, int] = {}
        for extent in (extent for pair in pairs for row in (pair.a, pair.b) for extent in row.extents):
            if partitions.setdefault(extent.digest, extent.partition_length) != extent.partition_length:
                raise MissingPartitionError(
                    f"partition {extent.digest.hex()} has two lengths in the manifests: run asymcheck verify",
                    extent.digest,
                )
        hints = Hints.of_manifests([*self.a.manifests, *self.b.manifests])
        meter = ProgressMeter(progress, sum(pair.a.nbytes + pair.b.nbytes for pair in pairs))
        try:
            with PartitionLocator(self.tier, PartitionSet.of_lengths(partitions), hints) as sources:
                order = {digest: index for index, digest in enumerate(sources.in_reading_order(list(partitions)))}
                read = functools.lru_cache(_KEPT)(partial(read_any, sources))
                # Read in pack order, so that tensors that share partitions follow each other.
                for pair in sorted(pairs, key=lambda pair: _first_position(pair, order)):
                    sums = NormSums(pair.a.dtype, pair.b.dtype, pair.b.role)
                    for compared in _compare_blocks(pair, read, sums):
                        meter.add(compared)
                    result = sums.result()
                    if result.differing or pair.kind != "value":
                        self._note(pair, pair.kind, result)
                    else:
                        self.unchanged.append(pair.b)
        except (MissingPartitionError, DamagedPartitionError) as error:
            side = self.a if error.digest in self.a.partitions else self.b
            needed = needed_by(side.manifests, error.digest)
            raise type(error)(f"{error}; {needed}", error.digest) from error

    def _values(self) -> tuple[tuple[ValueChange, ...], int]:
        a, b = self.a.values, self.b.values
        keys = [key for key in {*a, *b} if matches(self.pattern, [key[1]])]
        changed = [key for key in sorted(keys, key=lambda key: (key[0], in_order(key[1]))) if a.get(key) != b.get(key)]
        changes = tuple(
            ValueChange(self._of_rank(*key), shortened(a.get(key)), shortened(b.get(key))) for key in changed
        )
        return changes, len(keys) - len(changed)

    def _of_rank(self, rank: int, name: str) -> str:
        return f"rank {rank}: {name}" if len(self.a.manifests) > 1 else name


class _TensorStream:
    """Sequential reader of one tensor."""

    def __init__(self, row: TensorRow, read: _Read) -> None:
        self._pieces = (read(extent.digest)[extent.offset : extent.offset + extent.length] for extent in row.extents)
        self._piece = memoryview(row.inline or b"")

    def read_into(self, block: npt.NDArray[np.uint8]) -> None:
        """Fill a block with the next bytes. The block must not be longer than the rest of the tensor."""
        filled = 0
        while filled < len(block):
            self._piece = self._piece or next(self._pieces)
            part = self._piece[: len(block) - filled]
            block[filled : filled + len(part)] = np.frombuffer(part, dtype=np.uint8)
            self._piece = self._piece[len(part) :]
            filled += len(part)


def _compare_blocks(pair: _Pair, read: _Read, sums: NormSums) -> Iterator[int]:
    """Add two tensors to ``sums`` block by block. Yield the bytes of each block."""
    sizes = [DTYPE_BYTES[row.dtype] for row in (pair.a, pair.b)]
    streams = [_TensorStream(row, read) for row in (pair.a, pair.b)]
    blocks = [np.empty(_BLOCK_ELEMENTS * size, dtype=np.uint8) for size in sizes]
    remaining = pair.a.nbytes // sizes[0]
    while remaining:
        count = min(remaining, _BLOCK_ELEMENTS)
        views = [block[: count * size] for block, size in zip(blocks, sizes, strict=True)]
        for stream, view in zip(streams, views, strict=True):
            stream.read_into(view)
        sums.add(*views)
        remaining -= count
        yield count * sum(sizes)


def _first_position(pair: _Pair, order: Mapping[Digest, int]) -> tuple[int, int]:
    """Return the position of the first byte of A, or of B if A is inline. Inline pairs come first."""
    for row in (pair.a, pair.b):
        if row.extents:
            return order[row.extents[0].digest], row.extents[0].offset
    return -1, 0


def find_checkpoint(tier: ReadTier, name: int | str, run: str) -> tuple[CheckpointFiles, list[CheckpointFiles]]:
    """Return the checkpoint with a name: ``STEP``, ``save:DIGITS`` or ``best:METRIC``, alone or after ``RUN@``.

    If a step was saved several times, return the checkpoint that a restore would choose: the newest readable save on
    the line, or of the newest generation. The other checkpoints of the step follow, newest first. ``DIGITS`` are the
    first hexadecimal digits of exactly one save id.

    Raises:
        InvalidInputError: the name is invalid, or several checkpoints have these digits.
        CheckpointNotFoundError: no checkpoint has this name.
        HeadRecordError: the step was saved several times, and the line is unknown.
        InconsistentCheckpointError: the manifests of no save of the step are readable.

    Warns:
        SkippedCheckpointWarning: a newer save of the step is unfinished or damaged.
    """
    text = str(name)
    if "@" in text:
        run, text = text.split("@", 1)
    layout.check_run(run)
    which = parse_which(text)
    if isinstance(which, str):
        return named_checkpoint(tier, run, which), []
    chosen, _ = find_readable(tier, run, which)
    same_step = [listing for listing in tier.manifests.checkpoints(run) if listing.ref.step == which]
    return chosen, [listing for listing in reversed(same_step) if listing.ref != chosen.ref]


class Side:
    """The tensors and values of one of the two checkpoints."""

    def __init__(self, tier: ReadTier, listing: CheckpointFiles, same_step: Sequence[CheckpointFiles]) -> None:
        self.ref = listing.ref
        self.manifests: list[Manifest] = read_manifests(tier, listing)
        self.checkpoint = describe_by(listing, self.manifests, known_line(tier, listing.run))
        self.other_saves = tuple(other.ref.save_id.hex() for other in same_step)
        self.partitions: set[Digest] = set()
        self.inline: set[bytes] = set()
        self.tensors: list[tuple[int, tuple[str, ...], TensorRow]] = []
        """Each tensor once, with its rank and its names."""
        self.rows: dict[tuple[int, str], TensorRow] = {}
        """Each tensor by each of its names."""
        self.values: dict[tuple[int, str], str] = {}
        """The text of each plain value by rank and name."""
        for manifest in self.manifests:
            self._add(manifest)

    def _add(self, manifest: Manifest) -> None:
        rank = manifest.header.rank
        self.partitions.update(manifest.partitions())
        name_counts: dict[str, int] = {}
        for row in manifest.rows():
            if row.inline is not None:
                self.inline.add(row.inline)
            names = tuple(unique_name(name, name_counts) for name in (row.name, *row.aliases))
            self.tensors.append((rank, names, row))
            self.rows.update(dict.fromkeys([(rank, name) for name in names], row))
        self.values.update({(rank, name): text for name, text in plain_values(manifest).items()})

    def shared_bytes_of(self, row: TensorRow) -> int:
        """Count the bytes of a tensor of the other checkpoint that this checkpoint has, too."""
        if row.inline is not None:
            return len(row.inline) if row.inline in self.inline else 0
        return sum(extent.length for extent in row.extents if extent.digest in self.partitions)
