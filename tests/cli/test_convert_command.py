"""`asymcheck restore` and `asymcheck convert`: what they print, and that they leave nothing behind when they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from asymcheck import Store
from asymcheck.cli import exits
from tests.cli.conftest import Outcome

Call = Callable[..., Outcome]


def test_a_model_goes_in_and_out(call: Call, tmp_path: Path) -> None:
    """A file into a new store, and out again under another name, with the same bytes."""
    tensors = {"a": torch.randn(1000), "b": torch.arange(5)}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors")
    outcome = call("convert", tmp_path / "m.safetensors", tmp_path / "store", "--step", 4)
    assert outcome.status == exits.OK
    assert "default step 4, 3.9 KiB, of which 3.9 KiB were new" in outcome.out
    outcome = call("convert", tmp_path / "store", tmp_path / "again.safetensors")
    assert "again.safetensors: 2 tensors, 3.9 KiB, from default step 4" in outcome.out
    loaded = safetensors.torch.load_file(tmp_path / "again.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_what_is_left_out_is_said(call: Call, tmp_path: Path) -> None:
    """With the format that keeps it."""
    with Store.open(tmp_path / "store") as store:
        store.save({"model": {"w": torch.ones(3)}, "epoch": 3, "lr": 0.1}, step=1)
    outcome = call("restore", tmp_path / "store", "--to", tmp_path / "m.safetensors")
    assert "left out: 2 values that are no tensors (epoch, lr); a .pt file keeps them" in outcome.out


@pytest.mark.parametrize("content", [None, b"", b"not safetensors at all"])
def test_a_source_that_cannot_be_read_makes_no_store(call: Call, tmp_path: Path, content: bytes | None) -> None:
    """Status 2 or 3, and nothing new in the folder."""
    source = tmp_path / "m.safetensors"
    if content is not None:
        source.write_bytes(content)
    before = list(tmp_path.iterdir())
    assert call("convert", source, tmp_path / "store").status in (exits.USAGE, exits.NOT_FOUND)
    assert list(tmp_path.iterdir()) == before


def test_one_side_must_be_a_store(call: Call, tmp_path: Path) -> None:
    """Neither two files nor two stores."""
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "m.safetensors")
    outcome = call("convert", tmp_path / "m.safetensors", tmp_path / "m.pt")
    assert (outcome.status, "must be a store" in outcome.err) == (exits.USAGE, True)
    for name in ("a", "b"):
        Store.open(tmp_path / name).close()
    outcome = call("convert", tmp_path / "a", tmp_path / "b")
    assert (outcome.status, "is a store as well" in outcome.err) == (exits.USAGE, True)


def test_a_damaged_newest_checkpoint_shows_in_the_status(call: Call, tmp_path: Path) -> None:
    """The older one is written; the message on standard error says why."""
    with Store.open(tmp_path / "store") as store:
        for step in (1, 2):
            store.save({"a": torch.full((10_000,), step)}, step=step)
        newest = max((store.path / "manifests").rglob("*.manifest"))
    newest.write_bytes(b"x")
    outcome = call("restore", tmp_path / "store", "--to", tmp_path / "m.safetensors")
    assert outcome.status == exits.WARNINGS
    assert "from default step 1" in outcome.out
    assert "passed over step 2" in outcome.err


def test_completion_is_a_script_for_the_shell(call: Call) -> None:
    """Each shell's own, with the program's name."""
    for shell in ("bash", "zsh", "fish"):
        outcome = call("completion", shell)
        assert outcome.status == exits.OK
        assert "_ASYMCHECK_COMPLETE" in outcome.out
