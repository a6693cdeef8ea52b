"""Which part of a checkpoint an export writes: nothing that was asked for is left out in silence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from asymcheck import Store
from asymcheck.interop.convert import Output, export_checkpoint, import_checkpoint
from tests.store.equality import assert_same


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    """A new store."""
    with Store.open(store_path) as opened:
        yield opened


def _folder(tmp_path: Path) -> Path:
    """A model folder with a configuration."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    return tmp_path / "model"


def test_what_was_added_to_a_converted_model_is_exported_too(store: Store, tmp_path: Path) -> None:
    """Weights from elsewhere, then an optimizer: all of it goes into the file, or is named where there is no place."""
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
def test_a_converted_model_keeps_what_lay_beside_it(store: Store, tmp_path: Path, part: str | None) -> None:
    """Its configuration comes back with the weights, also when training has added to the state."""
    import_checkpoint(store, _folder(tmp_path), step=0)
    if part is not None:
        state: Any = store.load()
        store.save({**state, "epoch": 3}, step=1)
    export_checkpoint(store, Output(tmp_path / "out"), part=part)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert set(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")) == {"w"}


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
def test_a_key_of_that_name_in_a_state_of_ones_own_means_nothing(
    store: Store, tmp_path: Path, source: object, has_model: bool
) -> None:
    """It goes out as it came in."""
    state = {**({"model": {"w": torch.ones(3)}} if has_model else {"w": torch.ones(3)}), "safetensors": source}
    store.save(state, step=0)
    export_checkpoint(store, Output(tmp_path / "o.pt"))
    assert_same(torch.load(tmp_path / "o.pt", weights_only=True), state)


def test_the_files_of_a_converted_model_can_be_named_as_a_part(store: Store, tmp_path: Path) -> None:
    """Then they are tensors with their bytes, and nothing lies beside them."""
    import_checkpoint(store, _folder(tmp_path), step=0)
    export_checkpoint(store, Output(tmp_path / "out"), part="safetensors.files")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    loaded = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert loaded["config.json"].numpy().tobytes() == b"{}"
