"""Partition plan: split tensors into partitions, and assign each partition to a window of the iteration.

Pure functions. The canonical split depends only on names, sizes and groups: an unchanged tensor has the same partitions
in every checkpoint, and is stored once. Capacities of windows are rounded to KiB before tensors are split, and the
manifest records them. Therefore a resumed training uses the same boundaries, and unchanged bytes keep their digests.
"""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Literal

from asymcheck.config import StoreConfig
from asymcheck.format.registry import BLOCK_BYTES, INLINE_BYTES_MAX

Phase = Literal["forward", "backward"]
Windows = tuple[tuple[Phase, float], ...]
"""Phase and length in seconds of each window of an iteration, in order."""

PLAN_KIND = "canonical"
ASYMMETRIC = "asymmetric"
SYMMETRIC = "symmetric"
EAGER = "eager"
AT_ONCE = -1  # release of partitions that are captured inside ``step()``
ROUNDED = ("bfloat16", "float16")  # dtypes of rounded copies of float32 tensors

_MASTER_WIDTH, _COPY_WIDTH = 4, 2
"""Bytes of an element of a tensor and of its rounded copy, which is split at the same elements."""
_BYTES_PER_S = 0.8e9  # arbitrary speed of the link, as only proportions of windows count
_WINDOWS_MAX = 1 << 16
_KIB_MAX = 1 << 40
# Larger integers are not exact in every JSON reader.
_NUMBER_MAX = (1 << 53) - 1


@dataclasses.dataclass(frozen=True)
class Piece:
    """A byte range of one tensor."""

    row: int
    start: int  # first byte in the tensor
    length: int


@dataclasses.dataclass(frozen=True)
class Partition:
    """Pieces that are stored as one unit, in order."""

    pieces: tuple[Piece, ...]

    @functools.cached_property
    def length(self) -> int:
        """Plain bytes."""
        return sum(piece.length for piece in self.pieces)

    def parts(self, payload: memoryview) -> Iterator[tuple[Piece, memoryview]]:
        """Yield each piece with its bytes in the payload of the partition."""
        start = 0
        for piece in self.pieces:
            yield piece, payload[start : start + piece.length]
            start += piece.length


@dataclasses.dataclass(frozen=True)
class Cut:
    """Partitions of a whole state."""

    inline: tuple[int, ...]  # rows whose bytes stay in the manifest
    partitions: tuple[Partition, ...]


def cut(
    sizes: Sequence[int],
    groups: Sequence[str],
    config: StoreConfig,
    widths: Sequence[int] = (),
    rows: Sequence[int] | None = None,
) -> Cut:
    """Split tensors into partitions.

    Tensors of at least ``config.bundle_below_bytes`` are split into pieces of equal size, which are multiples of 4 KiB
    except for the last. Smaller tensors are bundled within their group in the order of rows. Tiny tensors stay in the
    manifest while it has space.

    Args:
        sizes: bytes of each tensor, by row.
        groups: tensors are bundled only within their group.
        config: configuration with the desired sizes.
        widths: bytes of an element of each tensor; 4 for all if empty. Tensors of 2 and 4 bytes are split at the same
            elements, so that each partition of a rounded copy corresponds to one partition of its original.
        rows: the tensors to split; all if None.
    """
    inline: list[int] = []
    inline_room = config.inline_total_bytes
    partitions: list[Partition] = []
    bundles: dict[str, list[Piece]] = {}
    filled: dict[str, int] = {}
    for row in range(len(sizes)) if rows is None else rows:
        size, group = sizes[row], groups[row]
        if size <= min(config.inline_bytes, inline_room, INLINE_BYTES_MAX):
            inline.append(row)
            inline_room -= size
        elif size >= config.bundle_below_bytes:
            width = widths[row] if widths else 4
            partitions.extend(
                Partition((Piece(row, start, length),))
                for start, length in _pieces(size, width, config.partition_bytes)
            )
        else:
            if filled.get(group, 0) + size > config.partition_bytes:
                partitions.append(Partition(tuple(bundles.pop(group))))
                filled[group] = 0
            bundles.setdefault(group, []).append(Piece(row, 0, size))
            filled[group] = filled.get(group, 0) + size
    partitions.extend(Partition(tuple(pieces)) for pieces in bundles.values())
    return Cut(tuple(inline), tuple(partitions))


def _pieces(size: int, width: int, most: int) -> list[tuple[int, int]]:
    """Return a piece length that is a multiple of 4,096 elements if possible, and so of 4 KiB."""
    elements, limit = -(-size // width), most // (_MASTER_WIDTH if width == _COPY_WIDTH else width)
    count = -(-elements // limit)
    granule = min(BLOCK_BYTES, limit)
    # Rounding up may exceed a limit that is no multiple of the granule.
    length = min(-(-elements // (count * granule)), limit // granule) * granule * width
    return [(start, min(length, size - start)) for start in range(0, size, length)]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Partitions and the windows that release them."""

    number: int  # increases with each new plan of a run
    kind: str  # ``canonical``, ``asymmetric``, ``symmetric`` or ``eager``
    cut: Cut  # the partitions: first those captured at once, then the deferred ones in order of release
    release: tuple[int, ...]
    """Window that releases each partition, or ``AT_ONCE``. Inline rows are captured at once."""
    windows: tuple[tuple[Phase, int], ...] = ()
    """Phase and capacity in KiB of each window, in asymmetric and symmetric plans."""

    @functools.cached_property
    def eager_bytes(self) -> int:
        """Bytes of the partitions that are captured at once."""
        released = zip(self.cut.partitions, self.release, strict=True)
        return sum(partition.length for partition, window in released if window == AT_ONCE)

    def record(self) -> dict[str, object]:
        """Return the plan record of the manifest: integers, strings and lists."""
        record: dict[str, object] = {"number": self.number, "kind": self.kind}
        if self.windows:
            record["windows"] = [[phase, kib] for phase, kib in self.windows]
        return record


@dataclasses.dataclass(frozen=True)
class PlanInput:
    """Input of a plan. All sequences have one entry per row."""

    sizes: Sequence[int]
    groups: Sequence[str]  # tensors are bundled only within their group
    deferred: Sequence[bool]
    """Whether the tensor does not change until the fence, so that it may be captured after ``step()``."""
    widths: Sequence[int] = ()  # bytes of an element; empty if all have 4

    def cut(self, rows: Sequence[int], config: StoreConfig) -> Cut:
        """Return the canonical split of some rows."""
        return cut(self.sizes, self.groups, config, self.widths, rows)


def make_plan(layout: PlanInput, config: StoreConfig, kind: str, number: int, profile: Windows | None = None) -> Plan:
    """Compute a plan.

    Tensors that are not deferred have their own canonical split in all plans except eager ones, so a new plan never
    changes their digests. Deferred tensors are concatenated in the order of rows, and this space is split as follows.

    - An ``asymmetric`` plan splits in proportion to the capacities of the windows (AsymCheck: length = share of the
      idle time × bytes): small pieces for short windows, and large pieces for long ones.
    - A ``symmetric`` plan splits into equal parts, as many as windows, spread evenly over them.
    - A ``canonical`` plan uses the canonical split, and releases everything in window 0. It is also the result without
      a profile or any capacity.

    An ``eager`` plan is the canonical split of the whole state, captured at once.

    Capacities are scaled to the number of bytes. If they are too small, the wait at the fence is the same as with the
    rest at the end, because the link is busy in any case.
    """
    windows: tuple[tuple[Phase, int], ...] = ()
    if profile is not None and kind in (ASYMMETRIC, SYMMETRIC) and len(profile) <= _WINDOWS_MAX:
        windows = tuple((phase, int(min(seconds * _BYTES_PER_S / 1024, _KIB_MAX))) for phase, seconds in profile)
    if kind != EAGER and not any(kib for _, kib in windows):
        kind, windows = PLAN_KIND, ()
    return _plan(layout, config, kind, number, windows)


def plan_from_record(record: object, layout: PlanInput, config: StoreConfig) -> Plan | None:
    """Compute the plan of a plan record; return None if the record is invalid.

    For the same layout and configuration, the result equals the plan that was recorded.
    """
    if type(record) is not dict or not {"number", "kind"} <= set(record) <= {"number", "kind", "windows", "encoding"}:
        return None
    number, kind = record["number"], record["kind"]
    if type(number) is not int or not 0 <= number <= _NUMBER_MAX:
        return None
    if kind in (PLAN_KIND, EAGER) and "windows" not in record:
        return _plan(layout, config, kind, number, ())
    windows = _windows_from(record.get("windows"))
    if kind not in (ASYMMETRIC, SYMMETRIC) or windows is None:
        return None
    return _plan(layout, config, kind, number, windows)


def _windows_from(value: object) -> tuple[tuple[Phase, int], ...] | None:
    if type(value) is not list or len(value) > _WINDOWS_MAX:
        return None
    windows: list[tuple[Phase, int]] = []
    for entry in value:
        if type(entry) is not list or [type(part) for part in entry] != [str, int]:
            return None
        phase, kib = entry
        if phase not in ("forward", "backward") or not 0 <= kib <= _KIB_MAX:
            return None
        windows.append((phase, kib))
    return tuple(windows) if any(kib for _, kib in windows) else None


def _plan(
    layout: PlanInput, config: StoreConfig, kind: str, number: int, windows: tuple[tuple[Phase, int], ...]
) -> Plan:
    if kind == EAGER:
        whole = layout.cut(range(len(layout.sizes)), config)
        return Plan(number, kind, whole, (AT_ONCE,) * len(whole.partitions))
    rows = [row for row, deferred in enumerate(layout.deferred) if deferred]
    fixed = layout.cut([row for row, deferred in enumerate(layout.deferred) if not deferred], config)
    # Tensors that are not deferred come first, so that their split does not depend on anything else.
    room = config.inline_total_bytes - sum(layout.sizes[row] for row in fixed.inline)
    free = layout.cut(rows, dataclasses.replace(config, inline_total_bytes=room))
    partitions, release = list(free.partitions), [0] * len(free.partitions)
    if kind != PLAN_KIND:
        total = sum(partition.length for partition in partitions)
        slots = _asymmetric(total, windows, config) if kind == ASYMMETRIC else _symmetric(total, len(windows), config)
        partitions, release = _lay(layout, sorted({*rows} - {*free.inline}), config, slots)
    inline = tuple(sorted((*fixed.inline, *free.inline)))
    release = [AT_ONCE] * len(fixed.partitions) + release
    return Plan(number, kind, Cut(inline, (*fixed.partitions, *partitions)), tuple(release), windows)


_Slot = tuple[int, int, int]
"""Start and end of the deferred bytes that should become one partition, and the window that releases it."""


def _asymmetric(total: int, windows: Sequence[tuple[Phase, int]], config: StoreConfig) -> list[_Slot]:
    """Return slots in proportion to the capacities, within the limits of a partition."""
    whole = sum(kib for _, kib in windows)
    granted = [0] * len(windows)
    waiting: dict[Phase, int] = {"forward": 0, "backward": 0}
    passed = 0
    for window, (phase, kib) in enumerate(windows):
        waiting[phase] += total * (passed + kib) // whole - total * passed // whole
        passed += kib
        # A remainder below the minimum is moved to the next window of the same phase.
        if waiting[phase] >= config.deferred_bytes_min:
            granted[window] = waiting[phase]
            waiting[phase] = 0
    # The remainder of a phase is less than one partition. The longest window takes it.
    widest = max(range(len(windows)), key=lambda window: (granted[window], windows[window][1]))
    granted[widest] += sum(waiting.values())
    slots: list[_Slot] = []
    start = 0
    for window, share in enumerate(granted):
        count = -(-share // config.deferred_bytes_max)
        slots += [(start + share * i // count, start + share * (i + 1) // count, window) for i in range(count)]
        start += share
    return slots


def _symmetric(total: int, windows: int, config: StoreConfig) -> list[_Slot]:
    """Return equal slots, as many as windows if the limits of a partition permit, spread evenly."""
    length = min(max(-(-total // windows), config.deferred_bytes_min), config.deferred_bytes_max)
    count = -(-total // length)
    return [(total * i // count, total * (i + 1) // count, i * windows // count) for i in range(count)]


def _lay(
    layout: PlanInput, rows: Sequence[int], config: StoreConfig, slots: Sequence[_Slot]
) -> tuple[list[Partition], list[int]]:
    """Split rows along the slots. Pieces of large tensors are separate, and small tensors are bundled as a whole."""
    small_below = min(config.bundle_below_bytes, config.deferred_bytes_max)
    cutter = _Cutter(slots, config)
    bundles: dict[str, list[Piece]] = {}
    filled: dict[str, int] = {}
    for row in rows:
        size, group = layout.sizes[row], layout.groups[row]
        if size >= small_below:
            cutter.cut_large(row, size)
            continue
        if group in bundles and filled[group] + size > cutter.wanted():
            cutter.emit(bundles.pop(group), filled[group])
        if group not in bundles:
            bundles[group], filled[group] = [], 0
        bundles[group].append(Piece(row, 0, size))
        filled[group] += size
    for group, pieces in bundles.items():
        cutter.emit(pieces, filled[group])
    return cutter.partitions, cutter.release


class _Cutter:
    """Builder of partitions that follow the slots as closely as tensor boundaries permit."""

    def __init__(self, slots: Sequence[_Slot], config: StoreConfig) -> None:
        self.partitions: list[Partition] = []
        self.release: list[int] = []
        self._slots = slots
        self._least = config.deferred_bytes_min
        self._most = config.deferred_bytes_max
        self._number = 0
        self._at = 0

    def wanted(self) -> int:
        """Return the bytes to the end of the slot, in multiples of 4 KiB and within the limits."""
        rest = self._slot()[1] - self._at
        return min(max((rest + BLOCK_BYTES // 2) // BLOCK_BYTES * BLOCK_BYTES, self._least), self._most)

    def emit(self, pieces: Sequence[Piece], length: int) -> None:
        self.partitions.append(Partition(tuple(pieces)))
        self.release.append(self._slot()[2])
        self._at += length

    def cut_large(self, row: int, size: int) -> None:
        start = 0
        while start < size:
            rest = size - start
            length = min(self.wanted(), rest)
            if 0 < rest - length < self._least:
                # The remainder would be too small: include it, or halve the rest if that would be too large.
                length = rest if rest <= self._most else rest // 2 // BLOCK_BYTES * BLOCK_BYTES
            self.emit((Piece(row, start, length),), length)
            start += length

    def _slot(self) -> _Slot:
        """Return the first slot whose middle is ahead, so that rounding errors average out."""
        while self._number + 1 < len(self._slots):
            start, end, _ = self._slots[self._number]
            if 2 * self._at < start + end:
                break
            self._number += 1
        return self._slots[self._number]


class Originals:
    """Candidates for partitions that are rounded copies of others, by dtype and shape.

    An example are bfloat16 weights with float32 masters. The caller compares the bytes.
    """

    def __init__(
        self, partitions: Sequence[Partition], dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        """Index the partitions of a plan, with the dtypes and shapes of the tensors by row."""
        self._dtypes, self._shapes = dtypes, shapes
        self._alone = {
            number: partition.pieces[0] for number, partition in enumerate(partitions) if len(partition.pieces) == 1
        }
        # By shape and row: first byte and number of each partition, in order.
        self._masters: dict[tuple[int, ...], dict[int, list[tuple[int, int]]]] = {}
        for number, piece in self._alone.items():
            if dtypes[piece.row] == "float32":
                rows = self._masters.setdefault(shapes[piece.row], {})
                rows.setdefault(piece.row, []).append((piece.start, number))
        for rows in self._masters.values():
            for starts in rows.values():
                starts.sort()

    def candidates(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield possible originals of a partition: their numbers, and the first byte of the original in each."""
        piece = self._alone.get(number)
        if piece is None or self._dtypes[piece.row] not in ROUNDED:
            return
        start, end = 2 * piece.start, 2 * (piece.start + piece.length)
        for starts in self._masters.get(self._shapes[piece.row], {}).values():
            at = bisect_right(starts, start, key=itemgetter(0)) - 1
            if at >= 0:
                other = starts[at][1]
                master = self._alone[other]
                if end <= master.start + master.length:
                    yield other, start - master.start
