"""Test `asymcheck restore` and `asymcheck convert`: output, and no files after a refusal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from asymcheck import Store
from asymcheck.cli import exit_status
from asymcheck.cli.options import parse_size
from tests.cli.conftest import Outcome
from tests.convert.files import raw

Call = Callable[..., Outcome]


def test_a_model_goes_in_and_out(call: Call, tmp_path: Path) -> None:
    """Test a file into a new store, and out again under another name, with the same bytes."""
    tensors = {"a": torch.randn(1000), "b": torch.arange(5)}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors")
    outcome = call("convert", tmp_path / "m.safetensors", tmp_path / "store", "--step", 4)
    assert outcome.status == exit_status.OK
    assert "run default, step 4, 3.9 KiB, 3.9 KiB newly stored" in outcome.out
    outcome = call("convert", tmp_path / "store", tmp_path / "again.safetensors")
    assert "again.safetensors: 2 tensors, 3.9 KiB, from run default, step 4" in outcome.out
    loaded = safetensors.torch.load_file(tmp_path / "again.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_bytes_in_the_manifest_are_not_counted_as_known(call: Call, tmp_path: Path) -> None:
    """Test that a first save of a few bytes counts all of them as written, although no pack has them."""
    safetensors.torch.save_file({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "small.safetensors")
    safetensors.torch.save_file({"a": torch.ones(3), "b": torch.ones(1000)}, tmp_path / "large.safetensors")
    for name, told in (("small", "20 B, 20 B newly stored"), ("large", "3.9 KiB, 3.9 KiB newly stored")):
        outcome = call("convert", tmp_path / f"{name}.safetensors", tmp_path / name)
        assert outcome.out == f"{tmp_path / name}: run default, step 0, {told}\n"
    outcome = call("convert", tmp_path / "large.safetensors", tmp_path / "large", "--step", 1)
    assert outcome.out == f"{tmp_path / 'large'}: run default, step 1, 3.9 KiB, 0 B newly stored\n"


def test_left_out_values_are_listed(call: Call, tmp_path: Path) -> None:
    """Test that the message recommends a format that keeps the values."""
    with Store.open(tmp_path / "store", create=True) as store:
        store.save({"model": {"w": torch.ones(3)}, "epoch": 3, "lr": 0.1}, step=1)
    outcome = call("restore", tmp_path / "store", "--to", tmp_path / "m.safetensors")
    assert "left out 2 plain values (epoch, lr); " in outcome.out
    outcome = call("convert", tmp_path / "store", tmp_path / "other.safetensors", "--dry-run")
    assert "left out 2 plain values (epoch, lr); " in outcome.out


@pytest.mark.parametrize("content", [None, b"", b"not safetensors at all"])
def test_a_source_that_cannot_be_read_makes_no_store(call: Call, tmp_path: Path, content: bytes | None) -> None:
    """Test status 2, or 3 for a missing source, and that no file is created."""
    source = tmp_path / "m.safetensors"
    if content is not None:
        source.write_bytes(content)
    before = list(tmp_path.iterdir())
    status = exit_status.NOT_FOUND if content is None else exit_status.USAGE
    assert call("convert", source, tmp_path / "store").status == status
    assert call("convert", source, tmp_path / "m.pt").status == status
    assert list(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"a": bytearray(b"x")}, "holds a pickled object of builtins.bytearray"),
        ({"a": {"b": "\ud800"}}, "cannot store state at a.b: cannot encode a string with lone surrogates"),
        ({"a": {(1, 2): 3}}, "cannot store state at a: "),
        (functools.reduce(lambda inner, _: [inner], range(70), 0), "nested deeper than"),
    ],
    ids=["bytearray", "surrogate", "key", "depth"],
)
def test_unsupported_value_creates_no_store(call: Call, tmp_path: Path, state: object, problem: str) -> None:
    """Test status 2 with the path in the file, and that no file is created."""
    torch.save(state, tmp_path / "m.pt")
    outcome = call("convert", tmp_path / "m.pt", tmp_path / "store")
    assert outcome.status == exit_status.USAGE
    assert outcome.err.startswith(f"asymcheck: {tmp_path / 'm.pt'}: ")
    assert problem in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]


def test_a_tensor_of_too_many_dimensions_makes_no_store(call: Call, tmp_path: Path) -> None:
    """Test every format: what a manifest cannot store is known before a store is created."""
    entry = {"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}
    (tmp_path / "m.safetensors").write_bytes(raw({"a.w": entry}, b"x"))
    torch.save({"w": torch.empty_strided([1] * 65, [1] * 65)}, tmp_path / "m.pt")
    before = sorted(tmp_path.iterdir())
    for name, tensor in (("m.safetensors", "model.a.w"), ("m.pt", "w")):
        outcome = call("convert", tmp_path / name, tmp_path / "store")
        assert outcome.status == exit_status.USAGE
        place = f"{tmp_path / name}: cannot store state at {tensor}: "
        assert f"{place}tensors of more than 64 dimensions are not supported" in outcome.err
        assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("words", [("--step", -3), ("--step", 1 << 70), ("--run", "a/b")])
def test_options_that_cannot_be_make_no_store(call: Call, tmp_path: Path, words: tuple[object, ...]) -> None:
    """Test status 2, before anything is created."""
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "m.safetensors")
    assert call("convert", tmp_path / "m.safetensors", tmp_path / "store", *words).status == exit_status.USAGE
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_suffix_that_is_not_known(call: Call, tmp_path: Path) -> None:
    """Test both directions; no folder of that name is created."""
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "m.safetensors")
    assert call("convert", tmp_path / "m.safetensors", tmp_path / "store").status == exit_status.OK
    outcome = call("convert", tmp_path / "store", tmp_path / "a.txt")
    assert (outcome.status, "ends in .safetensors, .pt, .pth, .bin, .ckpt, or" in outcome.err) == (
        exit_status.USAGE,
        True,
    )
    outcome = call("convert", tmp_path / "m.safetensors", tmp_path / "a.txt")
    assert (outcome.status, "a new store has no suffix" in outcome.err) == (exit_status.USAGE, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors", "store"]


@pytest.mark.parametrize("swapped", [False, True])
def test_uri_is_no_path(call: Call, tmp_path: Path, *, swapped: bool) -> None:
    """Test the URI of a remote location, which restore accepts, as source and as target."""
    (tmp_path / "m.safetensors").write_bytes(raw({}))
    words = ("s3://bucket/gpt2", tmp_path / "m.safetensors")
    outcome = call("convert", *(words[::-1] if swapped else words))
    assert outcome.status == exit_status.USAGE
    assert "this is a URI, but a local path is required" in outcome.err


def test_one_side_must_be_a_store(call: Call, tmp_path: Path) -> None:
    """Test two files, and two stores."""
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "m.safetensors")
    outcome = call("convert", tmp_path / "m.safetensors", tmp_path / "m.pt")
    assert (outcome.status, "must be a store" in outcome.err) == (exit_status.USAGE, True)
    for name in ("a", "b"):
        Store.open(tmp_path / name, create=True).close()
    outcome = call("convert", tmp_path / "a", tmp_path / "b")
    assert (outcome.status, "are both stores" in outcome.err) == (exit_status.USAGE, True)


def test_a_damaged_newest_checkpoint_shows_in_the_status(call: Call, tmp_path: Path) -> None:
    """Test that the older checkpoint is written, with a message on standard error."""
    with Store.open(tmp_path / "store", create=True) as store:
        for step in (1, 2):
            store.save({"a": torch.full((10_000,), step)}, step=step)
        newest = max((store.path / "manifests").rglob("*.manifest"))
    newest.write_bytes(b"x")
    outcome = call("restore", tmp_path / "store", "--to", tmp_path / "m.safetensors")
    assert outcome.status == exit_status.WARNINGS
    assert "from run default, step 1" in outcome.out
    assert "skipped step 2" in outcome.err


def test_completion_is_a_script_for_the_shell(call: Call) -> None:
    """Test the script of each shell, with the name of the program."""
    for shell in ("bash", "zsh", "fish"):
        outcome = call("completion", shell)
        assert outcome.status == exit_status.OK
        assert "_ASYMCHECK_COMPLETE" in outcome.out


def trained(folder: Path) -> Path:
    """Return a store with a model, an optimizer and a number."""
    state = {
        "model": {"transformer.h.0.w": torch.ones(40), "transformer.h.1.w": torch.ones(30), "head.w": torch.ones(20)},
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(40)}}},
        "epoch": 3,
    }
    with Store.open(folder / "store", create=True) as store:
        store.save(state, step=1)
    return folder / "store"


@pytest.mark.parametrize(
    "words",
    [
        ("restore", "{store}", "--to", "{out}"),
        ("restore", "{store}", "--to", "{out}.safetensors"),
        ("restore", "{store}", "--to", "{out}", "--tensors", "model.*"),
        ("convert", "{store}", "{out}"),
    ],
    ids=["folder", "file", "glob", "convert"],
)
def test_prefixed_names_are_reported(call: Call, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Test a model file of a whole state, in which other programs find no weights."""
    places = {"store": trained(tmp_path), "out": tmp_path / "out"}
    outcome = call(*(word.format(**places) for word in words))
    assert outcome.status == exit_status.OK
    assert "begin with model." in outcome.err
    assert "--part model" in outcome.err
    assert "begin with" not in outcome.out


@pytest.mark.parametrize("words", [("--part", "model", "--to", "{out}.safetensors"), ("--to", "{out}.pt")])
def test_expected_export_has_no_hints(call: Call, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Test a part with its own names, and a format that keeps the structure."""
    outcome = call("restore", trained(tmp_path), *(word.format(out=tmp_path / "out") for word in words))
    assert (outcome.status, outcome.err) == (exit_status.OK, "")


def test_hints_are_in_the_document(call: Call, tmp_path: Path) -> None:
    """Test the hints in JSON output."""
    document = call("restore", trained(tmp_path), "--to", tmp_path / "out", "--json").json
    assert len(document["hints"]) == 2  # type: ignore[arg-type]  # JSON


def test_model_folder_without_configuration_is_reported(call: Call, tmp_path: Path) -> None:
    """Test a folder without a configuration, and one with it."""
    store, folder = trained(tmp_path), tmp_path / "configured"
    folder.mkdir()
    words = ("restore", store, "--part", "model", "--to")
    for name, source in (("a", ()), ("b", ("--files-from", folder))):
        outcome = call(*words, tmp_path / name, *source)
        assert f"{tmp_path / name} has no config.json" in outcome.err
        assert "with asymcheck restore --files-from" in outcome.err  # convert has no such option
    (folder / "config.json").write_text("{}")
    assert call(*words, tmp_path / "c", "--files-from", folder).err == ""


def test_convert_takes_a_part_as_well(call: Call, tmp_path: Path) -> None:
    """Test an export of a part, and an import of a part."""
    outcome = call("convert", trained(tmp_path), tmp_path / "m.safetensors", "--part", "model.transformer")
    assert (outcome.status, outcome.err) == (exit_status.OK, "")
    assert "m.safetensors: 2 tensors" in outcome.out
    outcome = call("convert", tmp_path / "m.safetensors", tmp_path / "other", "--part", "optimizer")
    assert (outcome.status, "has no part" in outcome.err) == (exit_status.USAGE, True)
    assert not (tmp_path / "other").exists()
    assert call("convert", tmp_path / "m.safetensors", tmp_path / "other", "--part", "model").status == exit_status.OK
    words = ("convert", tmp_path / "store", tmp_path / "n.pt", "--part", "model", "--part", "optimizer")
    assert call(*words).status == exit_status.USAGE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("200", 200),
        ("200B", 200),
        ("200KB", 200_000),
        ("200KiB", 204_800),
        ("1.5MB", 1_500_000),
        ("5 GB", 5_000_000_000),
        ("2GiB", 1 << 31),
        ("1.1TB", 1_100_000_000_000),
    ],
)
def test_sizes_have_units(text: str, expected: int) -> None:
    """Test decimal units, as in transformers, and binary units."""
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["0", "-1", "", "KB", "200XB", "0.0001KB", "1e9", "200kib", "1.5.5", "²GB"])
def test_invalid_size_is_refused(call: Call, tmp_path: Path, text: str) -> None:
    """Test that the error lists valid alternatives."""
    outcome = call("restore", trained(tmp_path), "--to", tmp_path / "o", "--max-shard-size", text)
    assert outcome.status == exit_status.USAGE
    assert "give bytes, or a number with KB" in outcome.err or "less than one byte" in outcome.err


def test_a_size_cuts_a_folder_and_nothing_else(call: Call, tmp_path: Path) -> None:
    """Test the message for a format on which the size has no effect."""
    words = ("restore", trained(tmp_path), "--part", "model", "--max-shard-size", "0.2KB", "--to")
    assert call(*words, tmp_path / "o").status == exit_status.OK
    assert len(list((tmp_path / "o").glob("*.safetensors"))) == 2
    assert "--max-shard-size has no effect" in call(*words, tmp_path / "o.safetensors").err


def test_existing_step_is_reported(call: Call, tmp_path: Path) -> None:
    """Test that the message names the save id of the new checkpoint."""
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "m.safetensors")
    words = ("convert", tmp_path / "m.safetensors", tmp_path / "store")
    assert call(*words).err == ""
    outcome = call(*words)
    assert outcome.status == exit_status.OK
    assert "already had step 0 of run 'default', and now has 2 checkpoints" in outcome.err
    assert call(*words, "--step", "1").err == ""


def test_a_warning_is_a_message(call: Call, tmp_path: Path) -> None:
    """Test that the message has neither Python's format nor a line of click."""
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "m.safetensors")
    words = ("convert", tmp_path / "m.safetensors", tmp_path / "store", "--step")
    assert call(*words, 5).err == ""
    outcome = call(*words, 3)
    assert outcome.status == exit_status.OK
    assert outcome.err.startswith("asymcheck: run 'default' already has step 5, so step 3 will not be its newest")
    assert "an import or of another training, choose another run" in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_one_is_singular(call: Call, tmp_path: Path) -> None:
    """Test 1 tensor and 1 value."""
    with Store.open(tmp_path / "store", create=True) as store:
        store.save({"w": torch.ones(3), "epoch": 3}, step=1)
    outcome = call("restore", tmp_path / "store", "--to", tmp_path / "m.safetensors")
    assert "m.safetensors: 1 tensor, 12 B" in outcome.out
    assert "left out 1 plain value (epoch)" in outcome.out
    assert ": 1 tensor, 12 B\n" in call("inspect", tmp_path / "store", "--step", 1).out


@pytest.mark.parametrize("which", ["source", "target"])
def test_inaccessible_path_is_named(call: Call, store: Path, tmp_path: Path, which: str) -> None:
    """Test the message of the operating system, without output."""
    name = tmp_path / f"{'a' * 300}.pt"
    words = (name, tmp_path / "new") if which == "source" else (store, name)
    outcome = call("convert", *words)
    assert outcome.status == exit_status.STORAGE
    assert outcome.err == f"asymcheck: access {name}: File name too long\n"


def test_left_out_files_of_a_model_folder_are_listed(call: Call, tmp_path: Path) -> None:
    """Test the optimizer of a Trainer, subfolders, and links out of the folder."""
    folder = tmp_path / "model"
    (folder / "onnx").mkdir(parents=True)
    safetensors.torch.save_file({"a": torch.ones(3)}, folder / "model.safetensors")
    torch.save({}, folder / "optimizer.pt")
    (folder / "config.json").write_text("{}")
    outcome = call("convert", folder, tmp_path / "store", "--dry-run")
    assert f"would not convert onnx, optimizer.pt in {folder}. " in outcome.err
    outcome = call("convert", folder, tmp_path / "store")
    assert outcome.status == exit_status.OK
    assert f"did not convert onnx, optimizer.pt in {folder}. " in outcome.err
    outcome = call("convert", folder, tmp_path / "store", "--step", 1, "--part", "model")
    assert f"did not convert config.json, onnx, optimizer.pt in {folder}. " in outcome.err
    outcome = call("convert", folder, tmp_path / "store", "--step", 2, "--part", "safetensors.files")
    assert f"did not convert onnx, optimizer.pt in {folder}. " in outcome.err
