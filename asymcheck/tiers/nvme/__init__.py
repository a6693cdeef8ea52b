"""The NVMe tier: packs written by direct I/O, manifests as files, and the catalog in LMDB."""

from asymcheck.tiers.base_frames import BaseFrames, bases_in
from asymcheck.tiers.files import Files, OpenFile
from asymcheck.tiers.manifests import CheckpointFiles
from asymcheck.tiers.nvme.catalog import Catalog, Transaction
from asymcheck.tiers.nvme.manifests import ManifestFiles
from asymcheck.tiers.nvme.pack_files import PackFile
from asymcheck.tiers.nvme.packs import PackWriter
from asymcheck.tiers.nvme.scratch import scratch, seal_scratch_pack
from asymcheck.tiers.nvme.tier import NvmeTier
from asymcheck.tiers.nvme.workers import work_off
from asymcheck.tiers.slots import Slot, SlotPool

__all__ = [
    "BaseFrames",
    "Catalog",
    "CheckpointFiles",
    "Files",
    "ManifestFiles",
    "NvmeTier",
    "OpenFile",
    "PackFile",
    "PackWriter",
    "Slot",
    "SlotPool",
    "Transaction",
    "bases_in",
    "scratch",
    "seal_scratch_pack",
    "work_off",
]
