"""Create stores with deltas, and list the content of their packs."""

from __future__ import annotations

from pathlib import Path

import torch

from asymcheck import StoreConfig
from asymcheck.format.pack import Entries
from asymcheck.storage.nvme import NvmeTier
from asymcheck.types import PackId

CONFIG = StoreConfig(compression="smallest", partition_bytes=1 << 18, bundle_below_bytes=1 << 16)
PLAIN = StoreConfig(compression="off", partition_bytes=1 << 18, bundle_below_bytes=1 << 16)


def noise(seed: int, count: int = 37_000) -> torch.Tensor:
    """Return integers that no codec compresses."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, generator=generator)


def entries_of(tier: NvmeTier, pack_id: PackId) -> Entries:
    """Return the rows of a pack's index."""
    pack = tier.open_pack(pack_id)
    pack.close()
    return pack.entries


def pack_of_the_delta(path: Path) -> str:
    """Return the name of the only pack with a delta."""
    tier = NvmeTier(path, CONFIG, read_only=True)
    (found,) = (pack for pack in tier.pack_ids() if entries_of(tier, pack)["kind"].any())
    return f"{found.hex()}.pack"
