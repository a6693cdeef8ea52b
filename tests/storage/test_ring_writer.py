"""Test slots, entries, lock and file of the ring writer, within and between processes."""

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from asymcheck.errors import InvalidInputError, LimitError, LockTimeoutError, OutOfSpaceError, StorageError
from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor, payload_offset
from asymcheck.format.layout import ring_name
from asymcheck.format.ring_records import CAPTURES_MAX, COMPLETE, DATA_OFFSET, DURABLE, CaptureEntry
from asymcheck.storage import local_files
from asymcheck.storage.local_files import try_lock
from asymcheck.storage.shm.orphaned_rings import list_rings
from asymcheck.storage.shm.ring_reader import RingReader
from asymcheck.storage.shm.ring_writer import Ring
from asymcheck.types import SaveId, readable_size
from tests.storage.ring_cases import BLOCK, HEADER, SAVE, found, make_ring, payloads, put


def test_complete_frames_are_found(tmp_path: Path) -> None:
    """Test entered captures, in use and after keep."""
    ring = make_ring(tmp_path)
    assert ring.path.name == ring_name(HEADER.store_id, HEADER.ring_id)
    first, manifest = put(ring, b"a" * 300), put(ring, b"m" * 5000)
    number = ring.enter(manifest, SAVE)
    assert number is not None
    with RingReader(ring.path) as reader:
        assert reader.is_owned
        assert reader.header == HEADER
        assert payloads(reader) == {first.offset: b"a" * 300, manifest.offset: b"m" * 5000}
        assert reader.captures == [CaptureEntry(manifest.offset, SAVE, COMPLETE)]
        assert reader.offsets == {digest(b"a" * 300): [first.offset], digest(b"m" * 5000): [manifest.offset]}
    ring.mark_durable(number)
    ring.close(keep=True)
    with RingReader(ring.path) as reader:
        assert not reader.is_owned
        assert reader.captures == [CaptureEntry(manifest.offset, SAVE, DURABLE)]
        assert bytes(reader.frame(first.offset, 300))[128:428] == b"a" * 300
        reader.unlink()
    assert not ring.path.exists()


def test_a_forgotten_capture_has_no_entry_and_its_number_serves_again(tmp_path: Path) -> None:
    """Test that a full table takes no further capture until one is forgotten."""
    ring = make_ring(tmp_path)
    slot = put(ring, b"m")
    saves = [SaveId(bytes([number]) * 16) for number in range(CAPTURES_MAX)]
    assert [ring.enter(slot, save) for save in saves] == list(range(CAPTURES_MAX))
    assert ring.enter(slot, SAVE) is None
    ring.forget(17)
    with RingReader(ring.path) as reader:
        assert [entry.save_id for entry in reader.captures] == saves[:17] + saves[18:]
    assert ring.enter(slot, SAVE) == 17
    ring.close()


def test_missing_folder_is_an_error_of_the_package(tmp_path: Path) -> None:
    """Test that the error has a remedy."""
    with pytest.raises(StorageError, match=r"gone does not exist: create it, or choose another ring_folder"):
        make_ring(tmp_path / "gone")


def test_places_are_given_out_and_taken_back(tmp_path: Path) -> None:
    """Test whole blocks without overlap, None for a full ring, and the refusal of too long frames."""
    ring = make_ring(tmp_path)
    whole = HEADER.data_bytes - 128
    with pytest.raises(InvalidInputError, match="does not fit into a ring of 65536: raise ring_bytes"):
        ring.take(whole + 1)
    assert ring._allocator.free_bytes == HEADER.data_bytes
    slots = [ring.take(3969) for _ in range(8)]
    assert [slot and slot.offset for slot in slots] == [DATA_OFFSET + 2 * BLOCK * number for number in range(8)]
    assert ring._allocator.free_bytes == 0
    assert ring.take(1) is None
    for slot in slots:
        assert slot is not None
        ring.give_back(slot)
    slot = ring.take(HEADER.data_bytes - 128)
    assert slot is not None
    assert len(ring.frame(slot)) == slot.frame_bytes == HEADER.data_bytes
    ring.close()


def test_shared_slot_is_free_after_all_releases(tmp_path: Path) -> None:
    """Test releases in any order, each once; a free slot cannot be shared."""
    ring = make_ring(tmp_path)
    first = put(ring, b"a" * 5000)
    taken = HEADER.data_bytes - ring._allocator.free_bytes
    second = ring.share(first)
    assert second is not None
    third = ring.share(second)
    assert third is not None
    assert {first.offset, second.offset, third.offset} == {first.offset}
    for place in (second, second, first, first):
        ring.give_back(place)
        assert HEADER.data_bytes - ring._allocator.free_bytes == taken
    assert ring.share(first) is None
    fourth = ring.share(third)
    assert fourth is not None
    ring.give_back(third)
    assert bytes(ring.payload(fourth)) == b"a" * 5000
    assert HEADER.data_bytes - ring._allocator.free_bytes == taken
    ring.give_back(fourth)
    assert ring._allocator.free_bytes == HEADER.data_bytes
    # The last holder frees the slot.
    ring.give_back(put(ring, b"b" * 5000))
    assert ring._allocator.free_bytes == HEADER.data_bytes
    ring.close()


@pytest.mark.parametrize("length", [1, 3968, 3969, 50_000, 65_536, 70_000])
def test_slot_is_no_frame_before_completion(tmp_path: Path, length: int) -> None:
    """Test that the earlier content of the slot does not matter."""
    ring = make_ring(tmp_path, data_bytes=20 * BLOCK)
    before = put(ring, b"b" * length)
    assert found(ring.path) == {before.offset: b"b" * length}
    ring.give_back(before)
    # The slot was freed, but not reused, so its frame stays valid until the next use.
    assert found(ring.path) == {before.offset: b"b" * length}
    slot = ring.take(length)
    assert slot is not None
    assert slot.offset == before.offset
    assert found(ring.path) == {}
    ring.payload(slot)[:] = b"c" * length
    assert found(ring.path) == {}
    end = payload_offset(length) + length
    ring.frame(slot)[end:] = b"\xee" * (slot.frame_bytes - end)
    ring.complete(slot, FrameDescriptor.identity(digest(b"c" * length), length))
    assert found(ring.path) == {slot.offset: b"c" * length}
    ring.close()


def test_waiter_for_space_is_woken(tmp_path: Path) -> None:
    """Test a freed slot, an explicit wake-up, and a timeout."""
    ring = make_ring(tmp_path)
    slot = put(ring, b"x")
    ring.wait_for_room(0.001)
    for wake in (lambda: ring.give_back(slot), ring.wake):
        waiting, woken = threading.Event(), threading.Event()

        def wait(waiting: threading.Event = waiting, woken: threading.Event = woken) -> None:
            with ring._changed:
                waiting.set()
                if ring._changed.wait(60):
                    woken.set()

        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        wake()
        thread.join()
        assert woken.is_set()
    ring.close()


def test_the_file_is_private_and_has_all_its_memory(tmp_path: Path) -> None:
    """Test that other users cannot read the file, and that no page is missing for a write."""
    ring = make_ring(tmp_path)
    status = ring.path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == DATA_OFFSET + HEADER.data_bytes
    assert status.st_blocks * 512 >= status.st_size
    ring.close()


def test_too_little_memory_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that neither a file nor a descriptor stays."""

    def full(_descriptor: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    open_before = os.listdir("/proc/self/fd")
    with pytest.raises(OutOfSpaceError) as caught:
        make_ring(tmp_path)
    message = str(caught.value)
    assert message.startswith(
        f"{tmp_path} has not enough free memory for a ring of {readable_size(DATA_OFFSET + HEADER.data_bytes)}: "
    )
    assert all(advice in message for advice in ("ring_bytes", "ring_folder", f"mount -o remount,size=… {tmp_path}"))
    assert os.listdir(tmp_path) == []
    assert os.listdir("/proc/self/fd") == open_before


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()], ids=["eio", "interrupt"])
def test_whatever_goes_wrong_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Test also an interrupt during the reservation of memory, which takes seconds."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises((StorageError, KeyboardInterrupt)):
        make_ring(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_header_that_does_not_fit_leaves_no_file(tmp_path: Path) -> None:
    """Test a store path that is longer than a record."""
    open_before = os.listdir("/proc/self/fd")
    with pytest.raises(LimitError):
        make_ring(tmp_path, store="/x" * 2000)
    assert os.listdir(tmp_path) == []
    assert os.listdir("/proc/self/fd") == open_before


def test_a_folder_that_cannot_be_used_is_an_error_of_ours(tmp_path: Path) -> None:
    """Test a file in place of the folder, and an existing ring name."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        make_ring(tmp_path / "file")
    (tmp_path / ring_name(HEADER.store_id, HEADER.ring_id)).write_text("here before")
    with pytest.raises(StorageError, match="create"):
        make_ring(tmp_path)
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_folder_in_which_no_file_can_be_created_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Test that the advice is about the folder of rings, and not about the store."""
    monkeypatch.setattr(os, "open", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(StorageError, match=rf"{os.strerror(number)}\. Make the folder writable") as caught:
        make_ring(tmp_path)
    monkeypatch.undo()
    assert type(caught.value) is StorageError


READ_IN_CHILD = """
import sys
from pathlib import Path
from unittest.mock import Mock
from asymcheck.storage.shm.ring_reader import RingReader
with RingReader(Path(sys.argv[1])) as reader:
    print(reader.is_owned, len(reader.entries), len(reader.captures))
"""


def read_in_child(path: Path) -> str:
    """Return the output of another process that reads the ring."""
    done = subprocess.run([sys.executable, "-c", READ_IN_CHILD, str(path)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.slow
def test_ring_in_use_is_visible_to_other_processes(tmp_path: Path) -> None:
    """Test an open ring, and a ring after it was kept."""
    ring = make_ring(tmp_path)
    ring.enter(put(ring, b"m"), SAVE)
    assert read_in_child(ring.path) == "True 1 1"
    ring.close(keep=True)
    assert read_in_child(ring.path) == "False 1 1"


def test_closing_removes_the_file(tmp_path: Path) -> None:
    """Test that the file is removed unless it is kept, and that closing twice is allowed."""
    ring = make_ring(tmp_path)
    ring.close()
    ring.close()
    assert os.listdir(tmp_path) == []


def test_remaining_view_keeps_no_lock(tmp_path: Path) -> None:
    """Test that the memory stays while another process may recover the ring."""
    ring = make_ring(tmp_path)
    slot = put(ring, b"still here")
    view = ring.payload(slot)
    ring.close(keep=True)
    assert bytes(view) == b"still here"
    with RingReader(ring.path) as reader:
        assert not reader.is_owned
        other = reader.payload_at(slot.offset)
    with RingReader(ring.path) as again:
        assert not again.is_owned
    assert bytes(other) == b"still here"


def _owned_beside_a_child(path: Path, ring: Ring | RingReader) -> bool:
    """Fork a child that outlives the closed ring; return whether the ring still has an owner then."""
    (here, there), (ready, begun) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(there)
        os.write(begun, b"!")
        os.read(here, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        if isinstance(ring, Ring):
            ring.close(keep=True)
        else:
            ring.close()
        with RingReader(path) as reader:
            return reader.is_owned
    finally:
        for descriptor in (here, there, ready, begun):
            os.close(descriptor)
        os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_keeps_no_lock(tmp_path: Path) -> None:
    """Test that a data loader worker that outlives the training does not keep a ring or its recovery locked."""
    ring = make_ring(tmp_path)
    assert not _owned_beside_a_child(ring.path, ring)
    assert not _owned_beside_a_child(ring.path, RingReader(ring.path))


def test_reader_does_not_break_the_creation_of_a_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a search for orphaned rings, which briefly holds the lock and removes the file."""
    path = tmp_path / ring_name(HEADER.store_id, HEADER.ring_id)
    wait, looks = local_files.wait_lock, 0

    def looked_at(descriptor: int, timeout_s: float, *, exclusive: bool) -> bool:
        nonlocal looks
        looks += 1
        if looks == 1:
            other = os.open(path, os.O_RDWR)
            assert try_lock(other, exclusive=True)
            path.unlink()
            threading.Timer(0.1, os.close, [other]).start()
        return wait(descriptor, timeout_s, exclusive=exclusive)

    monkeypatch.setattr(local_files, "wait_lock", looked_at)
    ring = make_ring(tmp_path)
    assert looks == 2
    with RingReader(ring.path) as reader:
        assert reader.is_owned
    ring.close()


def test_a_lock_that_another_keeps_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a ring is not created without its lock, because another process would recover it."""
    monkeypatch.setattr(local_files, "_INSPECTION_S", 0.0)
    monkeypatch.setattr(local_files, "try_lock", lambda *_, **__: False)
    with pytest.raises(LockTimeoutError, match="another process held the lock"):
        make_ring(tmp_path)
    assert os.listdir(tmp_path) == []


def test_rings_of_a_store_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that rings of other stores, links, files of other users and missing folders are ignored."""
    assert list_rings(tmp_path / "nowhere", HEADER.store_id) == []
    rings = [make_ring(tmp_path, ring_id=bytes([number]) * 16) for number in (2, 1)]
    other = make_ring(tmp_path, store_id=b"o" * 16)
    (tmp_path / ring_name(HEADER.store_id, b"l" * 16)).symlink_to(other.path)
    (tmp_path / ring_name(HEADER.store_id, b"d" * 16)).mkdir()
    (tmp_path / "asymcheck.ring").write_text("")
    assert list_rings(tmp_path, HEADER.store_id) == [rings[1].path, rings[0].path]
    monkeypatch.setattr(os, "geteuid", lambda: rings[0].path.stat().st_uid + 1)
    assert list_rings(tmp_path, HEADER.store_id) == []
    for ring in (*rings, other):
        ring.close()
