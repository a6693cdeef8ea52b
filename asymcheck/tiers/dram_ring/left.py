"""Rings that lie in a folder: those of a store, in use or left behind."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from asymcheck.errors import CaptureWarning, FormatError, LockTimeoutError, UnsupportedVersionError, warn_user
from asymcheck.format.layout import parse_ring_name
from asymcheck.format.record import RECORD_BYTES
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.format.ring import CAPTURES_OFFSET, decode_ring_header
from asymcheck.tiers.dram_ring.reader import RingReader
from asymcheck.tiers.files import DESCRIPTORS, is_same_file, translated, try_lock
from asymcheck.tiers.owners import describe, is_dead
from asymcheck.types import Owner

_LOCKS = Path("/proc/locks")
_POLL_S = 0.01
_SLOW_POLL_S = 0.25
_TAKEN_UP_S = 10.0
_LOOKED_AT_S = 0.1
_ADOPTION_S = 1800.0
"""Longer than it takes to write all that fits into memory to a slow drive."""


def left_rings(folder: Path, store_id: bytes | None) -> list[Path]:
    """Return the rings in ``folder`` that belong to this user, in use or not; none without such a folder.

    Those of one store, or of all when ``store_id`` is None.

    Everybody may write into ``/dev/shm``: what another user put there is neither ours to open nor to be trusted.
    """
    with translated("list", folder):
        try:
            names = sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
    parsed = [(folder / name, parse_ring_name(name)) for name in names]
    named = [path for path, ids in parsed if ids is not None and store_id in (None, ids[0])]
    return [path for path in named if _is_own_file(path)]


def open_left(path: Path, *, patient: bool = True) -> RingReader | None:
    """Open a ring that no living process writes into, and hold it; None when it is in use.

    Somebody may only be looking at it, which takes a moment. Who is ``patient`` waits longer for a ring whose process
    is dead, for somebody may be taking it up.

    Raises:
        FileNotFoundError: it is gone.
        StorageError, FormatError: it cannot be read, or is no ring.
    """
    return _opened(path, _TAKEN_UP_S if patient else _LOOKED_AT_S)[0]


def wait_for_left(path: Path) -> RingReader | None:
    """Open a ring as :func:`open_left` does, however long somebody else takes it up, which ends.

    To go on without what it holds would lose steps.

    Warns:
        CaptureWarning: it takes a while; says who.

    Raises:
        LockTimeoutError: that somebody does not come to an end; says who.
        FileNotFoundError, StorageError, FormatError: as :func:`open_left`.
    """
    reader, is_left = _opened(path, _TAKEN_UP_S)
    if reader is None and is_left:
        warn_user(
            f"ring {path}, whose steps may lie nowhere else, is held by {_holder(path)}, which probably takes it up; "
            f"waiting for that, for at most {_ADOPTION_S:g} seconds",
            CaptureWarning,
        )
        reader, is_left = _opened(path, _ADOPTION_S)
    if reader is None and is_left:
        raise LockTimeoutError(
            f"ring {path}, whose steps may lie nowhere else, has been held for {_ADOPTION_S:g} seconds by "
            f"{_holder(path)}, which should have taken it up by now: stop that process, by which nothing in the ring "
            "is lost, then start again"
        )
    return reader


def _opened(path: Path, patience_s: float) -> tuple[RingReader | None, bool]:
    """Open a ring and hold it, or give up after a while if its process is dead; return whether that is so, too."""
    began = time.monotonic()
    while True:
        reader = RingReader(path)
        is_left = is_dead(reader.header.owner)
        if not reader.is_owned:
            return reader, is_left
        reader.close()
        waited_s = time.monotonic() - began
        if waited_s > (patience_s if is_left else _LOOKED_AT_S):
            return None, is_left
        time.sleep(_POLL_S if waited_s < _TAKEN_UP_S else _SLOW_POLL_S)


def run_of(path: Path) -> tuple[str, str] | None:
    """Return the run that a ring is of, and where its store was, whoever uses it; None when that cannot be read."""
    try:
        with RingReader(path, hold=False) as reader:
            return reader.header.run, reader.header.store
    except (FileNotFoundError, FormatError):
        return None


def _holder(path: Path) -> str:
    """Name the process that has a file locked."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = path.stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in _LOCKS.read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == device and int(fields[4]) > 0:
                return describe(Owner(int(fields[4]), 0, "", ""))
    return "a process that cannot be seen from here"


def _is_own_file(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def remove_unmade(path: Path) -> bool:
    """Remove what a process left that was killed while it made a ring; return False when captures may lie in it."""
    try:
        with _held(path) as descriptor:
            # Who makes a ring locks it first, so that one whose lock is had is made no further.
            if descriptor is not None:
                if _may_hold_captures(descriptor):
                    return False
                path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass
    return True


def unread_is(path: Path) -> Literal["used", "unmade", "damaged", "gone"]:
    """Tell what a file is that has the name of a ring, but no header that can be read."""
    try:
        with _held(path) as descriptor:
            if descriptor is None:
                return "used"
            return "damaged" if _may_hold_captures(descriptor) else "unmade"
    except FileNotFoundError:
        return "gone"


def _may_hold_captures(descriptor: int) -> bool:
    """Tell whether captures may lie in a ring that cannot be read; in one of another version, they may lie anywhere."""
    try:
        decode_ring_header(os.pread(descriptor, RECORD_BYTES, 0), "ring")
    except UnsupportedVersionError:
        return True
    except FormatError:
        pass
    return any(os.pread(descriptor, BLOCK_BYTES, CAPTURES_OFFSET))


def remove_unread(path: Path) -> bool:
    """Remove a ring whose header cannot be read, whatever lies in it; return whether nobody had it in use."""
    try:
        with _held(path) as descriptor:
            if descriptor is not None:
                path.unlink(missing_ok=True)
            return descriptor is not None
    except FileNotFoundError:
        return True


@contextlib.contextmanager
def _held(path: Path) -> Iterator[int | None]:
    """Open and lock a file that may be no ring; yields None when somebody else has it, or it has lost its name."""
    with translated("open", path):
        descriptor = DESCRIPTORS.open(os.open, path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        has_it = try_lock(descriptor, exclusive=True) and is_same_file(descriptor, path)
        yield descriptor if has_it else None
    finally:
        DESCRIPTORS.close(descriptor)
