"""Generate random states: any nesting of all supported values."""

import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from asymcheck import StoreConfig
from asymcheck.state.dtypes import TORCH_DTYPES
from asymcheck.state.numpy_dtypes import NUMPY_DTYPES

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
KEYS = st.one_of(
    TEXT, st.sampled_from(["model", "a.b", "", "0", "1"]), st.integers(-3, 3), st.integers(-(2**70), 2**70)
)
# torch cannot print numbers of these two dtypes, so a failing example could not be shown.
_UNPRINTABLE = ("complex32", "float4_e2m1fn_x2")
SIZES = {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items() if name not in _UNPRINTABLE}


@st.composite
def configs(draw: st.DrawFn) -> StoreConfig:
    """Generate configurations in which small states use every way of storing."""
    blocks = draw(st.integers(1, 4))
    return StoreConfig(
        partition_bytes=4096 * blocks,
        bundle_below_bytes=draw(st.sampled_from([0, 1, 1000, 4096 * blocks])),
        inline_bytes=draw(st.sampled_from([0, 10, 1024, 4096])),
        inline_total_bytes=draw(st.sampled_from([0, 100, 10_000])),
        slots=draw(st.integers(1, 4)),
        pack_bytes=draw(st.sampled_from([1, 20_000, 1 << 30])),
        pool_bytes=draw(st.sampled_from([0, 50_000, 1 << 30])),
    )


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """Generate shapes from scalars and empty ones to some thousand elements."""
    return tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 7, 40]), max_size=3)))


def _raw(draw: st.DrawFn, size: int, *, is_bool: bool) -> bytes:
    """Return some random bytes, repeated: long enough, and quick to draw and to shrink."""
    seed = draw(st.binary(min_size=1, max_size=24)) if size else b"\0"
    raw = (seed * (size // len(seed) + 1))[:size]
    return bytes(value & 1 for value in raw) if is_bool else raw


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Generate tensors of any dtype with any bits, in various layouts."""
    name, shape = draw(st.sampled_from(sorted(SIZES))), draw(shapes())
    size = SIZES[name] * int(np.prod(shape))
    raw = bytearray(_raw(draw, size, is_bool=name == "bool")) or bytearray(0)
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(TORCH_DTYPES[name]).reshape(shape)
    layout = draw(st.sampled_from(["plain", "transposed", "strided", "reversed dims", "expanded", "parameter"]))
    if layout == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, 1)
    if layout == "strided" and tensor.ndim and tensor.shape[0] > 1:
        return tensor[::2]
    if layout == "reversed dims":
        return tensor.permute(tuple(reversed(range(tensor.ndim))))
    if layout == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    if layout == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point() and tensor.element_size() > 1)
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Generate arrays of any dtype with any bits, in various orders."""
    name, shape = draw(st.sampled_from(sorted(NUMPY_DTYPES))), draw(shapes())
    dtype = NUMPY_DTYPES[name]
    raw = _raw(draw, dtype.itemsize * int(np.prod(shape)), is_bool=name == "bool")
    array = np.frombuffer(raw, dtype=dtype).reshape(shape)
    order = draw(st.sampled_from(["C", "F", "reversed", "writable"]))
    if order == "F":
        return np.asfortranarray(array)
    if order == "reversed" and array.ndim:
        return array[::-1]
    return array.copy() if order == "writable" else array


def _float(bits: int) -> float:
    value: float = struct.unpack(">d", bits.to_bytes(8, "big"))[0]
    return value


FLOATS = st.one_of(st.floats(), st.integers(0, 2**64 - 1).map(_float))
SCALARS = arrays().filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0])
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**53 - 1, 2**53, -(2**53), 10**4200, -(10**4000)]),
    FLOATS,
    st.builds(complex, FLOATS, FLOATS),
    TEXT,
    st.binary(max_size=20),
    shapes().map(torch.Size),
    st.sampled_from(sorted(TORCH_DTYPES.values(), key=str)),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")]),
    SCALARS,
)


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.lists(st.tuples(KEYS, children), max_size=5)
    return st.one_of(
        pairs.map(dict),
        pairs.map(OrderedDict),
        st.lists(children, max_size=5),
        st.lists(children, max_size=4).map(tuple),
    )


@st.composite
def states(draw: st.DrawFn) -> Any:  # noqa: ANN401 - any state
    """Generate states of any structure, in which some tensors may occur several times."""
    shared = draw(st.lists(st.one_of(tensors(), arrays()), max_size=2))
    leaves = [tensors(), arrays(), PLAIN, *([st.sampled_from(shared)] if shared else [])]
    return draw(st.recursive(st.one_of(*leaves), _containers, max_leaves=20))
