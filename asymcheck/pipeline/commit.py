"""Commit: from frames in packs to a checkpoint, the steps 3 to 5 of SPEC.md §8.1, for every way down; and back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection

from asymcheck.errors import AsymcheckError, MissingPartitionError, StorageError
from asymcheck.events import emit
from asymcheck.format import registry
from asymcheck.format.catalog import manifest_key
from asymcheck.format.layout import ManifestName
from asymcheck.pipeline.needed import is_gone
from asymcheck.pipeline.packing import Packing
from asymcheck.tiers.nvme import Catalog, CheckpointFiles, NvmeTier
from asymcheck.tiers.owners import this_process
from asymcheck.types import CheckpointRef, Digest, PackId


def enter(
    tier: NvmeTier,
    catalog: Catalog,
    packing: Packing,
    names: Collection[Digest],
    pin: bytes,
    rewrite: Callable[[set[Digest]], object],
) -> list[PackId]:
    """Seal the packs, enter them in the catalog and pin them; return the packs in which ``names`` lie.

    What collection took meanwhile is stored again by ``rewrite``.

    Raises:
        StorageError: the device refused, or collection took partitions again and again.
    """
    for _ in range(tier.config.commit_attempts):
        packing.seal()
        gone = _pin(catalog, packing, pin)
        if not gone:
            packing.close()
            _check_stored(names, packing)
            return sorted({at.pack_id for at in packing.written.values()} | packing.needed_packs())
        rewrite(set(packing.take_back(gone)))
    raise StorageError(
        f"store {tier.root}: collection took partitions away {tier.config.commit_attempts} times during one save; "
        "save again"
    )


def _pin(catalog: Catalog, packing: Packing, pin: bytes) -> list[PackId]:
    """Step 3 of §8.1, one transaction: returns the reused packs that are gone, or pins everything and returns none."""
    reused = packing.needed_packs()
    with catalog.write() as transaction:
        gone = [pack_id for pack_id in reused if transaction.pack_state(pack_id) != registry.PACK_LIVE]
        for name, location in packing.written.items():
            transaction.put_location(name, location)
        for pack_id, header in packing.packs.items():
            transaction.put_pack(pack_id, registry.PACK_LIVE, header.frame_count, header.pack_length)
        transaction.put_pin(pin, this_process(), {*packing.packs, *reused} - set(gone))
    emit("catalog.pinned", pin.hex())
    return gone


def _check_stored(names: Collection[Digest], packing: Packing) -> None:
    missing = [name for name in names if name not in packing.written and name not in packing.reused]
    if missing:
        raise MissingPartitionError(f"partition {missing[0].hex()} was not stored; nothing was committed")


def finish(catalog: Catalog, run: str, ref: CheckpointRef, name: ManifestName, size: int, pin: bytes) -> None:
    """Enter the manifest in the catalog and drop the pin, step 5: all is protected by the manifest now."""
    with catalog.write() as transaction:
        transaction.put_manifest(manifest_key(run, ref, name), size)
        transaction.delete_pin(pin)
    emit("catalog.committed", str(ref))


def remove(tier: NvmeTier, catalog: Catalog, listing: CheckpointFiles) -> None:
    """Delete a checkpoint, durably, by §8.2; collection frees what only it needed."""
    tier.manifests.remove(listing.run, listing.ref)
    keys = [manifest_key(listing.run, listing.ref, name) for name in listing.manifests]
    with catalog.write() as transaction:
        # But for one that a pull has brought back meanwhile.
        for key in keys:
            if is_gone(tier, key):
                transaction.delete_manifest(key)


def take_back(tier: NvmeTier, catalog: Catalog, run: str, rank: int, ref: CheckpointRef | None, pin: bytes) -> None:
    """Leave no manifest of a failed save, and let collection have what it has stored."""
    if ref is not None:
        with contextlib.suppress(AsymcheckError, FileNotFoundError):
            tier.manifests.withdraw(run, ref, rank)
    try:
        with catalog.write() as transaction:
            # A manifest that could not be removed keeps its packs.
            listed = () if ref is None else tier.manifests.listing(run, ref).manifests
            if all(name.rank != rank for name in listed):
                transaction.delete_pin(pin)
    except AsymcheckError:
        # The first failure is the one to report; the pin goes when this process has ended.
        return
