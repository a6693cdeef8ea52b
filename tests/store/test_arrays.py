"""Test numpy arrays and scalars in a state."""

from pathlib import Path

import numpy as np
import pytest

from asymcheck import Store
from asymcheck.state.numpy_dtypes import NUMPY_DTYPES
from tests.store.equality import assert_same

RANDOM = np.random.default_rng(3)


@pytest.mark.parametrize("count", [0, 1, 5_000, 1_100_000])
@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_every_dtype_keeps_every_bit(store: Store, name: str, count: int) -> None:
    """Test random bits, with sizes for each way of storing."""
    dtype = NUMPY_DTYPES[name]
    raw = RANDOM.integers(0, 2 if name == "bool" else 256, count * dtype.itemsize, dtype=np.uint8)
    state = {"x": raw.view(dtype)}
    store.save(state, step=1)
    assert_same(store.load(), state)


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_every_dtype_as_a_scalar_and_0_dimensional(store: Store, name: str) -> None:
    """Test that a scalar stays a scalar, and that an array without dimensions stays an array."""
    dtype = NUMPY_DTYPES[name]
    array = RANDOM.integers(0, 2, 1, dtype=np.uint8).astype(dtype)
    state = {"scalar": array[0], "array": array.reshape(())}
    store.save(state, step=1)
    loaded = store.load()
    assert_same(loaded, state)
    assert isinstance(loaded, dict)
    assert isinstance(loaded["scalar"], np.generic)
    assert isinstance(loaded["array"], np.ndarray)


def test_order_and_flags_do_not_matter(store: Store) -> None:
    """Test that Fortran order, negative strides, windows, broadcasts and read-only arrays keep their values."""
    plain = np.arange(60_000, dtype=np.int32).reshape(100, 600)
    fixed = plain.copy()
    fixed.flags.writeable = False
    records = np.zeros(500, dtype=[("tag", "i1"), ("value", "<f8")])
    records["value"] = np.arange(500) / 3
    state = {
        "fortran": np.asfortranarray(plain),
        "transposed": plain.T,
        "reversed": plain[::-1, ::-2],
        "read-only": fixed,
        "window": plain[3:50, 7:11],
        "broadcast": np.broadcast_to(plain[:1], (5, 600)),
        "unaligned field": records["value"],
        "small and read-only": np.broadcast_to(np.float64(2), (3, 3)),
    }
    store.save(state, step=1)
    loaded = store.load()
    assert_same(loaded, state)
    assert isinstance(loaded, dict)
    assert all(array.flags.writeable and array.flags.c_contiguous for array in loaded.values())


def test_a_mapped_file_comes_back_as_an_array(store: Store, tmp_path: Path) -> None:
    """Test that the bytes of a mapped file are stored; the mapping is not part of the state."""
    values = np.arange(5_000, dtype=np.float64)
    values.tofile(tmp_path / "values")
    mapped = np.memmap(tmp_path / "values", dtype=np.float64, mode="r")
    store.save({"x": mapped}, step=1)
    assert_same(store.load(), {"x": values})


def test_one_array_in_two_places_stays_one_array(store: Store) -> None:
    """Test that arrays that were tied share their memory after the load."""
    array = np.arange(3000.0)
    store.save({"a": array, "b": [array], "c": array.copy()}, step=1)
    loaded = store.load()
    assert isinstance(loaded, dict)
    assert loaded["a"] is loaded["b"][0]
    assert loaded["c"] is not loaded["a"]
