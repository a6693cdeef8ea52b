"""Boxes: rectangular parts of tensors, their intersections, and copies between them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from asymcheck.errors import LimitError

_Ints = npt.NDArray[np.int64]
_UNCOVERED_MAX = 1 << 12
"""Maximum number of uncovered pieces while parts are matched. No layout of ranks comes close."""
_WIDEST = 8  # bytes of the widest word that is copied at once


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: ``whole[offset[0]:offset[0] + shape[0], …]``."""

    whole: tuple[int, ...]  # shape of the whole tensor
    offset: tuple[int, ...]  # where the part begins in it, for each dimension
    shape: tuple[int, ...]  # shape of the part

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def of_whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of a whole tensor."""
        return cls(shape, (0,) * len(shape), shape)

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def shared(cls, whole: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]) -> Box:
        """Return a cached box, because most shards of a state are the same in each step."""
        return cls(whole, offset, shape)

    @property
    def is_valid(self) -> bool:
        """Whether the box is inside of its whole tensor."""
        return len(self.whole) == len(self.offset) == len(self.shape) and all(
            first >= 0 and size >= 0 and first + size <= most
            for most, first, size in zip(self.whole, self.offset, self.shape, strict=True)
        )

    @property
    def is_whole(self) -> bool:
        """Whether the box is the whole tensor."""
        return self.shape == self.whole

    @property
    def elements(self) -> int:
        """Number of elements; a scalar has one."""
        return math.prod(self.shape)

    def covers(self, other: Box) -> bool:
        """Tell whether another box of the same tensor is inside of this one."""
        return not other.elements or all(
            mine <= its and its + count <= mine + size
            for mine, size, its, count in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def common(self, other: Box) -> Box | None:
        """Return the intersection with another box of the same tensor; None if it is empty."""
        first = tuple(map(max, self.offset, other.offset))
        mine, theirs = (map(sum, zip(box.offset, box.shape, strict=True)) for box in (self, other))
        shape = tuple(end - start for start, end in zip(first, map(min, mine, theirs), strict=True))
        return Box(self.whole, first, shape) if all(size > 0 for size in shape) else None

    def without(self, other: Box) -> list[Box]:
        """Return the rest of this box without another one, as disjoint boxes."""
        hole = self.common(other)
        if hole is None:
            return [self]
        rest, offset, shape = [], list(self.offset), list(self.shape)
        for dim, (start, size) in enumerate(zip(hole.offset, hole.shape, strict=True)):
            end = offset[dim] + shape[dim]
            for first, last in ((offset[dim], start), (start + size, end)):
                if first < last:
                    place = (*offset[:dim], first, *offset[dim + 1 :])
                    rest.append(Box(self.whole, place, (*shape[:dim], last - first, *shape[dim + 1 :])))
            offset[dim], shape[dim] = start, size
        return rest

    def __str__(self) -> str:
        """Return the name for errors, for instance ``[0:2, 0:8] of [4, 8]``. Works for invalid boxes, too."""
        if not len(self.whole) == len(self.offset) == len(self.shape):
            return f"shape {list(self.shape)} at {list(self.offset)} of {list(self.whole)}"
        ranges = ", ".join(f"{first}:{first + size}" for first, size in zip(self.offset, self.shape, strict=True))
        return f"[{ranges}] of {list(self.whole)}"


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Disjoint parts that cover a box."""

    tiles: tuple[tuple[int, Box], ...]  # number of a part, and the box that it contributes
    missing: Box | None  # elements that no part has; None if the parts cover the box


def tile(box: Box, parts: Sequence[Box]) -> Tiling:
    """Cover a box with parts of the same tensor. Where parts overlap, the first one counts.

    Raises:
        LimitError: the parts overlap as in no layout of ranks, and matching them would take very long.
    """
    if not box.elements:
        return Tiling((), None)
    first = parts[0].common(box) if parts else None
    if first == box:
        return Tiling(((0, box),), None)
    starts = np.array([part.offset for part in parts], dtype=np.int64).reshape(len(parts), len(box.whole))
    ends = starts + np.array([part.shape for part in parts], dtype=np.int64).reshape(starts.shape)
    own = np.array(box.offset, dtype=np.int64)
    starts, ends = np.maximum(starts, own), np.minimum(ends, own + np.array(box.shape, dtype=np.int64))
    numbers = np.flatnonzero((starts < ends).all(axis=1))
    if not len(numbers):
        return Tiling((), box)
    # Replicas have equal boxes; the first one counts.
    _, chosen = np.unique(np.hstack([starts, ends])[numbers], axis=0, return_index=True)
    numbers = numbers[np.sort(chosen)]
    starts, ends = starts[numbers], ends[numbers]
    tiles = [
        (number, Box(box.whole, tuple(start), tuple(end - first for first, end in zip(start, stop, strict=True))))
        for number, start, stop in zip(numbers.tolist(), starts.tolist(), ends.tolist(), strict=True)
    ]
    if _are_apart(starts, ends) and sum(part.elements for _, part in tiles) == box.elements:
        return Tiling(tuple(tiles), None)
    return _tile_one_by_one(box, tiles)


def _are_apart(starts: _Ints, ends: _Ints) -> bool:
    """Tell whether distinct boxes form a grid, and so are disjoint."""
    for first, last in zip(starts.T, ends.T, strict=True):
        spans = np.unique(np.stack([first, last], axis=1), axis=0)
        if (spans[1:, 0] < spans[:-1, 1]).any():
            return False
    return True


def _tile_one_by_one(box: Box, parts: Sequence[tuple[int, Box]]) -> Tiling:
    tiles, uncovered = [], [box]
    for number, part in parts:
        covered = [common for piece in uncovered if (common := piece.common(part)) is not None]
        if covered:
            tiles += [(number, common) for common in covered]
            uncovered = [rest for piece in uncovered for rest in piece.without(part)]
        if not uncovered:
            break
        if len(uncovered) > _UNCOVERED_MAX:
            raise LimitError(f"parts of {list(box.whole)} overlap in more ways than a reader supports")
    return Tiling(tuple(tiles), uncovered[0] if uncovered else None)


@dataclasses.dataclass(frozen=True)
class Region:
    """Strided bytes in a source and in a target."""

    source: int  # first byte in the source
    target: int  # first byte in the target
    shape: tuple[int, ...]  # counts; the last one is a number of contiguous bytes
    source_strides: tuple[int, ...]  # strides in bytes in the source; the last one is 1
    target_strides: tuple[int, ...]  # strides in bytes in the target; the last one is 1

    @property
    def nbytes(self) -> int:
        """Total bytes."""
        return math.prod(self.shape)

    @property
    def is_run(self) -> bool:
        """Whether the bytes are contiguous in source and target."""
        return len(self.shape) == 1

    def copy(self, source: memoryview, target: npt.NDArray[np.uint8]) -> None:
        """Copy the bytes from ``source`` into ``target``, a writable array. Releases the GIL for large copies."""
        if self.is_run:
            count = self.shape[0]
            data = np.frombuffer(source, dtype=np.uint8, count=count, offset=self.source)
            np.copyto(target[self.target : self.target + count], data)
            return
        unit = math.gcd(_WIDEST, self.shape[-1])
        shape = (*self.shape[:-1], self.shape[-1] // unit)
        source_view, target_view = (
            np.ndarray(shape, f"u{unit}", place, first, (*steps[:-1], unit))
            for place, first, steps in (
                (source, self.source, self.source_strides),
                (target.data, self.target, self.target_strides),
            )
        )
        np.copyto(target_view, source_view)


class Crossing:
    """Intersection of two boxes of one tensor, as byte ranges in both. Both are in row-major order."""

    def __init__(self, source: Box, target: Box, common: Box, width: int) -> None:
        """Map bytes of ``source`` to bytes of ``target``.

        Their intersection ``common`` is not empty. An element has ``width`` bytes.
        """
        self.nbytes = common.elements * width  # bytes of the intersection
        # Dimensions of one element, or that both boxes span as a whole, are merged. Usually, one dimension remains.
        dims = [(width, width, width, 0, 0)]
        shapes = (source.shape, target.shape, common.shape)
        for p, q, c, start, a, b in [*zip(*shapes, common.offset, source.offset, target.offset, strict=True)][::-1]:
            p_in, q_in, c_in = dims[-1][:3]
            if p_in == c_in == q_in:
                dims[-1] = (p * p_in, q * q_in, c * c_in, (start - a) * p_in, (start - b) * q_in)
            elif p != 1 or q != 1:
                dims.append((p, q, c, start - a, start - b))
        columns = list(zip(*reversed(dims), strict=True))
        self._sizes, target_sizes, self._counts, self._starts, self._target_starts = columns
        self._strides = strides_of(self._sizes)
        self._target_strides = strides_of(target_sizes)

    @property
    def is_run(self) -> bool:
        """Whether the bytes of the intersection are contiguous in both boxes."""
        return len(self._counts) == 1 or all(count == 1 for count in self._counts[:-1])

    def touches(self, start: int, stop: int) -> bool:
        """Tell whether the source bytes from ``start`` to ``stop`` overlap with the target."""
        return next(self.regions(start, stop), None) is not None

    def regions(self, start: int, stop: int) -> Iterator[Region]:
        """Yield the regions for source bytes from ``start`` to ``stop``; ``Region.source`` counts from ``start``."""
        for firsts, counts in _boxes_of_range(self._sizes, start, stop):
            lows = tuple(map(max, firsts, self._starts))
            ends = (
                min(first + count, mine + most)
                for first, count, mine, most in zip(firsts, counts, self._starts, self._counts, strict=True)
            )
            shape = tuple(end - low for low, end in zip(lows, ends, strict=True))
            if all(size > 0 for size in shape):
                yield self._region(lows, shape, start)

    def _region(self, lows: tuple[int, ...], shape: tuple[int, ...], start: int) -> Region:
        source = sum(map(int.__mul__, lows, self._strides)) - start
        inside = (low - mine + its for low, mine, its in zip(lows, self._starts, self._target_starts, strict=True))
        target = sum(map(int.__mul__, inside, self._target_strides))
        kept = [dim for dim, size in enumerate(shape[:-1]) if size > 1] + [len(shape) - 1]
        return Region(
            source,
            target,
            tuple(shape[dim] for dim in kept),
            tuple(self._strides[dim] for dim in kept),
            tuple(self._target_strides[dim] for dim in kept),
        )


def strides_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major array, in elements."""
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _boxes_of_range(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and counts of the boxes that make up a range of a row-major array."""
    if start >= stop:
        return
    if len(sizes) == 1:
        yield (start,), (stop - start,)
        return
    inner = math.prod(sizes[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        for offsets, counts in _boxes_of_range(sizes[1:], head, tail):
            yield (first, *offsets), (1, *counts)
        return
    if head:
        for offsets, counts in _boxes_of_range(sizes[1:], head, inner):
            yield (first, *offsets), (1, *counts)
        first += 1
    if first < last:
        yield (first, *(0,) * (len(sizes) - 1)), (last - first, *sizes[1:])
    for offsets, counts in _boxes_of_range(sizes[1:], 0, tail):
        yield (last, *offsets), (1, *counts)
