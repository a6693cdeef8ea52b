"""What lies in a ring, looked at without taking it up: whose it is, which captures it holds, and what is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from asymcheck.errors import FormatError
from asymcheck.format.layout import parse_ring_name
from asymcheck.format.manifest import Manifest
from asymcheck.format.ring import DURABLE, CaptureEntry
from asymcheck.format.spans import ranks_in
from asymcheck.tiers.dram_ring.left import left_rings, unread_is
from asymcheck.tiers.dram_ring.reader import RingReader
from asymcheck.tiers.reading import StoreTier
from asymcheck.types import CheckpointRef, Digest, SaveId

IsStored = Callable[[str, CheckpointRef, int], bool]
"""Tells whether a rank's part of a checkpoint of a run is in the store."""


@dataclasses.dataclass(frozen=True)
class RingCapture:
    """One capture that is complete in a ring."""

    run: str
    """The run."""
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
    """What is wrong with it; empty when nothing is known."""
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
    """The file."""
    store_id: str
    """The store that it is of, 32 hexadecimal digits."""
    store: str | None
    """Where that store was; None when the header cannot be read, as all that follows from it."""
    run: str | None
    """The run."""
    rank: int | None
    """The rank."""
    pid: int | None
    """The process that made it."""
    created_ns: int | None
    """When, nanoseconds since 1970-01-01 UTC."""
    is_alive: bool
    """Whether a process uses it."""
    nbytes: int
    """Bytes of the file."""
    captures: tuple[RingCapture, ...]
    """What is complete in it, oldest first."""
    problem: str
    """What is wrong with the ring itself; empty when nothing is."""
    is_unmade: bool = False
    """Whether its process was killed while it made it, so that nothing can lie in it."""


def look_at(path: Path, is_stored: IsStored, *, check: bool) -> RingFile | None:
    """Return what lies in a ring; None when it is gone. With ``check``, frames of a dead process are verified.

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
        captures = [_capture(reader, entry, is_stored, check=check) for entry in reader.captures]
        if reader.is_owned:
            # It changes while it is looked at: what could not be read may have given way.
            captures = [capture for capture in captures if not capture.problem]
        return RingFile(
            path=path,
            store_id=header.store_id.hex(),
            store=header.store,
            run=header.run,
            rank=header.rank,
            pid=header.owner.pid,
            created_ns=header.created_ns,
            is_alive=reader.is_owned,
            nbytes=size,
            captures=tuple(sorted(captures, key=lambda capture: capture.save_id)),
            problem="",
        )


def _unread(path: Path, size: int, problem: str) -> RingFile | None:
    what = unread_is(path)
    if what == "gone":
        return None
    problems = {
        "used": "a process is making it",
        "unmade": "its process was killed while it made it",
        "damaged": problem,
    }
    store_id, _ = parse_ring_name(path.name) or (b"", b"")
    nothing = (None, None, None, None, None)
    return RingFile(path, store_id.hex(), *nothing, what == "used", size, (), problems[what], what == "unmade")


def _capture(reader: RingReader, entry: CaptureEntry, is_stored: IsStored, *, check: bool) -> RingCapture:
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
        is_durable=is_durable or is_stored(run, ref, manifest.header.rank),
        state_bytes=manifest.total_bytes,
        is_intact=not problem if has_been_checked else None,
        problem=problem,
        world_size=manifest.header.world_size,
        store_size=manifest.header.world_size if spans is None else len(ranks_in(spans)),
    )


def _problem(reader: RingReader, manifest: Manifest) -> str:
    places = reader.offsets()
    lost = [name for name, length in manifest.partitions().items() if not _is_intact(reader, places, name, length)]
    if not lost:
        return ""
    return f"{len(lost)} of {len(manifest.partitions())} partitions lie in no intact frame, one is {lost[0].hex()}"


def _is_intact(reader: RingReader, places: dict[Digest, list[int]], name: Digest, length: int) -> bool:
    return reader.intact(places.get(name, []), name, length) is not None


def survey_rings(tier: StoreTier, folder: Path, run: str | None, *, check: bool) -> list[RingFile]:
    """Return the rings of a store, of one run or of all; a ring whose header cannot be read may be of any run."""

    def is_stored(run: str, ref: CheckpointRef, rank: int) -> bool:
        return tier.manifests.listing(run, ref).has(rank)

    looked = [look_at(path, is_stored, check=check) for path in left_rings(folder, tier.descriptor.store_id)]
    return [ring for ring in looked if ring is not None and (run is None or ring.run in (None, run))]


def newer_than_stored(tier: StoreTier, rings: Sequence[RingFile]) -> list[RingCapture]:
    """Return of each run the newest capture of dead processes, if it is newer than each checkpoint of the store.

    Of several ranks, one that all of them have that save into this store.
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
