"""Test parts of checkpoints in an export: requested data is never left out silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from asymcheck import Store
from asymcheck.convert.convert import Output, export_checkpoint
from asymcheck.errors import InvalidInputError
from tests.convert.files import import_checkpoint
from tests.store.equality import assert_same


def _folder(tmp_path: Path) -> Path:
    """Create a model folder with a configuration."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    return tmp_path / "model"


def test_additions_to_a_converted_model_are_exported(store: Store, tmp_path: Path) -> None:
    """Test imported weights with an optimizer: each entry is written, or listed as left out."""
    import_checkpoint(store, _folder(tmp_path), step=0)
    state: Any = store.load()
    state |= {"optimizer": {"m": torch.zeros(3)}, "epoch": 3}
    store.save(state, step=1)
    export_checkpoint(store, Output(tmp_path / "full.pt"))
    assert_same(torch.load(tmp_path / "full.pt", weights_only=True), state)
    done = export_checkpoint(store, Output(tmp_path / "full.safetensors"))
    loaded = safetensors.torch.load_file(tmp_path / "full.safetensors")
    assert set(loaded) == {"model.w", "optimizer.m", "safetensors.files.config.json"}
    assert loaded["safetensors.files.config.json"].numpy().tobytes() == b"{}"
    assert done.left_out == ("safetensors.metadata.format", "epoch")


@pytest.mark.parametrize("part", ["model", None])
def test_converted_model_keeps_its_small_files(store: Store, tmp_path: Path, part: str | None) -> None:
    """Test that the configuration is exported with the weights, also after training has extended the state."""
    import_checkpoint(store, _folder(tmp_path), step=0)
    if part is not None:
        state: Any = store.load()
        store.save({**state, "epoch": 3}, step=1)
    export_checkpoint(store, Output(tmp_path / "out"), part=part)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert set(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")) == {"w"}


@pytest.mark.parametrize(
    ("suffix", "part", "expected"), [(".pt", None, 1), (".safetensors", None, 1), (".pt", "model", 0)]
)
def test_small_files_that_one_file_cannot_keep_are_named(
    store: Store, tmp_path: Path, suffix: str, part: str | None, expected: int
) -> None:
    """Test the export of an imported folder to a single file; a named part promises no other data."""
    import_checkpoint(store, _folder(tmp_path), step=0)
    done = export_checkpoint(store, Output(tmp_path / f"out{suffix}"), part=part)
    assert len([hint for hint in done.hints if hint.startswith("left out config.json; ")]) == expected


def test_converted_adapter_keeps_the_name_of_its_weights(store: Store, tmp_path: Path) -> None:
    """Test the folder of a LoRA, in which peft does not look for ``model.safetensors``."""
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    weights = {"base_model.model.a.lora_A.weight": torch.ones(3), "base_model.model.a.lora_B.weight": torch.zeros(3)}
    safetensors.torch.save_file(weights, tmp_path / "lora" / "adapter_model.safetensors")
    import_checkpoint(store, tmp_path / "lora")
    done = export_checkpoint(store, Output(tmp_path / "out", max_shard_bytes=12))
    assert done.hints == ()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert_same(safetensors.torch.load_file(tmp_path / "out" / "adapter_model.safetensors"), weights)


@pytest.mark.parametrize(
    "source",
    [
        {"version": "0.4"},
        {"metadata": {"format": "pt"}},
        {"metadata": {"format": 1}, "files": {}},
        {"metadata": {}, "files": {"a": "text"}},
        {"metadata": {}, "files": {}, "more": 1},
        "text",
    ],
    ids=str,
)
@pytest.mark.parametrize("has_model", [True, False], ids=["model", "none"])
def test_same_key_in_another_state_has_no_meaning(
    store: Store, tmp_path: Path, source: object, has_model: bool
) -> None:
    """Test that the key is exported unchanged."""
    state = {**({"model": {"w": torch.ones(3)}} if has_model else {"w": torch.ones(3)}), "safetensors": source}
    store.save(state, step=0)
    export_checkpoint(store, Output(tmp_path / "o.pt"))
    assert_same(torch.load(tmp_path / "o.pt", weights_only=True), state)


def test_the_files_of_a_converted_model_can_be_named_as_a_part(store: Store, tmp_path: Path) -> None:
    """Test that the requested files become tensors with their bytes, and no other file is written."""
    import_checkpoint(store, _folder(tmp_path), step=0)
    export_checkpoint(store, Output(tmp_path / "out"), part="safetensors.files")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    loaded = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert loaded["config.json"].numpy().tobytes() == b"{}"


NESTED: Any = {"l": [torch.ones(1), {"q": torch.ones(2)}, (torch.zeros(3), None)], "none": None, "epoch": 3, "e": {}}


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("l.1", NESTED["l"][1]),
        ("l.1.q", NESTED["l"][1]["q"]),
        ("l.2.0", NESTED["l"][2][0]),
        ("l.2.1", None),
        ("none", None),
        ("e", {}),
        ("epoch", 3),
    ],
)
def test_part_of_nested_containers(store: Store, tmp_path: Path, part: str, expected: object) -> None:
    """Test indices of lists and tuples, as in tensor names, and None."""
    store.save(NESTED, step=0)
    export_checkpoint(store, Output(tmp_path / "o.pt"), part=part)
    assert_same(torch.load(tmp_path / "o.pt", weights_only=True), expected)


@pytest.mark.parametrize(("part", "name"), [("l.1.q", "q"), ("l.2.0", "0")])
def test_a_part_that_is_a_tensor_keeps_its_last_key(store: Store, tmp_path: Path, part: str, name: str) -> None:
    """Test that the tensor has a name in a safetensors file."""
    store.save(NESTED, step=0)
    export_checkpoint(store, Output(tmp_path / "o.safetensors"), part=part)
    assert list(safetensors.torch.load_file(tmp_path / "o.safetensors")) == [name]


@pytest.mark.parametrize("part", ["l.3", "l.-1", "l.00", "l.q", "l.0.0", "none.x", "epoch.0", "e.x"])
def test_missing_part_is_refused(store: Store, tmp_path: Path, part: str) -> None:
    """Test that the error lists the existing parts."""
    store.save(NESTED, step=0)
    with pytest.raises(InvalidInputError, match=rf"no part '{part}'; it has l, none, epoch, e"):
        export_checkpoint(store, Output(tmp_path / "o.pt"), part=part)


@pytest.mark.parametrize("name", ["o.safetensors", "o"])
@pytest.mark.parametrize("part", ["none", "epoch", "e", "l.2.1"])
def test_a_part_without_tensors_makes_no_file_of_tensors(store: Store, tmp_path: Path, part: str, name: str) -> None:
    """Test that no empty file is written for a requested part."""
    store.save(NESTED, step=0)
    with pytest.raises(InvalidInputError, match=rf"part '{part}' of the checkpoint has no tensors; write a \.pt file"):
        export_checkpoint(store, Output(tmp_path / name), part=part)
    assert not list(tmp_path.glob("*o*.*"))


def test_a_file_without_tensors_comes_back(store: Store, tmp_path: Path) -> None:
    """Test an export without a requested part."""
    safetensors.torch.save_file({}, tmp_path / "m.safetensors", {"format": "pt"})
    import_checkpoint(store, tmp_path / "m.safetensors")
    export_checkpoint(store, Output(tmp_path / "o.safetensors"))
    assert (tmp_path / "o.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()
