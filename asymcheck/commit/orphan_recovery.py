"""Commit the complete captures that a killed process left in its ring (SPEC.md §B9)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from asymcheck.commit.encoder import Encoder
from asymcheck.commit.save_request import LineagePosition
from asymcheck.commit.transaction import RingTransaction
from asymcheck.errors import (
    FormatError,
    InvalidInputError,
    MissingPartitionError,
    OutOfSpaceError,
    StorageError,
    UnsupportedFormatError,
    listed,
)
from asymcheck.format.frame import frame_length
from asymcheck.format.layout import DESCRIPTOR_NAME
from asymcheck.format.manifest import Manifest, ManifestHeader
from asymcheck.format.record import RECORD_BYTES, decode_descriptor
from asymcheck.format.ring_records import COMPLETE
from asymcheck.format.spans import ranks_in
from asymcheck.storage.nvme import Catalog, NvmeTier, run_with_slots
from asymcheck.storage.shm.orphaned_rings import (
    list_rings,
    open_orphaned_ring,
    restore_command,
    ring_header,
    unreadable_ring,
    wait_for_orphaned_ring,
)
from asymcheck.storage.shm.ring_reader import RingPack, RingReader
from asymcheck.storage.slots import Slot
from asymcheck.types import CheckpointRef, Digest, SaveId

_KEPT = "the ring is kept, and uses memory until you remove it"
Metrics = Mapping[str, float]
Agree = Callable[[Mapping[SaveId, Metrics]], Mapping[SaveId, Metrics]]
"""Return the saves whose parts all machines have, given those whose parts this machine has in memory.

Each save comes with the metrics of its ranks, so that every store retains the same checkpoints.
"""


@dataclasses.dataclass(frozen=True)
class RecoveredCapture:
    """Outcome of adopting one capture."""

    run: str | None
    """Name of the run; None if the ring does not show it."""
    step: int | None
    """Training step; None if the ring does not show it."""
    ref: CheckpointRef | None
    """Committed checkpoint; None if the commit failed."""
    problem: str
    """Reason for the failed commit; empty after a commit."""


@contextlib.contextmanager
def adopting(
    tier: NvmeTier,
    open_catalog: Callable[[], Catalog],
    encoder: Encoder,
    folder: Path,
    placing: Callable[[ManifestHeader], LineagePosition],
    run: str | None = None,
    agree: Agree | None = None,
    *,
    raises: bool = True,
) -> Iterator[tuple[list[RecoveredCapture], list[RingPack]]]:
    """Commit the complete captures in the unused rings of this store, and remove these rings.

    Yields the outcome of each capture, and the frames of the rings. Inside the ``with`` block, the new checkpoints and
    many older ones can be read from memory. A ring is kept if a newer program, a repaired store, or the end of another
    process may allow the commit of one of its captures.

    The rings of ``run``, which resumes, come first. If another process adopts them, this function waits; otherwise, an
    older step would be restored. Rings of other runs are skipped while another process uses them.

    For a checkpoint of several ranks, all parts are committed or none. If the part of a rank is neither in a ring nor
    in the store, the checkpoint cannot be completed. If each machine has its own store, ``agree`` is called once, and
    captures of ``run`` that other machines lack are not committed, either.

    Raises:
        LockTimeoutError: another process did not finish adopting a ring of ``run``.
        OutOfSpaceError: a capture of ``run``, or any capture without ``run``, does not fit on the drive, and ``raises``
            is set; otherwise, its outcome says so.
        StorageError: a read or write failed. The ring is kept, and can be adopted again.
    """
    adoption = _Adoption(tier, open_catalog, encoder, placing, lambda other: raises and run in (None, other))
    packs: list[RingPack] = []
    rings = list_rings(folder, tier.descriptor.store_id)
    own = [] if run is None else [path for path in rings if _is_of(tier, path, run)]
    with contextlib.ExitStack() as stack:
        for paths, take in (
            (own, partial(wait_for_orphaned_ring, is_dead=tier.is_dead)),
            (
                [path for path in rings if path not in own],
                partial(open_orphaned_ring, is_dead=tier.is_dead, patient=run is None),
            ),
        ):
            readers = [stack.enter_context(reader) for reader in adoption.taken(paths, take)]
            adoption.commit_all(readers, agree if paths is own else None)
            packs += [RingPack(reader) for reader in readers]
        yield adoption.adopted, packs


def _is_of(tier: NvmeTier, path: Path, run: str) -> bool:
    header = ring_header(path)
    return header is not None and header.run == run and not is_of_a_copy(tier, header.store)


class _RingCapture(NamedTuple):
    """A complete capture in a ring."""

    reader: RingReader
    manifest: Manifest

    @property
    def header(self) -> ManifestHeader:
        return self.manifest.header

    @property
    def checkpoint(self) -> tuple[CheckpointRef, str, int]:
        """The same for all parts of one checkpoint."""
        return self.header.ref, self.header.run, self.header.world_size


@dataclasses.dataclass
class _Adoption:
    """Adoption of rings by one process; see :func:`adopting`."""

    tier: NvmeTier
    open_catalog: Callable[[], Catalog]
    encoder: Encoder
    placing: Callable[[ManifestHeader], LineagePosition]
    raises: Callable[[str], bool]
    """Tell whether a capture of a run that does not fit on the drive raises an error."""
    adopted: list[RecoveredCapture] = dataclasses.field(default_factory=list)
    _kept: set[RingReader] = dataclasses.field(default_factory=set)
    _unread: set[tuple[str, SaveId]] = dataclasses.field(default_factory=set)
    """Runs and save ids of captures that a newer program may read."""
    _in_use: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    """Runs and ranks of rings that other processes use."""

    def taken(self, paths: Sequence[Path], take: Callable[[Path], RingReader | None]) -> Iterator[RingReader]:
        """Lock and yield the rings that no other process uses."""
        for path in paths:
            try:
                reader = take(path)
            except FileNotFoundError:
                continue
            except FormatError as error:
                if unreadable_ring(path, remove=("unmade",)) == "damaged":
                    self._note(None, None, f"{error}; {_KEPT}")
                continue
            if reader is None:
                header = ring_header(path)
                self._in_use |= set() if header is None else {(header.run, header.rank)}
            elif is_of_a_copy(self.tier, reader.header.store):
                self._skip_copied_store(reader)
            else:
                yield reader

    def _note(self, run: str | None, step: int | None, problem: str) -> None:
        self.adopted.append(RecoveredCapture(run, step, None, problem))

    def _skip_copied_store(self, reader: RingReader) -> None:
        """Release the ring of another store with the same id, and report the ring unless it is empty."""
        with reader:
            if all(entry.state != COMPLETE for entry in reader.captures):
                return
        problem = (
            f"the ring belongs to store {reader.header.store}, which has the same id as this store; open that store"
        )
        self._note(reader.header.run, None, f"{reader.path}: {problem}")

    def commit_all(self, readers: Sequence[RingReader], agree: Agree | None) -> None:
        """Commit the complete captures of ``readers``, and remove the rings that are not kept."""
        captures = [capture for reader in readers for capture in self._captures_in(reader)]
        captures.sort(key=lambda capture: (capture.checkpoint, capture.header.rank))
        checkpoints = [[*parts] for _, parts in groupby(captures, key=attrgetter("checkpoint"))]
        common = None
        if agree is not None:
            whole = {
                parts[0].header.ref.save_id: dict(item for part in parts for item in part.header.metrics.items())
                for parts in checkpoints
                if not self._missing(parts)
            }
            # Captures for a newer program stay in memory, and the other machines commit their parts.
            common = agree({**{save_id: {} for _, save_id in self._unread}, **whole})
        for parts in checkpoints:
            self._commit(parts, common)
        for reader in readers:
            if reader not in self._kept:
                reader.unlink()

    def _captures_in(self, reader: RingReader) -> Iterator[_RingCapture]:
        run = reader.header.run
        for entry in reader.captures:
            if entry.state != COMPLETE:
                continue
            try:
                yield _RingCapture(reader, reader.manifest(entry))
            except UnsupportedFormatError as error:
                self._kept.add(reader)
                self._unread.add((run, entry.save_id))
                self._note(run, None, f"{error}; {_KEPT}")
            except FormatError as error:
                self._note(run, None, str(error))

    def _missing(self, parts: Sequence[_RingCapture]) -> list[int]:
        """Return the ranks that save into this store, and have no part in a ring or in the store."""
        header, in_rings = parts[0].header, {part.header.rank for part in parts}
        stored = self.tier.manifests.listing(header.run, header.ref)
        # The rings of other nodes cannot be read from this node.
        wanted = range(header.world_size) if header.store_ranks is None else ranks_in(header.store_ranks)
        return [rank for rank in wanted if rank not in in_rings and not stored.has(rank)]

    def _commit(self, parts: Sequence[_RingCapture], common: Mapping[SaveId, Metrics] | None) -> None:
        """Commit the parts of one checkpoint in the rings: all of them, or none.

        ``common`` has the saves of which other machines have their parts, with the metrics of all machines; None
        without other machines.
        """
        header = parts[0].header
        run, step = header.run, header.ref.step
        stored = self.tier.manifests.listing(run, header.ref)
        missing = self._missing(parts)
        # A process may have been killed after its commit, before it marked the capture as committed.
        parts = [part for part in parts if not stored.has(part.header.rank)]
        readers = {part.reader for part in parts}
        if missing:
            # The process may be about to end, or may itself be adopting the ring.
            in_use = [rank for rank in missing if (run, rank) in self._in_use]
            if in_use or (run, header.ref.save_id) in self._unread:
                self._kept |= readers
            if parts:
                problem = (
                    f"incomplete: ranks {listed(missing)} of {header.world_size} have no part in a ring or in the store"
                )
                if in_use:
                    problem += f"; a ring of ranks {listed(in_use)} is in use by another process; {_KEPT}"
                self._note(run, step, problem)
            return
        if not parts:
            return
        if common is not None and header.ref.save_id not in common:
            self._note(run, step, "incomplete: another machine has no part of it in memory or in its store")
            return
        try:
            refs = self._publish(parts, None if common is None else common[header.ref.save_id])
        except MissingPartitionError as error:
            self._note(run, step, str(error))
        except (OutOfSpaceError, FormatError, InvalidInputError) as error:
            if isinstance(error, OutOfSpaceError) and self.raises(run):
                store = self.tier.root
                command = restore_command(store, run, parts[0].reader.path.parent, step)
                raise OutOfSpaceError(
                    f"step {step} of run {run!r} is complete in memory, but the drive of store {store} is full. Free "
                    "space, for example with asymcheck gc and its --keep rules, and start again. Or write the step to "
                    f"another drive:\n  {command}\nOr continue from an older checkpoint: Checkpointer(on_error='warn')"
                ) from error
            # The capture is intact. If the store is damaged, for example a head record, a repair may help.
            self._kept |= readers
            self._note(run, step, f"{error}; {_KEPT}")
        else:
            self.adopted += [RecoveredCapture(run, step, ref, "") for ref in refs]

    def _publish(self, parts: Sequence[_RingCapture], metrics: Metrics | None) -> list[CheckpointRef]:
        """Make the partitions of all parts durable, then publish their manifests, with ``metrics`` (SPEC.md §C5)."""
        # A full drive may have no space for a new catalog, either.
        catalog = self.open_catalog()
        with contextlib.ExitStack() as stack:
            sealed = []
            for part in parts:
                header = part.header
                transaction = RingTransaction(self.tier, catalog, self.encoder, header.ref.save_id, header.rank)
                stack.enter_context(transaction)
                # Check the lineage before the write, so that a rejected capture is not written at each start.
                self.placing(header)
                _check_line(self.tier, header)
                # Replicas in the rings of other ranks replace damaged frames.
                self._add_all(transaction, part, [part.reader, *(other.reader for other in parts)])
                transaction.seal_frames()
                sealed.append((transaction, part))
            return [
                transaction.commit_capture(part.manifest, partial(self.placing, part.header), metrics=metrics)
                for transaction, part in sealed
            ]

    def _add_all(self, transaction: RingTransaction, capture: _RingCapture, readers: Sequence[RingReader]) -> None:
        lengths = capture.manifest.partitions()
        # Scan each ring now, because each thread would scan it.
        readers = [reader for reader in readers if reader.offsets]
        transaction.expect(sum(frame_length(length) for length in lengths.values()))

        def add(name: Digest, _slot: Slot) -> None:
            for reader in readers:
                if (intact := reader.intact(name, lengths[name])) is not None:
                    frame = reader.frame(intact[0], lengths[name])
                    transaction.add_frame(name, lengths[name], frame)
                    transaction.keep(name, lengths[name], frame)
                    return
            transaction.reuse(name, lengths[name])

        # Frames are written directly from the ring, so the slots hold no payload.
        config = self.tier.config
        run_with_slots(list(lengths), add, slots=self.tier.slots, payload_bytes=0, threads=config.slots, name="adopt")


def _check_line(tier: NvmeTier, header: ManifestHeader) -> None:
    """Reject a capture of an older copy of the store, whose generation has the same number."""
    head = tier.manifests.read_head(header.run, header.ref.generation)
    if head is not None and int.from_bytes(header.ref.save_id[:8], "big") < head[0].created_ns:
        raise InvalidInputError(
            f"step {header.ref.step} of run {header.run!r} was captured before generation {header.ref.generation} was "
            "opened in this store, so the capture belongs to another line"
        )


def is_store_missing(tier: NvmeTier, store: str | None, store_id: bytes) -> bool:
    """Return whether the store of a ring no longer exists at its recorded path."""
    path = _path(store)
    if path is None:
        # The ring records no usable path.
        return False
    try:
        return _id_at(tier, path) != store_id
    except (StorageError, FormatError):
        # The store exists, but is damaged or not readable for this user.
        return False


def is_of_a_copy(tier: NvmeTier, store: str | None) -> bool:
    """Return whether a ring belongs to another store with the same id, at the path that the ring records.

    One store is a copy of the other. If this store took the captures, the store that the training uses would lack them.
    """
    path = _path(store)
    try:
        has_same_id = path is not None and _id_at(tier, path) == tier.descriptor.store_id
        return has_same_id and not os.path.samefile(str(path), tier.root)
    except (StorageError, FormatError, OSError):
        return False


def _path(store: str | None) -> Path | None:
    return None if store is None or "\0" in store or not Path(store).is_absolute() else Path(store)


def _id_at(tier: NvmeTier, path: Path) -> bytes | None:
    descriptor = path / DESCRIPTOR_NAME
    data = tier.files.read_small(descriptor, RECORD_BYTES)
    return None if data is None else decode_descriptor(data, str(descriptor))[0].store_id
