"""Adopt: what a killed process left complete in its ring becomes checkpoints of the store (SPEC.md §8.5)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from asymcheck.errors import FormatError, InvalidInputError, MissingPartitionError, StorageError, UnsupportedFormatError
from asymcheck.format.frame import frame_length
from asymcheck.format.layout import DESCRIPTOR_NAME
from asymcheck.format.manifest import Manifest, ManifestHeader
from asymcheck.format.record import RECORD_BYTES, decode_descriptor
from asymcheck.format.ring import COMPLETE
from asymcheck.format.spans import ranks_in
from asymcheck.pipeline.encoder import Encoder
from asymcheck.pipeline.request import Place
from asymcheck.pipeline.transaction import RingTransaction
from asymcheck.tiers.dram_ring import (
    RingPack,
    RingReader,
    left_rings,
    open_left,
    remove_unread,
    run_of,
    wait_for_left,
)
from asymcheck.tiers.nvme import Catalog, CheckpointFiles, NvmeTier, work_off
from asymcheck.tiers.slots import Slot
from asymcheck.types import CheckpointRef, Digest, SaveId

_SHOWN = 8
_STAYS = "it stays there, and takes memory until removed"


@dataclasses.dataclass(frozen=True)
class Adopted:
    """What became of one capture."""

    run: str | None
    """The run; None when it cannot be known."""
    step: int | None
    """The training step; None when it cannot be known."""
    ref: CheckpointRef | None
    """The checkpoint; None when it could not be committed."""
    problem: str
    """Why not."""


@dataclasses.dataclass(frozen=True)
class Adoption:
    """Rings that were taken up: their memory is there as long as they are held, though most names are gone."""

    adopted: list[Adopted]
    """What became of the captures in them."""
    packs: list[RingPack]
    """Their frames."""


@contextlib.contextmanager
def adopting(
    tier: NvmeTier,
    open_catalog: Callable[[], Catalog],
    encoder: Encoder,
    folder: Path,
    placing: Callable[[ManifestHeader], Place],
    run: str | None = None,
) -> Iterator[Adoption]:
    """Commit what lies complete in the rings of this store that nobody uses any more, and remove these rings.

    A ring stays when it has what could be committed another day, by a newer program or when the store is mended.

    Who goes on with ``run`` takes up the rings of that first, and waits for them as long as somebody else takes them
    up: without what they hold an older step would be restored. Of those of other runs, it takes what is free.

    Of a checkpoint of several ranks every part is committed, or none: when some rank has left its part neither in a
    ring nor in the store, it can never be complete. While the rings are held, what is in the store now, and much of
    what was there before, can be read from memory.

    Raises:
        LockTimeoutError: a ring of ``run`` is being taken up by another process, which does not come to an end.
        StorageError: the device refused. The ring stays, and may be adopted again.
    """
    adopted: list[Adopted] = []
    packs: list[RingPack] = []
    rings = left_rings(folder, tier.descriptor.store_id)
    own = [] if run is None else [path for path in rings if _is_of(tier, path, run)]
    with contextlib.ExitStack() as stack:
        for paths, take in (
            (own, wait_for_left),
            ([path for path in rings if path not in own], partial(open_left, patient=run is None)),
        ):
            readers = [stack.enter_context(reader) for reader in _taken(tier, paths, take, adopted)]
            if readers:
                _adopt_all(tier, open_catalog(), encoder, placing, readers, adopted)
            packs += [RingPack(reader) for reader in readers]
        yield Adoption(adopted, packs)


def _is_of(tier: NvmeTier, path: Path, run: str) -> bool:
    found = run_of(path)
    return found is not None and found[0] == run and not is_of_a_copy(tier, found[1])


def _taken(
    tier: NvmeTier, paths: Sequence[Path], take: Callable[[Path], RingReader | None], adopted: list[Adopted]
) -> Iterator[RingReader]:
    """Yield the rings that can be had, each locked."""
    for path in paths:
        try:
            reader = take(path)
        except FileNotFoundError:
            continue
        except FormatError as error:
            if remove_unread(path) == "damaged":
                adopted.append(Adopted(None, None, None, f"{error}; {_STAYS}"))
            continue
        if reader is not None and is_of_a_copy(tier, reader.header.store):
            adopted += _left_to_the_other(reader)
        elif reader is not None:
            yield reader


def _adopt_all(
    tier: NvmeTier,
    catalog: Catalog,
    encoder: Encoder,
    placing: Callable[[ManifestHeader], Place],
    readers: Sequence[RingReader],
    adopted: list[Adopted],
) -> None:
    """Commit what lies complete in some rings, all those of a run, and remove those that need not stay."""
    kept = _Kept()
    found = [one for reader in readers for one in _found_in(reader, adopted, kept)]
    found.sort(key=lambda one: (one.header.ref, one.header.rank))
    for one in found:
        _adopt_one(tier, catalog, encoder, placing, one, found, adopted, kept)
    for reader in readers:
        if reader not in kept.rings:
            reader.unlink()


def _left_to_the_other(reader: RingReader) -> list[Adopted]:
    """Give back the ring of a store that has the id of this one, and say so if there is something in it."""
    with reader:
        if all(entry.state != COMPLETE for entry in reader.captures):
            return []
    problem = f"it is of the store {reader.header.store}, and one of the two is a copy of the other; it stays there"
    return [Adopted(reader.header.run, None, None, f"{reader.path}: {problem}")]


@dataclasses.dataclass(frozen=True)
class _Found:
    """A capture in a ring."""

    reader: RingReader
    manifest: Manifest

    @property
    def header(self) -> ManifestHeader:
        return self.manifest.header


@dataclasses.dataclass
class _Kept:
    """What is not at fault for not being committed."""

    rings: set[RingReader] = dataclasses.field(default_factory=set)
    """Rings that stay."""
    unread: set[tuple[str, SaveId]] = dataclasses.field(default_factory=set)
    """Runs and save ids of captures that a newer program may read."""


def _found_in(reader: RingReader, adopted: list[Adopted], kept: _Kept) -> Iterator[_Found]:
    for entry in reader.captures:
        if entry.state != COMPLETE:
            continue
        try:
            yield _Found(reader, reader.manifest(entry))
        except UnsupportedFormatError as error:
            kept.rings.add(reader)
            kept.unread.add((reader.header.run, entry.save_id))
            adopted.append(Adopted(reader.header.run, None, None, f"{error}; {_STAYS}"))
        except FormatError as error:
            adopted.append(Adopted(reader.header.run, None, None, str(error)))


def _adopt_one(
    tier: NvmeTier,
    catalog: Catalog,
    encoder: Encoder,
    placing: Callable[[ManifestHeader], Place],
    one: _Found,
    found: Sequence[_Found],
    adopted: list[Adopted],
    kept: _Kept,
) -> None:
    header = one.header
    stored = tier.manifests.listing(header.run, header.ref)
    if stored.has(header.rank):
        # Its process was killed between the commit and the note of it.
        return
    missing = _missing_ranks(header, stored, found)
    if missing:
        if (header.run, header.ref.save_id) in kept.unread:
            kept.rings.add(one.reader)
        if header.rank == min(other.header.rank for other in found if _is_same(other.header, header)):
            ranks = ", ".join(map(str, missing[:_SHOWN])) + (" and others" if len(missing) > _SHOWN else "")
            problem = f"of its {header.world_size} ranks, {ranks} left it complete neither there nor in the store"
            adopted.append(Adopted(header.run, header.ref.step, None, problem))
        return
    transaction = RingTransaction(tier, catalog, encoder, header.ref.save_id, header.rank)
    try:
        with transaction:
            # Asked first, too: what has no place in the store need not be written at each start.
            placing(header)
            _check_line(tier, header)
            _add_all(tier, transaction, one)
            ref = transaction.commit_capture(one.manifest, partial(placing, header))
    except MissingPartitionError as error:
        adopted.append(Adopted(header.run, header.ref.step, None, str(error)))
    except (FormatError, InvalidInputError) as error:
        # Nothing is wrong with the capture, but with the store, as with a head record: that may be mended.
        kept.rings.add(one.reader)
        adopted.append(Adopted(header.run, header.ref.step, None, f"{error}; {_STAYS}"))
    else:
        adopted.append(Adopted(header.run, header.ref.step, ref, ""))


def _check_line(tier: NvmeTier, header: ManifestHeader) -> None:
    """Refuse a capture of another line whose generation has the same number: of a store before it was put back."""
    head = tier.manifests.read_head(header.run, header.ref.generation)
    if head is not None and int.from_bytes(header.ref.save_id[:8], "big") < head[0].created_ns:
        raise InvalidInputError(
            f"step {header.ref.step} of run {header.run!r} was captured before generation {header.ref.generation} was "
            "opened in this store: it is of another line"
        )


def _missing_ranks(header: ManifestHeader, stored: CheckpointFiles, found: Sequence[_Found]) -> list[int]:
    there = {one.header.rank for one in found if _is_same(one.header, header)}
    # What ranks of other machines have left is there, where nobody can look from here.
    wanted = range(header.world_size) if header.store_ranks is None else ranks_in(header.store_ranks)
    return [rank for rank in wanted if rank not in there and not stored.has(rank)]


def _is_same(one: ManifestHeader, other: ManifestHeader) -> bool:
    return (one.run, one.ref, one.world_size) == (other.run, other.ref, other.world_size)


def _add_all(tier: NvmeTier, transaction: RingTransaction, one: _Found) -> None:
    lengths, offsets = one.manifest.partitions(), one.reader.offsets()
    transaction.expect(sum(frame_length(length) for length in lengths.values()))

    def add(name: Digest, _slot: Slot) -> None:
        found = one.reader.intact(offsets.get(name, []), name, lengths[name])
        if found is not None:
            transaction.add_frame(name, lengths[name], one.reader.frame(found[0], lengths[name]))
        else:
            transaction.reuse(name, lengths[name])

    # They are written from where they lie.
    work_off(list(lengths), add, slots=tier.slots, payload_bytes=0, threads=tier.config.slots, name="adopt")


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
    """Tell whether a ring with the id of this store is of one with the same id that lies elsewhere, where it says.

    One of the two is a copy of the other. What is taken from the ring would be missing where the training goes on.
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
