"""Test the tree: every plain value keeps its type and bits, and other values are refused."""

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
    """Build comparable values: containers carry their kind, leaves are tuples."""

    def plain(self, value: object) -> object:
        """Return a plain value with the name of its type; floats as their bits."""
        return (type(value).__name__, struct.pack(">d", value) if isinstance(value, float) else value)

    def sequence(self, kind: str, items: list[object]) -> object:
        """Return a list or tuple."""
        return (kind, items)

    def mapping(self, kind: str, pairs: list[tuple[Key, object]], metadata: object) -> object:
        """Return a mapping."""
        return (kind, pairs, metadata)

    def tensor(self, row: int, as_array: bool) -> object:
        """Return a row."""
        return ("tensor", row, as_array)

    def tagged(self, kind: str, value: object) -> object:
        """Return a shape, scalar, dtype or device."""
        return (kind, value)

    def typed(self, kind: str, parameter: str | int | None, content: object) -> object:
        """A typed value."""
        return ("typed", kind, parameter, content)


def decode(node: Node, rows: int = 0) -> object:
    """Return the value of a node after a round trip through JSON."""
    return tree.decode(parse_json(canonical_json(node), "test"), rows, Built(), "test")


strings = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
floats = st.floats() | st.sampled_from([0.0, -0.0, 5e-324, math.inf, -math.inf, math.nan])
plain = st.none() | st.booleans() | st.integers() | floats | strings | st.binary(max_size=20)
plain |= st.integers(1 << 52, 1 << 54) | st.integers(-(1 << 54), -(1 << 52)) | st.integers(-(1 << 300), 1 << 300)
keys = strings | st.integers() | st.integers(1 << 52, 1 << 60)


@given(plain)
def test_plain_values_go_round(value: object) -> None:
    """Test that a plain value keeps its type, and a float its bits."""
    assert decode(tree.encode_plain(value)) == Built().plain(value)


@given(st.complex_numbers())
def test_complex_numbers_go_round(value: complex) -> None:
    """Test that both parts keep their bits, including signs of zero and NaN."""
    _, found = decode(tree.encode_plain(value))  # type: ignore[misc]  # a pair
    assert struct.pack(">dd", found.real, found.imag) == struct.pack(">dd", value.real, value.imag)


@st.composite
def trees(draw: st.DrawFn) -> tuple[Node, object, int]:
    """Return a node, its decoded value, and the number of rows that it names."""
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
    """Test that containers keep kind, order and keys, and rows their numbers."""
    node, value, rows = made
    assert decode(node, rows) == value


@given(trees())
def test_every_row_must_be_named(made: tuple[Node, object, int]) -> None:
    """Test a row more than the tree names, and a row less."""
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
    """Test that any JSON is decoded, or raises a FormatError."""
    try:
        tree.decode(node, rows, Built(), "test")
    except FormatError:
        return
    assert node is None or isinstance(node, (bool, int, str, list))


@pytest.mark.parametrize("depth", [1, 63, 64])
def test_the_depth_is_bounded(depth: int) -> None:
    """Test 64 levels, and one more, for any kind of container."""
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
    """Test integers of more digits than Python converts, in both signs, and with pieces that begin with zeros."""
    for value in (10**digits, 10**digits - 1, 7 * 10**digits + 5, int("1" + "0" * 15) * 10 ** (digits - 10)):
        for signed in (value, -value):
            assert decode(tree.encode_plain(signed)) == ("int", signed)


def test_the_digits_of_an_integer_are_bounded() -> None:
    """Test the maximum number of digits, and one more, as a value, a key and a size."""
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
    """Test that an integer above the limit is refused before its conversion, which would take minutes."""
    began = time.process_time()
    with pytest.raises(LimitError, match="digits"):
        tree.decode(["i", "9" * (16 << 20)], 0, Built(), "test")
    assert time.process_time() - began < 1


@pytest.mark.parametrize("value", [1 << 53, -(1 << 53)])
def test_integers_beyond_binary64_are_text(value: int) -> None:
    """Test integers from 2^53 on, because other JSON parsers use binary64."""
    assert tree.encode_integer(value) == ["i", str(value)]
    assert tree.encode_integer(value - (1 if value > 0 else -1)) == value - (1 if value > 0 else -1)


class _Int(int):
    """A subclass of an integer."""


class _Str(str):
    """A subclass of a string."""

    __slots__ = ()


@pytest.mark.parametrize(
    "value", [_Int(1), _Str("a"), bytearray(b"a"), object(), {1}, range(3)], ids=lambda value: type(value).__name__
)
def test_other_types_have_no_plain_form(value: object) -> None:
    """Test values whose type would not be restored, including subclasses."""
    with pytest.raises(StructureError, match="cannot be stored"):
        tree.encode_plain(value)


@pytest.mark.parametrize("value", ["\ud800", "a\udfffb"])
def test_half_a_pair_of_surrogates_is_refused(value: str) -> None:
    """Test that a string without a UTF-8 form is refused by the writer."""
    with pytest.raises(StructureError, match="surrogates"):
        tree.encode_plain(value)


@pytest.mark.parametrize("value", [0.0, -1.5, 5e-324, 1e308, math.inf, -math.inf, 3])
def test_metrics_go_round(value: float) -> None:
    """Test metrics for which JSON has no number."""
    text = canonical_json(tree.encode_metric(value))
    assert tree.decode_metric(parse_json(text, "test"), "test") == value


def test_nan_is_a_metric() -> None:
    """Test a loss that is NaN."""
    assert tree.encode_metric(math.nan) == "NaN"
    assert math.isnan(tree.decode_metric("NaN", "test"))


@pytest.mark.parametrize("value", [None, True, "nan", "inf", "1", [], {}])
def test_other_metrics_are_refused(value: object) -> None:
    """Test values other than numbers and the three names."""
    with pytest.raises(StructureError, match="metric"):
        tree.decode_metric(value, "test")


def test_names_are_joined_by_dots() -> None:
    """Test keys and positions; the root has an empty name."""
    assert tree.join_name(["optimizer", "state", 0, "exp_avg"]) == "optimizer.state.0.exp_avg"
    assert tree.join_name([]) == ""
