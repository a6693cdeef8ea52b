"""Test that unsupported values are refused by name, before anything is written."""

import dataclasses
import datetime as dt
import enum
import random
import threading
from collections import UserDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch

from asymcheck import Store
from asymcheck.errors import InvalidInputError, StructureError, UnsupportedValueError
from asymcheck.state import leaves
from tests.store.equality import directory_content


class Level(enum.IntEnum):
    """A subclass of an integer."""

    LOW = 1


class Text(str):
    """A subclass of a string."""

    __slots__ = ()


@dataclasses.dataclass
class Unset:
    """A dataclass with a field that nothing sets."""

    field: int = dataclasses.field(init=False)


class HalfStateful:
    """An object with a state that cannot be loaded."""

    def state_dict(self) -> dict[str, object]:
        """Return a state."""
        return {"x": 1}


class TensorChild(torch.Tensor):
    """A subclass of a tensor."""


class Three(tuple[int, ...]):
    """A tuple that is more than a tuple."""

    __slots__ = ()


class Moment(dt.datetime):
    """A time that is more than a time."""


class OwnBits(np.random.PCG64):
    """A bit generator of a user."""


def _cyclic() -> object:
    state: dict[str, object] = {}
    state["self"] = [state]
    return state


def _deep() -> object:
    state: object = 1
    for _ in range(64):
        state = {"k": state}
    return state


REFUSED: dict[str, Callable[[], object]] = {
    "object": object,
    "set of objects": lambda: {object()},
    "set of enum members": lambda: {enum.Enum("Level", {"LOW": [1]}).LOW},  # type: ignore[attr-defined]  # a member
    "frozenset of functions": lambda: frozenset({_deep}),
    "function": lambda: _deep,
    "lambda": lambda: lambda: None,
    "class": lambda: dict,
    "module class": lambda: torch.nn.Linear,
    "lock": threading.Lock,
    "legacy generator": np.random.RandomState,
    "bit generator": np.random.PCG64,
    "generator without a state": random.SystemRandom,
    "generator with a bit generator of its own": lambda: np.random.Generator(OwnBits()),
    "half of the protocol": HalfStateful,
    "bytearray": lambda: bytearray(b"x"),
    "memoryview": lambda: memoryview(b"x"),
    "slice of texts": lambda: slice("a", "b"),
    "ellipsis": lambda: ...,
    "dataclass with an unset field": Unset,
    "decimal": lambda: Decimal(1),
    "fraction": lambda: Fraction(1, 2),
    "time zone of a name": lambda: dt.datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC")),
    "fixed offset with a name": lambda: dt.time(1, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET")),
    "subclass of datetime": lambda: Moment(2026, 1, 1),
    "subclass of str": lambda: Text("x"),
    "subclass of tuple": lambda: Three((1, 2)),
    "factory that is a function": lambda: defaultdict(lambda: 0),
    "factory that is a class": lambda: defaultdict(Text),
    "deque of more items than a double": lambda: deque(maxlen=1 << 60),
    "user dict": lambda: UserDict(a=1),
    "mapping proxy": lambda: MappingProxyType({"a": 1}),
    "lone surrogate": lambda: "\ud800",
    "array of objects": lambda: np.array([None, object()]),
    "array of texts": lambda: np.array(["a", "bc"]),
    "array of bytes": lambda: np.array([b"a"]),
    "array of times": lambda: np.array(["2026-01-01"], dtype="datetime64[s]"),
    "array of records": lambda: np.zeros(2, dtype=[("a", "i4")]),
    "array of the other byte order": lambda: np.arange(3, dtype=">f4"),
    "array of long doubles": lambda: np.zeros(2, dtype=np.longdouble),
    "masked array": lambda: np.ma.masked_array([1, 2, 3], [0, 1, 0]),
    "text scalar": lambda: np.str_("x"),
    "time scalar": lambda: np.datetime64("2026-01-01"),
    "long double": lambda: np.longdouble(1),
    "meta": lambda: torch.empty(3, device="meta"),
    "tensor subclass": lambda: torch.ones(2).as_subclass(TensorChild),
    "uninitialized parameter": torch.nn.UninitializedParameter,
    "dtype without a name": lambda: torch.quint8,
    "tensor of bits": lambda: torch.empty(3, dtype=torch.bits8),
}

STORAGELESS: dict[str, Callable[[], object]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse CSR": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "nested without components": lambda: torch.nested.nested_tensor([]),
    "jagged in another dimension": lambda: torch.nested.nested_tensor(
        [torch.ones(2, 3)], layout=torch.jagged
    ).transpose(1, 2),
}
"""Tensors whose creation warns, because torch has deprecated them or calls them a prototype."""

KEYS: dict[str, object] = {
    "bool": True,
    "none": None,
    "float": 1.0,
    "tuple": (1, 2),
    "bytes": b"k",
    "numpy integer": np.int64(3),
    "enum": Level.LOW,
    "subclass of str": Text("k"),
    "lone surrogate": "\udfff",
}


def _refuse(store: Store, state: object, path: str) -> None:
    """Check that a save of `state` is refused at `path`, and that it wrote nothing."""
    before = directory_content(store.path)
    with pytest.raises(UnsupportedValueError) as caught:
        store.save(state, step=2)
    assert caught.value.path == path
    assert path in str(caught.value)
    assert directory_content(store.path) == before


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_value_is_refused_by_path(store: Store, name: str) -> None:
    """Test that the error names the path, and that the store is unchanged."""
    store.save({"big": torch.ones(2_000_000)}, step=1)
    _refuse(store, {"big": torch.zeros(2_000_000), "a": [0, {"b": REFUSED[name]()}]}, "a.1.b")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", STORAGELESS)
def test_tensors_without_plain_memory_are_refused(store: Store, name: str) -> None:
    """Test tensors without elements at an address, for which even the address raises an error."""
    _refuse(store, {"big": torch.zeros(2_000_000), "a": [0, {"b": STORAGELESS[name]()}]}, "a.1.b")


@pytest.mark.parametrize("name", KEYS)
def test_keys_are_texts_and_integers_and_nothing_else(store: Store, name: str) -> None:
    """Test that the error names the path of the mapping, because the key has no name."""
    _refuse(store, {"a": [{"fine": torch.ones(2000)}, {KEYS[name]: 1}]}, "a.1")


def test_a_state_that_contains_itself_is_refused(store: Store) -> None:
    """Test that the path shows the cycle."""
    _refuse(store, _cyclic(), "self.0.self.0.self.0…")


def test_a_state_that_is_too_deep_is_refused(store: Store) -> None:
    """Test 65 levels, one more than the format allows."""
    _refuse(store, _deep(), "k.k.k.k.k.k…")


def test_a_huge_integer_as_a_key_does_not_hide_the_path(store: Store) -> None:
    """Test an integer of more than 4300 digits, which Python refuses to print, next to an unsupported object."""
    _refuse(store, {10**5000: object()}, "1" + "0" * 5000)


def test_root_may_be_unsupported(store: Store) -> None:
    """Test that the error names the root, which has no path."""
    with pytest.raises(UnsupportedValueError, match="<root>") as caught:
        store.save(object(), step=1)
    assert caught.value.path == ""


def test_an_object_that_fails_to_give_its_state_fails_the_save(store: Store) -> None:
    """Test that the object's own error is raised, and that nothing was written."""

    class Broken:
        def state_dict(self) -> dict[str, object]:
            raise ZeroDivisionError

        def load_state_dict(self, state_dict: dict[str, object]) -> None:
            del state_dict

    before = directory_content(store.path)
    with pytest.raises(ZeroDivisionError):
        store.save({"x": torch.ones(2_000_000), "broken": Broken()}, step=1)
    assert directory_content(store.path) == before


@pytest.mark.parametrize("step", [-1, 10**12, 1.0, "1", None, True], ids=repr)
def test_steps_are_integers_within_the_limits(store: Store, step: int) -> None:
    """Test 12 digits, from 0; a bool is not a step."""
    before = directory_content(store.path)
    with pytest.raises(InvalidInputError, match="step"):
        store.save({"x": torch.ones(2_000_000)}, step=step)
    assert directory_content(store.path) == before


@pytest.mark.parametrize("step", [0, 1, 10**12 - 1])
def test_the_first_and_the_last_step_can_be_saved(store: Store, step: int) -> None:
    """Test the minimum and the maximum step."""
    store.save({"x": step}, step=step)
    assert store.load(step) == {"x": step}


def test_unreadable_checkpoint_is_not_committed(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test any cause; the previous checkpoint stays the newest."""
    monkeypatch.setattr(leaves, "DIMENSIONS_MAX", 65)
    with Store.open(store_path, create=True) as store:
        store.save({"t": torch.ones(1)}, step=1)
        with pytest.raises(StructureError, match="more than 64 dimensions"):
            store.save({"t": torch.ones([1] * 65)}, step=2)
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [1]
        assert torch.equal(store.load(step=1)["t"], torch.ones(1))
        assert not store.verify()
