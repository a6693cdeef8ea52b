"""Test exports of a state with typed values: tensors by name, and plain containers."""

import dataclasses
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from asymcheck import Store
from tests.cli.conftest import run_command


@dataclasses.dataclass
class Options:
    """A value with a tensor."""

    scale: torch.Tensor
    name: str = "a"


def _state() -> dict[str, object]:
    return {
        "window": deque([torch.ones(2), torch.zeros(3)], 4),
        "options": Options(torch.arange(3.0)),
        "counts": defaultdict(int, a=1),
        "folder": Path("a/b"),
        "seen": {1, 2},
    }


def test_export_to_safetensors_has_the_tensors_in_typed_values(tmp_path: Path) -> None:
    """Test that tensors have their dotted names, and that plain values are listed as left out."""
    with Store.open(tmp_path / "store", create=True) as store:
        store.save(_state(), step=1)
    outcome = run_command("restore", tmp_path / "store", "--to", tmp_path / "out.safetensors")
    assert outcome.status == 0, outcome.err
    assert "left out" in outcome.out + outcome.err
    assert "folder" in outcome.out + outcome.err
    written = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert set(written) == {"window.0", "window.1", "options.scale"}
    assert written["options.scale"].tolist() == [0, 1, 2]


def test_export_of_a_part_descends_into_typed_values(tmp_path: Path) -> None:
    """Test that --part names a value inside a dataclass or deque."""
    with Store.open(tmp_path / "store", create=True) as store:
        store.save(_state(), step=1)
    outcome = run_command("restore", tmp_path / "store", "--to", tmp_path / "out.safetensors", "--part", "window")
    assert outcome.status == 0, outcome.err
    assert set(safetensors.torch.load_file(tmp_path / "out.safetensors")) == {"0", "1"}


def test_export_to_a_torch_file_has_plain_containers(tmp_path: Path) -> None:
    """Test that torch.load(weights_only=True) reads the file, with the contents of typed values."""
    with Store.open(tmp_path / "store", create=True) as store:
        store.save(_state(), step=1)
    outcome = run_command("restore", tmp_path / "store", "--to", tmp_path / "out.pt")
    assert outcome.status == 0, outcome.err
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded["options"]["scale"].tolist() == [0, 1, 2]
    assert (loaded["options"]["name"], loaded["counts"], loaded["folder"]) == ("a", {"a": 1}, "a/b")
    assert [tensor.tolist() for tensor in loaded["window"]] == [[1, 1], [0, 0, 0]]
    assert loaded["seen"] == (1, 2)


def test_export_to_a_torch_file_has_plain_containers_in_module_metadata(tmp_path: Path) -> None:
    """Test typed values and a tensor in the attribute in which state_dict() keeps the versions of modules."""
    model: Any = torch.nn.Linear(2, 2).state_dict()
    model._metadata[""].update(names={"b", "a"}, folder=Path("a/b"), scale=torch.ones(3))
    with Store.open(tmp_path / "store", create=True) as store:
        store.save({"model": model}, step=1)
    assert run_command("restore", tmp_path / "store", "--to", tmp_path / "out.pt").status == 0
    metadata = torch.load(tmp_path / "out.pt", weights_only=True)["model"]._metadata[""]
    assert (metadata["version"], metadata["names"], metadata["folder"]) == (1, ("a", "b"), "a/b")
    assert metadata["scale"].tolist() == [1, 1, 1]
