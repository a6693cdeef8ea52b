"""Test that values of the standard library, torch and numpy keep their types, and get the classes of a given state."""

import copy
import dataclasses
import datetime as dt
import enum
import random
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch

from asymcheck import RngState, Store
from asymcheck.errors import RefusedStateError, StateMismatchError, UnsupportedFeatureError, UnsupportedValueError
from asymcheck.format import layout
from asymcheck.format.digest import digest
from asymcheck.format.manifest import encode
from asymcheck.format.manifest_reader import decode_manifest
from asymcheck.format.tree import Node, value_features
from asymcheck.state import typed_values
from asymcheck.state.walk import flatten
from asymcheck.types import CheckpointRef, Part
from tests.store.equality import assert_same
from tools.manifest_files import encode_manifest
from tools.vectors_base import save_id
from tools.vectors_manifest import HEADER, header_for, inline_row, manifest_path


class Level(enum.IntEnum):
    """A number with a name."""

    LOW = 1
    HIGH = 2


class Access(enum.Flag):
    """Flags that can be combined."""

    READ = 1
    WRITE = 2


class Odd(enum.Enum):
    """A member whose value is no item of a set."""

    LIST = [1]  # noqa: RUF012 - a value that is not hashable


class Pair(NamedTuple):
    """Two values with names."""

    left: object
    right: object


@dataclasses.dataclass
class Averages:
    """A mutable dataclass with a tensor."""

    weight: object
    count: int = 0


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A dataclass that cannot change."""

    lr: float


class LabelError(ValueError):
    """An error that is never raised."""


UTC, EAST = dt.timezone.utc, dt.timezone(dt.timedelta(hours=5, minutes=30))
VALUES: dict[str, Callable[[], object]] = {
    "defaultdict": lambda: defaultdict(int, {"a": 1, 5: 2}),
    "defaultdict without a factory": lambda: defaultdict(None, a=1),
    "defaultdict of defaultdicts": lambda: defaultdict(dict, a=defaultdict(list, b=[1, torch.ones(3)])),
    "ordered dict": lambda: OrderedDict(b=1, a=2),
    "deque": lambda: deque([1, "a", None], maxlen=5),
    "deque of tensors": lambda: deque([torch.arange(3), torch.ones(2)]),
    "empty deque": lambda: deque(maxlen=0),
    "set": lambda: {1, "a", None, 2.5, (1, b"x"), frozenset({"b"})},
    "empty set": set,
    "frozenset": lambda: frozenset({("a", 1), -1}),
    "path": lambda: Path("runs/ä"),
    "pure path": lambda: PurePosixPath("/a/b"),
    "path of Windows": lambda: PureWindowsPath("C:\\a"),
    "date": lambda: dt.date(2024, 2, 29),
    "time": lambda: dt.time(23, 59, 59, 999_999),
    "time with fold": lambda: dt.time(2, 30, tzinfo=EAST, fold=1),
    "datetime": lambda: dt.datetime(2026, 11, 26, 1, 2, 3),  # noqa: DTZ001 - without a time zone on purpose
    "datetime in UTC": lambda: dt.datetime(2026, 11, 26, tzinfo=UTC),
    "datetime with an offset": lambda: dt.datetime(1, 1, 1, 0, 0, 0, 7, tzinfo=EAST, fold=1),
    "timedelta": lambda: dt.timedelta(days=-3, microseconds=1),
    "range": lambda: range(10, 1 << 70, -3),
    "slice": lambda: slice(None, 5, -1),
    "complex": lambda: complex(-0.0, float("inf")),
}
GIVEN: dict[str, Callable[[], object]] = {
    "namedtuple": lambda: Pair(torch.ones(3), [1, "a"]),
    "dataclass": lambda: Averages(torch.ones(3), 7),
    "frozen dataclass": lambda: Fixed(0.5),
    "dataclass in a dataclass": lambda: Averages(Pair(Fixed(0.25), Level.LOW), 1),
    "enum": lambda: Level.HIGH,
    "flags": lambda: Access.READ | Access.WRITE,
    "set of members": lambda: [{Level.HIGH, ("a", Access.WRITE), frozenset({Level.LOW}), 7}, Level.LOW, Access.READ],
    "frozenset of members": lambda: frozenset({Level.HIGH, (Access.READ, 1)}),
    "list of members": lambda: [Level.LOW, Level.HIGH],
    "counter": lambda: Counter("aab"),
}


def _same(actual: object, expected: object) -> None:
    """Compare types, order and bits, also inside typed values."""
    assert type(actual) is type(expected)
    if dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        _same(vars(actual), vars(expected))
    elif isinstance(expected, dict):
        assert [*actual] == [*expected]  # type: ignore[misc]  # a dict, as compared
        for key, value in expected.items():
            _same(actual[key], value)  # type: ignore[index]  # as above
    elif isinstance(expected, (list, tuple, deque)):
        for one, other in zip(actual, expected, strict=True):  # type: ignore[call-overload]  # as above
            _same(one, other)
    else:
        assert_same(actual, expected)
    for name in ("default_factory", "maxlen", "fold", "tzinfo"):
        assert getattr(actual, name, None) == getattr(expected, name, None)


@pytest.mark.parametrize("name", VALUES)
def test_value_of_the_standard_library_comes_back(store: Store, name: str) -> None:
    """Test that a load gives the same type, order and bits without a given state."""
    store.save({"value": VALUES[name](), "weight": torch.ones(2)}, step=1)
    _same(store.load()["value"], VALUES[name]())
    assert store.verify() == []


@pytest.mark.parametrize("name", [*VALUES, *GIVEN])
def test_value_is_restored_into_a_given_state(store: Store, name: str) -> None:
    """Test that a load fills a given value, with the class of this value."""
    make = {**VALUES, **GIVEN}[name]
    store.save({"value": make(), "weight": torch.ones(2)}, step=1)
    state = {"value": make(), "weight": torch.zeros(2)}
    _clear(state["value"])
    assert store.load(into=state) is state
    _same(state["value"], make())


def _clear(value: object) -> None:
    """Change what can be changed in place."""
    if isinstance(value, torch.Tensor):
        value.zero_()
    elif isinstance(value, (deque, set)):
        value.clear()
    elif isinstance(value, Averages):
        _clear(value.weight)
        value.count = -1
    elif isinstance(value, tuple):
        for item in value:
            _clear(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            value[key] = -1 if type(item) is int else item
            _clear(item)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_members_in_a_set_get_classes_of_the_whole_state(store: Store, kind: type) -> None:
    """Test an empty set at the start of a training, whose classes occur elsewhere in the given state."""
    seen = kind({Level.HIGH, ("a", Level.LOW), Access.READ | Access.WRITE})
    phases = [Averages(Level.LOW), deque([Access.READ])]
    state = {"seen": kind(), "phases": phases, "window": deque(), "new": None}
    store.save({"seen": seen, "phases": phases, "window": deque([seen]), "new": {"a": [seen]}}, step=1)
    store.load(into=state)
    for found in (state["seen"], state["window"][0], state["new"]["a"][0]):  # type: ignore[index]  # containers
        assert type(found) is kind
        assert {*map(repr, found)} == {*map(repr, seen)}
    given = {"object": Object(Level.LOW), "level": Level.LOW}
    given["object"].state["seen"] = kind()  # type: ignore[union-attr]  # an Object
    store.save({**given, "object": {**Object(Level.LOW).state, "seen": seen}}, step=2)
    store.load(into=given)
    assert {*map(repr, given["object"].state["seen"])} == {*map(repr, seen)} - {repr(Access.READ | Access.WRITE)} | {
        "3"
    }  # type: ignore[union-attr]  # as above


@pytest.mark.parametrize("kind", [set, frozenset])
def test_members_of_an_unknown_class_in_a_set_are_refused(store: Store, kind: type) -> None:
    """Test that a set never gets plain values in place of members, unless no set is given."""
    store.save({"seen": kind({Level.HIGH, ("a", Level.LOW)})}, step=1)
    namesake = enum.Enum("Level", {"HIGH": 2, "LOW": 1})
    for given in ({"seen": kind()}, {"seen": kind({Other.MIDDLE})}, {"seen": kind({Level.LOW, namesake.LOW})}):  # type: ignore[attr-defined]  # a member
        with pytest.raises(StateMismatchError, match=r"seen: the stored set has Level\.\w+.*add a member of the class"):
            store.load(into=given)
    with pytest.raises(StateMismatchError, match=r"has Level.HIGH, of which"):
        store.load(into={"seen": kind({enum.IntEnum("Level", {"LOW": 1}).LOW})})  # type: ignore[attr-defined]  # a member
    assert store.load()["seen"] == store.load(into={"seen": None})["seen"] == kind({2, ("a", 1)})


def test_containers_are_filled_in_place(store: Store) -> None:
    """Test that tensors, deques, sets and dataclasses stay the same objects."""
    tensor, averages = torch.zeros(3), Averages(torch.zeros(3))
    inner = averages.weight
    state: dict[str, Any] = {"d": deque([tensor], 4), "s": {5}, "a": averages, "m": defaultdict(int, n=0)}
    store.save({"d": deque([torch.ones(3)], 9), "s": {1, 2}, "a": Averages(torch.ones(3), 3), "m": {"n": 7}}, step=1)
    kept = dict(state)
    store.load(into=state)
    assert all(state[key] is value for key, value in kept.items())
    assert state["d"][0] is tensor
    assert averages.weight is inner
    assert tensor.tolist() == averages.weight.tolist() == [1, 1, 1]  # type: ignore[attr-defined]  # a tensor
    assert (state["s"], averages.count, state["d"].maxlen, state["m"]["n"]) == ({1, 2}, 3, 4, 7)


@pytest.mark.parametrize(
    "value", [Pair(1, torch.ones(2)), Averages(torch.ones(2), 3), Level.HIGH], ids=["namedtuple", "dataclass", "enum"]
)
def test_class_is_not_imported_without_a_given_state(store: Store, value: object) -> None:
    """Test that a load without a class gives a dict of the fields, or the value of the member."""
    store.save({"value": value}, step=1)
    loaded = store.load()["value"]
    if isinstance(value, Level):
        assert_same(loaded, 2)
    else:
        fields = value._asdict() if isinstance(value, Pair) else vars(value)
        assert_same(loaded, fields)


GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(5),
    "random": lambda: random.Random(5),
    **{
        name: lambda name=name: np.random.Generator(getattr(np.random, name)(5))  # type: ignore[misc]  # a bit generator
        for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
    },
}


def _draw(generator: Any) -> list[float]:  # noqa: ANN401 - of any library
    """Return numbers, of which the first leave something in the caches of the generator."""
    if isinstance(generator, torch.Generator):
        return torch.randn(3, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss() for _ in range(3)]
    return [*generator.integers(0, 100, 3, dtype=np.uint8).tolist(), *generator.standard_normal(3).tolist()]


@pytest.mark.parametrize("is_given", [False, True], ids=["new", "in place"])
@pytest.mark.parametrize("name", GENERATORS)
def test_generator_continues_its_numbers(store: Store, name: str, *, is_given: bool) -> None:
    """Test that a generator draws the same numbers after a load, as a new object or in place."""
    generator = GENERATORS[name]()
    _draw(generator)
    store.save({"generator": generator}, step=1)
    expected = _draw(generator)
    given = {"generator": generator}
    loaded = store.load(into=given) if is_given else store.load()
    assert (loaded["generator"] is generator) == is_given
    assert _draw(loaded["generator"]) == expected


class CudaGenerator(torch.Generator):
    """Stand-in for a generator of a CUDA device, because these tests run without one: a CPU generator in disguise.

    It shows which device type is stored and which generator takes the state. A state of a real CUDA generator, which
    get_state() also returns as a uint8 tensor in host memory, has 16 bytes and is not tested.
    """

    number = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # read-only on purpose
        """Device of the disguise."""
        return torch.device("cuda", self.number)


def _generator_of(state: torch.Tensor) -> CudaGenerator:
    """Return a generator with a state."""
    generator = CudaGenerator()
    generator.set_state(state)
    return generator


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(typed_values._PARTS, CudaGenerator, typed_values._PARTS[torch.Generator])


@pytest.mark.usefixtures("_stand_in")
def test_cuda_generator_continues_its_numbers_on_another_device(store: Store) -> None:
    """Test the stored device type and feature, and a restore into a generator of a device with another number."""
    generator = CudaGenerator()
    generator.manual_seed(5)
    _draw(generator)
    tree = flatten({"generator": generator}).tree
    assert tree == ["d", [["generator", ["x", "device-generator", "cuda", ["T", 0]]]]]
    assert b'"reader_features":["device-generator","typed-value"]' in encode_manifest(
        header_for(tree), [inline_row("generator", "uint8", (4,))]
    )
    store.save({"generator": generator}, step=1)
    state = generator.get_state()
    expected = _draw(generator)
    other = CudaGenerator()
    other.number = 1
    assert store.load(into={"generator": other})["generator"] is other
    assert _draw(other) == expected
    holder = Object(Level.LOW)
    holder.state = {"generator": CudaGenerator()}
    store.save({"object": {"generator": _generator_of(state)}}, step=2)
    assert isinstance(store.load(into={"object": holder})["object"].state["generator"], CudaGenerator)
    assert _draw(holder.state["generator"]) == expected
    assert torch.equal(store.load(1)["generator"], state)
    assert torch.equal(store.load(1, into={"generator": None})["generator"], state)
    assert store.verify() == []


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize(
    ("stored", "given", "named"),
    [
        (
            CudaGenerator,
            torch.Generator,
            r'of cpu is given, but one of cuda .* give torch.Generator\(device="cuda"\), or N',
        ),
        (
            torch.Generator,
            CudaGenerator,
            r'of cuda is given, but one of cpu .* give torch.Generator\(device="cpu"\), or N',
        ),
        (CudaGenerator, random.Random, r"a python-random is given, but a device-generator is stored"),
    ],
)
def test_state_of_a_generator_on_another_type_of_device_is_refused(
    store: Store, stored: type, given: type, named: str
) -> None:
    """Test that the error of a machine without the device says what to give, before anything is overwritten."""
    store.save({"x": stored(), "weight": torch.ones(2)}, step=1)
    state = {"x": given(), "weight": torch.zeros(2)}
    with pytest.raises(StateMismatchError, match=f"x: .*{named}"):
        store.load(into=state)
    assert state["weight"].tolist() == [0, 0]


def test_generator_of_another_device_is_refused_with_advice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a device type whose states are unknown, with the same stand-in."""
    monkeypatch.setitem(typed_values._PARTS, CudaGenerator, typed_values._PARTS[torch.Generator])
    monkeypatch.setattr(CudaGenerator, "device", torch.device("xpu"))
    with pytest.raises(UnsupportedValueError, match=r"of the CPU and of CUDA devices .*store its get_state\(\)"):
        store.save({"x": CudaGenerator()}, step=1)


def _jagged(first: float = 1.0) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.full((2, 3), first), torch.ones(4, 3)], layout=torch.jagged)


NESTED: dict[str, Callable[[], torch.Tensor]] = {
    "jagged": _jagged,
    "jagged with lengths": lambda: torch.nested.narrow(
        torch.arange(24.0).reshape(2, 6, 2), 1, torch.tensor([0, 1]), torch.tensor([3, 2]), layout=torch.jagged
    ),
    "strided": lambda: torch.nested.nested_tensor([torch.arange(6).reshape(2, 3), torch.ones(4, 1, dtype=torch.int64)]),
    "strided and transposed": lambda: torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 1)]).transpose(1, 2),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", NESTED)
def test_nested_tensor_comes_back(store: Store, name: str) -> None:
    """Test the components as a new tensor, in place, and into a tensor of other shapes."""
    stored = NESTED[name]()
    store.save({"x": stored}, step=1)
    other = torch.nested.nested_tensor([torch.ones(1, 3)], layout=stored.layout)
    given = {"x": NESTED[name]() * 0}
    kept = given["x"]
    for loaded in (store.load(), store.load(into=given), store.load(into={"x": other}), store.load(into={"x": None})):
        assert loaded["x"].is_nested
        assert loaded["x"].layout == stored.layout
        for found, expected in zip(loaded["x"].unbind(), stored.unbind(), strict=True):
            assert_same(found, expected)
    assert given["x"] is kept
    assert store.verify() == []
    features = value_features(flatten({"x": stored}).tree)
    assert features == {"typed-value", "nested-tensor"}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensor_of_another_form_is_refused(store: Store) -> None:
    """Test another layout, a dense tensor on either side, and a parameter of other shapes."""
    store.save({"x": _jagged(), "y": torch.ones(2)}, step=1)
    for given, named in (
        (NESTED["strided"](), "x: a nested tensor of layout strided is given, but one of layout jagged is stored"),
        (torch.ones(2, 4, 3), "x: a tensor is given, but a nested-tensor is stored"),
    ):
        with pytest.raises(StateMismatchError, match=named):
            store.load(into={"x": given, "y": torch.ones(2)})
    with pytest.raises(StateMismatchError, match="y: a nested-tensor is given, but a tensor is stored"):
        store.load(into={"x": None, "y": _jagged()})
    with pytest.raises(RefusedStateError, match="x: the components of the given nested parameter have other shapes"):
        store.load(into={"x": torch.nn.Parameter(torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.jagged))})
    parameter = torch.nn.Parameter(_jagged(5.0))
    assert store.load(into={"x": parameter})["x"] is parameter
    assert torch.equal(parameter.detach().values(), torch.ones(6, 3))  # type: ignore[attr-defined]  # a nested tensor


@pytest.mark.parametrize("offsets", [[0, 2, 99], [-1, 2, 3], [0, 3, 1], [[0, 1, 2]], [0.0, 1.0], []])
def test_hostile_offsets_of_a_nested_tensor_are_refused(offsets: list[Any]) -> None:
    """Test that no component is read from outside of the values."""
    for lengths in ([], [torch.tensor([1, 1 << 62])], [torch.tensor([-5, 1])]):
        content = [torch.ones(4, 3), torch.tensor(offsets), *lengths]
        with pytest.raises(RefusedStateError, match="nested-tensor"):
            typed_values.build(typed_values.TypedValue("nested-tensor", "jagged", content))


def test_selection_keeps_the_chosen_parts_of_containers(store: Store) -> None:
    """Test that a glob selects tensors inside containers, and other typed values as a whole."""
    state = {"a": Averages(torch.ones(2), 3), "w": deque([1, torch.ones(1)]), "rng": random.Random(4), "p": Path("x")}
    store.save(state, step=1)
    assert store.load(tensors="a.weight")["a"]["weight"].tolist() == [1, 1]
    assert store.load(tensors="a.weight").keys() == {"a"}
    assert [*store.load(tensors="w.0")["w"]] == [1, None]
    assert store.load(tensors="rng.1")["rng"].getstate() == state["rng"].getstate()  # type: ignore[attr-defined]  # a Random
    assert store.load(tensors="p") == {"p": Path("x")}


@pytest.mark.parametrize("name", ["set", "empty set", "frozenset", "range", "slice", "timedelta"])
def test_value_is_selected_by_its_name(store: Store, name: str) -> None:
    """Test values that consist of several numbers, by the name in the list of values."""
    store.save({"value": VALUES[name](), "weight": torch.ones(2)}, step=1)
    assert [value.name for value in store.values()[1]] == ["value"]
    _same(store.load(tensors="value"), {"value": VALUES[name]()})


def test_states_of_two_ranks_are_merged_inside_typed_values(store: Store) -> None:
    """Test that mappings of all ranks are merged by key, also in a defaultdict, and that rank 0 wins otherwise."""
    for rank in (0, 1):
        state = {"d": defaultdict(int, {f"rank{rank}": rank}), "s": {rank}, "r": random.Random(rank)}
        store.save(state, step=1, part=Part(rank, 2, "0" * 32))
    merged = store.load()
    _same(merged["d"], defaultdict(int, rank0=0, rank1=1))
    assert (merged["s"], merged["r"].getstate()) == ({0}, random.Random(0).getstate())
    assert store.load(rank=1)["s"] == {1}


def test_generator_in_two_places_is_one_state(store: Store) -> None:
    """Test that references to one generator are restored to the same state."""
    generator = torch.Generator().manual_seed(1)
    state = {"sampler": generator, "dataset": {"generator": generator}}
    store.save(state, step=1)
    expected = _draw(generator)
    store.load(into=state)
    assert _draw(generator) == expected


def test_tied_tensor_in_a_deque_is_stored_once(store: Store) -> None:
    """Test that a tensor in several typed values stays one tensor."""
    weight = torch.rand(70_000)
    store.save({"weight": weight, "window": deque([weight]), "average": Averages(weight)}, step=1)
    (stored,) = store.tensors(1)[1]
    assert stored.aliases == ("window.0", "average.weight")
    loaded = store.load()
    assert loaded["window"][0] is loaded["weight"] is loaded["average"]["weight"]


class Object:
    """An object whose state has classes."""

    def __init__(self, level: Level) -> None:
        """Take a level."""
        self.state: dict[str, object] = {"level": level, "pairs": [Pair(level, 1)], "average": Averages(level)}

    def state_dict(self) -> dict[str, object]:
        """Return the state."""
        return self.state

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take a state."""
        self.state = state


def test_object_gets_the_classes_of_its_own_state(store: Store) -> None:
    """Test that load_state_dict() receives members, namedtuples and dataclasses, and that old ones are unchanged."""
    store.save({"object": Object(Level.HIGH)}, step=1)
    given = Object(Level.LOW)
    before = given.state["average"]
    store.load(into={"object": given})
    _same(given.state, Object(Level.HIGH).state)
    assert before == Averages(Level.LOW)


@dataclasses.dataclass
class Renamed:
    """The fields of Averages after a change of the code."""

    weights: object
    count: int = 0


class Other(enum.IntEnum):
    """Levels after a change of the code."""

    MIDDLE = 7


@pytest.mark.parametrize(
    ("stored", "given", "named"),
    [
        (Averages(1), Renamed(1), r"x: Renamed lacks the stored field weight"),
        (Pair(1, 2), Averages(1), r"x: a dataclass is given, but a namedtuple is stored"),
        (Level.HIGH, Other.MIDDLE, r"x: Other has no member for the stored Level\.HIGH"),
        (deque([1, 2, 3]), deque([1], 2), r"x: a deque of at most 2 items is given, but 3 are stored"),
        ({1}, deque([1]), r"x: a deque is given, but a set is stored"),
        ([1], {1}, r"x: a set is given, but list is stored"),
        (deque([1]), torch.ones(1), r"x: a tensor is given, but a deque is stored"),
        (GENERATORS["PCG64"](), GENERATORS["Philox"](), r"x: a generator of Philox is given, but one of PCG64 is"),
        (GENERATORS["torch"](), GENERATORS["random"](), r"x: a python-random is given, but a torch-generator is"),
        (deque([torch.ones(2)]), deque([torch.ones(3)]), r"x\.0: float32 \[3\] is given, but float32 \[2\] is stored"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_state_of_another_form_is_named(store: Store, stored: object, given: object, named: str) -> None:
    """Test that a given value that does not fit is an error before anything is overwritten."""
    store.save({"x": stored, "weight": torch.ones(2)}, step=1)
    state = {"x": given, "weight": torch.zeros(2)}
    before = copy.copy(given)
    with pytest.raises(StateMismatchError, match=named):
        store.load(into=state)
    assert state["weight"].tolist() == [0, 0]  # type: ignore[attr-defined]  # a tensor
    assert isinstance(given, (torch.Tensor, random.Random, np.random.Generator)) or given == before


def test_field_that_was_not_saved_is_named(store: Store) -> None:
    """Test that the error names a field that a dataclass has gained."""
    store.save({"x": Averages(1)}, step=1)
    grown = dataclasses.make_dataclass("Averages", ["weight", "count", "scale"])(1, 0, 2)
    with pytest.raises(StateMismatchError, match=r"x\.scale: is not in the checkpoint"):
        store.load(into={"x": grown})


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (defaultdict(lambda: 0), r"default_factory is no builtin type .*; store dict\(value\)"),
        (dt.datetime(2026, 1, 1, tzinfo=dt.timezone(dt.timedelta(0), "X")), "with a fixed offset from UTC"),
        (np.random.RandomState(1), r"store its get_state\(\)"),
        (random.SystemRandom(), "only random.Random itself"),
        (dt.time(1, tzinfo=ZoneInfo("UTC")), "with a fixed offset from UTC"),
        (bytearray(b"a"), r"store bytes\(value\)"),
        (max, "leave the function out of the state"),
        (LabelError, "store its name as a string"),
        (torch.utils.data.DataLoader([1]), "use StatefulDataLoader of torchdata, or store the epoch"),
        ({object()}, r"state at x: .*object"),
        ({Odd.LIST}, "the items of a set cannot be stored; .*Enum members"),
        ({True: 1}, r"mapping key True is neither str nor int; use str\(key\) or int\(key\)"),
        (defaultdict(int, {False: 1}), "mapping key False"),
        (Averages(object()), r"state at x\.weight: values of type object"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_refusal_says_how_to_store_the_value(store: Store, value: object, remedy: str) -> None:
    """Test that the error about a value has a remedy for its type."""
    with pytest.raises(UnsupportedValueError, match=remedy):
        store.save({"x": value}, step=1)


_ORDER = """
from asymcheck.state.walk import flatten
print(flatten({"s": {*map(str, range(50)), *range(50)}}).tree)
"""


@pytest.mark.slow
def test_set_has_one_encoding_in_all_processes() -> None:
    """Test that the order of a set in memory, which depends on the hash seed, does not show."""
    trees = {
        subprocess.run(
            [sys.executable, "-c", _ORDER],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(Path(__file__).parents[2])},
        ).stdout
        for seed in (1, 2)
    }
    assert len(trees) == 1
    assert "['x', 'set', None, ['t', [" in trees.pop()


@pytest.mark.parametrize(
    ("value", "has_feature"),
    [
        ({"x": "deque"}, False),
        (["x", "deque", "set", ["x", "deque", None]], False),
        (Counter(a=1), False),
        ({"a": [{"b": deque()}]}, True),
    ],
    ids=["key", "items", "counter", "deque"],
)
def test_feature_is_listed_only_for_typed_values(value: object, *, has_feature: bool) -> None:
    """Test that manifests of other states list no feature, so that older programs read them."""
    rows = [inline_row("w", "uint8", (1,))]
    data = encode_manifest(header_for(["l", [["T", 0], flatten(value).tree]]), rows)
    assert (b'"reader_features":["typed-value"]' in data) == has_feature
    assert (b'"reader_features":[]' in data) != has_feature


@pytest.mark.parametrize(
    ("value", "has_feature"),
    [({Level.LOW}, True), ({(1, frozenset({Level.LOW}))}, True), ([{1}, Level.LOW, Averages([Level.LOW])], False)],
    ids=["set", "tuple", "no set"],
)
def test_feature_of_members_in_sets_is_listed_only_for_them(value: object, *, has_feature: bool) -> None:
    """Test that programs which know other typed values read all manifests without members in sets."""
    rows = [inline_row("w", "uint8", (1,))]
    data = encode_manifest(header_for(["l", [["T", 0], flatten(value).tree]]), rows)
    features = b'["enum-item","typed-value"]' if has_feature else b'["typed-value"]'
    assert b'"reader_features":' + features in data


def _store_with(store_path: Path, tree: Node) -> Store:
    """Return a store with a manifest that some other program wrote, newer than an intact checkpoint."""
    with Store.open(store_path, create=True) as store:
        store.save({"old": 1}, step=1, run=HEADER.run)
    header = header_for(tree, ref=CheckpointRef(1, 2, save_id("newer")), parent=None)
    data = encode_manifest(header, [inline_row("w", "uint8", (4,))])
    path = store_path / manifest_path(data, header)
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    return Store.open(store_path, read_only=True)


def test_unknown_type_stops_a_restore(store_path: Path) -> None:
    """Test that a checkpoint with a type of a later version is never skipped for an older checkpoint."""
    tree: Node = ["l", [["T", 0], ["x", "os.system", None, "true"]]]
    with (
        _store_with(store_path, tree) as store,
        pytest.raises(UnsupportedFeatureError, match=r"unknown type 'os\.system': install a newer asymcheck"),
    ):
        store.load(run=HEADER.run)


_KEY: Node = ["l", [0] * 624]
HOSTILE: dict[str, Node] = {
    "size": ["x", "torch-generator", "cpu", ["T", 0]],
    "position": [
        *("x", "numpy-generator", "MT19937"),
        ["d", [["bit_generator", "MT19937"], ["state", ["d", [["key", _KEY], ["pos", 1 << 30]]]]]],
    ],
    "buffer": ["x", "numpy-generator", "Philox", ["d", [["state", ["d", []]], ["buffer_pos", -5]]]],
    "no state": ["x", "numpy-generator", "PCG64", ["d", []]],
    "state that is a number": ["x", "numpy-generator", "SFC64", ["d", [["state", 1]]]],
    "words": ["x", "python-random", None, ["t", [3, ["N", 0], None]]],
}


def test_large_state_of_a_generator_is_refused_at_once(store_path: Path) -> None:
    """Test that words are counted before each of them becomes a Python integer."""
    tree: Node = ["x", "python-random", None, ["t", [3, ["N", 0], None]]]
    with Store.open(store_path, create=True) as store:
        store.save({"words": np.zeros(20_000_000, dtype=np.uint8)}, step=1)
        (path,) = store_path.glob("manifests/*/*/*.manifest")
        manifest = decode_manifest(path.read_bytes(), "manifest")
        data = encode(manifest, dataclasses.replace(manifest.header, tree=tree))
        path.unlink()
        path.with_name(str(layout.ManifestName(0, 1, digest(data)))).write_bytes(data)
        with pytest.raises(RefusedStateError, match="625 words, not 20000000"):
            store.load()


def test_set_at_the_largest_depth_is_stored_or_refused(store: Store) -> None:
    """Test that a state with an empty set is refused exactly if no program could read it."""
    for depth in (61, 62, 63):
        state: object = set()
        for _ in range(depth):
            state = [state]
        if depth > 62:
            with pytest.raises(UnsupportedValueError, match="nested deeper"):
                store.save(state, step=depth)
        else:
            store.save(state, step=depth)
            assert store.load(depth) == state


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_generator_state_is_refused(store_path: Path, name: str) -> None:
    """Test that a state which no generator accepts is an error of its own, and reads no foreign memory."""
    with (
        _store_with(store_path, ["l", [["T", 0], HOSTILE[name]]]) as store,
        pytest.raises(RefusedStateError, match=r"-generator|python-random"),
    ):
        store.load(run=HEADER.run)


@pytest.mark.parametrize(("left", "position"), [(624, 600), (2, 624), (624, 2)])
def test_torch_generator_with_a_position_outside_its_block_is_refused(store: Store, left: int, position: int) -> None:
    """Test positions that torch accepts, although it would then return foreign memory as numbers."""
    hostile = torch.Generator().get_state()
    hostile[8:24] = torch.frombuffer(bytearray(struct.pack("<iiQ", left, 1, position)), dtype=torch.uint8)
    generator = torch.Generator()
    generator.set_state(hostile)
    store.save({"rng": generator}, step=1)
    state = RngState().state_dict()
    store.save({"rng": {**state, "torch": hostile}}, step=2)
    store.save({"rng": {**state, "numpy": [*state["numpy"][:2], 10**6, 0, 0.0]}}, step=3)  # type: ignore[index]  # a list
    with pytest.raises(RefusedStateError, match=f"position {position} of a torch-generator is outside its block"):
        store.load(1)
    for step, match in ((2, "torch-generator is outside"), (3, "position 1000000 of the generator of numpy")):
        with pytest.raises(RefusedStateError, match=match):
            store.load(step, into={"rng": RngState()})


@pytest.mark.parametrize("drawn", [0, 1, 623, 624, 625, 1300])
def test_torch_generator_at_any_position_is_restored(store: Store, drawn: int) -> None:
    """Test positions at both ends of a block."""
    generator = torch.Generator()
    torch.empty(drawn, dtype=torch.int32).random_(generator=generator)
    store.save({"rng": generator}, step=1)
    loaded = store.load()["rng"]  # type: ignore[index]  # the state of the store
    assert torch.equal(loaded.get_state(), generator.get_state())


def test_refused_generator_names_its_path(store_path: Path) -> None:
    """Test that a restore in place names the generator, and the tensors that were overwritten."""
    tree: Node = ["d", [["w", ["T", 0]], ["rng", ["x", "numpy-generator", "PCG64", ["d", [["state", 1]]]]]]]
    given = {"w": torch.zeros(4, dtype=torch.uint8), "rng": np.random.default_rng()}
    with _store_with(store_path, tree) as store, pytest.raises((RefusedStateError, StateMismatchError), match="rng"):
        store.load(run=HEADER.run, into=given)


def test_values_are_shown_readably(store: Store) -> None:
    """Test the texts of typed values in the list of plain values."""
    store.save(
        {
            "hist": defaultdict(int, a=1),
            "set": {2, 1},
            "levels": {Level.LOW, ("a", Level.HIGH)},
            "none": set(),
            "path": Path("a/b"),
            "level": Level.LOW,
            "when": dt.datetime(2026, 1, 2, tzinfo=UTC),
            "range": range(3),
            "window": deque([1.5]),
            "options": Averages("x"),
            "pairs": [Pair(1, 2)],
        },
        step=1,
    )
    assert {value.name: value.text for value in store.values(1)[1]} == {
        "hist.a": "1",
        "set": "set(1, 2)",
        "levels": "set('a', Level.HIGH (2), Level.LOW (1))",
        "none": "set()",
        "path": "path('a/b')",
        "level": "Level.LOW (1)",
        "when": "datetime('2026-01-02T00:00:00+00:00')",
        "range": "range(0, 3, 1)",
        "window.0": "1.5",
        "options.weight": "'x'",
        "options.count": "0",
        "pairs.0.left": "1",
        "pairs.0.right": "2",
    }
