"""Test that the ring reader finds complete frames, and never uses invalid content."""

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from asymcheck.errors import (
    DigestMismatchError,
    FormatError,
    StorageError,
    StructureError,
    TruncatedError,
    UnsupportedVersionError,
)
from asymcheck.format.digest import sum8
from asymcheck.format.record import encode_record
from asymcheck.format.ring_records import (
    CAPTURES_OFFSET,
    COMPLETE,
    DATA_OFFSET,
    CaptureEntry,
    decode_ring_header,
    encode_entry,
    encode_ring_header,
)
from asymcheck.storage.shm import ring_reader
from asymcheck.storage.shm.orphaned_rings import unreadable_ring
from asymcheck.storage.shm.ring_reader import RingReader
from asymcheck.types import SaveId
from tests.damage.flips import flip
from tests.storage.ring_cases import BLOCK, HEADER, SAVE, found, make_ring, payloads, put

PARTITION, MANIFEST = b"p" * 300, b"m" * 5000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return an orphaned ring with two frames and a capture."""
    ring = make_ring(tmp_path)
    put(ring, PARTITION)
    ring.enter(put(ring, MANIFEST), SAVE)
    ring.close(keep=True)
    return ring.path


WHOLE = {DATA_OFFSET: PARTITION, DATA_OFFSET + BLOCK: MANIFEST}


def change(path: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_reader_finds_complete_frames(path: Path) -> None:
    """Test lengths and numbers, under an exclusive lock."""
    with RingReader(path) as one, RingReader(path) as other:
        assert payloads(one) == WHOLE
        assert one.entries["stored_length"].tolist() == one.entries["plain_length"].tolist() == [300, 5000]
        assert one.entries["digest_algorithm"].tolist() == [1, 1]
        assert (one.is_owned, other.is_owned) == (False, True)


def _answer(path: Path) -> str:
    """Read all content; check that everything found equals what was written."""
    try:
        with RingReader(path) as one:
            assert one.header == HEADER
            assert one.captures in ([], [CaptureEntry(DATA_OFFSET + BLOCK, SAVE, COMPLETE)])
            for offset in one.entries["offset"].tolist():
                try:
                    payload = bytes(one.payload_at(offset))
                except FormatError:
                    return "payload"
                assert payload == WHOLE[offset]
            return f"{len(one.captures)} captures, {len(one.entries)} frames"
    except FormatError as error:
        return error.kind


def _bits() -> list[int]:
    """Return all bits of the entry, the next entry and both frame headers, and some bits of copies and free entries."""
    every = [*range(CAPTURES_OFFSET, CAPTURES_OFFSET + 72)]
    every += [start + byte for start in WHOLE for byte in range(128)]
    some = random.Random(5).sample(range(8 * DATA_OFFSET), 600)
    return sorted({*some, *(8 * byte + bit for byte in every for bit in range(8))})


@pytest.mark.slow
def test_a_flipped_bit_makes_nothing_up(path: Path) -> None:
    """Test header, entries and frame headers: the ring is refused, or everything found is unchanged."""
    answers = {"header": set[str](), "entries": set[str](), "frames": set[str]()}
    for bit in _bits():
        flip(path, bit)
        byte = bit // 8
        part = "header" if byte < CAPTURES_OFFSET else "entries" if byte < DATA_OFFSET else "frames"
        answers[part].add(_answer(path))
        flip(path, bit)
    assert _answer(path) == "1 captures, 2 frames"
    assert answers == {
        "header": {"1 captures, 2 frames"},
        "entries": {"1 captures, 2 frames", "0 captures, 2 frames"},
        "frames": {"1 captures, 1 frames"},
    }


@pytest.mark.slow
def test_every_flipped_bit_of_the_header_leaves_the_other_copy() -> None:
    """Test every bit of both copies, without a file around them."""
    data = bytearray(encode_ring_header(HEADER))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert decode_ring_header(data, "ring") == HEADER
        data[bit // 8] ^= 1 << bit % 8


def test_a_flipped_bit_of_a_payload_is_seen(path: Path) -> None:
    """Test that the damage is detected at the read, because the frames are found by their headers."""
    flip(path, 8 * (DATA_OFFSET + 130))
    with RingReader(path) as one:
        assert len(one.entries) == 2
        with pytest.raises(DigestMismatchError, match=f"frame at byte {DATA_OFFSET} of ring {path.name}"):
            one.payload_at(DATA_OFFSET)
        assert bytes(one.payload_at(DATA_OFFSET + BLOCK)) == MANIFEST


@pytest.mark.parametrize("offset", [DATA_OFFSET + 3 * BLOCK, DATA_OFFSET + 64, 0, CAPTURES_OFFSET, 1 << 40])
def test_no_payload_without_a_frame(path: Path, offset: int) -> None:
    """Test a read beyond the end, too."""
    with RingReader(path) as one, pytest.raises(FormatError):
        one.payload_at(offset)


def _with_bytes(data_bytes: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        head = encode_ring_header(HEADER).split(b"\n")[0]
        fields = {**_json(head), "data_bytes": data_bytes}
        change(path, 0, encode_record(fields))

    return write


def _json(text: bytes) -> dict[str, object]:
    fields: dict[str, object] = json.loads(text)
    return fields


HOSTILE: dict[str, tuple[Callable[[Path], object], type[FormatError]]] = {
    "2^60 bytes of data": (_with_bytes(1 << 60), TruncatedError),
    "2^64 - 4096 bytes of data": (_with_bytes((1 << 64) - BLOCK), TruncatedError),
    "a block too many": (_with_bytes(17 * BLOCK), TruncatedError),
    "half a block": (_with_bytes(2048), StructureError),
    "a byte is missing": (lambda path: os.truncate(path, DATA_OFFSET + 16 * BLOCK - 1), TruncatedError),
    "no data": (lambda path: os.truncate(path, DATA_OFFSET), TruncatedError),
    "half a header": (lambda path: os.truncate(path, 5000), TruncatedError),
    "nothing": (lambda path: os.truncate(path, 0), TruncatedError),
    "zeros": (lambda path: change(path, 0, bytes(DATA_OFFSET)), FormatError),
}


@pytest.mark.parametrize(("damage", "error"), HOSTILE.values(), ids=HOSTILE)
def test_false_ring_file_is_refused(path: Path, damage: Callable[[Path], object], error: type[FormatError]) -> None:
    """Test the error of this package, and that no descriptor stays open."""
    damage(path)
    open_before = os.listdir("/proc/self/fd")
    with pytest.raises(error):
        RingReader(path)
    assert os.listdir("/proc/self/fd") == open_before


def test_a_file_that_cannot_be_mapped_is_an_error_of_ours(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a sparse file that is larger than the address space."""

    def refuse(_descriptor: int, _size: int, *, writable: bool) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(ring_reader, "map_file", refuse)
    with pytest.raises(StorageError, match=r"read .*: Cannot allocate memory"):
        RingReader(path)


@pytest.mark.parametrize("offset", [0, 8192, DATA_OFFSET + 16 * BLOCK, (1 << 64) - BLOCK, DATA_OFFSET + 1])
def test_an_entry_that_points_elsewhere_is_ignored(path: Path, offset: int) -> None:
    """Test entries with a valid checksum."""
    change(path, CAPTURES_OFFSET, encode_entry(CaptureEntry(offset, SAVE, COMPLETE)))
    with RingReader(path) as one:
        assert one.captures == []


@pytest.mark.parametrize("length", [1 << 30, 16 * BLOCK])
def test_a_header_that_claims_too_much_is_no_frame(path: Path, length: int) -> None:
    """Test that a frame must be stored within the data."""
    with path.open("r+b") as file:
        file.seek(DATA_OFFSET)
        head = bytearray(file.read(128))
    head[32:48] = length.to_bytes(8, "little") * 2
    head[72:76] = (BLOCK).to_bytes(4, "little")
    head[88:96] = sum8(bytes(head[:88]))
    head[120:128] = sum8(bytes(head[88:120]))
    change(path, DATA_OFFSET, bytes(head))
    assert found(path) == {DATA_OFFSET + BLOCK: MANIFEST}


def test_frames_of_another_ring_or_place_are_none(path: Path, tmp_path: Path) -> None:
    """Test frames that are otherwise complete."""
    other = make_ring(tmp_path, ring_id=b"o" * 16)
    frames = [bytes(other.frame(put(other, b"another"))) for _ in range(8)]
    other.close()
    change(path, DATA_OFFSET + 6 * BLOCK, frames[6])
    own = path.read_bytes()[DATA_OFFSET : DATA_OFFSET + BLOCK]
    change(path, DATA_OFFSET + 9 * BLOCK, own)
    assert found(path) == WHOLE


def test_a_ring_under_another_name_is_refused(path: Path) -> None:
    """Test that the frames are not attributed to the wrong store."""
    for name in ("x.ring", path.name.replace("10", "20", 1), path.name.replace("0f.", "00.")):
        with pytest.raises(StructureError, match="the header is that of"):
            RingReader(path.rename(path.with_name(name)))
        path.with_name(name).rename(path)


def test_special_file_is_refused(path: Path, tmp_path: Path) -> None:
    """Test a link, a folder and a pipe; a missing file has a different error."""
    other = tmp_path / "other"
    path.rename(other)
    with pytest.raises(FileNotFoundError):
        RingReader(path)
    path.symlink_to(other)
    with pytest.raises(StorageError, match="symbolic link"):
        RingReader(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(StorageError, match="read"):
        RingReader(path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises((StorageError, FormatError)):
        RingReader(path)


def test_ring_removed_before_its_lock_is_gone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a ring that another process has recovered is not recovered twice."""

    def late(descriptor: int, *, exclusive: bool) -> bool:
        path.unlink()
        return True

    monkeypatch.setattr(ring_reader, "try_lock", late)
    with pytest.raises(FileNotFoundError):
        RingReader(path)


def test_another_save_is_another_capture(path: Path) -> None:
    """Test that entries are found in any order."""
    other = CaptureEntry(DATA_OFFSET, SaveId(b"t" * 16), COMPLETE)
    change(path, DATA_OFFSET - 64, encode_entry(other))
    with RingReader(path) as one:
        assert one.captures == [CaptureEntry(DATA_OFFSET + BLOCK, SAVE, COMPLETE), other]


def test_a_ring_of_a_newer_program_stays(path: Path) -> None:
    """Test that a newer version, whose captures this program cannot find, is never mistaken for an empty ring."""
    data = bytearray(path.read_bytes())
    value = json.loads(bytes(data[:BLOCK]).partition(b"\n")[0])
    data[: 2 * BLOCK] = encode_record({**value, "format": 2})
    data[CAPTURES_OFFSET:DATA_OFFSET] = bytes(DATA_OFFSET - CAPTURES_OFFSET)
    path.write_bytes(data)
    with pytest.raises(UnsupportedVersionError):
        RingReader(path)
    assert unreadable_ring(path, remove=("unmade",)) == "damaged"
    assert path.read_bytes() == data
