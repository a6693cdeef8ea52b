"""Test that damaged and hostile safetensors files are refused by name, within bounded memory."""

import contextlib
import json
import os
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from asymcheck.convert.safetensors_format import SafetensorsHeader
from asymcheck.errors import ForeignFileError, InvalidInputError, NotFoundError, StorageError
from tests.convert.files import U8, header_of, one, package_accepts, raw, same_tensors

HUGE = 1 << 62

HOSTILE = {
    "no bytes": (b"", "truncated: 0 bytes"),
    "seven bytes": (bytes(7), "truncated: 7 bytes"),
    "only a length": (bytes(8), "does not begin with '{'"),
    "header beyond the file": (struct.pack("<Q", 3) + b"{}", "truncated: a header of 3 bytes"),
    "header of 2^64-1 bytes": (b"\xff" * 8 + b"{}", "the header has 18446744073709551615 bytes, at most 100000000"),
    "header over the limit": (struct.pack("<Q", 100_000_001) + b"{}", "the header has 100000001 bytes, at most"),
    "another format": (b"PK\x03\x04" + bytes(100), "truncated|does not begin"),
    "no object": (raw(b"[]"), "does not begin with '{'"),
    "leading space": (raw(b" {}"), "does not begin with '{'"),
    "byte order mark": (raw(b"\xef\xbb\xbf{}"), "does not begin with '{'"),
    "not UTF-8": (raw(b'{"\xff":1}'), "utf-8"),
    "UTF-16": (raw("{}".encode("utf-16-le")), "not valid JSON"),
    "not JSON": (raw(b"{a}"), "not valid JSON"),
    "two values": (raw(b"{}{}"), "Extra data"),
    "zeros as padding": (raw(b"{}\0\0"), "Extra data"),
    "NaN": (raw(b'{"a":NaN}'), "NaN is not JSON"),
    "nested too deep": (raw(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"), "recursion"),
    "nested deep, then taken for a shape": (one(shape=json.loads("[" * 400 + "]" * 400)), "not a list of integers"),
    "a name twice": (raw(b'{"a":%b,"a":%b}' % ((json.dumps(U8).encode(),) * 2), b"x"), "a key twice"),
    "a field twice": (raw(b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"), "a key twice"),
    "metadata twice": (raw(b'{"__metadata__":{},"__metadata__":{}}'), "a key twice"),
    "metadata key twice": (raw(b'{"__metadata__":{"a":"b","a":"c"}}'), "a key twice"),
    "half a surrogate pair": (raw(rb'{"\ud800":1}'), "surrogates"),
    "a number of 5000 digits": (raw(b'{"a":' + b"9" * 5000 + b"}"), "digits"),
    "metadata is a list": (raw({"__metadata__": []}), "does not map strings to strings"),
    "metadata of numbers": (raw({"__metadata__": {"a": 1}}), "does not map strings to strings"),
    "metadata of null": (raw({"__metadata__": {"a": None}}), "does not map strings to strings"),
    "tensor is null": (raw({"a": None}), "tensor 'a' is not a JSON object"),
    "tensor is a list": (raw({"a": ["U8", [], [0, 1]]}, b"x"), "tensor 'a' is not a JSON object"),
    "no dtype": (raw({"a": {"shape": [], "data_offsets": [0, 1]}}, b"x"), "unknown dtype None"),
    "no shape": (raw({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, b"x"), "shape that is not a list"),
    "no offsets": (raw({"a": {"dtype": "U8", "shape": []}}, b"x"), "data_offsets that is not a list"),
    "unknown dtype": (one(dtype="F128"), "tensor 'a' has the unknown dtype 'F128'"),
    "dtype in small letters": (one(dtype="u8"), "unknown dtype 'u8'"),
    "dtype is a list": (one(dtype=["U8"]), "unknown dtype"),
    "four bits": (one(dtype="F4", shape=[2]), "is F4, whose elements are smaller than a byte"),
    "six bits": (
        one(dtype="F6_E2M3", shape=[4], data_offsets=[0, 3]) + b"yz",
        "is F6_E2M3, whose elements are smaller",
    ),
    "six bits too": (
        one(dtype="F6_E3M2", shape=[4], data_offsets=[0, 3]) + b"yz",
        "is F6_E3M2, whose elements are smaller",
    ),
    "negative size": (one(shape=[-1]), "shape that is not a list of integers"),
    "two negative sizes": (one(shape=[-1, -1]), "shape that is not a list of integers"),
    "bool size": (one(shape=[True]), "shape that is not a list of integers"),
    "float size": (one(shape=[1.0]), "shape that is not a list of integers"),
    "text size": (one(shape=["1"]), "shape that is not a list of integers"),
    "size of 2^63": (one(shape=[0, 1 << 63], data_offsets=[0, 0])[:-1], "shape that is not a list of integers"),
    "size of 4000 digits": (one(shape=[10**4000]), "shape that is not a list of integers"),
    "shape is a number": (one(shape=1), "shape that is not a list of integers"),
    "product overflow": (one(shape=[HUGE, 4]), "overflows 64 bits"),
    "product overflow to 0": (one(shape=[HUGE, 4, 0], data_offsets=[0, 0])[:-1], "overflows 64 bits"),
    "product overflow to 1": (one(shape=[(1 << 32) + 1, (1 << 32) - 1]), "overflows 64 bits"),
    "bytes overflow": (one(dtype="F64", shape=[HUGE]), "overflows 64 bits"),
    "a long shape": (one(shape=[2] * 100_000), "overflows 64 bits"),
    "one offset": (one(data_offsets=[0]), r"not \[begin, end"),
    "three offsets": (one(data_offsets=[0, 1, 1]), r"not \[begin, end"),
    "end before begin": (one(data_offsets=[1, 0]), r"not \[begin, end"),
    "negative offset": (one(data_offsets=[-1, 0]), "data_offsets that is not a list of integers"),
    "bool offset": (one(data_offsets=[False, True]), "data_offsets that is not a list of integers"),
    "float offset": (one(data_offsets=[0.0, 1.0]), "data_offsets that is not a list of integers"),
    "fewer bytes than the shape": (one(shape=[2]), "has 1 bytes, but uint8 of shape .* takes 2"),
    "more bytes than the shape": (one(dtype="U8", shape=[0]), "has 1 bytes, but uint8 of shape .* takes 0"),
    "the dtype of another size": (one(dtype="F32"), "has 1 bytes, but float32 of shape .* takes 4"),
    "gap at the begin": (one(data_offsets=[1, 2]), "leaves a gap after the previous tensor"),
    "gap inside": (
        raw({"a": U8, "b": {**U8, "data_offsets": [2, 3]}}, b"xyz"),
        "'b' leaves a gap after the previous tensor",
    ),
    "overlap": (raw({"a": U8, "b": {**U8}}, b"x"), "'b' overlaps the previous tensor"),
    "overlap in part": (
        raw({"a": {**U8, "shape": [4], "data_offsets": [0, 4]}, "b": {**U8, "data_offsets": [3, 4]}}, b"wxyz"),
        "'b' overlaps the previous tensor",
    ),
    "an empty tensor inside another": (
        raw(
            {"a": {**U8, "shape": [2], "data_offsets": [0, 2]}, "b": {**U8, "shape": [0], "data_offsets": [1, 1]}},
            b"xy",
        ),
        "'b' overlaps the previous tensor",
    ),
    "an empty tensor far away": (one(shape=[0], data_offsets=[HUGE, HUGE]), "leaves a gap after the previous tensor"),
    "data cut off": (one()[:-1], r"truncated: \d+ bytes expected, \d+ found"),
    "trailing bytes": (one() + b"\0", "bytes that belong to no tensor"),
    "data of no tensor": (raw(b"{}", b"x"), "bytes that belong to no tensor"),
}

STRICTER = {"leading space", "a name twice", "metadata key twice", "tensor is a list", "size of 2^63"} | {
    label for label in HOSTILE if label.startswith(("four bits", "six bits"))
}
"""Files that the package accepts; `safetensors_format` explains why they are refused."""


def _read(folder: Path, data: bytes) -> SafetensorsHeader:
    path = folder / "x.safetensors"
    path.write_bytes(data)
    return header_of(path)


@pytest.mark.parametrize(("data", "what"), HOSTILE.values(), ids=HOSTILE)
def test_each_is_refused_by_name(data: bytes, what: str, tmp_path: Path) -> None:
    """Test that the error names file, problem and remedy, and stays short."""
    with pytest.raises(ForeignFileError, match=what) as caught:
        _read(tmp_path, data)
    assert isinstance(caught.value, InvalidInputError)
    assert caught.value.path == str(tmp_path / "x.safetensors")
    text = str(caught.value)
    assert text.startswith(caught.value.path)
    assert text.endswith(caught.value.remedy)
    assert len(caught.value.problem) < 500
    assert text.isprintable()


@pytest.mark.parametrize(("label", "data"), [(label, data) for label, (data, _) in HOSTILE.items()], ids=HOSTILE)
def test_safetensors_package_refuses_them_as_well(label: str, data: bytes) -> None:
    """Test that the package accepts only the listed exceptions."""
    if label == "four bits" and not package_accepts(data):
        pytest.skip("a release that does not know F4")
    assert package_accepts(data) == (label in STRICTER)


ACCEPTED = {
    "nothing": raw(b"{}"),
    "spaces as padding": raw(b"{}      "),
    "line breaks as padding": raw(b"{}\n\t\r"),
    "no metadata but null": raw(b'{"__metadata__":null}'),
    "an empty name": raw({"": U8}, b"x"),
    "a name with control characters": raw({"\0\n\x1b": U8}, b"x"),
    "an unknown field": one(more={"a": [1, None]}),
    "a name in escapes": raw(rb'{"\u00e9\ud83e\uddc0":{"dtype":"\u00558","shape":[],"data_offsets":[0,1]}}', b"x"),
    "metadata in escapes": raw(rb'{"__metadat\u0061__":{"a":"b"}}'),
    "tensors in another order": raw({"b": {**U8, "data_offsets": [1, 2]}, "a": U8}, b"xy"),
    "unaligned": raw({"a": U8, "b": {"dtype": "F64", "shape": [1], "data_offsets": [1, 9]}}, bytes(9)),
    "empty tensors between": raw(
        {
            "end": {**U8, "shape": [0], "data_offsets": [2, 2]},
            "all": {**U8, "shape": [2], "data_offsets": [0, 2]},
            "begin": {**U8, "shape": [3, 0], "data_offsets": [0, 0]},
        },
        b"xy",
    ),
    "large beside 0": one(shape=[0, HUGE, HUGE], data_offsets=[0, 0])[:-1],
}


@pytest.mark.parametrize("data", ACCEPTED.values(), ids=ACCEPTED)
def test_odd_but_sound_files_are_read(data: bytes, tmp_path: Path) -> None:
    """Test unusual valid files, which are read as by the package."""
    assert same_tensors(_read(tmp_path, data), data)


@contextlib.contextmanager
def traced() -> Iterator[list[int]]:
    """Measure the peak of Python's memory in a block, in bytes; the list contains it afterwards."""
    peak: list[int] = []
    tracemalloc.start()
    try:
        yield peak
    finally:
        peak.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


@pytest.mark.parametrize(
    "length", [4, 1 << 20, 100_000_000, 100_000_001, 1 << 40, (1 << 64) - 1], ids=lambda length: f"{length}"
)
def test_a_claimed_length_allocates_nothing(length: int, tmp_path: Path) -> None:
    """Test a claimed length in a short file, and in a long file without JSON."""
    short, long = tmp_path / "short", tmp_path / "long"
    short.write_bytes(struct.pack("<Q", length) + b"{}")
    long.write_bytes(struct.pack("<Q", length) + b" {}")
    os.truncate(long, 1 << 30)
    for path in (short, long):
        with traced() as peak, pytest.raises(ForeignFileError):
            header_of(path)
        assert peak[0] < 1 << 20


COSTLY = {
    "empty objects": b"{},",
    "empty lists": b"[],",
    "lists in lists": b"[[[[]]]],",
    "lists a hundred deep": b"[" * 100 + b"]" * 100 + b",",
    "objects a hundred deep": b'{"":' * 100 + b"0" + b"}" * 100 + b",",
    "small objects": b'{"":0},',
    "texts": b'"ab",',
    "numbers": b"1.5,",
}


@pytest.mark.slow(quick=["numbers"])
@pytest.mark.parametrize("filling", COSTLY.values(), ids=COSTLY)
def test_parsing_stays_within_the_stated_multiple(filling: bytes, tmp_path: Path) -> None:
    """Test the most expensive JSON, which needs at most 48 times its length."""
    text = b'{"a":[' + filling * (500_000 // len(filling)) + b"0]}"
    path = tmp_path / "x"
    path.write_bytes(raw(text))
    with traced() as peak, pytest.raises(ForeignFileError, match="not a JSON object"):
        header_of(path)
    assert len(text) < peak[0] < 48 * len(text)


def test_a_link_is_followed(tmp_path: Path) -> None:
    """Test that tensors have the path that was given."""
    (tmp_path / "x").write_bytes(one())
    (tmp_path / "link").symlink_to("x")
    assert [tensor.path for tensor in header_of(tmp_path / "link").tensors] == [tmp_path / "link"]


def test_non_files_are_refused(tmp_path: Path) -> None:
    """Test a folder and a pipe, without a wait; a missing or unreadable file has another error."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ForeignFileError, match=r"not a file|not a regular file"):
            header_of(path)
    with pytest.raises(NotFoundError, match="does not exist"):
        header_of(tmp_path / "missing")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageError, match=r"open .*loop"):
        header_of(tmp_path / "loop")


def test_file_that_shrinks_during_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a file that shrinks after its size was checked."""
    path = tmp_path / "x"
    path.write_bytes(one())
    real = os.fstat

    def cut_after(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        os.truncate(path, 20)
        return status

    monkeypatch.setattr(os, "fstat", cut_after)
    with pytest.raises(ForeignFileError, match="changed while it was read"):
        header_of(path)
