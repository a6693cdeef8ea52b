"""Test that any bytes are a valid header or a ForeignFileError, as for the `safetensors` package."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.convert.safetensors_format import DTYPE_TAGS, SafetensorsHeader, encode_header
from asymcheck.errors import ForeignFileError
from tests.convert.files import U8, byte_tensor, header_of, package_accepts, raw, same_tensors
from tests.convert.test_safetensors_format import SUB_BYTE, new

ROUNDS = 1_500
"""Number of changed files for each seed."""

SEEDS = [
    raw(b"{}"),
    raw(b'{"__metadata__":{"format":"pt","a":"b"}}   '),
    raw({"a": U8, "b": {"dtype": "F32", "shape": [2, 1], "data_offsets": [1, 9]}}, bytes(9)),
    raw({"a": {**U8, "shape": [0, 3], "data_offsets": [0, 0]}, "b": {**U8, "more": [[{}]]}}, b"x"),
    encode_header([new("w", "bfloat16", (2, 3)), byte_tensor("é\n", 3)], {"k": "v"})[0] + bytes(15),
]

PIECES = [
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"0", b"-", b"1", b".", b"e", b"\\", b" ", b"null", b"true", b"\xff"),
    *(b'"a"', b'"b"', b'"__metadata__"', b'"dtype"', b'"shape"', b'"data_offsets"', b'"U8"', b'"F4"'),
    b"9223372036854775808",
]


def _read(path: Path, data: bytes) -> SafetensorsHeader | None:
    path.write_bytes(data)
    try:
        return header_of(path)
    except ForeignFileError:
        return None


def _why_stricter(data: bytes) -> str | None:
    """Return the documented exception for a file that only the package accepts."""
    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    twice = []

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        twice.append(len(dict(pairs)) < len(pairs))
        return dict(pairs)

    header = json.loads(text, object_pairs_hook=unique)
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    if any(twice):
        return "a key twice"
    if not text.startswith(b"{"):
        return "a leading space"
    if any(isinstance(entry, list) for entry in entries):
        return "a tensor as a list"
    if any(size >= 1 << 63 for entry in entries for size in entry["shape"]):
        return "a size of 2^63"
    return "less than a byte" if any(entry["dtype"] in SUB_BYTE for entry in entries) else None


def _is_harmless_spelling(data: bytes) -> bool:
    """Return whether a file that only the package refuses has -0, or a number beyond a float."""
    return b"-0" in data or b"e" in data.replace(b"true", b"").replace(b"dtype", b"").replace(b"shape", b"")


def _judge(path: Path, data: bytes) -> str:
    """Compare with the package; return which of the two accepted the file."""
    ours, theirs = _read(path, data), package_accepts(data)
    if ours is not None and theirs:
        assert same_tensors(ours, data)
        return "both"
    if theirs:
        assert _why_stricter(data), data
        return "the package"
    if ours is not None:
        assert _is_harmless_spelling(data), data
        return "we"
    return "none"


def _change(data: bytes, dice: random.Random) -> bytes:
    """Change one to three positions of header or length; usually correct the length."""
    text, rest = data[8 : 8 + data[0]], data[8 + data[0] :]
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(text) + 1)
        match dice.randrange(5):
            case 0:
                text = text[:at] + bytes([dice.randrange(256)]) + text[at + 1 :]
            case 1:
                text = text[:at] + text[at + dice.randint(1, 8) :]
            case 2:
                text = text[:at] + dice.choice(PIECES) + text[at:]
            case 3:
                text = text[:at] + dice.choice(PIECES) + text[at + 1 :]
            case _:
                start = dice.randrange(len(text) + 1)
                text = text[:at] + text[start : start + dice.randint(1, 40)] + text[at:]
    changed = raw(text, rest)
    if dice.random() < 0.1:
        at = dice.randrange(8)
        changed = changed[:at] + bytes([dice.randrange(256)]) + changed[at + 1 :]
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(SEEDS)))
def test_changed_headers(seed: int, scratch: Path) -> None:
    """Test thousands of changed files: equal results, or a ForeignFileError, and both occur."""
    dice, seen = random.Random(seed), dict.fromkeys(("both", "the package", "we", "none"), 0)
    for _ in range(ROUNDS):
        seen[_judge(scratch / "changed", _change(SEEDS[seed], dice))] += 1
    assert seen["both"] >= ROUNDS // 400
    assert seen["none"] >= ROUNDS // 4


sizes = st.integers(0, 4) | st.sampled_from([-1, True, 1.0, None, "1", 1 << 62, 1 << 63, 1 << 64])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_TAGS.values(), *SUB_BYTE]) | st.sampled_from(["", "F128", None, 1]),
        "shape": st.lists(sizes, max_size=3) | sizes,
        "data_offsets": st.lists(st.integers(0, 8), min_size=2, max_size=2).map(sorted) | st.lists(sizes, max_size=3),
    },
    optional={"more": st.none() | st.lists(st.none())},
)
headers = st.dictionaries(
    st.sampled_from(["a", "b", "", "__metadata__"]), entries | st.dictionaries(st.text(max_size=2), st.text(max_size=2))
)


@given(header=headers, length=st.integers(0, 16))
def test_headers_of_sound_json(scratch: Path, header: object, length: int) -> None:
    """Test any entries and any length of the data."""
    _judge(scratch / "built", raw(header, bytes(length)))


@given(
    tensors=st.lists(st.tuples(st.sampled_from(sorted(DTYPE_TAGS)), st.integers(0, 3)), max_size=4),
    dice=st.randoms(use_true_random=False),
)
def test_sound_files_in_any_order(scratch: Path, tensors: list[tuple[str, int]], dice: random.Random) -> None:
    """Test files with contiguous tensors in any order and alignment."""
    header, end = {}, 0
    for i, (dtype, size) in enumerate(tensors):
        nbytes = new("", dtype, (size,)).nbytes
        header[f"t{i}"] = {"dtype": DTYPE_TAGS[dtype], "shape": [size], "data_offsets": [end, end + nbytes]}
        end += nbytes
    names = dice.sample(sorted(header), len(header))
    data = raw({name: header[name] for name in names}, bytes(range(end)))
    assert _judge(scratch / "ordered", data) == "both"


@given(data=st.binary(max_size=64))
def test_any_bytes(scratch: Path, data: bytes) -> None:
    """Test random bytes, which are rarely a file, and never another error."""
    _judge(scratch / "bytes", data)
