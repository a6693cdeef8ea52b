"""Create a store with very many partitions through the library's own layers, writing thousands of frames at once.

Nothing is mocked: packs have real frames with real digests, manifests and catalog are complete, and ``verify`` finds no
problem. Each partition has 512 bytes and occupies one block, so a million partitions need 4 GiB.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import numpy as np

import asymcheck
from asymcheck.config import WRITER, StoreConfig
from asymcheck.format import layout, registry
from asymcheck.format.catalog_records import manifest_key
from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor, encode_header, frame_length, payload_offset
from asymcheck.format.manifest import Extent, ManifestHeader, TensorRow
from asymcheck.format.pack import ENTRY_DTYPE, PackHeader, encode_index, encode_pack_header
from asymcheck.storage.nvme import Catalog, NvmeTier
from asymcheck.types import CheckpointRef, Digest, Location, PackId, SaveId
from tools.manifest_files import encode_manifest

PAYLOAD_BYTES = 512
RUN = "default"
_FLOATS = PAYLOAD_BYTES // 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """Size of the store."""

    partitions: int
    """Total number of partitions; each checkpoint adds the same number."""
    checkpoints: int
    """Number of checkpoints. The newest references every partition, the others only the partitions that they added."""

    @property
    def added(self) -> int:
        """Number of partitions that one checkpoint adds, all in one pack."""
        return self.partitions // self.checkpoints


def build(where: Path, shape: Shape) -> float:
    """Create the store; return the seconds."""
    began = time.perf_counter()
    asymcheck.Store.open(where, create=True).close()
    tier = NvmeTier(where, StoreConfig())
    catalog = tier.open_catalog(lambda _transaction: None)
    random = np.random.default_rng(1)
    packs: list[tuple[PackId, list[Digest]]] = []
    parent = None
    for step in range(shape.checkpoints):
        packs.append(_add_pack(tier, catalog, random, shape.added))
        named = packs if step == shape.checkpoints - 1 else packs[-1:]
        parent = _add_checkpoint(tier, catalog, step, parent, named)
    os.sync()
    tier.close()
    return time.perf_counter() - began


def _add_pack(tier: NvmeTier, catalog: Catalog, random: np.random.Generator, count: int) -> tuple[PackId, list[Digest]]:
    """Write one pack of ``count`` frames and enter it in the catalog."""
    pack_id, size = PackId(os.urandom(16)), frame_length(PAYLOAD_BYTES)
    end, start = registry.BLOCK_BYTES + count * size, payload_offset(PAYLOAD_BYTES)
    data = bytearray(end)
    entries = np.zeros(count, dtype=ENTRY_DTYPE)
    digests: list[Digest] = []
    payloads = random.bytes(count * PAYLOAD_BYTES)
    for number in range(count):
        payload = payloads[number * PAYLOAD_BYTES : (number + 1) * PAYLOAD_BYTES]
        name, offset = digest(payload), registry.BLOCK_BYTES + number * size
        header = encode_header(FrameDescriptor.identity(name, PAYLOAD_BYTES), pack_id, number)
        data[offset : offset + len(header)] = header
        data[offset + start : offset + start + PAYLOAD_BYTES] = payload
        digests.append(name)
    entries["digest"] = np.frombuffer(b"".join(digests), dtype=ENTRY_DTYPE["digest"])
    entries["offset"] = registry.BLOCK_BYTES + np.arange(count) * size
    entries["stored_length"] = entries["plain_length"] = PAYLOAD_BYTES
    entries["kind"], entries["codec"] = registry.KIND_FULL, registry.CODEC_IDENTITY
    entries["digest_algorithm"] = registry.DIGEST_XXH3_128
    pack = PackHeader(pack_id, count, end, time.time_ns(), WRITER)
    first, index = encode_pack_header(pack), encode_index(pack_id, entries)
    data[: len(first)] = first
    (tier.packs / layout.pack_name(pack_id)).write_bytes(data + index)
    with catalog.write() as transaction:
        for number, name in enumerate(digests):
            offset = registry.BLOCK_BYTES + number * size
            transaction.put_location(name, Location(pack_id, offset, PAYLOAD_BYTES, PAYLOAD_BYTES))
        transaction.put_pack(pack_id, registry.PACK_LIVE, count, pack.pack_length)
    return pack_id, digests


def _add_checkpoint(
    tier: NvmeTier,
    catalog: Catalog,
    step: int,
    parent: CheckpointRef | None,
    packs: list[tuple[PackId, list[Digest]]],
) -> CheckpointRef:
    """Publish a manifest with one tensor for each pack, made of all its partitions, and enter it in the catalog."""
    ref = CheckpointRef(1, step, SaveId(time.time_ns().to_bytes(8, "big") + os.urandom(8)))
    names = [f"layer{number}" for number in range(len(packs))]
    header = ManifestHeader(
        run=RUN,
        ref=ref,
        rank=0,
        world_size=1,
        parent=parent,
        created_ns=time.time_ns(),
        writer=WRITER,
        metrics={"loss": 1.0},
        plan={"number": 0, "kind": "canonical"},
        packs=tuple(pack_id for pack_id, _ in packs),
        tree=["d", [[name, ["T", row]] for row, name in enumerate(names)]],
    )
    rows = [_row(name, digests) for name, (_, digests) in zip(names, packs, strict=True)]
    data = encode_manifest(header, rows)
    name = tier.manifests.publish(RUN, ref, 0, 1, data)
    with catalog.write() as transaction:
        transaction.put_manifest(manifest_key(RUN, ref, name), len(data))
    return ref


def _row(name: str, digests: list[Digest]) -> TensorRow:
    floats = len(digests) * _FLOATS
    extents = tuple(Extent(one, 0, PAYLOAD_BYTES, PAYLOAD_BYTES) for one in digests)
    shape = (floats,)
    return TensorRow(name, (), "float32", "weights", shape, shape, (0,), floats * 4, None, extents)
