"""Discovery, inspection, adoption and removal of the rings of a store, in particular of dead processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import stat
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Literal

from asymcheck.config import DEFAULT_RUN, ring_folder_of
from asymcheck.errors import CaptureWarning, FormatError, LockTimeoutError, UnsupportedVersionError, warn_user
from asymcheck.format.layout import parse_ring_name
from asymcheck.format.manifest import Manifest
from asymcheck.format.record import RECORD_BYTES
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.format.ring_records import CAPTURES_OFFSET, DURABLE, CaptureEntry, RingHeader, decode_ring_header
from asymcheck.format.spans import ranks_in
from asymcheck.storage.interfaces import StoreTier
from asymcheck.storage.local_files import Files, locked, translated
from asymcheck.storage.manifests import ManifestReader
from asymcheck.storage.process_identity import describe, is_dead, is_exiting
from asymcheck.storage.shm.ring_reader import RingReader
from asymcheck.types import CheckpointRef, Owner, SaveId

_LOCKS = Path("/proc/locks")
_POLL_S = 0.01
_SLOW_POLL_S = 0.25
_ADOPTION_PATIENCE_S = 10.0
_INSPECTION_S = 0.1
_ADOPTION_S = 1800.0
"""Longer than writing all of the memory to a slow drive takes."""


def restore_command(store: Path | str, run: str | None, ring_folder: Path, step: int | None = None) -> str:
    """Return the command that writes a capture in memory to FILE, by default the newest one."""
    words = ["asymcheck", "restore", str(store), "--tier", "memory"]
    words += [] if step is None else ["--step", str(step)]
    words += [] if run is None or run == DEFAULT_RUN else ["--run", run]
    return f"{shlex.join(words + ring_folder_words(ring_folder))} --to FILE"


def ring_folder_words(folder: Path) -> list[str]:
    """Return the option that names ``folder``, or nothing for the default folder."""
    return [] if folder == ring_folder_of(None) else ["--ring-folder", str(folder)]


def list_rings(folder: Path, store_id: bytes | None) -> list[Path]:
    """Return the rings of a store in ``folder``, or of all stores if ``store_id`` is None, in use or not.

    Return an empty list without such a folder. Files of other users are ignored, because every user may write into
    ``/dev/shm``.
    """
    with translated("list", folder):
        try:
            names = sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
    paths = []
    for name in names:
        ids = parse_ring_name(name)
        if ids is not None and store_id in (None, ids[0]):
            with contextlib.suppress(FileNotFoundError):
                status = (folder / name).lstat()
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    paths.append(folder / name)
    return paths


IsDead = Callable[[Owner], bool]
"""Tell whether the process that created a ring is dead."""


def open_orphaned_ring(path: Path, is_dead: IsDead = is_dead, *, patient: bool = True) -> RingReader | None:
    """Open and lock the ring of a dead process; None if the ring is in use.

    A process that inspects the ring locks it for a moment. With ``patient``, wait longer for the ring of a dead
    process, because another process may be adopting it.

    Raises:
        FileNotFoundError: the ring was removed.
        StorageError, FormatError: the file cannot be read, or is not a ring.
    """
    return _open_locked(path, is_dead, _ADOPTION_PATIENCE_S if patient else _INSPECTION_S)[0]


def wait_for_orphaned_ring(path: Path, is_dead: IsDead) -> RingReader | None:
    """Open a ring like :func:`open_orphaned_ring`, and wait until another process has adopted it.

    Training without the captures in the ring would lose steps.

    Warns:
        CaptureWarning: the adoption takes long; names the other process.

    Raises:
        LockTimeoutError: the other process does not finish; names that process.
        FileNotFoundError, StorageError, FormatError: as :func:`open_orphaned_ring`.
    """
    reader, is_orphaned = _open_locked(path, is_dead, _ADOPTION_PATIENCE_S)
    if reader is None and is_orphaned:
        warn_user(
            f"ring {path} is locked by {_holder(path)}, which is probably adopting it. The ring may have the only copy "
            f"of some steps, so waiting for at most {_ADOPTION_S:g} seconds",
            CaptureWarning,
        )
        reader, is_orphaned = _open_locked(path, is_dead, _ADOPTION_S)
    if reader is None and is_orphaned:
        raise LockTimeoutError(
            f"ring {path}, which may have the only copy of some steps, was locked for {_ADOPTION_S:g} seconds by "
            f"{_holder(path)}. Stop that process, which keeps the content of the ring, then start again"
        )
    return reader


def _open_locked(path: Path, is_dead: IsDead, patience_s: float) -> tuple[RingReader | None, bool]:
    """Open and lock a ring; None if it is in use. Also return whether its process is dead or about to be."""
    began = time.monotonic()
    while True:
        with contextlib.ExitStack() as opened:
            reader = opened.enter_context(RingReader(path))
            is_orphaned = is_dead(reader.header.owner) or is_exiting(reader.header.owner)
            if not reader.is_owned:
                opened.pop_all()
                return reader, is_orphaned
        waited_s = time.monotonic() - began
        if waited_s > (patience_s if is_orphaned else _INSPECTION_S):
            return None, is_orphaned
        time.sleep(_POLL_S if waited_s < _ADOPTION_PATIENCE_S else _SLOW_POLL_S)


def ring_header(path: Path) -> RingHeader | None:
    """Return the header of a ring, even if the ring is in use; None if it cannot be read."""
    try:
        with RingReader(path, hold=False) as reader:
            return reader.header
    except (FileNotFoundError, FormatError):
        return None


def _holder(path: Path) -> str:
    """Describe the process that has locked a file."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = path.stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in _LOCKS.read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == device and int(fields[4]) > 0:
                return describe(Owner(int(fields[4]), 0, "", ""))
    return "a process that is not visible to this process"


Unreadable = Literal["used", "unmade", "damaged", "gone"]
"""State of a ring without a readable header: ``unmade`` if its process was killed during creation, so that it is empty,
and ``damaged`` if it may contain captures."""


def unreadable_ring(path: Path, remove: Container[Unreadable] = ()) -> Unreadable:
    """Return the state of a ring without a readable header, and remove the ring if its state is in ``remove``.

    A process locks a ring immediately after it creates the file, so an unlocked ring is not being created.
    """
    try:
        with locked(Files().open_read, path) as descriptor:
            if descriptor is None:
                return "used"
            state: Unreadable = "damaged" if _may_hold_captures(descriptor) else "unmade"
            if state in remove:
                path.unlink(missing_ok=True)
            return state
    except FileNotFoundError:
        return "gone"


def _may_hold_captures(descriptor: int) -> bool:
    """Tell whether an unreadable ring may contain captures. Another version may store them anywhere."""
    try:
        decode_ring_header(os.pread(descriptor, RECORD_BYTES, 0), "ring")
    except UnsupportedVersionError:
        return True
    except FormatError:
        pass
    return any(os.pread(descriptor, BLOCK_BYTES, CAPTURES_OFFSET))


@dataclasses.dataclass(frozen=True)
class RingCapture:
    """Complete capture in a ring."""

    run: str
    step: int | None
    """Training step; None if the manifest cannot be read."""
    generation: int | None
    """Generation of the training; None if the manifest cannot be read."""
    save_id: str
    """Save id: 32 hexadecimal digits that sort by time."""
    is_durable: bool
    """Whether the capture was committed in the store."""
    state_bytes: int
    """Bytes of all tensors; 0 if the manifest cannot be read."""
    is_intact: bool | None
    """Whether every frame is intact; None if the frames were not checked."""
    problem: str
    """Description of the damage; empty if none is known."""
    world_size: int = 0
    """Number of ranks of the checkpoint, each with a separate ring; 0 if the manifest cannot be read."""
    store_size: int = 0
    """Number of ranks that save into this store."""

    @property
    def ref(self) -> CheckpointRef | None:
        """Identity of the future checkpoint; None if the manifest cannot be read."""
        if self.step is None or self.generation is None:
            return None
        return CheckpointRef(self.generation, self.step, SaveId(bytes.fromhex(self.save_id)))


@dataclasses.dataclass(frozen=True)
class RingFile:
    """Content of one ring."""

    path: Path
    store_id: str
    """Id of the store: 32 hexadecimal digits."""
    store: str | None = None
    """Path of the store. This and the following fields are None if the header cannot be read."""
    run: str | None = None
    rank: int | None = None
    pid: int | None = None
    """Process that created the ring."""
    created_ns: int | None = None
    """Time of creation, in nanoseconds since 1970-01-01 UTC."""
    is_alive: bool = False
    """Whether a process uses the ring."""
    nbytes: int = 0
    """Bytes of the file."""
    captures: tuple[RingCapture, ...] = ()
    """Complete captures, oldest first."""
    problem: str = ""
    """Damage of the ring itself; empty if none is known."""
    is_unmade: bool = False
    """Whether the process was killed during creation, so that the ring is empty."""


def inspect_ring(path: Path, manifests: ManifestReader, *, check: bool) -> RingFile | None:
    """Return the content of a ring; None if the ring was removed.

    ``manifests`` of the store show the committed captures. With ``check``, verify the frames of a dead process.

    Raises:
        StorageError: the ring cannot be read.
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
            # The owner may have overwritten a capture that could not be read.
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
    problems = {"used": "a process is creating it", "unmade": "its process was killed while creating it"}
    state = unreadable_ring(path)
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
    is_checked = check and not reader.is_owned
    problem = _problem(reader, manifest) if is_checked else ""
    return RingCapture(
        run=run,
        step=ref.step,
        generation=ref.generation,
        save_id=save_id,
        # The process may have been killed after the commit, before it marked the capture as durable.
        is_durable=is_durable or manifests.listing(run, ref).has(manifest.header.rank),
        state_bytes=manifest.total_bytes,
        is_intact=not problem if is_checked else None,
        problem=problem,
        world_size=manifest.header.world_size,
        store_size=manifest.header.world_size if spans is None else len(ranks_in(spans)),
    )


def _problem(reader: RingReader, manifest: Manifest) -> str:
    lengths = manifest.partitions()
    lost = [name for name, length in lengths.items() if reader.intact(name, length) is None]
    return f"{len(lost)} of {len(lengths)} partitions have no intact frame, for example {lost[0].hex()}" if lost else ""


def survey_rings(tier: StoreTier, folder: Path, run: str | None, *, check: bool) -> list[RingFile]:
    """Return the rings of a store, for one run or all. Rings without a readable header are always included."""
    rings = [inspect_ring(path, tier.manifests, check=check) for path in list_rings(folder, tier.descriptor.store_id)]
    return [ring for ring in rings if ring is not None and (run is None or ring.run in (None, run))]


def newer_than_stored(tier: StoreTier, rings: Sequence[RingFile]) -> list[RingCapture]:
    """Return the newest capture of dead processes per run, if it is newer than every checkpoint of the run.

    Ignore a capture of several ranks unless all ranks that save into this store have it.
    """
    ranks: dict[tuple[str, CheckpointRef], set[int | None]] = {}
    captures: dict[tuple[str, CheckpointRef], RingCapture] = {}
    for ring in rings:
        for capture in () if ring.is_alive else ring.captures:
            if capture.ref is not None:
                ranks.setdefault((capture.run, capture.ref), set()).add(ring.rank)
                captures[capture.run, capture.ref] = capture
    newest = {run: ref for run, ref in sorted(captures) if len(ranks[run, ref]) == captures[run, ref].store_size}
    newer = []
    for run, ref in newest.items():
        stored = [listing.ref for listing in tier.manifests.checkpoints(run)]
        if not captures[run, ref].is_durable and all(ref > other for other in stored):
            newer.append(captures[run, ref])
    return newer
