"""Stream captures from the rings of killed processes, without recovering them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from asymcheck.errors import (
    CheckpointNotFoundError,
    DamagedPartitionError,
    FormatError,
    InconsistentCheckpointError,
    InvalidInputError,
    LockTimeoutError,
)
from asymcheck.format.manifest import Manifest
from asymcheck.restore.load import Loaded
from asymcheck.restore.read_plan import execute_in_memory
from asymcheck.restore.resolve import alternatives
from asymcheck.restore.tensor_stream import Sink, hand_on
from asymcheck.storage.interfaces import StoreTier
from asymcheck.storage.process_identity import describe as describe_owner
from asymcheck.storage.process_identity import is_dead
from asymcheck.storage.shm.orphaned_rings import list_rings
from asymcheck.storage.shm.ring_reader import RingReader
from asymcheck.types import CheckpointRef, Digest, Progress
from asymcheck.validation import metric_and_sign


class _Rings:
    """Rings of a store in one folder, and the captures of one run in them."""

    def __init__(self, tier: StoreTier, folder: Path, run: str, stack: contextlib.ExitStack) -> None:
        self.captures: dict[CheckpointRef, list[tuple[Manifest, RingReader]]] = {}
        self.in_use: list[str] = []
        self.damaged: list[str] = []
        self.runs: set[str] = set()
        for path in list_rings(folder, tier.descriptor.store_id):
            try:
                # The lock is not held, so that a starting training can recover the ring.
                reader = stack.enter_context(RingReader(path, hold=False))
            except FileNotFoundError:
                continue
            except FormatError as error:
                self.damaged.append(str(error))
                continue
            self.runs.add(reader.header.run)
            if reader.header.run != run:
                continue
            if reader.is_owned:
                self.in_use.append(_user(reader))
            else:
                self._take(reader)

    def _take(self, reader: RingReader) -> None:
        for entry in reader.captures:
            try:
                manifest = reader.manifest(entry)
            except FormatError as error:
                self.damaged.append(str(error))
            else:
                self.captures.setdefault(manifest.header.ref, []).append((manifest, reader))


def _user(reader: RingReader) -> str:
    owner = reader.header.owner
    if is_dead(owner):
        return f"ring {reader.path} is being recovered by a starting training"
    return f"ring {reader.path} is in use by {describe_owner(owner)}"


def stream_from_rings(
    tier: StoreTier,
    folder: Path,
    run: str,
    step: int | str | None,
    tensors: str,
    sink: Sink,
    progress: Progress | None,
) -> Loaded:
    """Stream the newest complete capture of a killed process, or that of a step, to ``sink``.

    The captures of several ranks are merged. If a capture is damaged, or missing on a rank, the next older one is
    streamed, or another save of ``step``.

    Raises:
        CheckpointNotFoundError: no such capture exists.
        InconsistentCheckpointError: all captures are damaged; lists the reasons.
        LockTimeoutError: a ring that may hold the capture is in use.
        InvalidInputError: ``step`` is ``best:METRIC``.
    """
    if isinstance(step, str) and metric_and_sign(step) is not None:
        raise InvalidInputError(f"{step} names one of the durable checkpoints: read it without --tier memory")
    with contextlib.ExitStack() as stack:
        rings = _Rings(tier, folder, run, stack)
        skipped = [*rings.in_use, *rings.damaged]
        for ref in sorted(rings.captures, reverse=True):
            if not _is_meant(ref, step):
                continue
            # Several rings may hold the capture of a rank, and any of them may be intact.
            by_rank = {manifest.header.rank: manifest for manifest, _ in rings.captures[ref]}
            manifests = [by_rank[rank] for rank in sorted(by_rank)]
            world_size = manifests[0].header.world_size
            if len(by_rank) < world_size:
                which = ", ".join(map(str, sorted(by_rank)))
                reason = f"only {which} of {world_size} ranks left a complete capture in memory"
                skipped.append(f"{ref}: {reason}")
                continue
            try:
                read = partial(execute_in_memory, payload=_payloads(rings.captures[ref]))
                state = hand_on(manifests, None, tensors, sink, progress, read)
            except (DamagedPartitionError, FormatError) as error:
                skipped.append(f"{ref}: {error}")
                continue
            return Loaded(state, run, ref, manifests, tuple(skipped))
    raise _nothing(tier, folder, run, step, rings, skipped)


def _is_meant(ref: CheckpointRef, step: int | str | None) -> bool:
    if isinstance(step, str):
        return ref.save_id.hex().startswith(step.removeprefix("save:"))
    return step in (None, ref.step)


def _nothing(
    tier: StoreTier, folder: Path, run: str, step: int | str | None, rings: _Rings, skipped: Sequence[str]
) -> LockTimeoutError | InconsistentCheckpointError | CheckpointNotFoundError:
    """Return the error if nothing could be read."""
    what = f"run {run!r}"
    if step is not None:
        what = f"{'' if isinstance(step, str) else 'step '}{step} of {what}"
    if rings.in_use:
        return LockTimeoutError(
            f"{rings.in_use[0]}, and reading the ring would race with it; try again when that process has ended, or "
            "read durable checkpoints (without --tier memory)"
        )
    if skipped:
        message = (
            f"no capture of {what} in the rings in {folder} is intact. Read durable checkpoints without --tier memory:"
        )
        return InconsistentCheckpointError(message, skipped)
    hint = alternatives({ref.step for ref in rings.captures}, rings.runs - {run})
    if not rings.runs:
        hint = "; the folder has no ring of this store"
    return CheckpointNotFoundError(
        f"no killed process left {what} of store {tier.root} complete in memory in {folder}{hint}"
    )


def _payloads(parts: Sequence[tuple[Manifest, RingReader]]) -> Callable[[Digest], memoryview]:
    """Return a function that reads and verifies a partition from any of the rings.

    Raises:
        DamagedPartitionError: the rings have no intact frame of a partition.
    """
    lengths: dict[Digest, int] = {}
    for name, length in (item for manifest, _ in parts for item in manifest.partitions().items()):
        if lengths.setdefault(name, length) != length:
            raise DamagedPartitionError(f"partition {name.hex()} has two lengths in the manifests", name)

    def payload(name: Digest) -> memoryview:
        tried = (reader.intact(name, lengths[name]) for _, reader in parts)
        intact = next(filter(None, tried), None)
        if intact is None:
            where = ", ".join(str(reader.path) for _, reader in parts)
            raise DamagedPartitionError(f"partition {name.hex()} has no intact frame in ring {where}", name)
        return intact[1]

    return payload
