"""The NVMe tier: packs written by direct I/O, manifests as files, and the catalog in LMDB."""

from asymcheck.storage.base_frames import BaseFrames, bases_in
from asymcheck.storage.local_files import Files, OpenFile
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.nvme.catalog import Catalog, Transaction
from asymcheck.storage.nvme.manifests import ManifestFiles
from asymcheck.storage.nvme.pack_reader import PackFile
from asymcheck.storage.nvme.pack_writer import PackWriter
from asymcheck.storage.nvme.scratch import scratch, seal_scratch_pack
from asymcheck.storage.nvme.slot_workers import work_off
from asymcheck.storage.nvme.tier import NvmeTier
from asymcheck.storage.slots import Slot, SlotPool

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
