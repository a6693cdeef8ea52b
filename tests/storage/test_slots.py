"""Test slots: aligned memory whose unused bytes never reach the disk."""

import ctypes
import threading

import pytest

from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor, check_frame, frame_length, payload_offset
from asymcheck.storage.nvme import Slot, SlotPool
from asymcheck.types import PackId

PACK = PackId(bytes(range(16)))


def _address(slot: Slot) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slot.memory))


@pytest.mark.parametrize("shift", [0, 64, 4_095])
@pytest.mark.parametrize("length", [1, 100, 3968, 3969, 65_535, 65_536, 65_537, 1_000_000])
def test_a_stamped_frame_is_whole_and_clean(length: int, shift: int) -> None:
    """Test that header, payload and zeros up to the next block replace any earlier content."""
    slot = Slot(1_000_000)
    slot.memory[:] = b"\xee" * len(slot.memory)
    shift = shift if length >= 65_536 else 0
    start = payload_offset(length, shift)
    payload = slot.memory[start : start + length]
    payload[:] = bytes(i % 251 for i in range(length))
    plain = bytes(payload)
    frame = slot.stamp(FrameDescriptor.identity(digest(payload), length, shift), PACK, 5)
    assert len(frame) == frame_length(length, shift)
    descriptor, found = check_frame(frame, PACK, 5, "frame")
    assert bytes(found) == plain
    assert descriptor.digest == digest(plain)
    assert not any(frame[128:start])
    assert not any(frame[start + length :])


def test_memory_is_aligned_as_direct_access_asks() -> None:
    """Test whole pages, at the start of one; the payload of a large frame, too."""
    slot = Slot(5)
    assert _address(slot) % 4096 == 0
    assert len(slot.memory) >= frame_length(5)
    assert payload_offset(65_536) % 4096 == 0


def test_a_slot_is_lent_again() -> None:
    """Test that large enough memory is reused, and that smaller memory is replaced."""
    pool = SlotPool(2, 1 << 20)
    with pool.slot(100_000) as first:
        pass
    with pool.slot(1000) as second:
        assert second is first
        with pool.slot(1000) as third:
            assert third is not first
    with pool.slot(200_000) as larger:
        assert larger is not first
        assert larger.payload_bytes >= 200_000


def test_pool_is_bounded() -> None:
    """Test that one huge partition does not keep its memory forever."""
    pool = SlotPool(2, 1000)
    with pool.slot(1001) as huge:
        pass
    with pool.slot(10) as other:
        assert other is not huge
    with pool.slot(1) as a, pool.slot(1) as b, pool.slot(1) as c:
        assert len({id(a), id(b), id(c)}) == 3
    assert len(pool._free) == 2


def test_a_slot_comes_back_after_a_failure() -> None:
    """Test that an error does not lose the slot."""
    pool = SlotPool(1, 1000)
    with pytest.raises(ZeroDivisionError), pool.slot(10) as first:
        raise ZeroDivisionError
    with pool.slot(10) as second:
        assert second is first


def test_no_two_threads_hold_one_slot() -> None:
    """Test many threads that take and return slots at random."""
    pool = SlotPool(3, 1 << 20)
    held: set[int] = set()
    lock = threading.Lock()
    clashes: list[int] = []

    def work() -> None:
        for _ in range(300):
            with pool.slot(100) as slot:
                with lock:
                    if id(slot) in held:
                        clashes.append(id(slot))
                    held.add(id(slot))
                with lock:
                    held.discard(id(slot))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
