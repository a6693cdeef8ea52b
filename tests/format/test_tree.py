"""The tree: every plain value keeps its type and bits, and nothing else is accepted."""

import math
import struct
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.errors import FormatError, LimitError, StructureError
from asymcheck.format import registry, tree
from asymcheck.format.record import canonical_json, parse_json
from asymcheck.format.tree import Key, Node


class Built:
    """Builds what can be compared: containers carry their kind, leaves are tuples."""

    def plain(self, value: object) -> object:
        """A plain value with the name of its type; floats as their bits."""
        return (type(value).__name__, struct.pack(">d", value) if isinstance(value, float) else value)

    def sequence(self, kind: str, items: list[object]) -> object:
        """A list or tuple."""
        return (kind, items)

    def mapping(self, kind: str, pairs: list[tuple[Key, object]], metadata: object) -> object:
        """A mapping of some kind."""
        return (kind, pairs, metadata)

    def tensor(self, row: int, as_array: bool) -> object:
        """A row."""
        return ("tensor", row, as_array)

    def tagged(self, kind: str, value: object) -> object:
        """A shape, scalar, dtype or device."""
        return (kind, value)

    def typed(self, kind: str, parameter: str | int | None, content: object) -> object:
        """A typed value."""
        return ("typed", kind, parameter, content)


def decode(node: Node, rows: int = 0) -> object:
    """The value of a node that went through JSON, as on disk."""
    return tree.decode(parse_json(canonical_json(node), "test"), rows, Built(), "test")


strings = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
floats = st.floats() | st.sampled_from([0.0, -0.0, 5e-324, math.inf, -math.inf, math.nan])
plain = st.none() | st.booleans() | st.integers() | floats | strings | st.binary(max_size=20)
plain |= st.integers(1 << 52, 1 << 54) | st.integers(-(1 << 54), -(1 << 52)) | st.integers(-(1 << 300), 1 << 300)
keys = strings | st.integers() | st.integers(1 << 52, 1 << 60)


@given(plain)
def test_plain_values_go_round(value: object) -> None:
    """A plain value comes back with its type, and a float with its bits."""
    assert decode(tree.encode_plain(value)) == Built().plain(value)


@given(st.complex_numbers())
def test_complex_numbers_go_round(value: complex) -> None:
    """Both parts come back with their bits, signs of zero and NaN included."""
    _, found = decode(tree.encode_plain(value))  # type: ignore[misc]  # a pair
    assert struct.pack(">dd", found.real, found.imag) == struct.pack(">dd", value.real, value.imag)


@st.composite
def trees(draw: st.DrawFn) -> tuple[Node, object, int]:
    """A node, what it must be decoded to, and the number of rows that it names."""
    rows = 0

    def leaf() -> tuple[Node, object]:
        nonlocal rows
        if draw(st.booleans()):
            value = draw(plain)
            return tree.encode_plain(value), Built().plain(value)
        rows += 1
        tag = draw(st.sampled_from("TN"))
        return [tag, rows - 1], ("tensor", rows - 1, tag == "N")

    def node(depth: int) -> tuple[Node, object]:
        kind = draw(st.sampled_from("xxltdom")) if depth else "x"
        if kind == "x":
            return leaf()
        children = [node(depth - 1) for _ in range(draw(st.integers(0, 3)))]
        if kind in "lt":
            return [kind, [child for child, _ in children]], (kind, [value for _, value in children])
        names = draw(
            st.lists(keys, min_size=len(children), max_size=len(children), unique_by=lambda key: (type(key), key))
        )
        pairs = [
            [tree.encode_integer(key) if isinstance(key, int) else key, child]
            for key, (child, _) in zip(names, children, strict=True)
        ]
        values = [(key, value) for key, (_, value) in zip(names, children, strict=True)]
        if kind != "m":
            return [kind, pairs], (kind, values, None)
        metadata, of_metadata = node(depth - 1)
        return [kind, pairs, metadata], (kind, values, of_metadata)

    made, value = node(3)
    return made, value, rows


@given(trees())
def test_whole_trees_go_round(made: tuple[Node, object, int]) -> None:
    """Containers come back with their kind, their order and their keys, rows with their numbers."""
    node, value, rows = made
    assert decode(node, rows) == value


@given(trees())
def test_every_row_must_be_named(made: tuple[Node, object, int]) -> None:
    """With one row more than the tree names, or one less, it is refused."""
    node, _, rows = made
    with pytest.raises(StructureError, match=f"row {rows} of the manifest is not in the tree"):
        decode(node, rows + 1)
    if rows:
        with pytest.raises(StructureError, match=f"names row {rows - 1} of {rows - 1}"):
            decode(node, rows - 1)


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | strings
    | st.sampled_from("ifcbltzdomTNnyv"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(strings, inner, max_size=2)
        | st.tuples(st.sampled_from("ifcbltzdomTNnyv"), inner).map(list)
        | st.tuples(st.sampled_from("ltdom"), st.lists(inner, max_size=2)).map(list)
    ),
)


@given(_json, st.integers(0, 2))
def test_any_json_is_decoded_or_refused(node: Any, rows: int) -> None:  # noqa: ANN401 - any JSON
    """Whatever stands there, nothing but a FormatError comes out."""
    try:
        tree.decode(node, rows, Built(), "test")
    except FormatError:
        return
    assert node is None or isinstance(node, (bool, int, str, list))


@pytest.mark.parametrize("depth", [1, 63, 64])
def test_the_depth_is_bounded(depth: int) -> None:
    """64 levels are decoded, one more is refused, however they are made."""
    for wrap in (lambda node: ["l", [node]], lambda node: ["d", [["k", node]]], lambda node: ["m", [], node]):
        node: Node = 1
        for _ in range(depth - 1):
            node = wrap(node)
        decode(node)
        for _ in range(registry.TREE_DEPTH_MAX + 1 - depth):
            node = wrap(node)
        with pytest.raises(LimitError, match="64"):
            decode(node)


@pytest.mark.parametrize("digits", [16, 4000, 4001, 8000, 20_000])
def test_integers_of_any_size(digits: int) -> None:
    """Integers beyond what Python converts at once come back, in both signs, also where a piece begins with zeros."""
    for value in (10**digits, 10**digits - 1, 7 * 10**digits + 5, int("1" + "0" * 15) * 10 ** (digits - 10)):
        for signed in (value, -value):
            assert decode(tree.encode_plain(signed)) == ("int", signed)


def test_the_digits_of_an_integer_are_bounded() -> None:
    """What may be written can be read; one digit more is refused by both, as a value, a key and a size."""
    most = 10**registry.INTEGER_DIGITS_MAX - 1
    for value in (most, -most):
        assert decode(tree.encode_integer(value)) == ("int", value)
    for value in (most + 1, -most - 1, 1 << (1 << 25)):
        with pytest.raises(LimitError, match="65536 digits"):
            tree.encode_plain(value)
    more = ["i", "9" * (registry.INTEGER_DIGITS_MAX + 1)]
    for node in (more, ["d", [[more, 1]]], ["z", [more]]):
        with pytest.raises(LimitError, match="65537 digits"):
            decode(node)


def test_digits_that_a_manifest_has_room_for_keep_no_reader_busy() -> None:
    """An integer beyond the limit is refused before it is converted, which would take minutes."""
    began = time.process_time()
    with pytest.raises(LimitError, match="digits"):
        tree.decode(["i", "9" * (16 << 20)], 0, Built(), "test")
    assert time.process_time() - began < 1


@pytest.mark.parametrize("value", [1 << 53, -(1 << 53)])
def test_integers_beyond_binary64_are_text(value: int) -> None:
    """From 2^53 on, because other JSON parsers use binary64."""
    assert tree.encode_integer(value) == ["i", str(value)]
    assert tree.encode_integer(value - (1 if value > 0 else -1)) == value - (1 if value > 0 else -1)


class _Int(int):
    """An integer of another type."""


class _Str(str):
    """A string of another type."""

    __slots__ = ()


@pytest.mark.parametrize(
    "value", [_Int(1), _Str("a"), bytearray(b"a"), object(), {1}, range(3)], ids=lambda value: type(value).__name__
)
def test_other_types_have_no_plain_form(value: object) -> None:
    """A value of a type that would not come back as it was is refused, subclasses included."""
    with pytest.raises(StructureError, match="cannot be stored"):
        tree.encode_plain(value)


@pytest.mark.parametrize("value", ["\ud800", "a\udfffb"])
def test_half_a_pair_of_surrogates_is_refused(value: str) -> None:
    """A string that has no UTF-8 form is refused when it is written."""
    with pytest.raises(StructureError, match="surrogates"):
        tree.encode_plain(value)


@pytest.mark.parametrize("value", [0.0, -1.5, 5e-324, 1e308, math.inf, -math.inf, 3])
def test_metrics_go_round(value: float) -> None:
    """A metric comes back, also where JSON has no number for it."""
    text = canonical_json(tree.encode_metric(value))
    assert tree.decode_metric(parse_json(text, "test"), "test") == value


def test_nan_is_a_metric() -> None:
    """A loss that is not a number is worth recording."""
    assert tree.encode_metric(math.nan) == "NaN"
    assert math.isnan(tree.decode_metric("NaN", "test"))


@pytest.mark.parametrize("value", [None, True, "nan", "inf", "1", [], {}])
def test_other_metrics_are_refused(value: object) -> None:
    """Nothing but numbers and the three names is a metric."""
    with pytest.raises(StructureError, match="metric"):
        tree.decode_metric(value, "test")


def test_names_are_joined_by_dots() -> None:
    """The dotted name of a leaf is its keys and positions; the root has none."""
    assert tree.join_name(["optimizer", "state", 0, "exp_avg"]) == "optimizer.state.0.exp_avg"
    assert tree.join_name([]) == ""
