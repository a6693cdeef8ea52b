"""Test targets of exports: existing files stay intact, and a failed export leaves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import pytest
import safetensors.torch
import torch

from asymcheck import Store
from asymcheck.cli.exit_status import STORAGE, status_of
from asymcheck.convert.convert import Output, export_checkpoint
from asymcheck.errors import (
    InconsistentCheckpointError,
    InvalidInputError,
    OutOfSpaceError,
    ReadOnlyStoreError,
    StorageError,
)
from asymcheck.storage.local_files import Files
from tests.damage.flips import flip
from tests.store.equality import assert_same

BIG = 600_000


@pytest.mark.parametrize(
    "name",
    [
        *("../evil", "/evil", "a/b", "..", ".", "", "nul\0", ".hidden"),
        *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "optimizer.pt"),
    ],
)
def test_only_names_of_small_files_are_written_into_a_folder(store: Store, tmp_path: Path, name: str) -> None:
    """Test a store from others: a file outside of the folder, in the place of the weights, or with a pickle."""
    beside = {"metadata": {}, "files": {name: torch.zeros(3, dtype=torch.uint8)}}
    store.save({"model": {"a": torch.ones(3)}, "safetensors": beside}, step=1)
    below = tmp_path / "below"
    below.mkdir()
    with pytest.raises(InvalidInputError, match=r"not that of a small file.*; write a \.safetensors or \.pt file"):
        export_checkpoint(store, Output(below / "out"))
    assert not (tmp_path / "evil").exists()
    assert list(below.iterdir()) == []
    for target in (below / "out.safetensors", below / "out.pt"):
        export_checkpoint(store, Output(target))
    assert sorted(path.name for path in below.iterdir()) == ["out.pt", "out.safetensors"]


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt", "out"])
def test_existing_target_is_replaced_only_on_request(store: Store, tmp_path: Path, name: str) -> None:
    """Test that the replacement is atomic: the old content stays until the new one is complete."""
    store.save({"a": torch.ones(3)}, step=1)
    target = tmp_path / "folder" / name
    with pytest.raises(InvalidInputError, match="create it first"):
        export_checkpoint(store, Output(target))
    target.parent.mkdir()
    export_checkpoint(store, Output(target))
    with pytest.raises(InvalidInputError, match="--overwrite"):
        export_checkpoint(store, Output(target))
    store.save({"a": torch.zeros(4)}, step=2)
    export_checkpoint(store, Output(target, overwrite=True))
    file = target / "model.safetensors" if name == "out" else target
    loaded = torch.load(file, weights_only=True) if name == "out.pt" else safetensors.torch.load_file(file)
    assert_same(loaded, {"a": torch.zeros(4)})
    assert [path.name for path in target.parent.iterdir()] == [name]


def test_a_folder_that_is_no_model_is_never_replaced(store: Store, tmp_path: Path) -> None:
    """Test folders such as a home directory."""
    store.save({"a": torch.ones(3)}, step=1)
    home = tmp_path / "home"
    (home / "below").mkdir(parents=True)
    (home / "model.safetensors").write_bytes(b"x")
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "a.txt").write_text("x")
    for folder in (home, notes):
        before = sorted(folder.rglob("*"))
        with pytest.raises(InvalidInputError, match="cannot replace"):
            export_checkpoint(store, Output(folder, overwrite=True))
        assert sorted(folder.rglob("*")) == before


def test_files_beside_weights_are_never_lost(store: Store, tmp_path: Path) -> None:
    """Test that a folder is only replaced by a folder with its configuration, tokenizer and texts."""
    store.save({"model": {"a": torch.ones(3)}, "optimizer": {"m": torch.ones(3)}}, step=1)
    folder = tmp_path / "out"
    export_checkpoint(store, Output(folder), part="model")
    for name in ("config.json", "tokenizer.json", "README.md"):
        (folder / name).write_text(name)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InvalidInputError, match=r"README\.md, config\.json, tokenizer\.json.*--files-from .*out"):
        export_checkpoint(store, Output(folder, overwrite=True), part="optimizer")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    export_checkpoint(store, Output(folder, overwrite=True, files_from=folder), part="optimizer")
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {"model.safetensors"}
    (folder / ".hidden").write_text("x")
    with pytest.raises(InvalidInputError, match=r"would lack \.hidden"):
        export_checkpoint(store, Output(folder, overwrite=True, files_from=folder), part="model")
    assert [path.name for path in tmp_path.glob("*out*")] == ["out"]


def save_two_and_damage_one(store: Store) -> None:
    """Save two steps, and damage the newer one."""
    for step in (1, 2):
        store.save({"a": torch.full((BIG,), step)}, step=step)
    newest = max((store.path / "packs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    flip(newest, 8 * (-5000 if newest.stat().st_size < BIG else 100_000))


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt", "out"])
def test_a_damaged_checkpoint_leaves_no_file(store: Store, tmp_path: Path, name: str) -> None:
    """Test that the next older checkpoint is written, or nothing if the step was requested."""
    save_two_and_damage_one(store)
    (tmp_path / "below").mkdir()
    with pytest.raises(InconsistentCheckpointError, match="digest mismatch"):
        export_checkpoint(store, Output(tmp_path / "below" / name), step=2)
    assert list((tmp_path / "below").iterdir()) == []
    done = export_checkpoint(store, Output(tmp_path / "below" / name))
    assert done.checkpoint.step == 1
    assert len(done.skipped) == 1
    assert [path.name for path in (tmp_path / "below").iterdir()] == [name]


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt", "out"])
def test_space_of_a_damaged_checkpoint_is_reused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Test a disk with space for only one file."""
    save_two_and_damage_one(store)
    monkeypatch.setattr(Files, "free_bytes", lambda _self, _path: BIG * 8 + 10_000)
    assert export_checkpoint(store, Output(tmp_path / name)).checkpoint.step == 1


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt", "out"])
def test_missing_space_is_reported_before_writing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Test the sum of all files of a folder, which are sparse at first."""
    store.save({f"t{i}": torch.randn(1000) for i in range(4)}, step=1)
    monkeypatch.setattr(Files, "free_bytes", lambda _self, _path: 9000)
    (tmp_path / "below").mkdir()
    with pytest.raises(OutOfSpaceError, match=r"only 8\.8 KiB are free"):
        export_checkpoint(store, Output(tmp_path / "below" / name, max_shard_bytes=4000))
    assert list((tmp_path / "below").iterdir()) == []


def test_a_folder_stays_when_the_new_one_cannot_take_its_name(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the old folder gets its name back."""
    store.save({"a": torch.ones(3)}, step=1)
    export_checkpoint(store, Output(tmp_path / "out"))
    rename = Path.rename

    def refusing(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial") and Path(target).name == "out":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refusing)
    with pytest.raises(StorageError):
        export_checkpoint(store, Output(tmp_path / "out", overwrite=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_place_that_cannot_be_written_is_named(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the error is one of the system, recommends another target, and does not mention the store."""
    store.save({"a": torch.ones(3)}, step=1)

    def refuse(*_arguments: object, **_options: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("asymcheck.convert.export_target.os.ftruncate", refuse)
    with pytest.raises(ReadOnlyStoreError, match=r"cannot write to .*choose another folder") as caught:
        export_checkpoint(store, Output(tmp_path / "m.safetensors"))
    assert status_of(caught.value) == STORAGE
    assert "read_only" not in str(caught.value)


def test_a_torch_that_cannot_write_a_dtype_is_named(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test torch 2.5, which cannot write all dtypes of random number generators. Newer releases imitate its error."""

    def refuse(_state: object, stream: IO[bytes]) -> None:
        stream.write(b"begun")
        raise KeyError("dtype torch.uint32 is not recognized")

    store.save({"a": torch.ones(3, dtype=torch.uint32)}, step=1)
    if not torch.__version__.startswith("2.5."):
        monkeypatch.setattr(torch, "save", refuse)
    with pytest.raises(InvalidInputError, match=r"dtype torch\.uint32 .*newer torch, or use \.safetensors"):
        export_checkpoint(store, Output(tmp_path / "m.pt"))
    assert not list(tmp_path.glob("*m.pt*"))
