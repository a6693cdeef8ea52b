"""Rings in a folder: those of a store, in use or left behind; taken up, looked at without that, or removed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from asymcheck.errors import CaptureWarning, FormatError, LockTimeoutError, UnsupportedVersionError, warn_user
from asymcheck.format.layout import parse_ring_name
from asymcheck.format.manifest import Manifest
from asymcheck.format.record import RECORD_BYTES
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.format.ring_records import CAPTURES_OFFSET, DURABLE, CaptureEntry, decode_ring_header
from asymcheck.format.spans import ranks_in
from asymcheck.storage.interfaces import StoreTier
from asymcheck.storage.local_files import DESCRIPTORS, is_same_file, translated, try_lock
from asymcheck.storage.manifests import ManifestReader
from asymcheck.storage.process_identity import describe, is_dead
from asymcheck.storage.shm.ring_reader import RingReader
from asymcheck.types import CheckpointRef, Owner, SaveId

_LOCKS = Path("/proc/locks")
_POLL_S = 0.01
_SLOW_POLL_S = 0.25
_TAKEN_UP_S = 10.0
_LOOKED_AT_S = 0.1
_ADOPTION_S = 1800.0
"""Longer than it takes to write all that fits into memory to a slow drive."""


def left_rings(folder: Path, store_id: bytes | None) -> list[Path]:
    """Return the rings in ``folder`` that belong to this user, in use or not; none without such a folder.

    Every user may write into ``/dev/shm``: a file of another user is neither ours to open nor to be trusted.

    Args:
        folder: where rings are stored.
        store_id: the store; None for all stores.
    """
    with translated("list", folder):
        try:
            names = sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
    found = []
    for name in names:
        ids = parse_ring_name(name)
        if ids is not None and store_id in (None, ids[0]):
            with contextlib.suppress(FileNotFoundError):
                status = (folder / name).lstat()
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    found.append(folder / name)
    return found


def open_left(path: Path, *, patient: bool = True) -> RingReader | None:
    """Open a ring that no living process writes into, and hold it; None when it is in use.

    A process that only looks at the ring holds it for a moment. With ``patient``, wait longer for a ring whose process
    is dead, because another process may be taking it up.

    Raises:
        FileNotFoundError: it is gone.
        StorageError, FormatError: it cannot be read, or is no ring.
    """
    return _opened(path, _TAKEN_UP_S if patient else _LOOKED_AT_S)[0]


def wait_for_left(path: Path) -> RingReader | None:
    """Open a ring as :func:`open_left` does, however long another process needs to take it up.

    Training without the captures in the ring would lose steps.

    Warns:
        CaptureWarning: it takes a while; names the process.

    Raises:
        LockTimeoutError: the other process does not come to an end; names it.
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
    """Return the run of a ring and the path of its store, even if the ring is in use; None if it cannot be read."""
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


def remove_unread(path: Path, *, damaged: bool = False) -> Literal["used", "unmade", "damaged", "gone"]:
    """Remove a ring whose header cannot be read, because its process was killed while it made it; return what it was.

    With ``damaged`` also one in which captures may lie. One that is in use stays.
    """
    with _held(path) as state:
        if state == "unmade" or (damaged and state == "damaged"):
            path.unlink(missing_ok=True)
        return state


@contextlib.contextmanager
def _held(path: Path) -> Iterator[Literal["used", "unmade", "damaged", "gone"]]:
    """Lock a file that has the name of a ring, but no header that can be read; yield what it is.

    A process locks a ring before anything else, so that a ring whose lock is free is not being made.
    """
    try:
        with translated("open", path):
            descriptor = DESCRIPTORS.open(os.open, path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        yield "gone"
        return
    try:
        if not (try_lock(descriptor, exclusive=True) and is_same_file(descriptor, path)):
            yield "used"
        else:
            yield "damaged" if _may_hold_captures(descriptor) else "unmade"
    finally:
        DESCRIPTORS.close(descriptor)


def _may_hold_captures(descriptor: int) -> bool:
    """Return whether an unreadable ring may hold captures; a ring of another version may hold them anywhere."""
    try:
        decode_ring_header(os.pread(descriptor, RECORD_BYTES, 0), "ring")
    except UnsupportedVersionError:
        return True
    except FormatError:
        pass
    return any(os.pread(descriptor, BLOCK_BYTES, CAPTURES_OFFSET))


@dataclasses.dataclass(frozen=True)
class RingCapture:
    """One capture that is complete in a ring."""

    run: str
    step: int | None
    """The training step; None when its manifest cannot be read."""
    generation: int | None
    """The line of training; None when its manifest cannot be read."""
    save_id: str
    """The attempt: 32 hexadecimal digits, sorting by time."""
    is_durable: bool
    """Whether it was committed in the store."""
    state_bytes: int
    """Bytes of all tensors; 0 when its manifest cannot be read."""
    is_intact: bool | None
    """Whether every frame of it is; None when that was not checked."""
    problem: str
    """The damage; empty when none is known."""
    world_size: int = 0
    """How many ranks the checkpoint has, each with a ring of its own; 0 when its manifest cannot be read."""
    store_size: int = 0
    """How many of them save into this store."""

    @property
    def ref(self) -> CheckpointRef | None:
        """The identity of the checkpoint that it is to become; None when its manifest cannot be read."""
        if self.step is None or self.generation is None:
            return None
        return CheckpointRef(self.generation, self.step, SaveId(bytes.fromhex(self.save_id)))


@dataclasses.dataclass(frozen=True)
class RingFile:
    """One ring in memory."""

    path: Path
    store_id: str
    """The store that it is of, 32 hexadecimal digits."""
    store: str | None = None
    """Where that store was; None when the header cannot be read, as all that follows from it."""
    run: str | None = None
    rank: int | None = None
    pid: int | None = None
    """The process that made it."""
    created_ns: int | None = None
    """When, nanoseconds since 1970-01-01 UTC."""
    is_alive: bool = False
    """Whether a process uses it."""
    nbytes: int = 0
    """Bytes of the file."""
    captures: tuple[RingCapture, ...] = ()
    """The complete captures, oldest first."""
    problem: str = ""
    """The damage of the ring itself; empty when there is none."""
    is_unmade: bool = False
    """Whether its process was killed while it created the ring, which is therefore empty."""


def look_at(path: Path, manifests: ManifestReader, *, check: bool) -> RingFile | None:
    """Return the content of a ring; None if it is gone. With ``check``, frames of a dead process are verified.

    ``manifests`` of the store say which captures were committed.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return None
    try:
        reader = RingReader(path, hold=False)
    except FileNotFoundError:
        return None
    except FormatError as error:
        return _unread(path, size, str(error))
    with reader:
        header = reader.header
        captures = [_capture(reader, entry, manifests, check=check) for entry in reader.captures]
        if reader.is_owned:
            # It changes while it is looked at: what could not be read may have given way.
            captures = [capture for capture in captures if not capture.problem]
        return RingFile(
            path,
            header.store_id.hex(),
            header.store,
            header.run,
            header.rank,
            header.owner.pid,
            header.created_ns,
            reader.is_owned,
            size,
            tuple(sorted(captures, key=lambda capture: capture.save_id)),
        )


def _unread(path: Path, size: int, problem: str) -> RingFile | None:
    problems = {"used": "a process is making it", "unmade": "its process was killed while it made it"}
    with _held(path) as state:
        if state == "gone":
            return None
        store_id, _ = parse_ring_name(path.name) or (b"", b"")
        return RingFile(
            path,
            store_id.hex(),
            is_alive=state == "used",
            nbytes=size,
            problem=problems.get(state, problem),
            is_unmade=state == "unmade",
        )


def _capture(reader: RingReader, entry: CaptureEntry, manifests: ManifestReader, *, check: bool) -> RingCapture:
    run, save_id, is_durable = reader.header.run, entry.save_id.hex(), entry.state == DURABLE
    try:
        manifest = reader.manifest(entry)
    except FormatError as error:
        return RingCapture(run, None, None, save_id, is_durable, 0, is_intact=False, problem=str(error))
    ref, spans = manifest.header.ref, manifest.header.store_ranks
    has_been_checked = check and not reader.is_owned
    problem = _problem(reader, manifest) if has_been_checked else ""
    return RingCapture(
        run=run,
        step=ref.step,
        generation=ref.generation,
        save_id=save_id,
        # Its process may have been killed between the commit and the note of it.
        is_durable=is_durable or manifests.listing(run, ref).has(manifest.header.rank),
        state_bytes=manifest.total_bytes,
        is_intact=not problem if has_been_checked else None,
        problem=problem,
        world_size=manifest.header.world_size,
        store_size=manifest.header.world_size if spans is None else len(ranks_in(spans)),
    )


def _problem(reader: RingReader, manifest: Manifest) -> str:
    lengths = manifest.partitions()
    lost = [name for name, length in lengths.items() if reader.intact(name, length) is None]
    return f"{len(lost)} of {len(lengths)} partitions lie in no intact frame, one is {lost[0].hex()}" if lost else ""


def survey_rings(tier: StoreTier, folder: Path, run: str | None, *, check: bool) -> list[RingFile]:
    """Return the rings of a store, of one run or of all; a ring whose header cannot be read may be of any run."""
    looked = [look_at(path, tier.manifests, check=check) for path in left_rings(folder, tier.descriptor.store_id)]
    return [ring for ring in looked if ring is not None and (run is None or ring.run in (None, run))]


def newer_than_stored(tier: StoreTier, rings: Sequence[RingFile]) -> list[RingCapture]:
    """Return of each run the newest capture of dead processes, if it is newer than each checkpoint of the store.

    A capture of several ranks counts when all ranks that save into this store have it.
    """
    ranks: dict[tuple[str, CheckpointRef], set[int | None]] = {}
    captures: dict[tuple[str, CheckpointRef], RingCapture] = {}
    for ring in rings:
        for capture in () if ring.is_alive else ring.captures:
            if capture.ref is not None:
                ranks.setdefault((capture.run, capture.ref), set()).add(ring.rank)
                captures[capture.run, capture.ref] = capture
    newest = {run: ref for run, ref in sorted(captures) if len(ranks[run, ref]) == captures[run, ref].store_size}
    found = []
    for run, ref in newest.items():
        stored = [listing.ref for listing in tier.manifests.checkpoints(run)]
        if not captures[run, ref].is_durable and all(ref > other for other in stored):
            found.append(captures[run, ref])
    return found
