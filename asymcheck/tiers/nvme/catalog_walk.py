"""A walk through a catalog that may be damaged, in a child process: a damaged map may kill who walks it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_TIMEOUT_S = 600
# It imports nothing of this package, which would load torch.
_WALK = """
import lmdb, sys, xxhash
env = lmdb.open(sys.argv[1], readonly=True, lock=False, max_dbs=8, map_size=int(sys.argv[2]))
with env.begin() as txn:
    for name in (b"meta", b"partitions", b"packs", b"manifests", b"pins"):
        db = env.open_db(name, txn=txn, create=False)
        for key, value in txn.cursor(db):
            if bytes(value[-8:]) != xxhash.xxh3_128_digest(bytes(key) + bytes(value[:-8]))[8:]:
                sys.exit(3)
"""


def is_intact(path: Path, map_bytes: int) -> bool:
    """Tell whether every entry of the catalog in ``path`` can be read and has the right checksum."""
    command = [sys.executable, "-c", _WALK, str(path), str(map_bytes)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
