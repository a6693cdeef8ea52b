"""Test that both readers agree on changed trees and changed headers of manifests."""

import copy
import functools
import json
import random
import runpy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asymcheck.errors import FormatError
from asymcheck.format import tree
from asymcheck.format.manifest_reader import decode_manifest
from asymcheck.format.record import parse_json
from tests.spec.corpus import FORMAT_SPEC, vectors
from tools.vectors_manifest import manifest_path
from tools.vectors_manifest_invalid import ROWS, ROWS_HEADER, arrow_file, columns_of, header_bytes

SAVE_ID = ROWS_HEADER.ref.save_id.hex()
COLUMNS = columns_of(ROWS)
SIZES = [(1 << 63) - 1, 1 << 63, -(1 << 63), -(1 << 63) - 1]
NODES: list[object] = [
    *("\ud800", "a\nb", -0.0, 1 << 53, 1 << 63, {"a": 1}, ["v", "a\nb"], ["v", "a", "b"], ["z", [3]], ["o", []]),
    *(["c", "3ff0000000000000\n3ff0000000000000"], ["n", "float32\n0000803f"], ["i", "-0"], ["i", "\u0669" * 16]),
    *(["z", [["i", str(size)]]] for size in SIZES),
]
"""Values for changed trees, in addition to parts of the vectors."""
VALUES: list[object] = [
    *(None, True, 0, -1, 1, 2, 4, 3.0, 1 << 53, 1 << 64, 10**400, "", "a", "NaN", "\ud800", "\0", [], {}, [[0, 0]]),
    *("05", "5", "0 5", SAVE_ID, SAVE_ID.upper(), f"{SAVE_ID}\n", [SAVE_ID], {"kind": "a", "number": True}),
    *({"generation": generation, "step": 1, "save_id": SAVE_ID} for generation in (1, 3, 4)),
]
"""Values for changed headers."""


@functools.cache
def reader() -> dict[str, Any]:
    """Return the names of the reference reader."""
    return runpy.run_path(str(FORMAT_SPEC / "reference_reader.py"), run_name="reader")


def library_accepts(check: Callable[[], object]) -> bool:
    """Return whether the library accepts the input."""
    try:
        check()
    except FormatError:
        return False
    return True


def reference_accepts(*arguments: object) -> bool:
    """Return whether the reference reader accepts a structure."""
    try:
        reader()["check_file"](*arguments)
    except reader()["SpecError"]:
        return False
    return True


def tree_verdicts(text: bytes, rows: int) -> tuple[bool, bool]:
    """Return whether the library and the reference reader accept a tree."""
    library = library_accepts(lambda: tree.check(parse_json(text, "tree"), rows, "tree"))
    return library, reference_accepts("tree", text, "tree", rows)


def header_verdicts(text: bytes) -> tuple[bool, bool]:
    """Return whether they accept a manifest with this header, stored at the path of the usual header."""

    def check() -> None:
        manifest = decode_manifest(data, "manifest")
        tree.check(manifest.header.tree, len(manifest), "manifest")
        names = ("run", "ref", "rank", "world_size")
        if any(getattr(manifest.header, name) != getattr(ROWS_HEADER, name) for name in names):
            raise FormatError("another path")

    data = arrow_file(COLUMNS, text)
    return library_accepts(check), reference_accepts("manifest", data, manifest_path(data))


def wrapped(node: object, times: int) -> object:
    """Return a node inside so many lists."""
    for _ in range(times):
        node = ["l", [node]]
    return node


TREES = {
    "sizes at the last level": wrapped(["z", [3, ["i", str(1 << 60)]]], 63),
    "a number below the last level": wrapped(3, 64),
    "a key at the last level but one": wrapped(["d", [[["i", str(1 << 60)], None]]], 62),
    "a line feed in a device": ["v", "a\nb"],
    "two devices": ["v", "a", "b"],
    "a scalar in one string": ["n", "float32\n0000803f"],
    "a complex number in one string": ["c", "3ff0000000000000\n3ff0000000000000"],
    "a size that is no integer node": ["z", [["i", "5"]]],
    "a size of 2^63": ["z", [["i", str(1 << 63)]]],
    "half a pair of surrogates": "\ud800",
    "half a pair of surrogates in a key": ["d", [["\udfff", 1]]],
}
ACCEPTED = {"sizes at the last level", "a key at the last level but one", "a line feed in a device"}


@pytest.mark.parametrize("name", TREES)
def test_both_say_the_same_of_a_tree(name: str) -> None:
    """Test trees at the limits of the rules."""
    assert tree_verdicts(json.dumps(TREES[name]).encode(), 0) == (name in ACCEPTED, name in ACCEPTED)


def header_text(key: str, value: object) -> bytes:
    """Return the header of a valid manifest with another value under a key."""
    return header_bytes(**{key: value})


_LARGEST = int(float.fromhex("0x1.fffffffffffffp+1023"))
HEADERS = {
    "a key twice, with one value": header_bytes()[:-1] + b',"step":1200}',
    "a metric twice": header_bytes().replace(b'"loss":3.25', b'"loss":3.25,"loss":3.25'),
    "half a pair of surrogates": header_text("writer", "\ud800"),
    "half a pair of surrogates under a further key": header_text("more", [{"\ud800": 1}]),
    "an integer that rounds to the largest binary64": header_text("metrics", {"loss": _LARGEST + 1}),
    "an integer that rounds to no binary64": header_text("metrics", {"loss": 2 * _LARGEST}),
}


@pytest.mark.parametrize("name", HEADERS)
def test_both_say_the_same_of_a_header(name: str) -> None:
    """Test headers at the limits of the rules."""
    good = name == "an integer that rounds to the largest binary64"
    assert header_verdicts(HEADERS[name]) == (good, good)


def places(value: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 - any JSON
    """Return every position in a JSON value: the list or object, and the index or key."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def changed(value: object, choices: list[object], numbers: random.Random) -> object:
    """Return a JSON value with a part removed, inserted, doubled or replaced by one of the choices."""
    value = copy.deepcopy(value)
    found = list(places(value))
    other = copy.deepcopy(numbers.choice(choices))
    if not found:
        return other
    where, key = numbers.choice(found)
    act = numbers.random()
    if act < 0.15:
        del where[key]
    elif act < 0.6 or isinstance(where, dict):
        where[key] = other
    else:
        where.insert(key, other if act < 0.9 else copy.deepcopy(where[key]))
    return value


@pytest.mark.slow
def test_both_say_the_same_of_changed_trees() -> None:
    """Test vectors of trees with several changes."""
    numbers = random.Random(7)
    sound = [(json.loads(vector.data), vector.facts["rows"]) for vector in vectors("tree")]
    choices = NODES + [
        part
        for node, _ in sound
        for part in [node, *(where[key] for where, key in places(node))]
        if len(json.dumps(part)) < 400
    ]
    accepted = 0
    for _ in range(6000):
        node, rows = numbers.choice(sound)
        for _ in range(numbers.randint(1, 3)):
            node = changed(node, choices, numbers)
        text = json.dumps(wrapped(node, numbers.choice([0, 0, 1, 62, 63]))).encode()
        library, reference = tree_verdicts(text, rows)
        assert library == reference, text[:300]
        accepted += library
    assert 500 < accepted < 5500


@pytest.mark.slow
def test_both_say_the_same_of_changed_headers() -> None:
    """Test headers of manifests with several changes."""
    numbers = random.Random(8)
    sound = json.loads(
        header_bytes(store_ranks=[[0, 0]], elsewhere="05", merged={"a": 1}, metrics={"a": 1, "b": "NaN", "c": 2.5})
    )
    accepted = 0
    for _ in range(1000):
        header = sound
        for _ in range(numbers.randint(1, 2)):
            header = changed(header, VALUES, numbers)
        library, reference = header_verdicts(json.dumps(header).encode())
        assert library == reference, json.dumps(header)
        accepted += library
    assert 30 < accepted < 970
