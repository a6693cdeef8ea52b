"""Test paths to which an export must not write, and formats by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from asymcheck import Store
from asymcheck.convert.convert import Output, export_checkpoint
from asymcheck.convert.export_target import check_target, format_of, is_store
from asymcheck.errors import InvalidInputError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("m.safetensors", "safetensors"),
        ("M.SafeTensors", "safetensors"),
        ("m.pt", "torch"),
        ("m.PTH", "torch"),
        ("pytorch_model.bin", "torch"),
        ("model", "folder"),
        ("model-v1.5", "folder"),
        ("llama.7b", "folder"),
        ("llama-3.1-8B", "folder"),
        ("w.onnx", "unknown"),
        ("a.txt", "unknown"),
        ("w.GGUF", "unknown"),
    ],
)
def test_a_name_stands_for_a_format(name: str, expected: str) -> None:
    """Test suffixes in any case; a dot alone is not a suffix."""
    assert format_of(Path(name)) == expected


@pytest.mark.parametrize("name", [".", "", "/", "..", "../here", "below/..", "below/../"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_place_that_cannot_be_taken_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, overwrite: bool
) -> None:
    """Test the working directory, its parents, and paths without a name."""
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with Store.open(tmp_path / "store", create=True) as store:
        store.save({"a": torch.ones(3)}, step=1)
        with pytest.raises(InvalidInputError, match="must name a new file or folder"):
            export_checkpoint(store, Output(Path(name), overwrite=overwrite))
    left = sorted(path.name for path in tmp_path.rglob("*") if "store" not in path.relative_to(tmp_path).parts)
    assert left == ["below", "here"]


@pytest.mark.parametrize("name", ["store", "store/w.safetensors", "store/packs/w.pt", "link/model"])
def test_nothing_is_written_into_a_store(tmp_path: Path, name: str) -> None:
    """Test the folder of a store, and paths below it in any spelling."""
    with Store.open(tmp_path / "store", create=True) as store:
        store.save({"a": torch.ones(3)}, step=1)
        (tmp_path / "link").symlink_to(store.path / "packs")
        before = sorted(store.path.rglob("*"))
        with pytest.raises(InvalidInputError, match=r"store.*choose a path outside"):
            export_checkpoint(store, Output(tmp_path / name, overwrite=True))
        assert sorted(store.path.rglob("*")) == before


@pytest.mark.parametrize("name", ["w.onnx", "m.gguf", "m.h5", "a.txt", "b.Pickle5"])
def test_formats_that_are_not_written_are_refused(tmp_path: Path, name: str) -> None:
    """Test that no folder of that name is created."""
    with pytest.raises(InvalidInputError, match=r"a name that ends in \.safetensors, \.pt, \.pth, \.bin, \.ckpt, or"):
        check_target(tmp_path / name)


@pytest.mark.parametrize("name", ["file:///mnt/x.pt", "hdfs://namenode:8020/x", "s3://bucket/x.safetensors"])
def test_a_uri_is_no_place_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Test also an existing folder with the name that pathlib makes of the URI."""
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(parents=True)
    for check in (check_target, is_store):
        with pytest.raises(InvalidInputError, match="is a URI"):
            check(Path(name))


def test_existing_folder_may_have_any_suffix(tmp_path: Path) -> None:
    """Test a folder that the user created."""
    (tmp_path / "model.v2").mkdir()
    assert check_target(tmp_path / "model.v2") == "folder"


def test_files_and_folders_do_not_replace_each_other(tmp_path: Path) -> None:
    """Test also with the option to overwrite."""
    (tmp_path / "m.pt").mkdir()
    (tmp_path / "model").write_text("x")
    with pytest.raises(InvalidInputError, match=r"m\.pt: a folder has this name"):
        check_target(tmp_path / "m.pt")
    with pytest.raises(InvalidInputError, match="model: a file has this name"):
        check_target(tmp_path / "model")


def test_special_files_are_not_replaced(tmp_path: Path) -> None:
    """Test a pipe, a device, and a link in place of a folder, before anything is read."""
    os.mkfifo(tmp_path / "pipe.pt")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for name in ("pipe.pt", "pipe"):
        with pytest.raises(InvalidInputError, match="neither a file nor a folder"):
            check_target(tmp_path / name)
    with pytest.raises(InvalidInputError, match=f"link: {tmp_path / 'real'}"):
        check_target(tmp_path / "link")
