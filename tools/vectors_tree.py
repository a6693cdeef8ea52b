"""Vectors of the tree of plain values (SPEC.md §A9).

The decoded value is an object with one key, the kind of value. Floats are written as their bits, bytes in hexadecimal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from asymcheck.format.record import canonical_json
from asymcheck.format.tree import Node, encode_integer, encode_plain
from tools.vectors_base import Vector, fixed_bytes, invalid, valid
from tools.vectors_typed import typed_vectors

Value = dict[str, object]
"""A value in the layout of vectors: ``{"int": "5"}``, ``{"list": [...]}``, …"""


def _plain(value: object) -> tuple[Node, Value]:
    """Return node and description of a plain value."""
    node = encode_plain(value)
    if value is None:
        return node, {"none": None}
    if isinstance(value, bool):
        return node, {"bool": value}
    if isinstance(value, int):
        return node, {"int": _decimal(value)}
    if isinstance(value, str):
        return node, {"str": value}
    if isinstance(value, bytes):
        return node, {"bytes": value.hex()}
    assert isinstance(node, list)
    return node, {"float": node[1]} if isinstance(value, float) else {"complex": node[1:]}


def _decimal(value: int) -> str:
    """Return the digits of an integer of any size, because Python refuses to print more than 4300."""
    digits = ""
    rest = abs(value)
    while rest >= 10**1000:
        rest, low = divmod(rest, 10**1000)
        digits = f"{low:01000d}{digits}"
    return ("-" if value < 0 else "") + str(rest) + digits


def tree_vectors() -> Iterator[Vector]:
    """Yield every vector of a tree."""
    yield from _plain_values()
    yield from _containers()
    yield from _leaves()
    yield from typed_vectors()
    yield from _broken_plain()
    yield from _broken_containers()
    yield from _broken_leaves()


def _tree(name: str, node: Node, value: Value, why: str, rows: int = 0, **more: object) -> Vector:
    return valid("tree", name, canonical_json(node), why, value, rows=rows, **more)


def _plain_values() -> Iterator[Vector]:
    for name, value, why in (
        ("none", None, "null"),
        ("true", True, "a boolean is no integer"),
        ("false", False, "a boolean is no integer"),
        ("zero", 0, "an integer"),
        ("integer", -1200, "a negative integer"),
        ("integer-largest", (1 << 53) - 1, "the largest integer that is a JSON number"),
        ("integer-smallest", 1 - (1 << 53), "the smallest integer that is a JSON number"),
        ("big-smallest", 1 << 53, "the first integer that a binary64 JSON parser could change"),
        ("big-negative", -(1 << 53), "the same below zero"),
        ("big-200-bits", -(1 << 200) - 1, "an integer of 200 bits"),
        ("big-5000-digits", 10**5000 + 7, "more digits than Python converts at once"),
        ("big-most-digits", 1 - 10**65536, "as many digits as there may be; the sign is none"),
        ("string-empty", "", "a string of no characters"),
        ("string-like-tag", "T", "a string that looks like a tag is a string"),
        ("string-unicode", 'Käse "\U0001f9c0"\\\n\0\x7f\u2028', "quotes, control characters, beyond the basic plane"),
        ("float", 0.1, "the nearest binary64 to a tenth"),
        ("float-minus-zero", -0.0, "the sign of zero is kept"),
        ("float-denormal", 5e-324, "the smallest binary64"),
        ("float-infinity", float("inf"), "an infinity"),
        ("float-nan", float("nan"), "the usual NaN"),
        ("complex", complex(1.5, -0.0), "both parts with their signs"),
        ("bytes-empty", b"", "no bytes"),
        ("bytes", bytes(range(256)), "every byte"),
        ("bytes-padded", fixed_bytes("bytes", 4), "base64 with two signs of padding"),
    ):
        node, described = _plain(value)
        yield _tree(name, node, described, why)
    bits = "fff8000000000123"
    yield _tree("float-nan-payload", ["f", bits], {"float": bits}, "the bits of a NaN are kept")


def _containers() -> Iterator[Vector]:
    one, a = {"int": "1"}, {"str": "a"}
    yield _tree("list-empty", ["l", []], {"list": []}, "an empty list")
    yield _tree("list", ["l", [1, "a"]], {"list": [one, a]}, "a list")
    yield _tree("tuple-empty", ["t", []], {"tuple": []}, "an empty tuple")
    yield _tree("tuple", ["t", [1, ["l", ["a"]]]], {"tuple": [one, {"list": [a]}]}, "a list in a tuple")
    yield _tree("dict-empty", ["d", []], {"dict": []}, "an empty mapping")
    yield _tree("dict", ["d", [["b", 1], ["a", "a"]]], {"dict": [[{"str": "b"}, one], [a, a]]}, "the order is kept")
    big = 1 << 60
    pairs = [[encode_integer(key), None] for key in (0, -1, big)]
    pairs.append(["0", None])
    keys = [[{"int": str(key)}, {"none": None}] for key in (0, -1, big)]
    keys.append([{"str": "0"}, {"none": None}])
    yield _tree("dict-integer-keys", ["d", pairs], {"dict": keys}, "the key 0 is not the key '0'")
    empty_key = [["", 1], ["\u00e4.\U0001f9c0", 1]]
    described = [[{"str": ""}, one], [{"str": "\u00e4.\U0001f9c0"}, one]]
    yield _tree("dict-string-keys", ["d", empty_key], {"dict": described}, "any string can be a key")
    yield _tree("ordered", ["o", [["b", 1], ["a", 1]]], {"ordered": [[{"str": "b"}, one], [a, one]]}, "an OrderedDict")
    version = ["d", [["", ["d", [["version", 1]]]]]]
    metadata: Value = {"dict": [[{"str": ""}, {"dict": [[{"str": "version"}, one]]}]]}
    module: Value = {"module": {"items": [[{"str": "weight"}, {"tensor": 0}]], "metadata": metadata}}
    yield _tree("module", ["m", [["weight", ["T", 0]]], version], module, "a module's state with its versions", rows=1)
    nothing: Value = {"module": {"items": [], "metadata": {"none": None}}}
    # asymcheck writes such a mapping as an OrderedDict.
    yield _tree("module-no-metadata", ["m", [], None], nothing, "metadata that is null", read_only=True)
    node: Node = 7
    value: Value = {"int": "7"}
    for _ in range(63):
        node, value = ["l", [node]], {"list": [value]}
    yield _tree("depth-64", node, value, "the root has depth 1, the number 64")


def _leaves() -> Iterator[Vector]:
    yield _tree("tensor", ["T", 0], {"tensor": 0}, "the whole state is one tensor", rows=1)
    yield _tree("array", ["N", 0], {"array": 0}, "the whole state is one numpy array", rows=1)
    tied = ["l", [["T", 0], ["T", 1], ["T", 0]]]
    yield _tree("tied", tied, {"list": [{"tensor": 0}, {"tensor": 1}, {"tensor": 0}]}, "row 0 is tied", rows=2)
    both = ["l", [["T", 0], ["N", 1]]]
    yield _tree("tensor-and-array", both, {"list": [{"tensor": 0}, {"array": 1}]}, "both kinds of rows", rows=2)
    yield _tree("size-empty", ["z", []], {"size": []}, "the shape of a scalar")
    yield _tree("size", ["z", [2, 0, 3]], {"size": ["2", "0", "3"]}, "a tensor's shape as a value")
    yield _tree("size-negative", ["z", [-1, 2]], {"size": ["-1", "2"]}, "an argument of reshape is such a value too")
    large = ["z", [["i", str(1 << 62)]]]
    yield _tree("size-large", large, {"size": [str(1 << 62)]}, "integers of a shape are integer nodes")
    for dtype, data in (("float32", "0000803f"), ("bool", "01"), ("int64", "ff" * 8), ("complex128", "00" * 16)):
        yield _tree(f"scalar-{dtype}", ["n", dtype, data], {"scalar": [dtype, data]}, "a numpy scalar, little-endian")
    for dtype in ("float32", "bfloat16", "bool"):
        yield _tree(f"dtype-{dtype}", ["y", dtype], {"dtype": dtype}, "a dtype as a value")
    for device in ("cpu", "cuda:0", "meta"):
        yield _tree(f"device-{device.replace(':', '-')}", ["v", device], {"device": device}, "a device as a value")


def _broken(name: str, node: Node, why: str, kind: str = "bad-structure", rows: int = 0) -> Vector:
    text = node if isinstance(node, bytes) else json.dumps(node, separators=(",", ":")).encode("ascii")
    return invalid("tree", name, text, kind, why, rows=rows)


def _broken_plain() -> Iterator[Vector]:
    for name, node, why in (
        ("number-fraction", 1.5, "a JSON number with a fraction: floats are written as bits"),
        ("number-exponent", b"1e3", "a JSON number with an exponent"),
        ("number-large", 1 << 53, "a plain integer of 2^53"),
        ("number-small", -(1 << 53), "a plain integer of -2^53"),
        ("object", {"a": 1}, "a JSON object is no node"),
        ("array-empty", [], "an array without a tag"),
        ("tag-number", [1, 2], "a tag that is no string"),
        ("tag-unknown", ["P", "os.system"], "an unknown tag"),
        ("tag-array", [["l", []]], "a tag that is an array"),
        ("big-number", ["i", 1 << 53], "digits that are no string"),
        ("big-small", ["i", "12"], "an integer that is a JSON number must be written as one"),
        ("big-limit", ["i", str((1 << 53) - 1)], "the same at the limit"),
        ("big-zeros", ["i", "009007199254740992"], "leading zeros"),
        ("big-plus", ["i", "+9007199254740992"], "a plus sign"),
        ("big-two-signs", ["i", "--9007199254740992"], "two signs"),
        ("big-space", ["i", " 9007199254740992"], "a space"),
        ("big-underscore", ["i", "9_007_199_254_740_992"], "underscores between the digits"),
        ("big-other-digits", ["i", "\u0669007199254740992"], "a digit that is not ASCII"),
        ("big-empty", ["i", ""], "no digits"),
        ("big-more", ["i", str(1 << 53), 0], "an argument too many"),
        ("float-short", ["f", "3ff00000000000"], "14 digits"),
        ("float-upper", ["f", "3FF0000000000000"], "digits in upper case"),
        ("float-number", ["f", 1], "bits that are no string"),
        ("float-not-hex", ["f", "3ff000000000000g"], "a letter that is no digit"),
        ("float-spaces", ["f", "3ff0 0000 00000 "], "spaces among the digits"),
        ("float-bare", ["f"], "no argument"),
        ("complex-one", ["c", "3ff0000000000000"], "one part"),
        ("complex-three", ["c", *["3ff0000000000000"] * 3], "three parts"),
        ("bytes-not-base64", ["b", "a*b="], "a sign that base64 lacks"),
        ("bytes-unpadded", ["b", "AAA"], "padding is missing"),
        ("bytes-line-feed", ["b", "AAAA\nAAAA"], "a line feed"),
        ("bytes-url-safe", ["b", "-_-_"], "the other alphabet"),
        ("bytes-not-canonical", ["b", "AB=="], "bits that belong to no byte are not zero"),
        ("bytes-number", ["b", 1234], "a number that would pass for base64"),
        ("string-surrogate", b'"\\ud800"', "half of a pair of surrogates has no UTF-8 form"),
    ):
        yield _broken(name, node, why)


def _broken_containers() -> Iterator[Vector]:
    deep: Node = 7
    for _ in range(64):
        deep = ["l", [deep]]
    yield _broken("depth-65", deep, "the number has depth 65", "limit-exceeded")
    keyed: Node = 7
    for _ in range(64):
        keyed = ["m", [], keyed]
    yield _broken("depth-metadata", keyed, "metadata counts as a level", "limit-exceeded")
    big = str(1 << 60)
    many = ["i", "1" + "0" * 65536]
    yield _broken("big-too-many-digits", many, "an integer of 65537 digits", "limit-exceeded")
    yield _broken("key-too-many-digits", ["d", [[many, 1]]], "a key of 65537 digits", "limit-exceeded")
    for name, node, why in (
        ("list-object", ["l", {}], "items that are no array"),
        ("list-spread", ["l", 1, 2], "items that are not in an array of their own"),
        ("tuple-bare", ["t"], "no items"),
        ("dict-object", ["d", {"a": 1}], "pairs that are no array"),
        ("dict-pair-of-one", ["d", [["a"]]], "a pair of one"),
        ("dict-pair-of-three", ["d", [["a", 1, 2]]], "a pair of three"),
        ("dict-pair-string", ["d", ["ab"]], "a string of two characters is no pair"),
        ("dict-key-null", ["d", [[None, 1]]], "a key that is null"),
        ("dict-key-true", ["d", [[True, 1]]], "a key that is true"),
        ("dict-key-float", ["d", [[["f", "3ff0000000000000"], 1]]], "a key that is a float"),
        ("dict-key-fraction", ["d", [[1.5, 1]]], "a key that is a JSON fraction"),
        ("dict-key-large", ["d", [[1 << 53, 1]]], "a key of 2^53 that is a JSON number"),
        ("dict-key-list", ["d", [[["l", []], 1]]], "a key that is a list"),
        ("dict-key-twice", ["d", [["a", 1], ["a", 2]]], "a string key twice"),
        ("dict-number-twice", ["d", [[1, 1], [1, 2]]], "an integer key twice"),
        ("dict-big-twice", ["d", [[["i", big], 1], [["i", big], 2]]], "a big integer key twice"),
        ("ordered-key-twice", ["o", [["a", 1], ["a", 2]]], "a key of an ordered mapping twice"),
        ("ordered-metadata", ["o", [], None], "metadata of a mapping that has none"),
        ("module-bare", ["m", []], "a module's state without metadata"),
        ("module-key-twice", ["m", [["a", 1], ["a", 2]], None], "a key of a module's state twice"),
        ("module-metadata", ["m", [], {}], "metadata that is no node"),
        ("key-surrogate", b'["d",[["\\udfff",1]]]', "a key that has no UTF-8 form"),
    ):
        yield _broken(name, node, why)


def _broken_leaves() -> Iterator[Vector]:
    for name, node, rows, why in (
        ("row-range", ["T", 1], 1, "row 1 of 1"),
        ("row-none", ["T", 0], 0, "row 0 of 0"),
        ("row-negative", ["l", [["T", 0], ["T", -1]]], 1, "row -1"),
        ("row-true", ["T", False], 1, "false is not row 0"),
        ("row-string", ["T", "0"], 1, "a row that is a string"),
        ("row-float", ["T", 0.0], 1, "a row that is a JSON fraction"),
        ("row-huge", ["T", 1 << 70], 1, "a row beyond every integer type"),
        ("row-big", ["T", ["i", str(1 << 60)]], 1, "a row is never so big"),
        ("row-bare", ["T"], 1, "no row"),
        ("row-unnamed", ["T", 0], 2, "row 1 is in no node"),
        ("rows-unnamed", None, 3, "no row is in a node"),
        ("array-range", ["N", 1], 1, "row 1 of 1"),
        ("size-string", ["z", ["1"]], 0, "a dimension that is a string"),
        ("size-float", ["z", [1.0]], 0, "a dimension that is a JSON fraction"),
        ("size-true", ["z", [True]], 0, "true is no dimension"),
        ("size-large", ["z", [1 << 53]], 0, "a dimension of 2^53 that is a JSON number"),
        ("size-2-63", ["z", [["i", str(1 << 63)]]], 0, "a dimension that no shape can have"),
        ("size-spread", ["z", 1, 2], 0, "dimensions that are not in an array of their own"),
        ("scalar-dtype", ["n", "float128", "00" * 16], 0, "a dtype that the registry lacks"),
        ("scalar-size", ["n", "float32", "000080"], 0, "3 bytes for 4"),
        ("scalar-upper", ["n", "float32", "0000803F"], 0, "digits in upper case"),
        ("scalar-list", ["n", ["float32"], "0000803f"], 0, "a dtype that is no string"),
        ("dtype-unknown", ["y", "float128"], 0, "a dtype that the registry lacks"),
        ("dtype-list", ["y", ["float32"]], 0, "a dtype that is no string"),
        ("device-number", ["v", 0], 0, "a device that is no string"),
    ):
        yield _broken(name, node, why, rows=rows)
