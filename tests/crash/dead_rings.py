"""Create a killed training whose ring is ahead of its store, and damage the ring."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from asymcheck.errors import UnsupportedFeatureError
from asymcheck.format.record import RECORD_BYTES
from asymcheck.format.ring_records import RingHeader, decode_ring_header, encode_ring_header
from asymcheck.storage.shm.ring_reader import RingReader
from asymcheck.types import Owner
from tests.checkpointer.loops import rings
from tests.crash.states import Journal
from tests.zygote import Child, wait_until

DURABLE, CAPTURED = 2, 5
"""The killed training has steps 0 and 1 on disk, and steps 2, 3 and 4 only in memory."""


def kill_when_ready(child: Child, folder: Path) -> None:
    """Kill a training after its last step."""
    wait_until(lambda: bool(Journal(folder / "journal").lines("ready")), "the training")
    child.kill()
    child.wait_killed()


def copied(folder: Path, target: Path) -> Path:
    """Copy a folder with a store and its rings, and make the rings name the copied store."""
    shutil.copytree(folder, target)
    for ring in rings(target):
        set_store_path(ring, str(target / "store"))
    return target


def set_store_path(ring: Path, store: str) -> None:
    """Change the store path in a ring."""
    _change_header(ring, lambda header: dataclasses.replace(header, store=store))


def set_owner(ring: Path, owner: Owner) -> None:
    """Change the process that created a ring."""
    _change_header(ring, lambda header: dataclasses.replace(header, owner=owner))


def _change_header(ring: Path, change: Callable[[RingHeader], RingHeader]) -> None:
    data = ring.read_bytes()
    header = change(decode_ring_header(data[:RECORD_BYTES], "ring"))
    ring.write_bytes(encode_ring_header(header) + data[RECORD_BYTES:])


def refuse_rings(_features: Iterable[str], what: str) -> None:
    """Change every manifest in a ring to the format of a newer program."""
    if what.startswith("manifest in ring"):
        raise UnsupportedFeatureError(f"{what} needs something: install a newer asymcheck")


def partition_of_newest(ring: Path) -> tuple[int, int]:
    """Return offset and length of a frame that only the newest capture needs: the last frame before its manifest."""
    with RingReader(ring) as reader:
        manifests = {entry.offset for entry in reader.captures}
        frames = zip(reader.entries["offset"].tolist(), reader.entries["stored_length"].tolist(), strict=True)
        return max(frame for frame in frames if frame[0] not in manifests)
