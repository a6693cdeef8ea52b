"""Test that plain values keep type, order and bits."""

import math
import struct
from collections import OrderedDict

import numpy as np
import pytest
import torch

from asymcheck import Store
from asymcheck.state.dtypes import TORCH_DTYPES
from tests.store.equality import assert_same


def _float(bits: int) -> float:
    value: float = struct.unpack(">d", struct.pack(">Q", bits))[0]
    return value


VALUES: dict[str, object] = {
    "empty dict": {},
    "empty list": [],
    "empty tuple": (),
    "empty ordered dict": OrderedDict(),
    "none": None,
    "booleans": [True, False, 1, 0],
    "nested": {"a": [{"b": (1, [2, (3, {})])}, OrderedDict([("z", 1), ("a", [None])])]},
    "order of keys": {"z": 1, "a": 2, "m": {"2": 1, "1": 2}},
    "int and str keys": {
        1: "int",
        "1": "str",
        -1: "negative",
        0: "zero",
        "": "empty",
        2**53: "big",
        -(2**60): "bigger",
    },
    "dotted keys": {"a.b": 1, "a": {"b": 2}, ".": 3, "..": 4, "*": 5, "a/b": 6, "\n\0": 7},
    "unicode": {"schlüssel": "größe", "鍵": "値", "🗝": "💾\U0010ffff", "combining": "e\u0301 \u202e \ufeff"},
    "integers": [
        0,
        -1,
        2**31,
        2**53 - 1,
        2**53,
        2**53 + 1,
        -(2**53) + 1,
        -(2**53),
        -(2**53) - 1,
        2**63,
        2**64,
        -(2**64),
    ],
    "huge integers": [10**4299, 10**4300, 10**5000, -(10**5000), 10**4000 - 1, 10**4000, 10**8000, 3**20_000],
    "huge integer key": {10**5000: {-(10**4500): [1]}},
    "floats": [0.0, -0.0, 1.5, math.pi, 5e-324, -5e-324, 1.7976931348623157e308, math.inf, -math.inf],
    "payloads of NaN": [_float(bits) for bits in (0x7FF8000000000000, 0xFFF8000000000001, 0x7FF80000DEADBEEF)],
    "complex": [1 + 2j, complex(-0.0, -0.0), complex(math.inf, math.nan), complex(0.0, -0.0)],
    "bytes": [b"", b"\0", bytes(range(256)), b"x" * 10_000],
    "long text": "x" * 1_000_000,
    "shapes": [torch.Size([]), torch.Size([0, 1, 2**40]), (1, 2)],
    "dtypes": list(TORCH_DTYPES.values()),
    "devices": [torch.device("cpu"), torch.device("cuda"), torch.device("cuda", 3), torch.device("meta")],
    "a JSON look-alike": ["T", 0, ["T", 0], {"T": ["d", []]}, ["i", "1"], "NaN", "null"],
    "numpy numbers": [
        np.bool_(True),
        np.int8(-128),
        np.uint8(255),
        np.int16(-2),
        np.uint16(65535),
        np.int32(-3),
        np.uint32(2**32 - 1),
        np.int64(-(2**63)),
        np.uint64(2**64 - 1),
        np.float16(-0.0),
        np.float32("nan"),
        np.float64("-inf"),
        np.complex64(1 - 2j),
        np.complex128(-0.0 + 1j),
    ],
}


@pytest.mark.parametrize("name", VALUES)
def test_plain_values_round_trip(store: Store, name: str) -> None:
    """Test values as a part of a state and as the whole state."""
    state = {"x": VALUES[name], "tensor": torch.ones(2)}
    store.save(state, step=1)
    assert_same(store.load(), state)
    store.save(VALUES[name], step=2)
    assert_same(store.load(), VALUES[name])


def test_a_signalling_nan_keeps_its_bits_in_numpy_and_torch(store: Store) -> None:
    """Test that no NaN is changed, because numbers are copied as bytes."""
    bits = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x80000000], dtype=np.uint32)
    state = {"array": bits.view(np.float32), "tensor": torch.from_numpy(bits.view(np.int32)).view(torch.float32)}
    store.save(state, step=1)
    loaded = store.load()
    assert isinstance(loaded, dict)
    assert loaded["array"].view(np.uint32).tolist() == bits.tolist()
    assert loaded["tensor"].view(torch.int32).numpy().view(np.uint32).tolist() == bits.tolist()


def test_the_whole_depth_of_the_format_can_be_used(store: Store) -> None:
    """Test 63 containers with a leaf in the innermost: 64 levels."""
    state: object = torch.ones(1)
    for level in range(63):
        state = [state] if level % 2 else {"k": state}
    store.save(state, step=1)
    assert_same(store.load(), state)


@pytest.mark.slow
def test_a_large_mapping_of_plain_values_comes_back(store: Store) -> None:
    """Test a log of 10,000 entries inside the state."""
    state = {"log": [{"step": i, "loss": i / 7, "tag": f"t{i}"} for i in range(10_000)]}
    store.save(state, step=1)
    assert_same(store.load(), state)
