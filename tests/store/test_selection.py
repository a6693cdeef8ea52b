"""Test that partial loads read and return only the requested tensors."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from asymcheck import Store, StoreConfig
from asymcheck.errors import CheckpointNotFoundError, InvalidInputError, StateMismatchError
from asymcheck.storage.nvme import NvmeTier
from tests.store.equality import assert_same
from tests.store.spies import CountingFiles, frames_read

MIB = 1 << 20


def _training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return 4 MiB of weights in large and small tensors, with twice as much optimizer state."""
    model = torch.nn.Sequential(torch.nn.Linear(1000, 500), torch.nn.Linear(500, 1000), torch.nn.LayerNorm(1000))
    optimizer = torch.optim.AdamW(model.parameters())
    # Use a weighted sum. The plain sum after a LayerNorm has no gradient, so all moments would be zero and equal.
    (model(torch.randn(2, 1000)) * torch.randn(2, 1000)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_weights_alone_are_read_without_a_byte_of_the_optimizer(store: Store) -> None:
    """Test that the frames have exactly the bytes of the model that are not in the manifest."""
    model, optimizer = _training()
    store.save({"model": model, "optimizer": optimizer}, step=1)
    with frames_read() as seen:
        loaded = store.load(tensors="model.*")
    assert_same(loaded, {"model": model.state_dict()})
    weights = [tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()]
    assert seen.total_bytes == sum(size for size in weights if size > 1024)
    with frames_read() as all_seen:
        store.load()
    assert all_seen.total_bytes > 2.9 * seen.total_bytes


def test_weights_alone_cost_the_device_little_more_than_their_size(store_path: Path) -> None:
    """Test the bytes of all reads: manifest, indexes and headers are added, and no optimizer state."""
    model, optimizer = _training()
    files = CountingFiles()
    with Store(NvmeTier(store_path, StoreConfig(), files=files)) as store:
        store.save({"model": model, "optimizer": optimizer}, step=1)
        files.read_bytes = 0
        store.load(tensors="model.*", into={"model": model})
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    assert weights < files.read_bytes < weights + 200_000


def test_filling_a_part_reads_that_part_only(store: Store) -> None:
    """Test that entries that `into` lacks are not read."""
    model, optimizer = _training()
    store.save({"model": model, "optimizer": optimizer}, step=1)
    with frames_read() as seen:
        store.load(into={"model": model})
    assert seen.total_bytes < 4.2 * MIB
    with frames_read() as seen:
        store.load(into={"model": {"0.bias": torch.zeros(500)}})
    assert seen.count == 1


def test_tensors_in_the_manifest_need_no_frame(store: Store) -> None:
    """Test that small tensors are read with the manifest, without any pack."""
    store.save({"small": torch.arange(10), "large": torch.zeros(MIB)}, step=1)
    with frames_read() as seen:
        assert_same(store.load(tensors="small"), {"small": torch.arange(10)})
    assert seen.count == 0


STATE: dict[str, Any] = {
    "model": OrderedDict([("a.weight", torch.arange(3)), ("a.bias", torch.arange(2)), ("b.weight", torch.arange(1))]),
    "optimizer": {"state": {0: {"step": torch.tensor(1)}, 10: {"step": torch.tensor(2)}}, "groups": [{"lr": 0.1}]},
    "list": [torch.tensor(5), {"x": torch.tensor(6), "y": 1}, torch.tensor(7)],
    "tuple": (torch.tensor(8), 2),
    "plain": {"epoch": 3, "empty": {}},
    "[odd]": 1,
}

SELECTED: dict[str, object] = {
    "*": STATE,
    "model.*": {"model": STATE["model"]},
    "model.a.*": {"model": OrderedDict(list(STATE["model"].items())[:2])},
    "*.weight": {"model": OrderedDict([("a.weight", torch.arange(3)), ("b.weight", torch.arange(1))])},
    "optimizer.state.1*": {"optimizer": {"state": {10: {"step": torch.tensor(2)}}}},
    "optimizer.groups.0.lr": {"optimizer": {"groups": [{"lr": 0.1}]}},
    "list.0": {"list": [torch.tensor(5), None, None]},
    "list.1.x": {"list": [None, {"x": torch.tensor(6)}, None]},
    "tuple.0": {"tuple": (torch.tensor(8), None)},
    "plain.*": {"plain": {"epoch": 3}},
    "[[]odd]": {"[odd]": 1},
    "?lain.epoch": {"plain": {"epoch": 3}},
}


@pytest.mark.parametrize("pattern", SELECTED)
def test_a_glob_selects_leaves_by_their_dotted_names(store: Store, pattern: str) -> None:
    """Test that containers keep types and order, empty containers are dropped, and gaps in sequences are None."""
    store.save(STATE, step=1)
    assert_same(store.load(tensors=pattern), SELECTED[pattern])


@pytest.mark.parametrize("pattern", ["epoch", "MODEL.*", "", "model"])
def test_a_glob_that_selects_nothing_is_an_error(store: Store, pattern: str) -> None:
    """Test that the message lists the existing names."""
    store.save(STATE, step=1)
    with pytest.raises(InvalidInputError, match=r"matches no name.*it has model, optimizer, list"):
        store.load(tensors=pattern)
    with pytest.raises(InvalidInputError, match="matches no name"):
        store.load(tensors=pattern, into={"model": torch.nn.Linear(1, 1)})


def test_module_is_filled_from_a_selection(store: Store) -> None:
    """Test that the version entries of a module stay with the selection."""
    model = torch.nn.BatchNorm1d(3)
    store.save({"model": model}, step=1)
    loaded = store.load(tensors="model.running_*")
    assert isinstance(loaded, dict)
    assert list(loaded["model"]) == ["running_mean", "running_var"]
    assert loaded["model"]._metadata[""] == {"version": 2}


def test_excluding_a_requested_tensor_is_a_mismatch(store: Store) -> None:
    """Test that the tensor does not silently keep its values."""
    store.save({"a": torch.ones(3), "b": torch.ones(3)}, step=1)
    into = {"a": torch.zeros(3), "b": torch.zeros(3)}
    with pytest.raises(StateMismatchError, match="b: is not in the checkpoint, or not in the selection 'a'"):
        store.load(tensors="a", into=into)
    assert into["a"].sum() == 0
    store.save({"model": torch.nn.Linear(2, 2)}, step=2)
    with pytest.raises(StateMismatchError, match=r"model.bias: is not in the checkpoint, or not in the selection"):
        store.load(tensors="model.weight", into={"model": torch.nn.Linear(2, 2)})


def test_a_bare_tensor_has_the_empty_name(store: Store) -> None:
    """Test that only patterns such as `*` select a bare tensor."""
    store.save(torch.arange(3), step=1)
    assert_same(store.load(tensors="**"), torch.arange(3))
    with pytest.raises(InvalidInputError, match="matches no name"):
        store.load(tensors="x*")


def test_selecting_from_an_empty_store_finds_no_checkpoint(store: Store) -> None:
    """Test that the error names the checkpoint, not the pattern."""
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint"):
        store.load(tensors="model.*")


def test_a_selection_of_one_layer_reads_one_layer(store_path: Path) -> None:
    """Test one of 32 layers of 1 MiB each, which is one frame."""
    state = {"model": {f"h.{i}.weight": torch.full((MIB // 4,), float(i)) for i in range(32)}}
    with Store.open(store_path, create=True) as store:
        store.save(state, step=1)
        with frames_read() as seen:
            loaded = store.load(tensors="model.h.7.*")
    assert_same(loaded, {"model": {"h.7.weight": torch.full((MIB // 4,), 7.0)}})
    assert (seen.count, seen.total_bytes) == (1, MIB)
