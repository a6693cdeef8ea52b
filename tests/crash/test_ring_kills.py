"""Test SIGKILL while the ring is ahead of the store: the next start recovers complete captures."""

from __future__ import annotations

import os
import random
import shutil
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from asymcheck import Checkpointer, Store, events
from asymcheck.errors import SkippedCheckpointWarning
from asymcheck.events import COMMIT_ORDER
from asymcheck.format.frame import payload_offset
from asymcheck.format.record import RECORD_BYTES
from asymcheck.format.ring_records import CAPTURES_OFFSET, COMPLETE, ENTRY_BYTES, CaptureEntry, encode_entry
from asymcheck.gc.collect import collect_rings
from asymcheck.storage.shm import orphaned_rings
from asymcheck.storage.shm.ring_reader import RingReader
from asymcheck.types import SaveId
from tests.checkpointer.loops import linear_loop, rings
from tests.crash.dead_rings import CAPTURED, DURABLE, copied, kill_when_ready, partition_of_newest
from tests.crash.states import Journal, fingerprint
from tests.crash.trainer import assert_restored, config_for, newest_complete, train, train_two_runs
from tests.damage.flips import flip
from tests.zygote import Child, Zygote, wait_until


def _steps(folder: Path) -> list[int]:
    with Store.open(folder / "store", read_only=True) as store:
        return [checkpoint.step for checkpoint in store.checkpoints()]


# -------------------------------------------------------------------------------------------------------------- kills


def test_captures_in_memory_are_recovered(folder: Path) -> None:
    """Test that all captures become checkpoints in order, the ring is removed, and a second start changes nothing."""
    assert _steps(folder) == list(range(DURABLE))
    assert newest_complete(folder) == CAPTURED - 1
    for _ in range(2):
        assert_restored(folder, CAPTURED - 1)
        assert rings(folder) == []
        assert _steps(folder) == list(range(CAPTURED))
    with Store.open(folder / "store", create=True) as store:
        for step in range(CAPTURED):
            state = store.load(step)
            assert fingerprint(state) == Journal(folder / "journal").lines("step")[step]["fingerprint"]


@pytest.mark.slow(
    quick=["capture.complete-1", "frame.written-4", "manifest.committed-4"],
    long=["pack.*-1", "manifest.*-1", "catalog.*-1"],
)
@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("event", ["ring.created", "capture.complete", "capture.durable", *COMMIT_ORDER])
def test_killed_at_each_event(zygote: Zygote, tmp_path: Path, event: str, number: int) -> None:
    """Test that no complete capture is lost, and that only begun checkpoints appear."""
    child = zygote.start(train, path=str(tmp_path), steps=12, delay_s=0.002, kill=event, number=number)
    if event == "ring.created" and number > 1:
        kill_when_ready(child, tmp_path)
    elif event == "manifest.directory_created" and number > 1:
        kill_when_ready(child, tmp_path) if not _was_killed(child, tmp_path) else child.wait_killed()
    else:
        child.wait_killed()
    begun = [int(str(line["step"])) for line in Journal(tmp_path / "journal").lines("step")]
    assert_restored(tmp_path, newest_complete(tmp_path), max(begun, default=-1))
    assert rings(tmp_path) == []


def _was_killed(child: Child, folder: Path) -> bool:
    """Return whether the training was killed before its last step."""

    def has_ended() -> bool:
        state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z" or bool(Journal(folder / "journal").lines("ready"))

    wait_until(has_ended, "the training")
    return not Journal(folder / "journal").lines("ready")


@pytest.mark.slow
def test_killed_at_random_again_and_again(zygote: Zygote, tmp_path: Path) -> None:
    """Test one training resumed four times on a slow disk: each start continues from the newest complete step."""
    dice = random.Random(5)
    journal = Journal(tmp_path / "journal")
    for number in range(4):
        promised, started = newest_complete(tmp_path), len(journal.lines("restored"))
        prints = {line["step"]: line["fingerprint"] for line in journal.lines("step")}
        child = zygote.start(train, path=str(tmp_path), delay_s=0.004)
        wait_until(lambda before=started: len(journal.lines("restored")) > before, "the restore")  # type: ignore[misc]  # bound now
        if number % 2:
            wait_until(lambda before=promised: newest_complete(tmp_path) > before + 1, "two checkpoints")  # type: ignore[misc]  # bound now
        time.sleep(dice.uniform(0, 0.2))
        child.kill()
        child.wait_killed()
        restored = journal.lines("restored")[started]
        assert int(str(restored["step"])) >= promised
        assert restored.get("fingerprint") == prints.get(restored["step"])
    assert_restored(tmp_path, newest_complete(tmp_path))
    assert newest_complete(tmp_path) > 2, "the trainings did next to nothing"


@pytest.mark.slow(quick=["2-catalog.pinned"])
@pytest.mark.parametrize("event", ["pack.renamed", "catalog.pinned", "manifest.renamed", "catalog.committed"])
@pytest.mark.parametrize("number", [1, 2])
def test_killed_while_a_ring_is_taken_up(zygote: Zygote, folder: Path, event: str, number: int) -> None:
    """Test that the ring still exists or was committed, and that the next start has all captures."""
    child = zygote.start(train, path=str(folder), kill=event, number=number)
    child.wait_killed()
    assert_restored(folder, CAPTURED - 1, CAPTURED - 1)
    assert rings(folder) == []
    assert _steps(folder) == list(range(CAPTURED))


@pytest.mark.slow
def test_two_dead_rings_of_one_store(zygote: Zygote, tmp_path: Path) -> None:
    """Test two runs of a killed process: the first restore recovers both rings."""
    child = zygote.start(train_two_runs, path=str(tmp_path), steps=3)
    kill_when_ready(child, tmp_path)
    assert len(rings(tmp_path)) == 2
    assert _steps(tmp_path) == []
    assert_restored(tmp_path, 2, run="two")
    assert rings(tmp_path) == []
    assert_restored(tmp_path, 2, run="one")
    assert _steps(tmp_path) == [0, 1, 2] * 2


# -------------------------------------------------------------------------------------------------- foreign rings


@pytest.mark.slow
def test_a_ring_that_a_living_process_uses_is_left_alone(zygote: Zygote, tmp_path: Path) -> None:
    """Test that the process continues, and that its captures are recovered after its death."""
    child = zygote.start(train, path=str(tmp_path), steps=CAPTURED, durable=DURABLE)
    wait_until(lambda: bool(Journal(tmp_path / "journal").lines("ready")), "the training")
    (ring,) = rings(tmp_path)
    with Store.open(tmp_path / "store", create=True) as store, store.training.adopting(ring.parent) as adopted:
        assert adopted == []
    assert rings(tmp_path) == [ring]
    assert _steps(tmp_path) == list(range(DURABLE))
    child.kill()
    child.wait_killed()
    assert_restored(tmp_path, CAPTURED - 1)
    assert rings(tmp_path) == []


def test_a_ring_of_another_store_is_left_alone(folder: Path, tmp_path: Path) -> None:
    """Test that a store recovers only rings with its own id."""
    (ring,) = rings(folder)
    before = ring.read_bytes()
    with Store.open(tmp_path / "another", create=True) as store:
        _, _, loop = linear_loop()
        assert Checkpointer(store, loop.state, capture=config_for(folder), every=1, keep=None).restore() is None
    assert ring.read_bytes() == before
    assert_restored(folder, CAPTURED - 1)


def test_a_copy_of_a_store_leaves_the_ring_to_its_store(folder: Path, tmp_path: Path) -> None:
    """Test a copy with the same id: captures in the copy would be missing where the training continues."""
    (ring,) = rings(folder)
    before = ring.read_bytes()
    copy = tmp_path / "elsewhere" / "store"
    shutil.copytree(folder / "store", copy)
    with Store.open(copy, create=True) as store:
        _, _, loop = linear_loop()
        checkpointer = Checkpointer(store, loop.state, capture=config_for(folder), every=1, keep=None)
        with pytest.warns(
            SkippedCheckpointWarning, match=rf"{ring.name}: the ring belongs to store {folder / 'store'}, which"
        ):
            restored = checkpointer.restore()
        assert restored is not None
        assert restored.step == DURABLE - 1
        assert collect_rings(store.resources.writable(), ring.parent, discard=True, dry_run=False) == []
    assert ring.read_bytes() == before
    assert_restored(folder, CAPTURED - 1)


def test_a_store_that_was_moved_takes_its_ring_up(folder: Path, tmp_path: Path) -> None:
    """Test a store whose former path does not exist any more."""
    (tmp_path / "elsewhere").mkdir()
    for name in ("store", "journal"):
        (folder / name).rename(tmp_path / "elsewhere" / name)
    (ring,) = rings(folder)
    ring.parent.rename(tmp_path / "elsewhere" / ring.parent.name)
    assert_restored(tmp_path / "elsewhere", CAPTURED - 1)
    assert rings(tmp_path / "elsewhere") == []


def test_a_store_by_another_name_takes_its_ring_up(folder: Path, tmp_path: Path) -> None:
    """Test a store opened through a link."""
    (tmp_path / "link").symlink_to(folder)
    assert_restored(tmp_path / "link", CAPTURED - 1)
    assert rings(folder) == []


def test_ring_locked_by_a_reader_is_recovered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a start waits for a short lock of another process."""
    (ring,) = rings(folder)
    looking = RingReader(ring)

    def meanwhile(_seconds: float) -> None:
        looking.close()

    monkeypatch.setattr(orphaned_rings, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=meanwhile))
    assert_restored(folder, CAPTURED - 1)
    assert rings(folder) == []


def test_reader_does_not_block_a_ring(folder: Path) -> None:
    """Test that the ring can be recovered and removed, and is still readable."""
    (ring,) = rings(folder)
    with RingReader(ring, hold=False) as looking:
        assert_restored(folder, CAPTURED - 1)
        assert rings(folder) == []
        assert max(looking.manifest(entry).header.ref.step for entry in looking.captures) == CAPTURED - 1


# ------------------------------------------------------------------------------------------------------------- damage


def _newest_manifest(ring: Path) -> tuple[int, int, int]:
    """Return the offset of the frame of the newest manifest, its length, and the number of its entry."""
    with RingReader(ring) as reader:
        newest = max(reader.captures, key=lambda entry: entry.save_id)
        lengths = dict(zip(reader.entries["offset"].tolist(), reader.entries["stored_length"].tolist(), strict=True))
        data = bytes(reader._memory[CAPTURES_OFFSET : CAPTURES_OFFSET + 64 * ENTRY_BYTES])
    number = next(at for at in range(64) if bytes(newest.save_id) in data[at * ENTRY_BYTES : (at + 1) * ENTRY_BYTES])
    return newest.offset, lengths[newest.offset], number


@pytest.mark.parametrize("where", ["header", "payload", "last byte"])
def test_a_damaged_partition_is_passed_over(folder: Path, where: str) -> None:
    """Test the warning that names the step, and that older captures are recovered."""
    (ring,) = rings(folder)
    offset, length = partition_of_newest(ring)
    start = payload_offset(length)
    place = {"header": 9, "payload": start + 5, "last byte": start + length - 1}[where]
    flip(ring, 8 * (offset + place) + 6)
    with pytest.warns(SkippedCheckpointWarning, match=r"step 4 of run 'default' in memory: partition"):
        assert_restored(folder, CAPTURED - 2, CAPTURED - 2)
    assert rings(folder) == []
    assert _steps(folder) == list(range(CAPTURED - 1))


@pytest.mark.parametrize("where", [3, 40, 4200, -1], ids=["magic", "digest", "payload", "end"])
def test_a_damaged_manifest_is_passed_over(folder: Path, where: int) -> None:
    """Test the warning, the recovery of older captures, and that no later restore fails because of the manifest."""
    (ring,) = rings(folder)
    offset, length, _ = _newest_manifest(ring)
    payload = offset + payload_offset(length)
    place = payload + length - 1 if where < 0 else offset + where if where < 100 else payload + 7
    flip(ring, 8 * place)
    with pytest.warns(SkippedCheckpointWarning, match=r"a checkpoint of run 'default' in memory"):
        assert_restored(folder, CAPTURED - 2, CAPTURED - 2)
    assert rings(folder) == []
    assert_restored(folder, CAPTURED - 2, CAPTURED - 2)


@pytest.mark.parametrize("offset", [0, 20, 63])
def test_a_damaged_entry_is_none(folder: Path, offset: int) -> None:
    """Test that a damaged entry counts as an entry that was not completely written."""
    (ring,) = rings(folder)
    flip(ring, 8 * (CAPTURES_OFFSET + _newest_manifest(ring)[2] * ENTRY_BYTES + offset))
    assert_restored(folder, CAPTURED - 2, CAPTURED - 2)
    assert rings(folder) == []


def test_an_entry_of_another_capture_is_passed_over(folder: Path) -> None:
    """Test an entry whose save id differs from its manifest; older captures are recovered."""
    (ring,) = rings(folder)
    offset, _, number = _newest_manifest(ring)
    with ring.open("r+b") as file:
        file.seek(CAPTURES_OFFSET + number * ENTRY_BYTES)
        file.write(encode_entry(CaptureEntry(offset, SaveId(b"another" * 2 + b"!!"), COMPLETE)))
    with pytest.warns(SkippedCheckpointWarning, match="another capture than its entry"):
        assert_restored(folder, CAPTURED - 2, CAPTURED - 2)
    assert rings(folder) == []


@pytest.mark.parametrize("copy", [0, RECORD_BYTES // 2])
def test_a_header_with_one_damaged_copy_is_read(folder: Path, copy: int) -> None:
    """Test that the second copy of the header is read."""
    (ring,) = rings(folder)
    flip(ring, 8 * (copy + 30))
    assert_restored(folder, CAPTURED - 1)
    assert rings(folder) == []


def test_a_ring_with_a_damaged_header_is_reported_and_stays(folder: Path) -> None:
    """Test that the ring stays because it may have checkpoints, and that the store is restored without it."""
    (ring,) = rings(folder)
    flip(ring, 8 * 30)
    flip(ring, 8 * (RECORD_BYTES // 2 + 30))
    with pytest.warns(SkippedCheckpointWarning, match=rf"in memory: .*{ring.name}.*kept"):
        assert_restored(folder, DURABLE - 1, DURABLE - 1)
    assert rings(folder) == [ring]


@pytest.mark.slow
def test_any_flipped_bit_leaves_a_right_state(dead: Path, tmp_path: Path) -> None:
    """Test random positions: some step is restored with the right bytes, and no restore fails."""
    dice = random.Random(3)
    (original,) = rings(dead)
    with RingReader(original) as reader:
        end = int((reader.entries["offset"] + reader.entries["stored_length"]).max()) + 4096
    for number in range(25):
        folder = copied(dead, tmp_path / str(number))
        offset = dice.randrange(RECORD_BYTES + 4096 if number % 3 == 0 else end)
        flip(rings(folder)[0], 8 * offset + dice.randrange(8))
        with pytest.WarningsRecorder(_ispytest=True) as caught:
            assert_restored(folder, CAPTURED - 2)
        assert {warning.category for warning in caught} <= {SkippedCheckpointWarning}, offset
        assert rings(folder) == []


def _is_half_made(ring: Path, how: str) -> None:
    size = ring.stat().st_size
    if how == "empty":
        os.truncate(ring, 0)
    else:
        data = ring.read_bytes()[: 1000 if how == "part of a header" else 0]
        ring.write_bytes(data + bytes(size - len(data)))


@pytest.mark.parametrize("how", ["empty", "zeros", "part of a header"])
def test_a_half_made_ring_is_removed(folder: Path, how: str) -> None:
    """Test a ring whose process was killed during its creation: it has no capture, but uses memory."""
    (ring,) = rings(folder)
    _is_half_made(ring, how)
    assert_restored(folder, DURABLE - 1, DURABLE - 1)
    assert rings(folder) == []


def test_a_ring_that_is_being_made_is_left_alone(zygote: Zygote, tmp_path: Path) -> None:
    """Test that a process that reserves the memory of its new ring already holds the lock."""
    child = zygote.start(make_slowly, path=str(tmp_path))
    wait_until(lambda: bool(Journal(tmp_path / "journal").lines("making")), "the ring")
    (ring,) = rings(tmp_path)
    with Store.open(tmp_path / "store", create=True) as store, store.training.adopting(ring.parent) as adopted:
        assert adopted == []
    assert rings(tmp_path) == [ring]
    Journal(tmp_path / "journal").note("go on")
    kill_when_ready(child, tmp_path)
    assert_restored(tmp_path, 0)


def make_slowly(path: str) -> None:
    """Train a step, but wait during the creation of the ring. Runs in a child."""
    journal = Journal(Path(path) / "journal")
    reserve: Callable[[int, int, int], None] = os.posix_fallocate

    def slowly(descriptor: int, offset: int, length: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".ring"):
            journal.note("making")
            wait_until(lambda: bool(journal.lines("go on")), "the other process")
        reserve(descriptor, offset, length)

    os.posix_fallocate = slowly
    train(path, steps=1)


# ------------------------------------------------------------------------------------------- checks of these tests


def test_a_training_without_a_ring_would_lose_steps(folder: Path) -> None:
    """Test that the tests above depend on the ring."""
    (ring,) = rings(folder)
    ring.unlink()
    with pytest.raises(AssertionError, match="step 1 was restored"):
        assert_restored(folder, CAPTURED - 1)


def test_the_events_are_those_of_the_library() -> None:
    """Test the names of the events, because an unknown name would never kill."""
    assert set(COMMIT_ORDER) <= set(events.COMMIT_ORDER)
