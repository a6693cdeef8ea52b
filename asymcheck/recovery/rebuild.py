"""Rebuild the catalog from packs and manifests alone (SPEC.md §10.4)."""

from __future__ import annotations

import contextlib

from asymcheck.errors import AsymcheckError
from asymcheck.format import registry
from asymcheck.format.catalog import manifest_key
from asymcheck.tiers.nvme import NvmeTier, PackFile, Transaction
from asymcheck.types import Digest, Location


def rebuild(tier: NvmeTier, transaction: Transaction) -> None:
    """Enter every complete pack with its partitions, and every manifest, into an empty catalog.

    A pack that cannot be read is left out: what it holds is written again by the next save that needs it.
    """
    for pack_id in tier.pack_ids():
        try:
            pack = tier.open_pack(pack_id)
        except AsymcheckError:
            continue
        if pack.damage is None:
            with_locations(pack, transaction)
        pack.close()
    # Whoever gave a pack its name may have been killed before this; from now on saves rely on it.
    tier.files.sync_directory(tier.packs)
    for run in tier.manifests.runs():
        for listing in tier.manifests.checkpoints(run):
            for name in listing.manifests:
                path = tier.manifests.directory(run, listing.ref) / str(name)
                with contextlib.suppress(OSError):  # deleted since it was listed, or a link that leads nowhere
                    transaction.put_manifest(manifest_key(run, listing.ref, name), path.stat().st_size)


def with_locations(pack: PackFile, transaction: Transaction) -> None:
    """Enter one pack and its partitions."""
    header, entries = pack.header, pack.entries
    rows = entries[["offset", "stored_length", "plain_length", "kind", "codec", "digest_algorithm"]].tolist()
    for name, (offset, stored, plain, kind, codec, algorithm) in zip(pack.digests(), rows, strict=True):
        transaction.put_location(Digest(name), Location(header.pack_id, offset, stored, plain, kind, codec, algorithm))
    transaction.put_pack(header.pack_id, registry.PACK_LIVE, header.frame_count, header.pack_length)
