"""Stores with valid digests and names, but hostile content."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from asymcheck.config import StoreConfig
from asymcheck.format.digest import digest
from asymcheck.format.layout import ManifestName, pack_name
from asymcheck.format.manifest import TensorRow
from asymcheck.format.pack import PackHeader, encode_pack_header
from asymcheck.format.tree import Node
from asymcheck.storage.nvme import NvmeTier
from asymcheck.store import Store
from asymcheck.types import PackId
from tests.damage.memory_limit import limit_memory, unlimit_memory
from tools.manifest_files import encode_manifest

CONFIG = StoreConfig(catalog_map_bytes=1 << 24, slots=1)
STATE = {"w": torch.arange(2000)}
PACK_ID = PackId(b"\x11" * 16)


def new_store(path: Path) -> Store:
    """Return a store with one intact checkpoint."""
    store = Store.open(path, config=CONFIG, create=True)
    store.save(STATE, step=1)
    return store


def put_manifest(
    store: Store, tree: Node, rows: list[TensorRow] | None = None, rank: int = 0, packs: Sequence[PackId] = ()
) -> Path:
    """Replace the manifest of an intact checkpoint by one with another tree or rows, and a valid name."""
    manifests = store.resources.tier.manifests
    *_, listing = manifests.checkpoints("default")
    name = listing.manifests[rank]
    folder = manifests.directory("default", listing.ref)
    manifest = manifests.read("default", listing.ref, name)
    header, old = manifest.header, manifest.rows() if rows is None else rows
    data = encode_manifest(dataclasses.replace(header, tree=tree, packs=tuple(packs) or header.packs), old)
    (folder / str(name)).unlink()
    path = folder / str(ManifestName(rank, name.world_size, digest(data)))
    path.write_bytes(data)
    return path


def open_large_claims(path: str) -> list[str]:
    """Open packs with false sizes, with little memory; return the error of each."""
    refused = []
    with Store.open(path, config=CONFIG, create=True) as store:
        packs = Path(path, "packs")
        for count, index_offset in (
            (4_000_000, 4096),
            (4_000_000, 1 << 40),
            (1, (1 << 63) - 4096),
            (1, 1 << 63),
            (1, (1 << 64) - (1 << 20)),
            (4_000_000, (1 << 64) - (1 << 33)),
        ):
            header = encode_pack_header(PackHeader(PACK_ID, count, index_offset, time.time_ns(), "test"))
            (packs / pack_name(PACK_ID)).write_bytes(header + bytes(1 << 16))
            refused.append(_open(store.resources.tier))
    return refused


def _open(tier: NvmeTier) -> str:
    limit_memory(16 << 20)
    try:
        tier.open_pack(PACK_ID).close()
    except Exception as error:  # noqa: BLE001 - the test looks at its type
        return f"{type(error).__name__}: {error}"
    finally:
        unlimit_memory()
    return "opened"
