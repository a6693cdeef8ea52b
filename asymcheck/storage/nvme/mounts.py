"""The type of the file system that holds a path: LMDB must not be placed on a network file system."""

from __future__ import annotations

import os
import re
from pathlib import Path

from asymcheck.errors import UnsupportedFileSystemError

# fmt: off
NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse.beegfs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs",
    "fuse.juicefs", "fuse.s3fs", "fuse.sshfs", "gfs2", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2",
    "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
})
# fmt: on
"""Types in /proc/self/mountinfo whose locks or maps are not local."""

_ESCAPED = re.compile(r"\\([0-7]{3})")


def file_system_type(path: Path, mountinfo: str | None = None) -> str:
    """Return the type of the file system that holds ``path`` (or its nearest existing parent), '' when unknown."""
    existing = path.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    target = os.path.realpath(existing)
    text = os.fsdecode(Path("/proc/self/mountinfo").read_bytes()) if mountinfo is None else mountinfo
    best, found = -1, ""
    for line in filter(None, text.split("\n")):
        left, _, right = line.partition(" - ")
        # The kernel writes blanks and backslashes of a name as three octal digits, and every other character as it is.
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), left.split(" ")[4])
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        # A later line of the same mount point hides the earlier one, hence ">=".
        if inside and len(point) >= best:
            best, found = len(point), right.split()[0]
    return found


def refuse_network(path: Path, mountinfo: str | None = None) -> None:
    """Refuse a path on a network file system; the error names its type and what to use instead."""
    kind = file_system_type(path, mountinfo)
    if kind in NETWORK:
        raise UnsupportedFileSystemError(
            f"{path} is on a network file system ({kind}); the catalog needs local locks and maps. "
            "Put the store on a local drive; a shared file system is for the file:// layout of a deeper tier"
        )
