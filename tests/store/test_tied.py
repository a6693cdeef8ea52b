"""Test that tied tensors stay tied after a load, also of a part."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from asymcheck import Store


class Tied(torch.nn.Module):
    """A language model whose output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(300, 16)
        self.head = torch.nn.Linear(16, 300, bias=False)
        self.head.weight = self.embedding.weight


def _load(store: Store, **options: Any) -> Mapping[str, Any]:  # noqa: ANN401 - passed on as they are
    loaded = store.load(**options)
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 5_000, 3_000_000], ids=["inline", "bundled", "partitioned"])
def test_the_same_tensor_in_many_places_is_the_same_object(store: Store, count: int) -> None:
    """Test mappings, sequences and several depths; a copy with equal values stays a copy."""
    tensor = torch.arange(count, dtype=torch.float32)
    store.save({"a": tensor, "b": [tensor, (tensor,)], "view": tensor.view(-1), "copy": tensor.clone()}, step=1)
    loaded = _load(store)
    assert loaded["a"] is loaded["b"][0]
    assert loaded["a"] is loaded["b"][1][0]
    assert loaded["a"] is loaded["view"]
    assert loaded["copy"] is not loaded["a"]
    loaded["a"][0] = 42
    assert loaded["b"][1][0][0] == 42
    assert loaded["copy"][0] == 0


def test_tied_tensors_are_stored_once(store: Store) -> None:
    """Test that a tied tensor costs only a name in the manifest."""
    tensor = torch.randn(1_000_000)
    saved = store.save({"a": tensor, "b": tensor}, step=1)
    assert saved.state_bytes == saved.written_bytes == 4_000_000


def test_a_tied_module_is_tied_after_the_load(store: Store) -> None:
    """Test a state dict, and a module that is filled."""
    model = Tied()
    store.save({"model": model}, step=1)
    loaded = _load(store)["model"]
    assert loaded["head.weight"] is loaded["embedding.weight"]
    other = Tied()
    store.load(into={"model": other})
    assert other.head.weight is other.embedding.weight
    assert torch.equal(other.head.weight, model.head.weight)


@pytest.mark.parametrize("name", ["first", "second"])
def test_one_name_of_a_tied_tensor_is_enough(store: Store, name: str) -> None:
    """Test that any of its names selects the tensor."""
    tensor = torch.randn(4000)
    store.save({"first": {"w": tensor}, "second": {"w": tensor}}, step=1)
    loaded = _load(store, tensors=f"{name}.*")
    assert list(loaded) == [name]
    assert torch.equal(loaded[name]["w"], tensor)


def test_selection_keeps_ties(store: Store) -> None:
    """Test that two of three selected names are the same object."""
    tensor = torch.randn(4000)
    store.save({"a": tensor, "b": tensor, "c": tensor}, step=1)
    loaded = _load(store, tensors="[bc]")
    assert list(loaded) == ["b", "c"]
    assert loaded["b"] is loaded["c"]


def test_overlapping_views_are_stored_separately(store: Store) -> None:
    """Test that only equal views of the same memory are tied."""
    base = torch.arange(4000.0)
    store.save({"whole": base, "part": base[:2000], "other dtype": base.view(torch.int32)}, step=1)
    loaded = _load(store)
    loaded["whole"].zero_()
    assert torch.equal(loaded["part"], base[:2000])
    assert torch.equal(loaded["other dtype"], base.view(torch.int32))


def test_a_conjugate_is_not_tied_to_its_original(store: Store) -> None:
    """Test views that share memory and strides, but have different numbers."""
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    store.save({"a": numbers, "b": numbers.conj()}, step=1)
    loaded = _load(store)
    assert loaded["a"].tolist() == [1 + 2j, 3 - 4j]
    assert loaded["b"].tolist() == [1 - 2j, 3 + 4j]


def test_untied_targets_of_a_tied_tensor_are_all_filled(store: Store) -> None:
    """Test a state that ties fewer tensors than the checkpoint: each of its tensors gets the values."""
    tensor = torch.randn(4000)
    store.save({"a": tensor, "b": tensor}, step=1)
    into = {"a": torch.zeros(4000), "b": torch.zeros(4000)}
    store.load(into=into)
    assert torch.equal(into["a"], tensor)
    assert torch.equal(into["b"], tensor)
    assert into["a"] is not into["b"]
