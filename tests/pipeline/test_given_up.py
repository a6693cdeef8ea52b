"""Captures that are given up: what still writes for them is waited for, and nothing of them stays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from asymcheck import Store
from asymcheck.errors import StorageError, TornCaptureError
from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor
from asymcheck.pipeline.joint import Joint
from asymcheck.pipeline.moving import Moving
from asymcheck.pipeline.packing import Packing
from asymcheck.tiers.files import DESCRIPTORS
from asymcheck.tiers.nvme import NvmeTier, PackWriter


class _Writes:
    """Threads that still write when they are waited for."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.waited = 0

    def soon(self, moving: Moving, numbers: Sequence[int]) -> None:
        """Refuse."""
        raise AssertionError(moving, numbers)

    def wait(self, _moving: Moving) -> None:
        """Be done, and say what went wrong, as the flush from the ring does."""
        self.waited += 1
        raise self._error

    def now(self, moving: Moving, number: int) -> bool:
        """Refuse."""
        raise AssertionError(moving, number)


def test_ranks_too_wait_for_what_still_writes_before_they_give_up_a_capture() -> None:
    """What comes next removes the packs that these threads write into; the others are told all the same."""
    error = TornCaptureError("the state changed")
    told: list[tuple[bytes, bool]] = []
    joint = Joint.__new__(Joint)
    vars(joint)["_committing"] = SimpleNamespace(report=lambda _at, what, *, failed: told.append((what, failed)))
    capture = SimpleNamespace(turn=SimpleNamespace(number=1, shares_anew=False), error=error)
    writes = _Writes(error)
    with pytest.raises(TornCaptureError):
        joint.commit(cast(Moving, SimpleNamespace(capture=capture)), writes)
    assert writes.waited == 1
    assert told == [(b"TornCaptureError: the state changed", True)]


def _write(packing: Packing, tier: NvmeTier) -> None:
    data = os.urandom(100_000)

    def write(writer: PackWriter, descriptor: FrameDescriptor) -> None:
        with tier.slots.slot(len(data)) as slot:
            slot.payload(len(data))[:] = data
            writer.write(slot, descriptor)

    packing.write(FrameDescriptor.identity(digest(data), len(data)), write)


def test_a_save_that_was_given_up_begins_no_further_pack(store_path: os.PathLike[str]) -> None:
    """Nobody would seal or remove it: it would lie there, locked, until the process ends."""
    with Store.open(store_path) as store:
        packing, before = Packing(store._nvme, store._catalog()), set(DESCRIPTORS._open)
        packing.expect(1 << 20)
        _write(packing, store._nvme)
        packing.abandon()
        with pytest.raises(StorageError, match="given up"):
            _write(packing, store._nvme)
        assert os.listdir(store._nvme.packs) == []
        assert before == DESCRIPTORS._open
