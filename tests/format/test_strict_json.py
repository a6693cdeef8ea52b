"""Test strict JSON: one text has one meaning."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.errors import StructureError
from asymcheck.format.record import canonical_json, parse_json

strings = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | strings,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=4),
)


@given(values)
def test_canonical_json_is_read_back(value: object) -> None:
    """Test that canonical JSON is read as it was written."""
    assert parse_json(canonical_json(value), "test") == value


@given(values)
def test_other_spellings_are_read_too(value: object) -> None:
    """Test JSON with spaces and UTF-8 characters."""
    assert parse_json(json.dumps(value, ensure_ascii=False, indent=2).encode(), "test") == value


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting"),
        (b"1 2", "Extra data"),
        (b'{"a":1,"a":1}', "key twice"),
        (b'[{"b":{"a":1,"a":2}}]', "key twice"),
        (b"NaN", "NaN"),
        (b"[Infinity]", "Infinity"),
        (b"-Infinity", "Infinity"),
        (b"\xef\xbb\xbf1", "BOM"),
        (b'"\xff"', "utf-8"),
        ("[1]".encode("utf-16"), "utf-8"),
        ("[1]".encode("utf-32-le"), "Expecting value"),
        (b'"\xed\xa0\x80"', "utf-8"),
        (rb'"\ud800"', "surrogates"),
        (rb'{"\uDFFF":1}', "surrogates"),
        (rb'["\udc00\ud800"]', "surrogates"),
        (b"[" * 100_000 + b"]" * 100_000, "recursion"),
        (b"9" * 5000, "digits"),
    ],
)
def test_invalid_json_is_refused(text: bytes, what: str) -> None:
    """Test the StructureError, which names the problem and the structure."""
    with pytest.raises(StructureError, match=what) as caught:
        parse_json(text, "the header")
    assert "the header" in str(caught.value) or "JSON" in str(caught.value)


@pytest.mark.parametrize("text", [rb'"\ud83e\uddc0"', rb'"\\ud800"', '"\U0001f9c0"'.encode()])
def test_valid_surrogates_are_accepted(text: bytes) -> None:
    """Test a surrogate pair, and a backslash before a word."""
    assert parse_json(text, "test") == json.loads(text)


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(text: bytes) -> None:
    """Test that any bytes are read, or raise a StructureError."""
    try:
        parse_json(text, "test")
    except StructureError:
        return
    json.loads(text)
