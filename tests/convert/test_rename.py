"""Renamed tensors: regular expressions on dotted names, in both directions."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from asymcheck import Store
from asymcheck.convert.convert import Output, export_checkpoint, foreign_state
from asymcheck.convert.rename import compile_renames, rename_tensors
from asymcheck.errors import InvalidInputError
from tests.store.equality import assert_same

ONE, TWO = torch.ones(1), torch.ones(2)


def renamed(state: object, *pairs: tuple[str, str]) -> Any:  # noqa: ANN401 - a nested state
    """Return the state with renamed tensors."""
    return rename_tensors(state, compile_renames(pairs), torch.Tensor)


@pytest.mark.parametrize(
    ("state", "pair", "expected"),
    [
        ({"m": {"module.a.w": ONE, "module.b": TWO}}, (r"\bmodule\.", ""), {"m": {"a.w": ONE, "b": TWO}}),
        ({"state_dict": {"a.w": ONE}, "epoch": 3}, ("^state_dict", "model"), {"epoch": 3, "model": {"a.w": ONE}}),
        ({"state_dict": {"net.a.w": ONE}}, (r"^state_dict\.net", "model"), {"model": {"a.w": ONE}}),
        ({"state_dict": {"net.w": ONE}}, (r"^state_dict\.", ""), {"net": {"w": ONE}}),
        ({"o": {"state": {0: {"m": ONE}}, "lr": 1}}, (r"\.m$", ".v"), {"o": {"state": {0: {"v": ONE}}, "lr": 1}}),
        ({"o": {"state": {0: {"m": ONE}}, "lr": 1}}, ("^o", "p"), {"o": {"lr": 1}, "p": {"state": {0: {"m": ONE}}}}),
        ({"state": {0: {"m": ONE}, 1: TWO}}, ("^state", "s"), {"s": {0: {"m": ONE}, 1: TWO}}),
        ({"a": ONE, "b": TWO}, ("^a$", "c"), {"c": ONE, "b": TWO}),
        ({"a": ONE}, ("^", "net."), {"net.a": ONE}),
        ({"m": {"a": ONE}}, (r"\ba", "net.a"), {"m": {"net.a": ONE}}),
        ({"a": ONE, "b": TWO}, ("([ab])", r"x\1"), {"xa": ONE, "xb": TWO}),
        ({"a": ONE, "b": TWO}, ("^(.)$", r"\1\1"), {"aa": ONE, "bb": TWO}),
        ({"a": 1, "l": {"a": ONE}}, ("a$", "b"), {"a": 1, "l": {"b": ONE}}),
        ({"a": {}, "b": ONE}, ("b", "c"), {"a": {}, "c": ONE}),
        ({"a": ONE, "b": {"c": TWO}}, ("^a$", "b.d"), {"b.d": ONE, "b": {"c": TWO}}),
        ({"safetensors": {"a": ONE}, "m": {"a": TWO}}, ("a$", "b"), {"safetensors": {"a": ONE}, "m": {"b": TWO}}),
    ],
)  # fmt: skip
def test_names_are_replaced_as_by_re_sub(state: object, pair: tuple[str, str], expected: object) -> None:
    """Test names of one mapping, of another mapping, plain values and integer keys."""
    assert_same(renamed(state, pair), expected)


def test_tensors_in_typed_values_are_renamed_in_exports(tmp_path: Path) -> None:
    """Test a defaultdict, a defaultdict whose tensors all move, and a defaultdict as the part."""
    inside: dict[str, object] = defaultdict(None, {"net": {"weight": ONE}, "bias": TWO})
    with Store.open(tmp_path / "store", create=True) as store:
        store.save({"model": inside, "old": defaultdict(dict, a=TWO)}, step=1)
        whole = Output(tmp_path / "a.pt", renames=compile_renames([("weight", "kernel"), ("^old", "new")]))
        export_checkpoint(store, whole)
        part = Output(tmp_path / "b.safetensors", renames=compile_renames([("weight", "kernel")]))
        export_checkpoint(store, part, part="model")
    expected = {"model": {"net": {"kernel": ONE}, "bias": TWO}, "new": {"a": TWO}}
    assert_same(torch.load(tmp_path / "a.pt", weights_only=True), expected)
    assert_same(safetensors.torch.load_file(tmp_path / "b.safetensors"), {"bias": TWO, "net.kernel": ONE})


def test_renamed_model_keeps_the_versions_of_its_modules() -> None:
    """Test the attribute by which load_state_dict() decides how to read the state of a module."""
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    changed = renamed({"model": state, "other": ONE}, ("weight$", "scale"))["model"]
    assert list(changed)[:2] == ["0.scale", "0.bias"]
    assert changed._metadata["0"] == {"version": 2}


def test_patterns_are_applied_in_their_order() -> None:
    """Test two patterns that swap two names."""
    swapped = renamed({"a": ONE, "b": TWO}, ("^a$", "x"), ("^b$", "a"), ("^x$", "b"))
    assert_same(swapped, {"b": ONE, "a": TWO})


@pytest.mark.parametrize(
    ("state", "pair", "problem"),
    [
        ({"a": ONE, "b": TWO}, ("^a$", "b"), "a and b would both be named b"),
        ([ONE, TWO], ("^0$", "b"), "not in a mapping"),
        ({"m": {"a": ONE, "b": TWO}}, ("[ab]$", "c"), "m.a and m.b would both be named m.c"),
        ({"a": ONE, "b": 3}, ("^a$", "b"), "a and b would both be named b"),
        ({"a": {"b": ONE}, "x": TWO}, ("^x$", "a.b"), "a.b and x would both be named a.b"),
        ({"a": 1, "b": ONE}, ("^a$", "c"), "matches no name of a tensor"),
        ({"a": ONE}, ("^a$", ""), "part of the name is empty"),
        ({"a.b": ONE}, ("^a", ""), "part of the name is empty"),
        ({"l": [ONE]}, ("^l", "k"), "it is in a list"),
        ({"a": {"b": ONE}, "c": TWO}, (r"^a\.b$", "c.d"), "another value has a part of this name"),
    ],
)
def test_impossible_names_are_refused(state: object, pair: tuple[str, str], problem: str) -> None:
    """Test collisions, empty names, lists, and a name below that of another tensor."""
    with pytest.raises(InvalidInputError, match=problem):
        renamed(state, pair)


@pytest.mark.parametrize("pair", [("(", "x"), ("a", r"\1"), ("a", r"\g<name>")])
def test_invalid_expression_is_a_clear_error(pair: tuple[str, str]) -> None:
    """Test a pattern, and replacements that refer to missing groups."""
    with pytest.raises(InvalidInputError, match="invalid regular expression"):
        compile_renames([pair])


def test_tensors_are_renamed_in_files(store_path: Path, tmp_path: Path) -> None:
    """Test an import, and exports to a safetensors file, a torch file and a folder."""
    torch.save({"state_dict": {"net.w": ONE, "net.b": TWO}, "epoch": 3}, tmp_path / "a.ckpt")
    with Store.open(store_path, create=True) as store:
        renames = compile_renames([("^state_dict", "model"), (r"\bnet\.", "")])
        with foreign_state(tmp_path / "a.ckpt", renames=renames) as state:
            store.save(state, step=1)
        assert_same(store.load(), {"epoch": 3, "model": {"w": ONE, "b": TWO}})
        back = compile_renames([("^", "net.")])
        for name in ("m.safetensors", "m.pt", "m"):
            export_checkpoint(store, Output(tmp_path / name, renames=back), part="model")
        with pytest.raises(InvalidInputError, match="w and b would both be named x"):
            export_checkpoint(store, Output(tmp_path / "n.pt", renames=compile_renames([("^.*$", "x")])), part="model")
    expected: object = {"net.b": TWO, "net.w": ONE}
    for name in ("m.safetensors", "m/model.safetensors"):
        loaded = safetensors.torch.load_file(tmp_path / name)
        assert_same(dict(sorted(loaded.items())), expected)
    assert_same(torch.load(tmp_path / "m.pt", weights_only=True), {"net.w": ONE, "net.b": TWO})
    assert not (tmp_path / "n.pt").exists()
