"""Test discarded captures: pending writes are awaited, and no file is left."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest

from asymcheck import Store
from asymcheck.capture.inflight import Capture
from asymcheck.capture.ring_flush import RingFlusher
from asymcheck.capture.two_phase_commit import TwoPhaseCommit, Writes
from asymcheck.commit.pack_builder import PackBuilder
from asymcheck.commit.save_request import new_save_id
from asymcheck.commit.transaction import RingTransaction
from asymcheck.errors import StorageError, TornCaptureError
from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor, frame_length
from asymcheck.storage.local_files import DESCRIPTORS
from asymcheck.storage.nvme import NvmeTier, PackWriter
from asymcheck.storage.process_identity import is_let_go, this_process
from asymcheck.types import PackId


def test_ranks_wait_for_pending_writes_before_an_abort() -> None:
    """Test that an abort, which removes packs, waits for writer threads, and that other ranks are informed."""
    error = TornCaptureError("the state changed")
    told: list[BaseException] = []
    joint = TwoPhaseCommit.__new__(TwoPhaseCommit)
    vars(joint)["_committing"] = SimpleNamespace(fail=lambda _at, what: told.append(what))
    waited: list[str] = []
    write = SimpleNamespace(exception=lambda: waited.append("until it has ended"))
    save_round = SimpleNamespace(number=1, reassigns=False)
    capture = SimpleNamespace(save_round=save_round, error=error, writes=[write])
    capture.wait = partial(Capture.wait, cast(Capture, capture))
    with pytest.raises(TornCaptureError):
        joint.commit(cast(Capture, capture), cast(Writes, None))
    assert waited
    assert told == [error]


def _write(packing: PackBuilder, tier: NvmeTier) -> None:
    data = os.urandom(100_000)

    def write(writer: PackWriter, descriptor: FrameDescriptor) -> None:
        with tier.slots.slot(len(data)) as slot:
            slot.payload(len(data))[:] = data
            writer.write(slot, descriptor)

    packing.write(FrameDescriptor.identity(digest(data), len(data)), write)


def test_a_save_that_was_given_up_begins_no_further_pack(store_path: os.PathLike[str]) -> None:
    """Test that no new pack is begun that nobody would seal or remove until the process ends."""
    with Store.open(store_path, create=True) as store:
        packing, before = (
            PackBuilder(store.resources.nvme, store.resources.catalog()),
            set(DESCRIPTORS._open),
        )
        packing.expect(1 << 20)
        _write(packing, store.resources.nvme)
        packing.abandon()
        with pytest.raises(StorageError, match="abandoned"):
            _write(packing, store.resources.nvme)
        assert os.listdir(store.resources.nvme.packs) == []
        assert before == DESCRIPTORS._open


@pytest.mark.parametrize("error", [TornCaptureError("the state changed"), KeyboardInterrupt()])
def test_nothing_stays_of_a_capture_that_was_given_up_for_whatever_reason(
    store_path: os.PathLike[str], error: BaseException
) -> None:
    """Test also an interrupt during a copy of the training thread: no pack, descriptor or pin is left."""
    data = os.urandom(100_000)
    descriptor = FrameDescriptor.identity(digest(data), len(data))
    with Store.open(store_path, create=True) as store:
        tier, catalog, before = store.resources.nvme, store.resources.catalog(), set(DESCRIPTORS._open)
        transaction = RingTransaction(tier, catalog, store.resources.encoder, new_save_id(), 0)
        transaction.expect(frame_length(len(data)))
        with tier.slots.slot(len(data)) as slot:
            slot.payload(len(data))[:] = data
            transaction.add_frame(descriptor.digest, len(data), slot.stamp(descriptor, PackId(bytes(16)), 0))
        assert len(os.listdir(tier.packs)) == 1
        flusher = RingFlusher.__new__(RingFlusher)
        vars(flusher)["_two_phase"] = None
        capture = SimpleNamespace(error=error, transaction=transaction, writes=[], entry=None)
        capture.failing = partial(Capture.failing, cast(Capture, capture))
        capture.wait = partial(Capture.wait, cast(Capture, capture))
        # An escaped interrupt would end the whole test session.
        with contextlib.suppress(KeyboardInterrupt):
            flusher._settle(cast(Capture, capture))
        assert capture.error is error
        assert os.listdir(tier.packs) == []
        assert before == DESCRIPTORS._open
        assert is_let_go(transaction._pin, this_process())
