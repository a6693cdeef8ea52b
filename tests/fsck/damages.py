"""Damage stores on purpose, and list the data that remains readable."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from asymcheck.errors import AsymcheckError
from asymcheck.format.pack import ENTRY_DTYPE, decode_index, decode_pack_header
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.store import Store
from asymcheck.types import Digest
from tests.crash.actions import open_store
from tests.crash.states import fingerprint, make_state
from tests.damage.flips import flip


def packs(store: Path) -> list[Path]:
    """Return the packs of a store, by name."""
    return sorted((store / "packs").glob("*.pack"))


def frames(pack: Path) -> list[tuple[Digest, int, int]]:
    """Return digest, offset and length of each frame of an intact pack."""
    data = pack.read_bytes()
    header = decode_pack_header(data, pack.name)
    entries = decode_index(data[header.index_offset : header.pack_length], header, pack.name)
    assert entries.dtype == ENTRY_DTYPE
    return [(Digest(e["digest"].tobytes()), int(e["offset"]), int(e["stored_length"])) for e in entries]


def flip_payload(pack: Path, frame: int) -> Digest:
    """Flip a bit of a frame's payload; return the lost digest."""
    name, offset, _ = frames(pack)[frame]
    flip(pack, (offset + BLOCK_BYTES + 7) * 8 if _is_aligned(pack, frame) else (offset + 130) * 8)
    return name


def _is_aligned(pack: Path, frame: int) -> bool:
    return frames(pack)[frame][2] >= 65536


def flip_frame_header(pack: Path, frame: int) -> None:
    """Flip a bit of a frame's header, not of its payload."""
    flip(pack, (frames(pack)[frame][1] + 20) * 8)


def flip_header(pack: Path) -> None:
    """Flip a bit of a pack's header."""
    flip(pack, 40 * 8)


def flip_index(pack: Path) -> None:
    """Flip a bit of a pack's index."""
    header = decode_pack_header(pack.read_bytes(), pack.name)
    flip(pack, (header.index_offset + 80) * 8)


def readable(path: Path, steps: range = range(20)) -> set[int]:
    """Return the steps that can be restored, with the right bytes."""
    found = set()
    with open_store(path, read_only=True) as store:
        there = {checkpoint.step for checkpoint in store.checkpoints()}
        for step in there & set(steps):
            with contextlib.suppress(AsymcheckError):
                assert fingerprint(store.load(step)) == fingerprint(make_state(step))
                found.add(step)
    return found


def check_idle(store: Store) -> None:
    """Check that a repair finds nothing to do."""
    before = _files(store.path)
    again = store.repair()
    assert again.done == ()
    assert again.copied_partitions == 0
    assert _files(store.path) == before


def _files(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and "catalog" not in file.parts
    }


@contextlib.contextmanager
def locked(pack: Path) -> Iterator[None]:
    """Hold the lock of a pack, like a reader in another process."""
    with pack.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield
