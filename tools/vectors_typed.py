"""Vectors of typed values in a tree (SPEC.md §A9)."""

from __future__ import annotations

import json
from collections.abc import Iterator

from asymcheck.format.record import canonical_json
from asymcheck.format.tree import Node
from tools.vectors_base import Vector, invalid, valid

Value = dict[str, object]
Parameter = str | int | None

_ONE: Value = {"int": "1"}
_NONE: Value = {"none": None}
_NOON = "12:00:00"


def typed_vectors() -> Iterator[Vector]:
    """Yield every vector of a typed value."""
    yield from _containers()
    yield from _texts()
    yield from _tuples()
    yield from _generators()
    yield from _broken()


def _typed(
    name: str, kind: str, parameter: Parameter, content: Node, value: Value, why: str, rows: int = 0, **more: object
) -> Vector:
    node = canonical_json(["x", kind, parameter, content])
    described = {"typed": {"type": kind, "parameter": parameter, "content": value}}
    return valid("tree", name, node, why, described, rows=rows, **more)


def _containers() -> Iterator[Vector]:
    pairs: Node = ["d", [["a", 1]]]
    fields: Value = {"dict": [[{"str": "a"}, _ONE]]}
    yield _typed("defaultdict", "defaultdict", "list", pairs, fields, "a builtin type makes missing values")
    yield _typed("defaultdict-no-factory", "defaultdict", None, pairs, fields, "no factory")
    inner: Node = ["d", [["b", ["x", "defaultdict", "int", pairs]]]]
    part: Value = {"typed": {"type": "defaultdict", "parameter": "int", "content": fields}}
    nested: Value = {"dict": [[{"str": "b"}, part]]}
    yield _typed("defaultdict-nested", "defaultdict", "dict", inner, nested, "a typed value in a typed value")
    both: Node = ["l", [["T", 0], ["T", 1]]]
    tensors: Value = {"list": [{"tensor": 0}, {"tensor": 1}]}
    yield _typed("deque", "deque", 2, both, tensors, "a full queue of tensors", rows=2)
    yield _typed("deque-unbounded", "deque", None, ["l", []], {"list": []}, "a queue without a limit")
    yield _typed("deque-of-nothing", "deque", 0, ["l", []], {"list": []}, "a queue that takes no item")
    yield _typed("namedtuple", "namedtuple", "Pair", pairs, fields, "the fields of a named tuple")
    tensor: Value = {"dict": [[{"str": "weight"}, {"tensor": 0}]]}
    yield _typed("dataclass", "dataclass", "Averages", ["d", [["weight", ["T", 0]]]], tensor, "a field is a tensor", 1)
    yield _typed("enum", "enum", "Level.LOW", 1, _ONE, "a member with its value")
    items = ['"', 1, None, False, ["f", "3ff8000000000000"], ["n", "int8", "02"], ["t", [1]]]
    described = [{"str": '"'}, _ONE, _NONE, {"bool": False}, {"float": "3ff8000000000000"}, {"scalar": ["int8", "02"]}]
    described.append({"tuple": [_ONE]})
    order = sorted(zip(map(canonical_json, items), items, described, strict=True), key=lambda row: row[0])
    node = ["t", [row[1] for row in order]]
    value: Value = {"tuple": [row[2] for row in order]}
    yield _typed("set", "set", None, node, value, "items in the order of their JSON")
    empty: Value = {"typed": {"type": "frozenset", "parameter": None, "content": {"tuple": []}}}
    node = ["t", [["x", "frozenset", None, ["t", []]]]]
    member: Node = ["x", "enum", "Level.LOW", 1]
    pair: Node = ["t", [["t", [member, 1]], member]]
    low: Value = {"typed": {"type": "enum", "parameter": "Level.LOW", "content": _ONE}}
    members: Value = {"tuple": [{"tuple": [low, _ONE]}, low]}
    yield _typed("set-of-members", "set", None, pair, members, "members of enumerations, one of them in a tuple")
    yield _typed("frozenset", "frozenset", None, node, {"tuple": [empty]}, "a set in a set")


def _texts() -> Iterator[Vector]:
    for name, kind, parameter, text, why in (
        ("path", "path", "posix", "runs/\u00e4", "a path that can be opened"),
        ("path-windows", "pure-path", "windows", "C:\\runs", "the path of another system"),
        ("date", "date", None, "2024-02-29", "a leap day"),
        ("time", "time", None, "23:59:59.000001", "a time without a zone"),
        ("time-fold", "time", 1, "02:30:00", "the second of two equal times"),
        ("datetime", "datetime", None, "2026-11-26T12:00:00+00:00", "a time in UTC"),
        ("datetime-offset", "datetime", 1, "0001-01-01T00:00:00-23:59:59.999999", "the largest offset"),
    ):
        yield _typed(name, kind, parameter, text, {"str": text}, why)


def _tuples() -> Iterator[Vector]:
    big = ["i", str(1 << 60)]
    least = [-999999999, 0, 999999]
    described: Value = {"tuple": [{"int": str(item)} for item in least]}
    yield _typed("timedelta", "timedelta", None, ["t", least], described, "the first day")
    items: list[Value] = [{"int": "0"}, {"int": str(1 << 60)}, {"int": "-1"}]
    yield _typed("range", "range", None, ["t", [0, big, -1]], {"tuple": items}, "an integer of any size")
    yield _typed("slice", "slice", None, ["t", [None, 1, None]], {"tuple": [_NONE, _ONE, _NONE]}, "parts may be absent")


def _generators() -> Iterator[Vector]:
    # No generator accepts such a state, but the form is right.
    opaque = {"read_only": True}
    yield _typed("torch-generator", "torch-generator", "cpu", ["T", 0], {"tensor": 0}, "a generator", 1, **opaque)
    yield _typed("device-generator", "device-generator", "cuda", ["T", 0], {"tensor": 0}, "of a device", 1, **opaque)
    rows: Node = ["l", [["T", 0], ["T", 1]]]
    both: Value = {"list": [{"tensor": 0}, {"tensor": 1}]}
    yield _typed("nested-jagged", "nested-tensor", "jagged", rows, both, "values and offsets", 2, **opaque)
    rows, both = ["l", [["T", 0], ["T", 1], ["T", 1]]], {"list": [{"tensor": 0}, {"tensor": 1}, {"tensor": 1}]}
    yield _typed("nested-lengths", "nested-tensor", "jagged", rows, both, "lengths, too", 2, **opaque)
    rows, both = ["l", [["T", 0]]], {"list": [{"tensor": 0}]}
    yield _typed("nested-strided", "nested-tensor", "strided", rows, both, "one component", 1, **opaque)
    state: Node = ["d", [["bit_generator", "MT19937"], ["state", ["d", [["key", ["N", 0]], ["pos", 1]]]]]]
    inner: Value = {"dict": [[{"str": "key"}, {"array": 0}], [{"str": "pos"}, _ONE]]}
    value: Value = {"dict": [[{"str": "bit_generator"}, {"str": "MT19937"}], [{"str": "state"}, inner]]}
    yield _typed("numpy-generator", "numpy-generator", "MT19937", state, value, "a generator", 1, **opaque)
    gauss: Node = ["t", [3, ["N", 0], ["f", "3ff8000000000000"]]]
    parts: Value = {"tuple": [{"int": "3"}, {"array": 0}, {"float": "3ff8000000000000"}]}
    yield _typed("python-random", "python-random", None, gauss, parts, "a generator", 1, **opaque)


def _broken() -> Iterator[Vector]:
    unknown = ["x", "object", "os.system", "true"]
    yield _refused("type-unknown", unknown, "a type that the registry lacks", kind="unsupported-feature")
    deep: Node = 7
    for _ in range(64):
        deep = ["x", "enum", "A.B", deep]
    yield _refused("depth-typed", deep, "the content is one level deeper", kind="limit-exceeded")
    for name, node, why in (
        ("type-number", ["x", 1, None, 1], "a type that is no string"),
        ("typed-bare", ["x", "set", None], "no content"),
        ("typed-more", ["x", "enum", "A.B", 1, 1], "an argument too many"),
        ("factory-other", ["x", "defaultdict", "eval", ["d", []]], "a factory that is not listed"),
        ("factory-list", ["x", "defaultdict", ["int"], ["d", []]], "a factory that is no string"),
        ("factory-ordered", ["x", "defaultdict", "int", ["o", []]], "content of another kind"),
        ("deque-full", ["x", "deque", 1, ["l", [1, 2]]], "more items than the largest number"),
        ("deque-negative", ["x", "deque", -1, ["l", []]], "a negative number of items"),
        ("deque-true", ["x", "deque", True, ["l", [1]]], "true is no number"),
        ("deque-large", ["x", "deque", 1 << 53, ["l", []]], "too large a number"),
        ("deque-tuple", ["x", "deque", None, ["t", []]], "content of another kind"),
        ("set-order", ["x", "set", None, ["t", [2, 1]]], "items out of order"),
        ("set-twice", ["x", "set", None, ["t", [1, 1]]], "an item twice"),
        ("set-of-list", ["x", "set", None, ["t", [["l", []]]]], "a list is no item"),
        ("set-of-tuple", ["x", "set", None, ["t", [["t", [["d", []]]]]]], "an item contains a mapping"),
        ("set-of-sets", ["x", "set", None, ["t", [["x", "set", None, ["t", []]]]]], "a set is no item"),
        (
            "set-of-member",
            ["x", "set", None, ["t", [["x", "enum", "A.B", ["l", []]]]]],
            "a member whose value is no item",
        ),
        ("set-parameter", ["x", "set", 1, ["t", []]], "a parameter that is not null"),
        ("fields-number", ["x", "dataclass", "A", ["d", [[1, 1]]]], "a field whose name is no string"),
        ("fields-class", ["x", "namedtuple", None, ["d", []]], "no name of the class"),
        ("enum-number", ["x", "enum", 1, 1], "a member without a name"),
        ("path-number", ["x", "path", "posix", 1], "a path that is no string"),
        ("path-system", ["x", "path", "vms", "a"], "an unknown kind of path"),
        ("date-missing", ["x", "date", None, "2026-02-29"], "a day that the year lacks"),
        ("date-short", ["x", "date", None, "20260226"], "another form of a date"),
        ("time-hour", ["x", "time", None, "24:00:00"], "an hour that a day lacks"),
        ("time-zeros", ["x", "time", None, "12:00:00.000000"], "a fraction of 0 is left out"),
        ("time-fold-two", ["x", "time", 2, _NOON], "a fold of 2"),
        ("time-fold-true", ["x", "time", True, _NOON], "true is no fold"),
        ("datetime-space", ["x", "datetime", None, f"2026-11-26 {_NOON}"], "a space before the time"),
        ("datetime-zulu", ["x", "datetime", None, f"2026-11-26T{_NOON}Z"], "another form of UTC"),
        ("datetime-offset-large", ["x", "datetime", None, f"2026-11-26T{_NOON}+24:00"], "an offset of a day"),
        ("timedelta-two", ["x", "timedelta", None, ["t", [1, 2]]], "two integers"),
        ("timedelta-seconds", ["x", "timedelta", None, ["t", [0, 86400, 0]]], "a day of seconds"),
        ("timedelta-days", ["x", "timedelta", None, ["t", [10**9, 0, 0]]], "too many days"),
        ("timedelta-true", ["x", "timedelta", None, ["t", [True, 0, 0]]], "true is no integer"),
        ("range-zero", ["x", "range", None, ["t", [0, 1, 0]]], "a step of 0"),
        ("range-null", ["x", "range", None, ["t", [0, None, 1]]], "no end"),
        ("slice-string", ["x", "slice", None, ["t", ["a", None, None]]], "a start that is no integer"),
        ("slice-two", ["x", "slice", None, ["t", [None, None]]], "two parts"),
        ("numpy-other", ["x", "numpy-generator", "os", ["d", []]], "an unknown bit generator"),
        ("random-words", ["x", "python-random", None, ["t", [3, ["l", []], None]]], "words that are no row"),
    ):
        yield _refused(name, node, why)
    yield _refused("torch-device", ["x", "torch-generator", "cuda", ["T", 0]], "a device other than the CPU", rows=1)
    yield _refused("device-cpu", ["x", "device-generator", "cpu", ["T", 0]], "the CPU is no device", rows=1)
    for name, layout, items, why in (
        ("offsets", "jagged", [["T", 0]], "no offsets"),
        ("four", "jagged", [["T", 0]] * 4, "a fourth tensor"),
        ("empty", "strided", [], "no component"),
        ("array", "strided", [["N", 0]], "a component that is an array"),
        ("layout", "sparse", [["T", 0]], "an unknown layout"),
    ):
        yield _refused(f"nested-{name}", ["x", "nested-tensor", layout, ["l", items]], why, rows=min(len(items), 1))
    yield _refused("random-version", ["x", "python-random", None, ["t", [True, ["N", 0], None]]], "no version", rows=1)


def _refused(name: str, node: Node, why: str, rows: int = 0, kind: str = "bad-structure") -> Vector:
    return invalid("tree", name, json.dumps(node, separators=(",", ":")).encode("ascii"), kind, why, rows=rows)
