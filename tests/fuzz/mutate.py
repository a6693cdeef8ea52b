"""Mutate bytes, and JSON values that keep their shape."""

import json
import random
import struct

_INTERESTING = (0, 1, 2, 63, 64, 127, 128, 255, 4095, 4096, 65535, 65536, 1 << 30, (1 << 31) - 1, 1 << 31, 1 << 32)
_HUGE = ((1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 4096, 1 << 62, 1 << 40)
_STRINGS = ("", "a", "NaN", "\0", "é", "\ud800", "A" * 300, "../..", "00" * 16, "0" * 31 + "\n", "-0", "1e5", "\uff11")
_LEAVES: tuple[object, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    -0.0,
    1e308,
    1 << 53,
    (1 << 53) - 1,
    -(1 << 53),
    1 << 64,
    10**300,
    *_STRINGS,
    [],
    {},
    [[]],
    {"": 0},
)


def bytes_of(data: bytes, dice: random.Random) -> bytes:
    """Change one to four positions of ``data``."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        _change(changed, dice)
    return bytes(changed)


def _change(data: bytearray, dice: random.Random) -> None:
    place = dice.randrange(len(data) + 1)
    match dice.randrange(9):
        case 0 | 1:
            if data:
                data[place % len(data)] ^= 1 << dice.randrange(8)
        case 2:
            if data:
                data[place % len(data)] = dice.choice((0, 1, 127, 128, 255, dice.randrange(256)))
        case 3 | 4:
            size = dice.choice((1, 2, 4, 8))
            place -= place % size
            value = dice.choice((*_INTERESTING, *_HUGE)) & ((1 << 8 * size) - 1)
            if place + size <= len(data):
                data[place : place + size] = value.to_bytes(size, dice.choice(("little", "little", "big")))
        case 5:
            del data[place : place + dice.choice((1, 4, 64, 4096))]
        case 6:
            data[place:place] = dice.randbytes(dice.choice((1, 4, 64)))
        case 7:
            other, size = dice.randrange(len(data) + 1), dice.choice((4, 16, 64))
            data[place : place + size] = data[other : other + size]
        case 8:
            del data[place:]


def struct_field(data: bytes, layout: struct.Struct, start: int, dice: random.Random) -> bytes:
    """Give one field of a binary structure another value of its type, so that only its meaning is wrong."""
    values = list(layout.unpack_from(data, start))
    number = dice.randrange(len(values))
    value = values[number]
    if isinstance(value, bytes):
        values[number] = dice.choice((bytes(len(value)), dice.randbytes(len(value)), b"\xff" * len(value)))
    else:
        values[number] = dice.choice((*_INTERESTING, *_HUGE, value + 1, max(value - 1, 0), value ^ 1 << 12))
    try:
        return data[:start] + layout.pack(*values) + data[start + layout.size :]
    except struct.error:
        return data


def json_of(value: object, dice: random.Random) -> object:
    """Change one to three nodes of a JSON value, at any depth."""
    for _ in range(dice.choice((1, 1, 2, 3))):
        value = _json(value, dice)
    return value


def _json(value: object, dice: random.Random) -> object:
    if isinstance(value, dict) and value and dice.random() < 0.9:
        return _object(value, dice)
    if isinstance(value, list) and value and dice.random() < 0.9:
        return _array(value, dice)
    if isinstance(value, int) and not isinstance(value, bool) and dice.random() < 0.5:
        return value + dice.choice((1, -1, 1 << 32, 1 << 53))
    if isinstance(value, str) and value and dice.random() < 0.5:
        place = dice.randrange(len(value))
        return value[:place] + dice.choice((*_STRINGS, "x", "f")) + value[place + dice.randrange(2) :]
    if dice.random() < 0.05:
        return nested(dice.choice((60, 63, 64, 65, 300)), dice.choice(("l", "d")))
    return dice.choice(_LEAVES)


def _object(value: dict[str, object], dice: random.Random) -> object:
    key = dice.choice(list(value))
    match dice.randrange(8):
        case 0:
            return {name: item for name, item in value.items() if name != key}
        case 1:
            return {**value, dice.choice(_STRINGS): dice.choice(_LEAVES)}
        case _:
            return {**value, key: _json(value[key], dice)}


def _array(value: list[object], dice: random.Random) -> object:
    place = dice.randrange(len(value))
    match dice.randrange(8):
        case 0:
            return value[:place] + value[place + 1 :]
        case 1:
            return [*value[:place], value[place], *value[place:]]
        case 2:
            return [*value[:place], dice.choice(_LEAVES), *value[place:]]
        case _:
            return [*value[:place], _json(value[place], dice), *value[place + 1 :]]


def dumps(value: object, *, sort_keys: bool = False, separators: tuple[str, str] | None = None) -> bytes:
    """Write the result of json_of; values that json refuses, such as mixed keys, become null."""
    try:
        return json.dumps(value, sort_keys=sort_keys, separators=separators).encode()
    except (RecursionError, TypeError, ValueError):
        return b"null"


def nested(depth: int, kind: str) -> object:
    """Return nested lists or mappings, in the form of the tree."""
    value: object = None
    for _ in range(depth):
        value = ["l", [value]] if kind == "l" else ["d", [["k", value]]]
    return value
