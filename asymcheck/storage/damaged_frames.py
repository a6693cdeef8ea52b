"""Frames that this process has found damaged.

A save stores each partition once. Without this record, a training that was restored from an older checkpoint, because
the newest one is damaged, would compute the same bytes again and refer to the damaged frame.
"""

from __future__ import annotations

from asymcheck.types import PackId

_damaged: set[tuple[PackId, int]] = set()


def note(pack_id: PackId, offset: int) -> None:
    """Record that the frame at ``offset`` of a pack is damaged. Pack ids are random, so they name no other pack."""
    _damaged.add((pack_id, offset))


def known() -> tuple[tuple[str, int], ...]:
    """Return the packs, in hexadecimal digits, and the offsets of all damaged frames."""
    return tuple(sorted((pack_id.hex(), offset) for pack_id, offset in _damaged.copy()))


def offsets_in(pack_id: PackId) -> list[int]:
    """Return the offsets of the damaged frames of a pack."""
    return [offset for damaged, offset in _damaged.copy() if damaged == pack_id]


def is_damaged(pack_id: PackId, offset: int) -> bool:
    """Tell whether the frame at ``offset`` of a pack was found damaged."""
    return (pack_id, offset) in _damaged
