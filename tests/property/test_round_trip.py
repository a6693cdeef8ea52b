"""Test round trips of random states: structure, types, bits and ties."""

import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from asymcheck import Store, StoreConfig
from tests.property.strategies import configs, states
from tests.store.equality import assert_same, tensor_bytes, tensors_in

SETTINGS = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which each example creates a store."""
    return tmp_path_factory.mktemp("stores")


def _view(tensor: torch.Tensor | np.ndarray) -> object:
    """Return the identity of a tensor of a state; None for empty tensors."""
    if isinstance(tensor, np.ndarray):
        return ("array", id(tensor))
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else None


def _ties(state: object) -> set[frozenset[int]]:
    """Return the groups of positions with the same tensor."""
    groups: dict[object, set[int]] = {}
    for position, tensor in enumerate(tensors_in(state)):
        if _view(tensor) is not None:
            groups.setdefault(_view(tensor), set()).add(position)
    return {frozenset(group) for group in groups.values() if len(group) > 1}


def _blank(state: Any, *, strided: bool) -> Any:  # noqa: ANN401 - any state
    """Return a state of the same structure with zero tensors, and without plain values."""
    if isinstance(state, torch.Tensor):
        shape = tuple(state.shape)
        blank = torch.empty(shape[::-1] if strided else shape, dtype=state.dtype)
        blank.view(-1).view(torch.uint8).zero_()
        return blank.permute(tuple(reversed(range(blank.ndim)))) if strided else blank
    if isinstance(state, np.ndarray):
        return np.zeros(state.shape, dtype=state.dtype, order="F" if strided else "C")
    if isinstance(state, dict):
        pairs = [(key, _blank(value, strided=strided)) for key, value in state.items()]
        return OrderedDict(pairs) if isinstance(state, OrderedDict) else dict(pairs)
    if type(state) in (list, tuple):
        return type(state)(_blank(value, strided=strided) for value in state)
    return None


@SETTINGS
@given(state=states(), config=configs())
def test_state_round_trip(folder: Path, state: object, config: StoreConfig) -> None:
    """Test a load by the same store and by one with other settings, and verify."""
    with tempfile.TemporaryDirectory(dir=folder) as path:
        with Store.open(Path(path) / "store", config=config, create=True) as store:
            saved = store.save(state, step=1)
            loaded = store.load()
            assert store.verify() == []
            assert store.save(state, step=2).written_bytes == 0
        assert_same(loaded, state)
        assert _ties(loaded) == _ties(state)
        with Store.open(Path(path) / "store", read_only=True) as store:
            assert_same(store.load(), state)
            assert store.checkpoints()[0].state_bytes == saved.state_bytes


@pytest.mark.slow
@SETTINGS
@given(state=states(), config=configs(), strided=st.booleans())
def test_a_state_is_filled_in_place(folder: Path, state: object, config: StoreConfig, strided: bool) -> None:
    """Test that every tensor keeps its memory and gets the stored bits, and that other values are replaced."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as path,
        Store.open(Path(path) / "store", config=config, create=True) as store,
    ):
        store.save(state, step=1)
        into = _blank(state, strided=strided)
        addresses = [_view(tensor) for tensor in tensors_in(into)]
        filled = into if into is None else store.load(into=into)
        if into is not None:
            assert_same(filled, state)
            assert [_view(tensor) for tensor in tensors_in(filled)] == addresses


def _leaves(state: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, object]]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _leaves(value, (*path, str(key)))
    elif type(state) in (list, tuple):
        for index, value in enumerate(state):  # type: ignore[arg-type, var-annotated]  # the type was just compared
            yield from _leaves(value, (*path, str(index)))
    else:
        yield ".".join(path), state


@pytest.mark.slow
@SETTINGS
@given(state=states(), config=configs(), data=st.data())
def test_a_leaf_is_found_by_its_name(folder: Path, state: object, config: StoreConfig, data: st.DataObject) -> None:
    """Test that one dotted name selects exactly the leaves of that name, with the same bits."""
    leaves = list(_leaves(state))
    if not leaves or isinstance(state, torch.Tensor):
        return
    name = data.draw(st.sampled_from([name for name, _ in leaves]))
    note(f"name {name!r}")
    pattern = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
    if pattern == "*":
        return
    with (
        tempfile.TemporaryDirectory(dir=folder) as path,
        Store.open(Path(path) / "store", config=config, create=True) as store,
    ):
        store.save(state, step=1)
        selected = dict(enumerate(value for found, value in _leaves(store.load(tensors=pattern)) if found == name))
    expected = dict(enumerate(value for found, value in leaves if found == name))
    assert_same(selected, expected)


def test_equality_sees_a_single_bit() -> None:
    """Test that the comparison detects signed zeros, payloads, types, order and keys."""
    pairs: list[tuple[object, object]] = [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        ((1,), [1]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1: 1}, {"1": 1}),
        ({}, OrderedDict()),
        (torch.zeros(1), -torch.zeros(1)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(1), np.zeros(1, dtype=np.float32)),
        (np.float64(1), 1.0),
        (np.zeros(()), np.float64(0)),
        (b"", ""),
        (None, False),
    ]
    for one, other in pairs:
        assert_same(one, one)
        with pytest.raises(AssertionError):
            assert_same(one, other)
    assert tensor_bytes(torch.tensor([1, 2], dtype=torch.int16)) == b"\x01\0\x02\0"
