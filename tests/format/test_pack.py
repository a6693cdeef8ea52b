"""Test packs: every byte of header and index is checked, and frames are contiguous."""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asymcheck.errors import FormatError, LimitError, StructureError, TruncatedError, UnsupportedCodecError
from asymcheck.format import registry
from asymcheck.format.digest import sum8
from asymcheck.format.frame import FrameDescriptor, frame_length
from asymcheck.format.pack import (
    ENTRY_DTYPE,
    INDEX_HEADER,
    PACK_HEADER,
    Entries,
    PackHeader,
    check_entry,
    decode_index,
    decode_pack_header,
    encode_index,
    encode_pack_header,
    frame_lengths,
    round_up,
)
from asymcheck.types import Digest, PackId

PACK = PackId(bytes(range(16)))
lengths = st.integers(1, 1 << 30) | st.sampled_from([1, 3968, 3969, 65535, 65536, 65537, 1 << 30])


def entries_of(stored: list[int]) -> tuple[Entries, PackHeader]:
    """Return an index of contiguous frames of these payloads, and its header."""
    entries = np.zeros(len(stored), dtype=ENTRY_DTYPE)
    entries["stored_length"] = entries["plain_length"] = stored
    entries["digest_algorithm"] = 1
    offset = 4096
    for row, length in enumerate(stored):
        entries[row]["digest"] = np.void(row.to_bytes(16, "big"))
        entries[row]["offset"] = offset
        offset += frame_length(length)
    return entries, PackHeader(PACK, len(stored), offset, 1_790_000_000_000_000_000, "asymcheck test")


@given(st.lists(st.tuples(lengths, st.integers(0, 4095)), min_size=1, max_size=50))
def test_frame_lengths_are_frame_length(frames: list[tuple[int, int]]) -> None:
    """Test that the vectorised computation equals the single one, for any shift."""
    entries = _bare_entries([stored for stored, _ in frames])
    entries["payload_shift"] = [shift for _, shift in frames]
    assert frame_lengths(entries).tolist() == [frame_length(*frame) for frame in frames]


def _bare_entries(stored: list[int]) -> Entries:
    entries = np.zeros(len(stored), dtype=ENTRY_DTYPE)
    entries["stored_length"] = stored
    return entries


@pytest.mark.parametrize("edge", [1, 3968, 4096, 65536, 1 << 20, (1 << 30) + (8 << 20)])
def test_frame_lengths_agree_around_every_edge(edge: int) -> None:
    """Test each length near a limit."""
    stored = [length for length in range(edge - 300, edge + 300) if length > 0]
    assert frame_lengths(_bare_entries(stored)).tolist() == list(map(frame_length, stored))


@given(st.lists(lengths, min_size=1, max_size=80), st.integers(0, (1 << 64) - 1))
def test_packs_go_round(stored: list[int], created: int) -> None:
    """Test that the header fills a block, the index ends on one, and both are read as written."""
    entries, header = entries_of(stored)
    header = dataclasses.replace(header, created_ns=created)
    block, index = encode_pack_header(header), encode_index(PACK, entries)
    assert (len(block), len(index)) == (4096, round_up(64 + 64 * len(stored)))
    assert decode_pack_header(block, "test") == header
    assert header.pack_length == header.index_offset + len(index)
    assert decode_index(index, header, "test").tobytes() == entries.tobytes()


def test_sizes() -> None:
    """Test the sizes of the fixed structures."""
    assert (PACK_HEADER.size, INDEX_HEADER.size, ENTRY_DTYPE.itemsize) == (128, 64, 64)


def test_every_changed_byte_of_the_header_is_found() -> None:
    """Test that a header block with any changed byte is refused."""
    block = encode_pack_header(entries_of([300])[1])
    for offset in range(4096):
        changed = bytearray(block)
        changed[offset] ^= 0x80
        with pytest.raises(FormatError):
            decode_pack_header(changed, "test")


def test_every_changed_byte_of_the_index_is_found() -> None:
    """Test that an index with any changed byte is refused, including its padding."""
    entries, header = entries_of([300, 70_000])
    index = encode_index(PACK, entries)
    for offset in range(len(index)):
        changed = bytearray(index)
        changed[offset] ^= 0x80
        with pytest.raises(FormatError):
            decode_index(changed, header, "test")


@pytest.mark.parametrize("offset", [*range(10, 16), *range(104, 120)])
def test_every_reserved_byte_of_the_header_is_refused(offset: int) -> None:
    """Test non-zero reserved bytes under a valid checksum."""
    changed = bytearray(encode_pack_header(entries_of([300])[1]))
    changed[offset] = 1
    changed[120:128] = sum8(bytes(changed[:120]))
    with pytest.raises(StructureError, match="reserved"):
        decode_pack_header(changed, "test")


@pytest.mark.parametrize("offset", [*range(12, 16), *range(40, 48)])
def test_every_reserved_byte_of_the_index_is_refused(offset: int) -> None:
    """Test non-zero reserved bytes in the header of the index."""
    entries, header = entries_of([300])
    changed = bytearray(encode_index(PACK, entries))
    changed[offset] = 1
    changed[56:64] = sum8(bytes(changed[:56]))
    with pytest.raises(StructureError, match="reserved"):
        decode_index(changed, header, "test")


@pytest.mark.parametrize("offset", range(61, 64))
def test_every_reserved_byte_of_an_entry_is_refused(offset: int) -> None:
    """Test non-zero reserved bytes in every entry."""
    entries, header = entries_of([300, 400])
    raw = bytearray(entries.tobytes())
    raw[64 + offset] = 1
    with pytest.raises(StructureError, match="reserved"):
        decode_index(encode_index(PACK, np.frombuffer(raw, dtype=ENTRY_DTYPE)), header, "test")


@pytest.mark.parametrize(
    ("row", "field", "value", "error"),
    [
        (0, "payload_shift", 1, StructureError),
        (1, "payload_shift", 4096, StructureError),
        (0, "offset", 0, StructureError),
        (1, "offset", 4096, StructureError),
        (1, "offset", 12288, StructureError),
        (1, "offset", (1 << 64) - 4096, StructureError),
        (1, "stored_length", 0, StructureError),
        (1, "plain_length", 0, StructureError),
        (1, "plain_length", 401, StructureError),
        (1, "stored_length", (1 << 64) - 1, LimitError),
        (1, "plain_length", (1 << 64) - 1, LimitError),
        (0, "kind", 3, UnsupportedCodecError),
        (1, "codec", 5, UnsupportedCodecError),
        (0, "kind", 1, StructureError),
        (1, "codec", 3, StructureError),
        (1, "digest_algorithm", 0, UnsupportedCodecError),
        (1, "base_digest", np.void(b"\1" + bytes(15)), StructureError),
    ],
    ids=str,
)
def test_entries_that_break_a_rule_are_refused(row: int, field: str, value: object, error: type[FormatError]) -> None:
    """Test invalid entries with valid checksums: each raises the matching error."""
    entries, header = entries_of([300, 400])
    entries[row][field] = value
    with pytest.raises(error):
        decode_index(encode_index(PACK, entries), header, "test")


@pytest.mark.parametrize("stored", [[0], [300, 0]])
def test_a_frame_of_no_bytes_is_refused(stored: list[int]) -> None:
    """Test a length of zero in an otherwise valid index."""
    entries, header = entries_of(stored)
    with pytest.raises(StructureError, match="zero"):
        decode_index(encode_index(PACK, entries), header, "test")


def test_a_pack_of_no_frames_is_refused() -> None:
    """Test an index without frames."""
    with pytest.raises(StructureError):
        decode_pack_header(encode_pack_header(PackHeader(PACK, 0, 4096, 0, "test")), "test")


def test_lengths_that_overflow_do_not_fool_the_sum() -> None:
    """Test a thousand frames of the maximum length."""
    entries, header = entries_of([registry.PARTITION_BYTES_MAX] * 1000)
    assert header.index_offset > 1 << 39
    assert len(decode_index(encode_index(PACK, entries), header, "test")) == 1000


def test_a_short_index_is_refused() -> None:
    """Test an index that is truncated within its padding."""
    entries, header = entries_of([300])
    with pytest.raises(TruncatedError, match="4095 of 4096"):
        decode_index(encode_index(PACK, entries)[:-1], header, "test")


def test_the_largest_index_is_bounded() -> None:
    """Test that the header alone shows that an index exceeds the limit."""
    count = registry.PACK_INDEX_BYTES_MAX // 64
    entries, header = entries_of([300])
    decode_pack_header(encode_pack_header(dataclasses.replace(header, frame_count=count - 1)), "test")
    with pytest.raises(LimitError):
        decode_pack_header(encode_pack_header(dataclasses.replace(header, frame_count=count)), "test")
    assert len(entries) == 1


@settings(max_examples=20)
@given(st.text(st.characters(max_codepoint=127, exclude_characters="\0"), max_size=32))
def test_the_writer_is_ascii_of_at_most_32(writer: str) -> None:
    """Test that the name is restored, and that a longer name is truncated."""
    _, header = entries_of([300])
    for name in (writer, writer + "x" * 32):
        found = decode_pack_header(encode_pack_header(dataclasses.replace(header, writer=name)), "test")
        assert found.writer == name[:32]


def test_an_index_of_100_000_frames_is_read_in_a_moment() -> None:
    """Test that 100,000 entries are read as columns, in well under a second."""
    entries, header = entries_of([4096] * 100_000)
    index = encode_index(PACK, entries)
    began = time.process_time()
    decode_index(index, header, "test")
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("digest", np.void(b"\1" * 16)),
        ("base_digest", np.void(b"\1" * 16)),
        ("stored_length", 301),
        ("plain_length", 301),
        ("kind", 1),
        ("codec", 1),
        ("digest_algorithm", 2),
    ],
    ids=str,
)
def test_an_entry_that_is_not_of_the_frame_is_refused(field: str, value: object) -> None:
    """Test each field that the entry and the frame have in common."""
    entry = entries_of([300])[0][0]
    frame = FrameDescriptor.identity(Digest(bytes(16)), 300)
    check_entry(entry, frame, "test")
    entry[field] = value
    with pytest.raises(StructureError):
        check_entry(entry, frame, "test")


_BASED = {"base_digest": np.void(b"\7" * 16)}


@pytest.mark.parametrize(
    ("changes", "sound"),
    [
        ({"codec": 1, "stored_length": 200}, True),
        ({"codec": 2, "plain_length": 900}, True),
        ({"kind": 1, "codec": 3, **_BASED}, True),
        ({"kind": 2, "codec": 4, "plain_length": 7, **_BASED}, True),
        ({"kind": 1, "codec": 3}, False),
        ({"kind": 2, "codec": 4}, False),
        ({"codec": 2, **_BASED}, False),
        ({"kind": 1, "codec": 3, "digest": np.void(b"\7" * 16), **_BASED}, False),
        ({"kind": 1, "codec": 2, **_BASED}, False),
    ],
    ids=str,
)
def test_kinds_codecs_and_bases_go_together(changes: dict[str, object], sound: bool) -> None:
    """Test that an entry has a base if and only if its kind needs one, never itself."""
    entries, header = entries_of([300, 400])
    for field, value in changes.items():
        entries[0][field] = value
    index = encode_index(PACK, entries)
    if sound:
        assert len(decode_index(index, header, "test")) == 2
    else:
        with pytest.raises(StructureError):
            decode_index(index, header, "test")
