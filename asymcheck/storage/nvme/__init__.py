"""Local store on NVMe: packs written by direct I/O, manifest files, and the LMDB catalog."""

from asymcheck.storage.local_files import Files, OpenFile
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.nvme.catalog import Catalog, Transaction
from asymcheck.storage.nvme.manifests import ManifestFiles
from asymcheck.storage.nvme.pack_reader import PackFile
from asymcheck.storage.nvme.pack_writer import PackWriter
from asymcheck.storage.nvme.tier import NvmeTier, scratch, seal_scratch_pack
from asymcheck.storage.slots import Slot, SlotPool, run_with_slots

__all__ = [
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
    "run_with_slots",
    "scratch",
    "seal_scratch_pack",
]
