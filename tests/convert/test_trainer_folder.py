"""The output folder of a Trainer, and files of torch.save with any suffix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from asymcheck import Store
from asymcheck.cli import exit_status
from asymcheck.convert.convert import foreign_state
from asymcheck.errors import ForeignFileError
from tests.cli.conftest import Outcome, run_command
from tests.store.equality import assert_same

Call = Callable[..., Outcome]


@pytest.fixture
def call() -> Call:
    """Call the command line with some words, as in a pipe."""
    return run_command


def checkpoint(folder: Path, step: int, state: str | None = None) -> None:
    """Write a checkpoint folder, as a Trainer does; ``state`` replaces the content of its last file."""
    target = folder / f"checkpoint-{step}"
    target.mkdir(parents=True)
    safetensors.torch.save_file({"w": torch.full((300,), float(step))}, target / "model.safetensors")
    (target / "trainer_state.json").write_text(json.dumps({"global_step": step}) if state is None else state)


def steps(store: Path) -> list[int]:
    """Return the steps of a store."""
    with Store.open(store, read_only=True) as opened:
        return [item.step for item in opened.checkpoints()]


def test_newest_complete_checkpoint_is_imported(call: Call, tmp_path: Path) -> None:
    """Test numbers that sort differently as text; the step is that of the checkpoint."""
    for step in (900, 1000, 500):
        checkpoint(tmp_path / "out", step)
    outcome = call("convert", tmp_path / "out", tmp_path / "store")
    assert outcome.status == exit_status.OK
    assert "checkpoint-1000, the newest of 3 checkpoints; pass --all" in outcome.err
    assert steps(tmp_path / "store") == [1000]
    with Store.open(tmp_path / "store", read_only=True) as store:
        assert store.load()["model"]["w"][0] == 1000  # type: ignore[index]  # a nested state
    assert call("convert", tmp_path / "out", tmp_path / "other", "--step", 3).status == exit_status.OK
    assert steps(tmp_path / "other") == [3]


@pytest.mark.parametrize("state", ["", '{"global_step": 1000', '{"global_step": 7}', "[]"])
def test_unfinished_checkpoint_is_skipped(call: Call, tmp_path: Path, state: str) -> None:
    """Test checkpoints whose last file is missing, cut short or of another step."""
    checkpoint(tmp_path / "out", 500)
    checkpoint(tmp_path / "out", 1000, state)
    outcome = call("convert", tmp_path / "out", tmp_path / "store")
    assert outcome.status == exit_status.WARNINGS
    assert "skipped unfinished checkpoint-1000" in outcome.err
    assert steps(tmp_path / "store") == [500]
    (tmp_path / "out" / "checkpoint-500" / "trainer_state.json").unlink()
    outcome = call("convert", tmp_path / "out", tmp_path / "new")
    assert (outcome.status, "no complete checkpoint" in outcome.err) == (exit_status.USAGE, True)
    assert not (tmp_path / "new").exists()


def test_unfinished_checkpoint_that_is_asked_for_is_imported_with_a_message(call: Call, tmp_path: Path) -> None:
    """Test a folder whose last file is missing, with and without a step."""
    checkpoint(tmp_path / "out", 20, "")
    outcome = call("convert", tmp_path / "out" / "checkpoint-20", tmp_path / "store")
    assert "imported as step 0; pass --step" in outcome.err
    assert steps(tmp_path / "store") == [0]
    again = call("convert", tmp_path / "out" / "checkpoint-20", tmp_path / "other", "--step", 20)
    assert (again.err, steps(tmp_path / "other")) == ("", [20])


def test_all_checkpoints_are_imported_on_request(call: Call, tmp_path: Path) -> None:
    """Test --all, its document, and the options that contradict it."""
    for step in (10, 20):
        checkpoint(tmp_path / "out", step)
    words = ("convert", tmp_path / "out", tmp_path / "store", "--all")
    document = call(*words, "--json").json
    assert [item["step"] for item in document["imported"]] == [10, 20]  # type: ignore[attr-defined]  # JSON
    assert steps(tmp_path / "store") == [10, 20]
    assert call(*words, "--step", 3).status == exit_status.USAGE
    plain = tmp_path / "out" / "checkpoint-10"
    assert call("convert", plain, tmp_path / "new", "--all").status == exit_status.USAGE


@pytest.mark.parametrize("words", [(), ("--dry-run",)], ids=["save", "dry"])
def test_stopped_import_of_all_checkpoints_names_the_saved_ones(
    call: Call, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Test --all with a damaged folder in the middle; a dry run has saved no step."""
    for step in (10, 20, 30, 40):
        checkpoint(tmp_path / "out", step)
    (tmp_path / "out" / "checkpoint-30" / "model.safetensors").write_bytes(b"")
    outcome = call("convert", tmp_path / "out", tmp_path / "store", "--all", *words)
    assert outcome.status == exit_status.USAGE
    assert "checkpoint-30" in outcome.err
    assert ("already has step 10, 20 of " in outcome.err) == (not words)


def test_model_in_the_output_folder_is_preferred(call: Call, tmp_path: Path) -> None:
    """Test a folder with a final model, which transformers would load, and name the newest checkpoint."""
    checkpoint(tmp_path / "out", 10)
    safetensors.torch.save_file({"w": torch.zeros(300)}, tmp_path / "out" / "model.safetensors")
    outcome = call("convert", tmp_path / "out", tmp_path / "store")
    assert outcome.status == exit_status.OK
    assert f"asymcheck convert {tmp_path / 'out' / 'checkpoint-10'} {tmp_path / 'store'}" in outcome.err
    assert steps(tmp_path / "store") == [0]
    call("convert", tmp_path / "out" / "checkpoint-10", tmp_path / "store")
    assert steps(tmp_path / "store") == [0, 10]


@pytest.mark.parametrize("name", ["a.ckpt", "a.pth", "a.bin", "a.pth.tar", "a", "a.safetensors"])
@pytest.mark.parametrize("legacy", [False, True])
def test_content_decides_the_format(tmp_path: Path, name: str, *, legacy: bool) -> None:
    """Test files of torch.save and of safetensors under any name."""
    state = {"w": torch.arange(9.0)}
    torch.save(state, tmp_path / name, _use_new_zipfile_serialization=not legacy)
    with foreign_state(tmp_path / name) as found, Store.open(tmp_path / "store", create=True) as store:
        store.save(found, step=1)
        assert_same(store.load(), state)
    safetensors.torch.save_file(state, tmp_path / name)
    with foreign_state(tmp_path / name) as found:
        assert isinstance(found, dict)
        assert list(found["model"]) == ["w"]


def test_folder_with_torch_weights_is_imported(tmp_path: Path) -> None:
    """Test one pytorch_model.bin, shards, and a missing shard."""
    first, second = {"a": torch.ones(3)}, {"b": torch.zeros(2)}
    (tmp_path / "config.json").write_text("{}")
    torch.save(first, tmp_path / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(ForeignFileError, match="some shards of the weights are missing"), foreign_state(tmp_path):
        pass
    torch.save(second, tmp_path / "pytorch_model-00002-of-00002.bin")
    left_out: list[str] = []
    with foreign_state(tmp_path, left_out=left_out) as found:
        assert isinstance(found, dict)
        assert list(found["model"]) == ["a", "b"]
        assert list(found["safetensors"]["files"]) == ["config.json"]
    torch.save(first, tmp_path / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(ForeignFileError, match="names are in another shard"), foreign_state(tmp_path):
        pass
    torch.save(second, tmp_path / "pytorch_model.bin")
    with foreign_state(tmp_path, left_out=left_out) as found:
        assert isinstance(found, dict)
        assert list(found["model"]) == ["b"]
    assert left_out == ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]


@pytest.mark.parametrize("target", ["new", "new.pt", "new.safetensors"])
def test_dry_run_lists_tensors_and_writes_nothing(call: Call, tmp_path: Path, target: str) -> None:
    """Test an import and exports of all formats: the listed tensors are those that are written afterwards."""
    torch.save({"model": {"w": torch.ones(300), "b": torch.ones(2)}, "epoch": 3}, tmp_path / "a.ckpt")
    source: tuple[object, ...] = ("convert", tmp_path / "a.ckpt", tmp_path / "store")
    before = sorted(tmp_path.rglob("*"))
    outcome = call(*source, "--step", 7, "--dry-run")
    assert outcome.out.endswith(f"{tmp_path / 'store'}: run default, step 7, 2 tensors, 1.2 KiB\n")
    assert "model.w" in outcome.out
    assert sorted(tmp_path.rglob("*")) == before
    call(*source, "--step", 7)
    words = ("convert", tmp_path / "store", tmp_path / target, "--part", "model", "--rename", "^w", "v")
    before = sorted(tmp_path.rglob("*"))
    document = call(*words, "--dry-run", "--json").json
    assert sorted(tmp_path.rglob("*")) == before
    assert {key: document[key] for key in ("step", "nbytes", "run")} == {"step": 7, "nbytes": 1208, "run": "default"}
    names = [item["name"] for item in document["tensors"]]  # type: ignore[attr-defined]  # JSON
    assert sorted(names) == ["b", "v"]
    assert call(*words).status == exit_status.OK
    assert call(*words, "--dry-run").status == exit_status.USAGE
    again = call("convert", tmp_path / target, tmp_path / "again", "--dry-run", "--json").json
    assert sorted(item["name"].split(".")[-1] for item in again["tensors"]) == ["b", "v"]  # type: ignore[attr-defined]  # JSON


def test_dry_run_finds_what_an_export_would_refuse(call: Call, tmp_path: Path) -> None:
    """Test a dtype that safetensors lacks."""
    torch.save({"w": torch.zeros(3, dtype=torch.complex128)}, tmp_path / "a.pt")
    call("convert", tmp_path / "a.pt", tmp_path / "store")
    outcome = call("convert", tmp_path / "store", tmp_path / "a.safetensors", "--dry-run")
    assert (outcome.status, "complex128" in outcome.err) == (exit_status.USAGE, True)


def test_invalid_expression_creates_nothing(call: Call, tmp_path: Path) -> None:
    """Test an import with an invalid regular expression."""
    torch.save({"w": torch.zeros(3)}, tmp_path / "a.pt")
    outcome = call("convert", tmp_path / "a.pt", tmp_path / "store", "--rename", "(", "x")
    assert (outcome.status, "invalid regular expression" in outcome.err) == (exit_status.USAGE, True)
    assert not (tmp_path / "store").exists()
