"""Detection of network file systems, which LMDB does not support, and of paravirtual drives."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import numpy as np

from asymcheck.errors import UnsupportedFileSystemError
from asymcheck.storage.pages import are_huge

# fmt: off
NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse.alluxio-fuse", "fuse.beegfs", "fuse.blobfuse",
    "fuse.blobfuse2", "fuse.ceph", "fuse.ceph-fuse", "fuse.daos", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs",
    "fuse.rclone", "fuse.s3fs", "fuse.seaweedfs", "fuse.sshfs", "gfs2", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
    "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
})
# fmt: on
"""Types in /proc/self/mountinfo of file systems whose locks or maps are not local."""

_ESCAPED = re.compile(r"\\([0-7]{3})")

_PARAVIRTUAL = frozenset({"virtio_blk", "vbd", "xen-blkfront"})
"""Drivers of paravirtual drives. Their host processes every segment of a request in software."""


def needs_slot(device: int, memory: memoryview) -> bool:
    """Tell whether direct I/O between a drive (``st_dev``) and ``memory`` is slower than a copy through a slot.

    Each page is a segment of the request. Measured on a paravirtual drive (1.26 GB, two cores, four threads), write and
    read: 2.1 and 0.9 GB/s directly with small pages, 3.1 and 1.5 GB/s through slots, 4.0 and 1.8 GB/s with huge pages.
    """
    return is_paravirtual(device) and not are_huge(np.frombuffer(memory, dtype=np.uint8).ctypes.data, len(memory))


@functools.cache
def is_paravirtual(device: int, devices: Path = Path("/sys/dev/block")) -> bool:
    """Tell whether the device of a file system (``st_dev``) is a paravirtual drive, or is composed of such drives."""
    folder = (devices / f"{os.major(device)}:{os.minor(device)}").resolve()
    slaves = folder / "slaves"
    parts = list(slaves.iterdir()) if slaves.is_dir() else []
    return any(map(_has_paravirtual_driver, [part.resolve() for part in parts] or [folder]))


def _has_paravirtual_driver(folder: Path) -> bool:
    # The folder of a partition is inside the folder of its drive.
    drivers = (parent / "device" / "driver" for parent in (folder, folder.parent))
    return any(driver.resolve().name in _PARAVIRTUAL for driver in drivers if driver.exists())


def file_system_type(path: Path, mountinfo: str | None = None) -> str:
    """Return the type of the file system that holds ``path`` (or its nearest existing parent), '' if unknown."""
    existing = path.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    target = os.path.realpath(existing)
    text = os.fsdecode(Path("/proc/self/mountinfo").read_bytes()) if mountinfo is None else mountinfo
    longest, file_system = -1, ""
    for line in filter(None, text.split("\n")):
        mount, _, source = line.partition(" - ")
        # The kernel escapes blanks and backslashes as three octal digits.
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), mount.split(" ")[4])
        is_inside = target == point or target.startswith(point.rstrip("/") + "/")
        # A later line of the same mount point hides the earlier one, hence ">=".
        if is_inside and len(point) >= longest:
            longest, file_system = len(point), source.split()[0]
    return file_system


def refuse_network(path: Path, mountinfo: str | None = None) -> None:
    """Raise UnsupportedFileSystemError if ``path`` is on a network file system."""
    kind = file_system_type(path, mountinfo)
    if kind in NETWORK:
        raise UnsupportedFileSystemError(
            f"{path} is on a network file system ({kind}), but the catalog needs local locks and memory maps. "
            "Put the store on a local drive, and use the shared file system as a remote location (file://)"
        )
