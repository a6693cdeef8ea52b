"""Test that a restore after SIGKILL reads from the ring, and verifies every byte."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asymcheck import Checkpointer, Store
from asymcheck.storage.nvme.pack_reader import PackFile
from asymcheck.storage.shm.ring_reader import RingPack
from asymcheck.storage.slots import Slot
from tests.checkpointer.loops import copy_of, linear_loop
from tests.crash.dead_rings import CAPTURED
from tests.crash.states import Journal, fingerprint
from tests.crash.trainer import config_for


def _count_frames(monkeypatch: pytest.MonkeyPatch, where: type[RingPack] | type[PackFile]) -> list[int]:
    """Record which frames are read from the ring."""
    read: list[int] = []
    plain = where.read_frame

    def noted(pack: RingPack | PackFile, sequence: int, slot: Slot) -> memoryview:
        read.append(sequence)
        return plain(pack, sequence, slot)  # type: ignore[arg-type]  # of the class it was taken from

    monkeypatch.setattr(where, "read_frame", noted)
    directly = where.read_payload

    def noted_directly(
        pack: RingPack | PackFile, sequence: int, payload: memoryview, slot: Slot
    ) -> tuple[memoryview, memoryview, memoryview] | None:
        read.append(sequence)
        return directly(pack, sequence, payload, slot)  # type: ignore[arg-type]  # as above

    monkeypatch.setattr(where, "read_payload", noted_directly)
    return read


def _restored(folder: Path) -> tuple[int, str]:
    """Restore as a new process does; return the step and the state."""
    with Store.open(folder / "store", create=True) as store:
        _, _, loop = linear_loop()
        # An optimizer has no state to fill before its first step.
        loop.iterate(0)
        restored = Checkpointer(store, loop.state, capture=config_for(folder), every=1, keep=None).restore()
        assert restored is not None
        return restored.step, fingerprint(copy_of(loop.state))


def _expected(folder: Path) -> tuple[int, object]:
    return CAPTURED - 1, Journal(folder / "journal").lines("step")[CAPTURED - 1]["fingerprint"]


def test_no_frame_comes_from_the_drive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the newest checkpoint is read from memory, and that the next restore reads the drive."""
    on_drive, in_memory = (_count_frames(monkeypatch, where) for where in (PackFile, RingPack))
    assert _restored(folder) == _expected(folder)
    assert (bool(in_memory), on_drive) == (True, [])
    in_memory.clear()
    assert _restored(folder) == _expected(folder)
    assert (in_memory, bool(on_drive)) == ([], True)


def test_frame_damaged_after_recovery_comes_from_the_drive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the flipped bit is detected, and that the copy on the drive is read."""
    plain = RingPack.read_frame

    def flipped(pack: RingPack, sequence: int, slot: Slot) -> memoryview:
        frame = bytearray(plain(pack, sequence, slot))
        frame[-1 if len(frame) % 4096 else len(frame) // 2] ^= 4
        return memoryview(frame)

    monkeypatch.setattr(RingPack, "read_frame", flipped)
    on_drive, in_memory = (_count_frames(monkeypatch, where) for where in (PackFile, RingPack))
    assert _restored(folder) == _expected(folder)
    assert (bool(in_memory), bool(on_drive)) == (True, True)


def test_the_memory_is_given_back(folder: Path) -> None:
    """Test that nothing of the ring stays open or mapped, and that the open store reads the drive again."""
    ring_folder = str(config_for(folder).ring_folder)
    with Store.open(folder / "store", create=True) as store:
        _, _, loop = linear_loop()
        loop.iterate(0)
        Checkpointer(store, loop.state, capture=config_for(folder), every=1, keep=None).restore()
        assert ring_folder not in Path("/proc/self/maps").read_text()
        assert not [path for path in Path("/proc/self/fd").iterdir() if ring_folder in os.path.realpath(path)]
        assert fingerprint(store.load()) == _expected(folder)[1]
