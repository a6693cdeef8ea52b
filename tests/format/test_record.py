"""Test record files: two copies with checksums, of which one suffices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.errors import (
    ChecksumError,
    FormatError,
    LimitError,
    StructureError,
    TruncatedError,
    UnsupportedFeatureError,
)
from asymcheck.format import registry
from asymcheck.format.record import (
    Descriptor,
    HeadRecord,
    canonical_json,
    decode_descriptor,
    decode_head,
    encode_descriptor,
    encode_head,
    encode_record,
    parent_from_json,
    parent_to_json,
    parse_id,
)
from asymcheck.types import CheckpointRef, SaveId

ids = st.binary(min_size=16, max_size=16)
times = st.integers(0, (1 << 64) - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
DESCRIPTOR = Descriptor(bytes(range(16)), 1_790_000_000_000_000_000, "asymcheck test")


@given(ids, times, texts, st.lists(texts, max_size=3))
def test_descriptors_go_round(store_id: bytes, created: int, writer: str, features: list[str]) -> None:
    """Test writer features of later versions, too."""
    descriptor = Descriptor(store_id, created, writer, (), tuple(features))
    data = encode_descriptor(descriptor)
    assert len(data) == 8192
    assert decode_descriptor(data, "test") == (descriptor, 0)


@given(st.data(), st.integers(2, registry.GENERATION_MAX), times, texts)
def test_heads_go_round(data: st.DataObject, generation: int, created: int, writer: str) -> None:
    """Test that a head record is read as it was written."""
    older = st.builds(CheckpointRef, st.integers(1, generation - 1), st.integers(0, registry.STEP_MAX), ids.map(SaveId))
    head = HeadRecord("run", generation, data.draw(st.none() | older), created, writer)
    assert decode_head(encode_head(head), "test") == (head, 0)


@pytest.mark.parametrize("block", [0, 4096], ids=["first", "second"])
def test_every_damaged_byte_of_one_copy_is_survived(block: int) -> None:
    """Test that the other copy is read, and the damage is counted, for any changed byte."""
    data = encode_descriptor(DESCRIPTOR)
    for offset in range(block, block + 4096):
        changed = bytearray(data)
        changed[offset] ^= 0x21
        assert decode_descriptor(changed, "test") == (DESCRIPTOR, 1), offset


def test_a_byte_damaged_in_both_copies_is_refused() -> None:
    """Test any byte that is damaged in both copies."""
    data = encode_descriptor(DESCRIPTOR)
    for offset in range(4096):
        changed = bytearray(data)
        changed[offset] ^= 0x21
        changed[offset + 4096] ^= 0x21
        with pytest.raises(ChecksumError, match="both copies"):
            decode_descriptor(changed, "test")


@pytest.mark.parametrize("length", [0, 1, 4096, 8191, 8193])
def test_another_size_is_refused(length: int) -> None:
    """Test that a file of another size than 8192 bytes is refused, even with an intact block."""
    data = (encode_descriptor(DESCRIPTOR) * 2)[:length]
    with pytest.raises(TruncatedError, match=f"has {length} bytes"):
        decode_descriptor(data, "test")


def test_the_longest_record_fits_and_no_longer() -> None:
    """Test that 4000 bytes of JSON fit a block, and that 4001 are refused before anything is written."""
    room = 4000 - len(canonical_json({"a": ""}))
    assert len(encode_record({"a": "x" * room})) == 8192
    with pytest.raises(LimitError, match="4001 bytes"):
        encode_record({"a": "x" * (room + 1)})


def test_a_record_of_another_kind_is_refused() -> None:
    """Test that the message names the kind of the record."""
    with pytest.raises(StructureError, match="of kind 'head', not 'store'"):
        decode_descriptor(encode_head(HeadRecord("run", 1, None, 0, "")), "test")


def test_unknown_features_come_before_other_keys() -> None:
    """Test a descriptor of a newer program, in which another key has another type."""
    fields = {"kind": "store", "format": 1, "reader_features": ["apples"], "writer_features": {}}
    with pytest.raises(UnsupportedFeatureError, match="apples"):
        decode_descriptor(encode_record(fields), "test")


@pytest.mark.parametrize(
    "text", ["", "0" * 31, "0" * 33, "G" * 32, "AB" * 16, " " * 32, "0" * 31 + "\n", None, 7, ["0"]]
)
def test_ids_are_32_lower_case_digits(text: object) -> None:
    """Test other texts, including texts that bytes.fromhex accepts."""
    with pytest.raises(StructureError, match="not an id"):
        parse_id(text, "test")


def test_parents_go_round() -> None:
    """Test an object and null."""
    ref = CheckpointRef(3, 12, SaveId(bytes(16)))
    assert parent_from_json(parent_to_json(ref), "test") == ref
    assert parent_from_json(parent_to_json(None), "test") is None


@given(st.dictionaries(st.sampled_from(["generation", "step", "save_id"]), st.none() | st.integers() | texts))
def test_any_parent_is_read_or_refused(value: dict[str, object]) -> None:
    """Test that any parent is read, or raises a FormatError."""
    try:
        parent_from_json(value, "test")
    except FormatError:
        return
    assert set(value) == {"generation", "step", "save_id"}
