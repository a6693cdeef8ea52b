"""The tree as a fuzzing target: every accepted tree has one encoding."""

import json
import random

from asymcheck.format.record import parse_json
from asymcheck.format.tree import Key, Node, decode, encode_integer, encode_plain
from tests.fuzz import mutate

ROWS = 3
SEED: Node = [
    "d",
    [
        ["model", ["m", [["w", ["T", 0]], ["tied", ["T", 0]]], ["o", [["", ["d", [["version", 2]]]]]]]],
        [
            "plain",
            ["l", [None, True, False, 0, -5, (1 << 53) - 1, "", "é", ["i", str(1 << 70)], ["i", "-" + "9" * 30]]],
        ],
        ["numbers", ["t", [["f", "3ff8000000000000"], ["f", "7ff8000000000001"], ["c", "0" * 16, "8" + "0" * 15]]]],
        [7, ["b", "AAEC/w=="]],
        [["i", str(1 << 60)], ["z", [2, 0, ["i", str(1 << 62)]]]],
        ["array", ["N", 1]],
        ["scalar", ["n", "float32", "0000803f"]],
        ["types", ["l", [["y", "bfloat16"], ["v", "cuda:1"], ["n", "complex128", "00" * 16]]]],
        [
            "typed",
            [
                "l",
                [
                    ["x", "defaultdict", "int", ["d", [["a", 1]]]],
                    ["x", "deque", 3, ["l", [1, ["T", 1]]]],
                    ["x", "frozenset", None, ["t", ['"', 1, ["t", [2]]]]],
                    ["x", "dataclass", "Config", ["d", [["lr", ["f", "3ff8000000000000"]]]]],
                    ["x", "enum", "Level.LOW", 1],
                    ["x", "set", None, ["t", [["x", "enum", "Level.LOW", 1]]]],
                    ["x", "device-generator", "cuda", ["T", 1]],
                    ["x", "nested-tensor", "jagged", ["l", [["T", 1], ["T", 2]]]],
                    ["x", "datetime", None, "2026-11-26T01:02:03+01:00"],
                    ["x", "timedelta", None, ["t", [-1, 86399, 5]]],
                    ["x", "range", None, ["t", [0, ["i", str(1 << 60)], -1]]],
                ],
            ],
        ],
        ["last", ["T", 2]],
    ],
]


class Rewriter:
    """Builds the nodes again from the values of the decoder."""

    def plain(self, value: object) -> object:
        """Build a plain value."""
        return encode_plain(value)

    def sequence(self, kind: str, items: list[object]) -> object:
        """Build a list or a tuple."""
        return [kind, items]

    def mapping(self, kind: str, pairs: list[tuple[Key, object]], metadata: object) -> object:
        """Build a mapping of any kind."""
        nodes = [[encode_integer(key) if isinstance(key, int) else key, value] for key, value in pairs]
        return [kind, nodes, metadata] if kind == "m" else [kind, nodes]

    def tensor(self, row: int, as_array: bool) -> object:
        """Build a row."""
        return ["N" if as_array else "T", row]

    def tagged(self, kind: str, value: object) -> object:
        """Build a shape, a scalar, a dtype or a device."""
        if kind == "z":
            return ["z", [encode_integer(size) for size in value]]  # type: ignore[attr-defined]  # a tuple
        if kind == "n":
            dtype, data = value  # type: ignore[misc]  # a pair
            return ["n", dtype, data.hex()]
        return [kind, value]

    def typed(self, kind: str, parameter: str | int | None, content: object) -> object:
        """A typed value."""
        return ["x", kind, parameter, content]


def seeds() -> list[bytes]:
    """Return one tree with every kind of node."""
    return [json.dumps(SEED).encode()]


def change(data: bytes, dice: random.Random) -> bytes:
    """Return other nodes, of other types, at other depths."""
    return mutate.dumps(mutate.json_of(json.loads(data), dice))


def read(data: bytes) -> object:
    """Parse, and write again: the same value in another spelling is refused."""
    node = parse_json(data, "input")
    rewritten = decode(node, ROWS, Rewriter(), "input")
    # Compare text, because 1, 1.0 and True are equal in Python.
    assert json.dumps(rewritten) == json.dumps(node)
    return rewritten


def depth(levels: int, kind: str) -> Node:
    """Return a tree of so many levels that names all rows at the bottom."""
    rows: Node = ["l", [["T", row] for row in range(ROWS)]]
    value: Node = rows
    for _ in range(levels - 2):
        value = ["l", [value]] if kind == "l" else [kind, [["k", value]], *([None] if kind == "m" else [])]
    return value
