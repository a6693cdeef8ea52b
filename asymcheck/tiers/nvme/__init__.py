"""The NVMe tier: packs written by direct I/O, manifests as files, and the catalog in LMDB."""

from asymcheck.tiers.files import Files
from asymcheck.tiers.nvme.catalog import Catalog, Transaction
from asymcheck.tiers.nvme.manifests import CheckpointFiles, ManifestFiles
from asymcheck.tiers.nvme.pack_files import PackFile
from asymcheck.tiers.nvme.packs import PackWriter
from asymcheck.tiers.nvme.slots import Slot, SlotPool
from asymcheck.tiers.nvme.tier import NvmeTier
from asymcheck.tiers.nvme.workers import work_off

__all__ = [
    "Catalog",
    "CheckpointFiles",
    "Files",
    "ManifestFiles",
    "NvmeTier",
    "PackFile",
    "PackWriter",
    "Slot",
    "SlotPool",
    "Transaction",
    "work_off",
]
