"""Test that a file that changes while it is imported is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from asymcheck import Store
from asymcheck.convert import convert, hugging_face, safetensors_format
from asymcheck.convert.convert import foreign_state
from asymcheck.convert.safetensors_format import SafetensorsHeader
from asymcheck.convert.source_file import SourceFile
from asymcheck.errors import ForeignFileError
from tests.convert.files import import_checkpoint
from tests.store.equality import assert_same

CHANGED = "changed while it was read"
NUMBERS = torch.arange(100_000, dtype=torch.float32)


def _safetensors(folder: Path) -> tuple[Path, Path]:
    safetensors.torch.save_file({"a": NUMBERS, "b": NUMBERS + 1}, folder / "m.safetensors")
    return folder / "m.safetensors", folder / "m.safetensors"


def _torch(folder: Path) -> tuple[Path, Path]:
    torch.save({"a": NUMBERS}, folder / "m.pt")
    return folder / "m.pt", folder / "m.pt"


def _turned(folder: Path) -> tuple[Path, Path]:
    torch.save({"a": NUMBERS.reshape(100, 1000).t()}, folder / "m.pt")
    return folder / "m.pt", folder / "m.pt"


def _model_folder(folder: Path) -> tuple[Path, Path]:
    (folder / "model").mkdir()
    safetensors.torch.save_file({"a": NUMBERS}, folder / "model" / "model.safetensors")
    (folder / "model" / "config.json").write_text("{}" + " " * 10_000)
    return folder / "model", folder / "model" / "config.json"


def _dcp(folder: Path) -> tuple[Path, Path]:
    dcp.save({"a": NUMBERS}, checkpoint_id=str(folder / "dcp"), no_dist=True)
    return folder / "dcp", folder / "dcp" / "__0_0.distcp"


Make = Callable[[Path], tuple[Path, Path]]


def _write(path: Path) -> None:
    """Change a byte in place, like a program that writes into the file."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"x")
    # A coarse clock may return the time at which the file was created.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def _grow(path: Path) -> None:
    """Append to the file, at the same time by a coarse clock."""
    before = path.stat()
    with path.open("ab") as file:
        file.write(b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _shrink(path: Path) -> None:
    """Truncate the file in the middle."""
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("change", [_write, _grow, _shrink])
@pytest.mark.parametrize("make", [_safetensors, _torch, _turned, _model_folder, _dcp])
def test_file_that_changes_during_the_import_is_refused(
    store: Store, tmp_path: Path, make: Make, change: Callable[[Path], None]
) -> None:
    """Test any format, and tensors at any position; nothing is committed."""
    source, changing = make(tmp_path)
    with foreign_state(source) as state:
        change(changing)
        with pytest.raises(ForeignFileError, match=CHANGED) as caught:
            store.save(state, step=0)
    assert caught.value.path == str(changing)
    assert store.checkpoints() == []


def _after_header(monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]) -> None:
    """Change a file after its header was read, and before its tensors are."""

    def read_header(file: SourceFile) -> SafetensorsHeader:
        header = safetensors_format.read_header(file)
        change(file.path)
        return header

    for module in (convert, hugging_face):
        monkeypatch.setattr(module, "read_header", read_header)


@pytest.mark.parametrize("name", ["m.safetensors", "."], ids=["file", "folder"])
def test_a_file_that_is_written_after_its_header_was_read_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Test a file that does not change while its tensors are read."""
    (tmp_path / "model").mkdir()
    _safetensors(tmp_path / "model")
    _after_header(monkeypatch, _write)
    with pytest.raises(ForeignFileError, match=CHANGED):
        import_checkpoint(store, tmp_path / "model" / name)
    assert store.checkpoints() == []


@pytest.mark.parametrize("name", ["m.safetensors", "."], ids=["file", "folder"])
def test_a_header_and_tensors_of_two_files_are_not_put_together(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Test that tensors are read from the file of the header, although another file has replaced it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "new").mkdir()
    _safetensors(tmp_path / "model")
    safetensors.torch.save_file({"a": NUMBERS + 2, "b": NUMBERS + 3}, tmp_path / "new" / "m.safetensors")
    _after_header(monkeypatch, (tmp_path / "new" / "m.safetensors").rename)
    import_checkpoint(store, tmp_path / "model" / name)
    loaded: Any = store.load()
    assert_same(loaded["model"], {"a": NUMBERS, "b": NUMBERS + 1})


def test_replaced_file_is_read_to_its_end(store: Store, tmp_path: Path) -> None:
    """Test that a rename does not change an open file, also for tensors in several ranges."""
    conjugate = torch.randn(300, dtype=torch.complex64).conj()
    state = {"a": NUMBERS, "turned": NUMBERS.reshape(100, 1000).t(), "conj": conjugate}
    torch.save(state, tmp_path / "m.pt")
    torch.save({"a": NUMBERS + 1}, tmp_path / "new.pt")
    with foreign_state(tmp_path / "m.pt") as read:
        (tmp_path / "new.pt").rename(tmp_path / "m.pt")
        store.save(read, step=0)
    assert_same(store.load(), {**state, "conj": conjugate.resolve_conj()})
