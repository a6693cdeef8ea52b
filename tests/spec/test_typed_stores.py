"""Test that both readers read the frozen stores of typed values, with and without the classes of a given state."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import asymcheck
from asymcheck.format.manifest_reader import decode_manifest
from asymcheck.format.typed_value import in_order
from tests.spec.frozen import Frozen, found_tensors, typed_stores
from tests.spec.test_reference_reader import read
from tools.vectors_typed_store import CONFIG, STATES

ALL = typed_stores()
CLASSES = ("namedtuple", "dataclass", "enum")
SETS = ("set", "frozenset")

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def state_of(frozen: Frozen, change: int) -> dict[str, object]:
    """Return the state of a store, or another one of the same form."""
    (make,) = (make for name, make in STATES.items() if frozen.whole.name.endswith(name))
    return make(change)


def test_typed_stores_exist() -> None:
    """Test that the first version exists."""
    assert {"v1-by-0.1.0-typed-value", "v1-by-0.1.0-nested-tensor"} <= {frozen.whole.name for frozen in ALL}


@pytest.mark.parametrize("frozen", ALL, ids=str)
def test_given_state_gets_every_value(frozen: Frozen) -> None:
    """Test values, classes, tensors and generators bit for bit, and that a check finds no damage."""
    (facts,) = frozen.checkpoints
    state = state_of(frozen, 1)
    assert found_tensors(state)[0] != facts["tree"]
    with asymcheck.Store.open(frozen.whole / "store", read_only=True) as store:
        assert store.load(into=state) is state
        assert store.verify() == []
    assert found_tensors(state) == (facts["tree"], facts["tensors"])
    assert found_tensors(state_of(frozen, 0)) == (facts["tree"], facts["tensors"])


@pytest.mark.parametrize("frozen", ALL, ids=str)
def test_load_without_a_state_gives_values_without_classes(frozen: Frozen) -> None:
    """Test that only values whose class is not in the standard library, torch or numpy lose their type."""
    (facts,) = frozen.checkpoints
    with asymcheck.Store.open(frozen.whole / "store", read_only=True) as store:
        tree, tensors = found_tensors(store.load())
    assert (tree, tensors) == (_without_classes(facts["tree"]), facts["tensors"])


def _without_classes(node: Any) -> Any:  # noqa: ANN401 - JSON
    if not isinstance(node, list):
        return node
    if node[:1] == ["x"] and node[1] in CLASSES:
        return _without_classes(node[3])
    if node[:1] == ["x"] and node[1] in SETS:
        return [*node[:3], ["t", in_order([*map(_without_classes, node[3][1])])]]
    return [*map(_without_classes, node)]


@pytest.mark.parametrize("frozen", ALL, ids=str)
def test_reference_reader_reads_the_tree(frozen: Frozen) -> None:
    """Test the tree and the digest of every tensor."""
    (facts,) = frozen.checkpoints
    chosen = read(frozen.whole / "store")["chosen"]
    assert chosen["save_id"] == facts["save_id"]
    assert (chosen["tree"], chosen["tensors"]) == (facts["tree"], facts["tensors"])


@pytest.mark.parametrize("frozen", ALL, ids=str)
def test_a_copy_can_be_trained_on(frozen: Frozen, store_path: Path) -> None:
    """Test that the restored state is saved without new partitions, and that a collection keeps it."""
    frozen.copy_to(store_path)
    state = state_of(frozen, 0)
    with asymcheck.Store.open(store_path, config=CONFIG, create=True) as store:
        store.load(into=state)
        assert store.save(state, step=8).written_bytes == 0
        store.delete(7)
        store.gc()
        assert found_tensors(store.load(into=state_of(frozen, 1))) == found_tensors(state)
        assert store.verify() == []


@pytest.mark.parametrize("frozen", [frozen for frozen in ALL if frozen.whole.name.endswith("-nested-tensor")], ids=str)
def test_the_store_has_members_in_sets_and_nested_tensors(frozen: Frozen) -> None:
    """Test the parameters, and that the manifest lists three reader features."""
    (path,) = frozen.whole.rglob("*.manifest")
    found = [*_typed_values(decode_manifest(path.read_bytes(), path.name).header.tree)]
    assert {parameter for kind, parameter in found if kind == "nested-tensor"} == {"jagged", "strided"}
    assert b'"reader_features":["enum-item","nested-tensor","typed-value"]' in path.read_bytes()


@pytest.mark.parametrize("frozen", [frozen for frozen in ALL if frozen.whole.name.endswith("-typed-value")], ids=str)
def test_the_store_has_every_type(frozen: Frozen) -> None:
    """Test that every type and parameter of its version occurs, and that the manifest lists the reader feature."""
    old: dict[str, Any] = json.loads((frozen.whole / "registry.json").read_text("ascii"))
    (path,) = frozen.whole.rglob("*.manifest")
    found = [*_typed_values(decode_manifest(path.read_bytes(), path.name).header.tree)]
    assert {kind for kind, _ in found} == set(old["value_types"])
    assert {parameter for kind, parameter in found if kind in ("path", "pure-path")} == {"posix", "windows"}
    assert len({parameter for kind, parameter in found if kind == "numpy-generator"}) == 5
    assert {parameter for kind, parameter in found if kind == "datetime"} == {None, 1}
    assert b'"reader_features":["typed-value"]' in path.read_bytes()


def _typed_values(node: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - JSON
    """Yield type and parameter of each typed value. No string of the state is "x"."""
    if isinstance(node, list):
        if node[:1] == ["x"]:
            yield node[1], node[2]
        for item in node:
            yield from _typed_values(item)
