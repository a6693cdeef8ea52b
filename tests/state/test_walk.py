"""Test the walk of a state: the tree of its structure, one row per tensor, and dotted names."""

from collections import OrderedDict

import numpy as np
import pytest
import torch

from asymcheck.errors import UnsupportedValueError
from asymcheck.format.tree import check
from asymcheck.state.walk import flatten


class Part:
    """An object with a state."""

    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> object:
        """Return the given state."""
        return self.state

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Replace the state."""
        self.state = state_dict


def test_the_tree_follows_the_table_of_nodes() -> None:
    """Test one value of each kind, with its node of SPEC.md §A9."""
    state = {
        "none": None,
        "yes": True,
        "text": "ü",
        "int": -(2**53) + 1,
        "big": 2**53,
        "float": -0.0,
        "complex": 1j,
        "bytes": b"\0\xff",
        "list": [1],
        "tuple": (2,),
        "size": torch.Size([3, 4]),
        "ordered": OrderedDict([(1, 2)]),
        "tensor": torch.ones(3),
        "array": np.ones(3),
        "scalar": np.int16(-2),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        7: {},
        -(2**60): [],
    }
    flat = flatten(state)
    assert flat.tree == [
        "d",
        [
            ["none", None],
            ["yes", True],
            ["text", "ü"],
            ["int", -(2**53) + 1],
            ["big", ["i", "9007199254740992"]],
            ["float", ["f", "8000000000000000"]],
            ["complex", ["c", "0000000000000000", "3ff0000000000000"]],
            ["bytes", ["b", "AP8="]],
            ["list", ["l", [1]]],
            ["tuple", ["t", [2]]],
            ["size", ["z", [3, 4]]],
            ["ordered", ["o", [[1, 2]]]],
            ["tensor", ["T", 0]],
            ["array", ["N", 1]],
            ["scalar", ["n", "int16", "feff"]],
            ["dtype", ["y", "bfloat16"]],
            ["device", ["v", "cuda:1"]],
            [7, ["d", []]],
            [["i", "-1152921504606846976"], ["l", []]],
        ],
    ]
    assert [(leaf.name, leaf.dtype, leaf.group) for leaf in flat.leaves] == [
        ("tensor", "float32", "tensor"),
        ("array", "float64", "array"),
    ]


def test_a_module_keeps_the_versions_that_hang_on_its_state() -> None:
    """Test the versions that `Module.state_dict()` stores as an attribute of the mapping."""
    tree = flatten({"model": torch.nn.BatchNorm1d(2)}).tree
    kind, _, metadata = tree[1][0][1]  # type: ignore[index]  # a node is a nested list
    assert kind == "m"
    assert metadata == ["o", [["", ["d", [["version", 2]]]]]]


def test_names_are_the_way_to_the_leaf() -> None:
    """Test keys, positions, and integers of any size; two leaves may have one name."""
    state = {"a": [{"b.c": torch.ones(1)}, {"b": {"c": torch.ones(2)}}], 3: (torch.ones(3),), 10**5000: torch.ones(4)}
    names = [leaf.name for leaf in flatten(state).leaves]
    assert names == ["a.0.b.c", "a.1.b.c", "3.0", "1" + "0" * 5000]


def test_tied_tensors_are_one_row_with_every_name() -> None:
    """Test tied tensors in an object's own state, and a Parameter with its data."""
    layer = torch.nn.Linear(2, 2, bias=False)
    flat = flatten({"model": layer, "copy": [layer.weight, layer.weight.detach()], "other": layer.weight.t()})
    assert flat.tree == [
        "d",
        [
            ["model", ["m", [["weight", ["T", 0]]], ["o", [["", ["d", [["version", 1]]]]]]]],
            ["copy", ["l", [["T", 0], ["T", 0]]]],
            ["other", ["T", 1]],
        ],
    ]
    assert [(leaf.name, leaf.aliases) for leaf in flat.leaves] == [
        ("model.weight", ("copy.0", "copy.1")),
        ("other", ()),
    ]


def test_objects_are_asked_for_their_state_at_every_depth() -> None:
    """Test an object inside of an object's state."""
    flat = flatten([Part({"inner": Part({"x": 1})})])
    assert flat.tree == ["l", [["d", [["inner", ["d", [["x", 1]]]]]]]]


def test_a_state_may_be_a_single_leaf() -> None:
    """Test that a bare tensor has the empty name."""
    flat = flatten(torch.ones(2))
    assert (flat.tree, flat.leaves[0].name, flat.leaves[0].group) == (["T", 0], "", "")


def test_depth_ends_where_the_format_says() -> None:
    """Test 64 levels including root and leaf, and one more."""
    state: object = 1
    for _ in range(63):
        state = [state]
    flatten(state)
    with pytest.raises(UnsupportedValueError, match="deeper"):
        flatten([state])


@pytest.mark.parametrize("lists", [59, 60, 61, 62, 63])
def test_versions_of_modules_end_where_the_format_says(lists: int) -> None:
    """Test that versions of modules, which are one level deeper, can be read if they are accepted."""
    state: object = torch.nn.BatchNorm1d(2).state_dict()
    for _ in range(lists):
        state = [state]
    try:
        flat = flatten(state)
    except UnsupportedValueError:
        assert lists > 60
    else:
        check(flat.tree, len(flat.leaves), "tree")
        assert lists <= 60


def test_more_dimensions_than_the_format_has_are_refused_by_name() -> None:
    """Test that the error is raised before anything is written."""
    flatten({"most": torch.ones([1] * 64)})
    with pytest.raises(UnsupportedValueError, match=r"too\.many.*more than 64 dimensions"):
        flatten({"too": {"many": torch.ones([1] * 65)}})


def test_integers_end_where_the_format_says() -> None:
    """Test values and keys at the limit, and one digit more, before anything is written."""
    most = 10**65536 - 1
    check(flatten({"a": most, -most: 1}).tree, 0, "test")
    for state, name in (({"a": {"b": most + 1}}, "a.b"), ({"a": {-most - 1: 1}}, "a"), ({"a": 1 << (1 << 22)}, "a")):
        with pytest.raises(UnsupportedValueError, match="65536 digits") as caught:
            flatten(state)
        assert caught.value.path == name


@pytest.mark.parametrize("part", [[1], (), "text", None, torch.ones(1), 3], ids=repr)
def test_an_object_whose_state_is_no_dict_is_refused(part: object) -> None:
    """Test an object that could not be filled, because `load_state_dict` needs a dict."""
    with pytest.raises(UnsupportedValueError, match="state_dict") as caught:
        flatten({"a": {"b": Part(part)}})
    assert caught.value.path == "a.b"


def test_an_object_that_is_its_own_state_is_refused() -> None:
    """Test that the walk does not loop forever."""
    part = Part(None)
    part.state = part
    with pytest.raises(UnsupportedValueError, match="state_dict"):
        flatten(part)


def test_a_class_is_not_an_object_with_a_state() -> None:
    """Test `Linear` in place of `Linear(2, 2)`, which has the same methods."""
    with pytest.raises(UnsupportedValueError) as caught:
        flatten({"model": torch.nn.Linear})
    assert caught.value.path == "model"
