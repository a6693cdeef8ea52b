"""The plan: how tensors are cut into partitions, and in which window of the iteration each partition is released.

Pure functions of their arguments. The canonical cut depends on names, sizes and groups alone: an unchanged tensor gets
the same partitions at every step, and its bytes are stored once. The capacities of windows are rounded to KiB before
anything is cut, and the manifest records them. Therefore a resumed training cuts as before, and unchanged bytes keep
their digests.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter

from asymcheck.config import StoreConfig
from asymcheck.errors import InvalidInputError
from asymcheck.format.registry import BLOCK_BYTES, INLINE_BYTES_MAX
from asymcheck.state.iteration_profile import Phase, Windows

PLAN_KIND = "canonical"
ASYMMETRIC = "asymmetric"
SYMMETRIC = "symmetric"
EAGER = "eager"
AT_ONCE = -1  # release of partitions that are captured inside ``step()``
ROUNDED = ("bfloat16", "float16")  # the dtypes of rounded copies of float32 tensors

_MASTER_WIDTH, _COPY_WIDTH = 4, 2
"""Bytes of an element of a tensor, and of its rounded copy, which is cut at the same elements."""
_BYTES_PER_S = 0.8e9  # an arbitrary speed of the link: only the proportions of the windows count
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

    @property
    def length(self) -> int:
        """Plain bytes."""
        return sum(piece.length for piece in self.pieces)


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a whole state is cut."""

    inline: tuple[int, ...]  # rows whose bytes stay in the manifest
    partitions: tuple[Partition, ...]


def cut(sizes: Sequence[int], groups: Sequence[str], config: StoreConfig, widths: Sequence[int] | None = None) -> Cut:
    """Cut tensors into partitions.

    Tensors of at least ``config.bundle_below_bytes`` are cut into pieces of equal size, which are multiples of 4 KiB
    except for the last. Smaller ones are bundled within their group in order of rows. Tiny ones stay in the manifest
    while it has room.

    Args:
        sizes: bytes of each tensor, by row.
        groups: tensors are bundled only within their group.
        config: the sizes to aim at.
        widths: bytes of an element of each tensor, 4 for all when None. Tensors of 2 and 4 bytes are cut at the same
            elements: so a partition of a rounded copy lies within one of its original.
    """
    inline: list[int] = []
    inline_room = config.inline_total_bytes
    partitions: list[Partition] = []
    bundles: dict[str, list[Piece]] = {}
    filled: dict[str, int] = {}
    for row, (size, group) in enumerate(zip(sizes, groups, strict=True)):
        if size <= min(config.inline_bytes, inline_room, INLINE_BYTES_MAX):
            inline.append(row)
            inline_room -= size
        elif size >= config.bundle_below_bytes:
            width = 4 if widths is None else widths[row]
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
    """Cut at multiples of 4096 elements where these are not too many, and so of 4 KiB."""
    elements, limit = -(-size // width), most // (_MASTER_WIDTH if width == _COPY_WIDTH else width)
    count = -(-elements // limit)
    granule = min(BLOCK_BYTES, limit)
    length = -(-elements // (count * granule)) * granule * width
    return [(start, min(length, size - start)) for start in range(0, size, length)]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A cut and when its partitions are released."""

    number: int  # increases with each new plan of a run
    kind: str  # ``canonical``, ``asymmetric``, ``symmetric`` or ``eager``
    cut: Cut  # the partitions: first those captured at once, then the deferred ones in order of release
    release: tuple[int, ...]
    """For each partition the window whose beginning releases it, or ``AT_ONCE``. Inline rows are captured at once."""
    windows: tuple[tuple[Phase, int], ...] = ()
    """Phase and capacity in KiB of each window; only in asymmetric and symmetric plans."""

    def record(self) -> dict[str, object]:
        """Return the manifest's ``plan``: integers, strings and lists, from which the plan can be made again."""
        record: dict[str, object] = {"number": self.number, "kind": self.kind}
        if self.windows:
            record["windows"] = [[phase, kib] for phase, kib in self.windows]
        return record


@dataclasses.dataclass(frozen=True)
class PlanInput:
    """Input of a plan. All sequences have one entry a row."""

    sizes: Sequence[int]
    groups: Sequence[str]  # tensors are bundled only within their group
    deferred: Sequence[bool]
    """Whether the tensor stays as it is up to the fence, so that it may be captured after ``step()``."""
    widths: Sequence[int] = ()  # bytes of an element; none when all have 4

    def cut(self, rows: Sequence[int], config: StoreConfig) -> Cut:
        """Return the canonical cut of some rows alone."""
        widths = [self.widths[row] for row in rows] if self.widths else None
        found = cut([self.sizes[row] for row in rows], [self.groups[row] for row in rows], config, widths)
        partitions = (
            Partition(tuple(dataclasses.replace(piece, row=rows[piece.row]) for piece in partition.pieces))
            for partition in found.partitions
        )
        return Cut(tuple(rows[row] for row in found.inline), tuple(partitions))


def make_plan(layout: PlanInput, config: StoreConfig, kind: str, number: int, profile: Windows | None = None) -> Plan:
    """Make a plan.

    Tensors that are not deferred have the canonical cut of them alone in every plan but an eager one, so a new
    plan never gives them new digests. Deferred ones are laid end to end in order of rows, and that space is cut

    - in an ``asymmetric`` plan in proportion to the capacities of the windows (AsymCheck: length = share of the idle
      time × bytes), small pieces where gaps are short and large ones where they are long;
    - in a ``symmetric`` plan into equal parts, as many as windows, spread evenly over them;
    - in a ``canonical`` plan as everywhere, all released in window 0; so also without a profile or any capacity.

    An ``eager`` plan is the canonical cut of the whole state, all captured at once.

    The capacities are scaled to the bytes in both directions. When they are too small, as much is left to wait for
    at the fence as if the rest had been put off to the end, since the link works through what is queued either way.

    Raises:
        InvalidInputError: an unknown kind, or a number that a manifest cannot record.
    """
    if kind not in (PLAN_KIND, ASYMMETRIC, SYMMETRIC, EAGER):
        raise InvalidInputError(f"plan kind {kind!r}: give canonical, asymmetric, symmetric or eager")
    if not 0 <= number <= _NUMBER_MAX:
        raise InvalidInputError(f"plan number {number}: give 0 to {_NUMBER_MAX}")
    windows: tuple[tuple[Phase, int], ...] = ()
    if profile is not None and kind in (ASYMMETRIC, SYMMETRIC) and len(profile) <= _WINDOWS_MAX:
        windows = tuple((phase, int(min(seconds * _BYTES_PER_S / 1024, _KIB_MAX))) for phase, seconds in profile)
    if kind != EAGER and not any(kib for _, kib in windows):
        kind, windows = PLAN_KIND, ()
    return _plan(layout, config, kind, number, windows)


def plan_from_record(record: object, layout: PlanInput, config: StoreConfig) -> Plan | None:
    """Make the plan again that a manifest recorded, or return None if the record is none of ours.

    For the same layout and configuration it equals the plan whose ``record()`` this is.
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
    # What is not deferred goes first, so that its cut does not depend on anything else; the rest has what room is left.
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


@dataclasses.dataclass(frozen=True)
class _Slot:
    """A stretch of the space of deferred bytes that should become one partition."""

    start: int
    end: int
    window: int


def _asymmetric(total: int, windows: Sequence[tuple[Phase, int]], config: StoreConfig) -> list[_Slot]:
    """Slots in proportion to the capacities, between the least and the most that one partition may have."""
    whole = sum(kib for _, kib in windows)
    granted = [0] * len(windows)
    waiting: dict[Phase, int] = {"forward": 0, "backward": 0}
    passed = 0
    for window, (phase, kib) in enumerate(windows):
        waiting[phase] += total * (passed + kib) // whole - total * passed // whole
        passed += kib
        # Too little for a partition is kept for the next window of the phase, whose gap is of the same kind.
        if waiting[phase] >= config.deferred_bytes_min:
            granted[window] = waiting[phase]
            waiting[phase] = 0
    # What is left of a phase is less than one partition. The widest gap feels it least.
    widest = max(range(len(windows)), key=lambda window: (granted[window], windows[window][1]))
    granted[widest] += sum(waiting.values())
    slots: list[_Slot] = []
    start = 0
    for window, share in enumerate(granted):
        slots.extend(_equal(start, share, -(-share // config.deferred_bytes_max), window))
        start += share
    return slots


def _symmetric(total: int, windows: int, config: StoreConfig) -> list[_Slot]:
    """Equal slots, as many as windows unless that would make them too small or too large, spread evenly."""
    length = min(max(-(-total // windows), config.deferred_bytes_min), config.deferred_bytes_max)
    count = -(-total // length)
    return [
        dataclasses.replace(slot, window=number * windows // count)
        for number, slot in enumerate(_equal(0, total, count, 0))
    ]


def _equal(start: int, length: int, count: int, window: int) -> Iterator[_Slot]:
    for part in range(count):
        yield _Slot(start + length * part // count, start + length * (part + 1) // count, window)


def _lay(
    layout: PlanInput, rows: Sequence[int], config: StoreConfig, slots: Sequence[_Slot]
) -> tuple[list[Partition], list[int]]:
    """Cut the rows along the slots: pieces of large tensors stand alone, small tensors are bundled whole."""
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
    """Emits partitions that follow the slots as nearly as the ends of tensors allow."""

    def __init__(self, slots: Sequence[_Slot], config: StoreConfig) -> None:
        self.partitions: list[Partition] = []
        self.release: list[int] = []
        self._slots = slots
        self._least = config.deferred_bytes_min
        self._most = config.deferred_bytes_max
        self._number = 0
        self._at = 0

    def wanted(self) -> int:
        """Bytes from here to the end of the slot in multiples of 4 KiB, within the limits."""
        rest = self._slot().end - self._at
        return min(max((rest + BLOCK_BYTES // 2) // BLOCK_BYTES * BLOCK_BYTES, self._least), self._most)

    def emit(self, pieces: Sequence[Piece], length: int) -> None:
        self.partitions.append(Partition(tuple(pieces)))
        self.release.append(self._slot().window)
        self._at += length

    def cut_large(self, row: int, size: int) -> None:
        start = 0
        while start < size:
            left = size - start
            length = min(self.wanted(), left)
            if 0 < left - length < self._least:
                # No piece is too small: the rest goes along, or what is left is halved where that is too much.
                length = left if left <= self._most else left // 2 // BLOCK_BYTES * BLOCK_BYTES
            self.emit((Piece(row, start, length),), length)
            start += length

    def _slot(self) -> _Slot:
        """The slot to fill: the first whose middle is still ahead, so that errors of rounding even out."""
        while self._number + 1 < len(self._slots):
            slot = self._slots[self._number]
            if 2 * self._at < slot.start + slot.end:
                break
            self._number += 1
        return self._slots[self._number]


class Originals:
    """Guesses, from dtypes and shapes, which partitions of a plan are rounded copies of others.

    An example is bfloat16 weights with float32 masters. The caller, which has the bytes, has to check the guesses.
    """

    def __init__(
        self, partitions: Sequence[Partition], dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        """Take the partitions of a plan, and the dtypes and shapes of the tensors by row."""
        self._dtypes, self._shapes = dtypes, shapes
        self._alone = {
            number: partition.pieces[0] for number, partition in enumerate(partitions) if len(partition.pieces) == 1
        }
        # By shape and row: the first byte and the number of each partition, in order.
        self._masters: dict[tuple[int, ...], dict[int, list[tuple[int, int]]]] = {}
        for number, piece in self._alone.items():
            if dtypes[piece.row] == "float32":
                rows = self._masters.setdefault(shapes[piece.row], {})
                rows.setdefault(piece.row, []).append((piece.start, number))
        for rows in self._masters.values():
            for starts in rows.values():
                starts.sort()

    def candidates(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield possible originals of a partition: their numbers, and the byte in each where the original begins."""
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
