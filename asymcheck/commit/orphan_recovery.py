"""Adopt: what a killed process left complete in its ring becomes checkpoints of the store (SPEC.md §8.5)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from asymcheck.commit.encoder import Encoder
from asymcheck.commit.save_request import LineagePosition
from asymcheck.commit.transaction import RingTransaction
from asymcheck.errors import FormatError, InvalidInputError, MissingPartitionError, StorageError, UnsupportedFormatError
from asymcheck.format.frame import frame_length
from asymcheck.format.layout import DESCRIPTOR_NAME
from asymcheck.format.manifest import Manifest, ManifestHeader
from asymcheck.format.record import RECORD_BYTES, decode_descriptor
from asymcheck.format.ring_records import COMPLETE
from asymcheck.format.spans import ranks_in
from asymcheck.storage.nvme import Catalog, CheckpointFiles, NvmeTier, run_with_slots
from asymcheck.storage.shm import (
    RingPack,
    RingReader,
    list_rings,
    open_orphaned_ring,
    remove_unreadable_ring,
    ring_run_and_store,
    wait_for_orphaned_ring,
)
from asymcheck.storage.slots import Slot
from asymcheck.types import CheckpointRef, Digest, SaveId

_SHOWN = 8
_STAYS = "it stays there, and takes memory until removed"


@dataclasses.dataclass(frozen=True)
class RecoveredCapture:
    """Outcome of adopting one capture."""

    run: str | None
    """The run; None when it cannot be known."""
    step: int | None
    """The training step; None when it cannot be known."""
    ref: CheckpointRef | None
    """The checkpoint; None when it could not be committed."""
    problem: str
    """Why not."""


@contextlib.contextmanager
def adopting(
    tier: NvmeTier,
    open_catalog: Callable[[], Catalog],
    encoder: Encoder,
    folder: Path,
    placing: Callable[[ManifestHeader], LineagePosition],
    run: str | None = None,
) -> Iterator[tuple[list[RecoveredCapture], list[RingPack]]]:
    """Commit the complete captures in the rings of this store that no process uses, and remove these rings.

    Yields what became of each capture, and the frames of the rings: while the ``with`` block lasts, new and many older
    checkpoints can be read from that memory. A ring stays when it has a capture that a newer program may commit, or
    that can be committed when the store is repaired.

    The rings of ``run``, which is to go on, come first. When another process adopts them, this waits for it: without
    them, an older step would be restored. Rings of other runs are taken when they are free.

    Of a checkpoint of several ranks every part is committed, or none: when some rank has left its part neither in a
    ring nor in the store, the checkpoint can never be complete.

    Raises:
        LockTimeoutError: another process adopts a ring of ``run``, and does not come to an end.
        StorageError: the device refused. The ring stays, and may be adopted again.
    """
    adoption = _Adoption(tier, open_catalog, encoder, placing)
    packs: list[RingPack] = []
    rings = list_rings(folder, tier.descriptor.store_id)
    own = [] if run is None else [path for path in rings if _is_of(tier, path, run)]
    with contextlib.ExitStack() as stack:
        for paths, take in (
            (own, wait_for_orphaned_ring),
            ([path for path in rings if path not in own], partial(open_orphaned_ring, patient=run is None)),
        ):
            readers = [stack.enter_context(reader) for reader in adoption.taken(paths, take)]
            if readers:
                adoption.commit_all(readers)
            packs += [RingPack(reader) for reader in readers]
        yield adoption.adopted, packs


def _is_of(tier: NvmeTier, path: Path, run: str) -> bool:
    found = ring_run_and_store(path)
    return found is not None and found[0] == run and not is_of_a_copy(tier, found[1])


class _Found(NamedTuple):
    """A complete capture in a ring."""

    reader: RingReader
    manifest: Manifest

    @property
    def header(self) -> ManifestHeader:
        return self.manifest.header

    def is_part_of_same(self, other: ManifestHeader) -> bool:
        """Tell whether this is a part of the checkpoint of which ``other`` describes a part."""
        header = self.header
        return (header.run, header.ref, header.world_size) == (other.run, other.ref, other.world_size)


class _Adoption:
    """The adoption of rings by one process."""

    def __init__(
        self,
        tier: NvmeTier,
        open_catalog: Callable[[], Catalog],
        encoder: Encoder,
        placing: Callable[[ManifestHeader], LineagePosition],
    ) -> None:
        self._tier, self._open_catalog, self._encoder, self._placing = tier, open_catalog, encoder, placing
        self.adopted: list[RecoveredCapture] = []
        self._kept: set[RingReader] = set()
        # Runs and save ids of captures that a newer program may read.
        self._unread: set[tuple[str, SaveId]] = set()

    def taken(self, paths: Sequence[Path], take: Callable[[Path], RingReader | None]) -> Iterator[RingReader]:
        """Yield the rings that are free, each locked."""
        for path in paths:
            try:
                reader = take(path)
            except FileNotFoundError:
                continue
            except FormatError as error:
                if remove_unreadable_ring(path) == "damaged":
                    self._note(None, None, f"{error}; {_STAYS}")
                continue
            if reader is not None and is_of_a_copy(self._tier, reader.header.store):
                self._leave_to_the_other(reader)
            elif reader is not None:
                yield reader

    def _note(self, run: str | None, step: int | None, problem: str) -> None:
        self.adopted.append(RecoveredCapture(run, step, None, problem))

    def _leave_to_the_other(self, reader: RingReader) -> None:
        """Give back the ring of another store that has the id of this one, and say so unless the ring is empty."""
        with reader:
            if all(entry.state != COMPLETE for entry in reader.captures):
                return
        problem = f"it is of the store {reader.header.store}, and one of the two is a copy of the other; it stays there"
        self._note(reader.header.run, None, f"{reader.path}: {problem}")

    def commit_all(self, readers: Sequence[RingReader]) -> None:
        """Commit the complete captures in some rings, all those of a run, and remove the rings that need not stay."""
        catalog = self._open_catalog()
        found = [capture for reader in readers for capture in self._found_in(reader)]
        found.sort(key=lambda capture: (capture.header.ref, capture.header.rank))
        for capture in found:
            self._commit(catalog, capture, found)
        for reader in readers:
            if reader not in self._kept:
                reader.unlink()

    def _found_in(self, reader: RingReader) -> Iterator[_Found]:
        run = reader.header.run
        for entry in reader.captures:
            if entry.state != COMPLETE:
                continue
            try:
                yield _Found(reader, reader.manifest(entry))
            except UnsupportedFormatError as error:
                self._kept.add(reader)
                self._unread.add((run, entry.save_id))
                self._note(run, None, f"{error}; {_STAYS}")
            except FormatError as error:
                self._note(run, None, str(error))

    def _commit(self, catalog: Catalog, capture: _Found, found: Sequence[_Found]) -> None:
        header = capture.header
        run, step = header.run, header.ref.step
        stored = self._tier.manifests.listing(run, header.ref)
        if stored.has(header.rank):
            # Its process was killed between the commit and the note of it.
            return
        parts = [other for other in found if other.is_part_of_same(header)]
        missing = _missing_ranks(header, stored, parts)
        if missing:
            if (run, header.ref.save_id) in self._unread:
                self._kept.add(capture.reader)
            if header.rank == min(other.header.rank for other in parts):
                ranks = ", ".join(map(str, missing[:_SHOWN])) + (" and others" if len(missing) > _SHOWN else "")
                problem = f"of its {header.world_size} ranks, {ranks} left it complete neither there nor in the store"
                self._note(run, step, problem)
            return
        transaction = RingTransaction(self._tier, catalog, self._encoder, header.ref.save_id, header.rank)
        try:
            with transaction:
                # Asked first, too: what has no place in the store need not be written at each start.
                self._placing(header)
                _check_line(self._tier, header)
                self._add_all(transaction, capture)
                ref = transaction.commit_capture(capture.manifest, partial(self._placing, header))
        except MissingPartitionError as error:
            self._note(run, step, str(error))
        except (FormatError, InvalidInputError) as error:
            # Nothing is wrong with the capture, but with the store, as with a head record: that may be mended.
            self._kept.add(capture.reader)
            self._note(run, step, f"{error}; {_STAYS}")
        else:
            self.adopted.append(RecoveredCapture(run, step, ref, ""))

    def _add_all(self, transaction: RingTransaction, capture: _Found) -> None:
        reader, lengths = capture.reader, capture.manifest.partitions()
        transaction.expect(sum(frame_length(length) for length in lengths.values()))

        def add(name: Digest, _slot: Slot) -> None:
            intact = reader.intact(name, lengths[name])
            if intact is not None:
                frame = reader.frame(intact[0], lengths[name])
                transaction.add_frame(name, lengths[name], frame)
                transaction.keep(name, lengths[name], frame)
            else:
                transaction.reuse(name, lengths[name])

        # Frames are written from the ring, so a slot needs no room.
        config = self._tier.config
        run_with_slots(list(lengths), add, slots=self._tier.slots, payload_bytes=0, threads=config.slots, name="adopt")


def _check_line(tier: NvmeTier, header: ManifestHeader) -> None:
    """Refuse a capture of another line whose generation has the same number: of a store before it was put back."""
    head = tier.manifests.read_head(header.run, header.ref.generation)
    if head is not None and int.from_bytes(header.ref.save_id[:8], "big") < head[0].created_ns:
        raise InvalidInputError(
            f"step {header.ref.step} of run {header.run!r} was captured before generation {header.ref.generation} was "
            "opened in this store: it is of another line"
        )


def _missing_ranks(header: ManifestHeader, stored: CheckpointFiles, parts: Sequence[_Found]) -> list[int]:
    left = {part.header.rank for part in parts}
    # What ranks of other machines have left is there, where nobody can look from here.
    wanted = range(header.world_size) if header.store_ranks is None else ranks_in(header.store_ranks)
    return [rank for rank in wanted if rank not in left and not stored.has(rank)]


def is_gone(tier: NvmeTier, store: str | None, store_id: bytes) -> bool:
    """Tell whether the store of a ring is certainly not where it was."""
    path = _path(store)
    if path is None:
        # Where it was, nobody can tell from that.
        return False
    try:
        return _id_at(tier, path) != store_id
    except (StorageError, FormatError):
        # Damaged, or not for this user to see; but there.
        return False


def is_of_a_copy(tier: NvmeTier, store: str | None) -> bool:
    """Return whether a ring with this store's id belongs to another store with the same id, at the path in the ring.

    One of the two stores is a copy of the other. Captures taken from the ring would be missing in the store in which
    the training goes on.
    """
    path = _path(store)
    try:
        there = path is not None and _id_at(tier, path) == tier.descriptor.store_id
        return there and not os.path.samefile(str(path), tier.root)
    except (StorageError, FormatError, OSError):
        return False


def _path(store: str | None) -> Path | None:
    return None if store is None or "\0" in store or not Path(store).is_absolute() else Path(store)


def _id_at(tier: NvmeTier, path: Path) -> bytes | None:
    descriptor = path / DESCRIPTOR_NAME
    data = tier.files.read_small(descriptor, RECORD_BYTES)
    return None if data is None else decode_descriptor(data, str(descriptor))[0].store_id
