"""Test that ``asymcheck inspect`` shows the content of a store."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

import asymcheck
from asymcheck.cli import exit_status
from asymcheck.format.spans import shown_spans, spans_of
from asymcheck.types import Part
from tests.cli.conftest import Outcome

Call = Callable[..., Outcome]

CHECKPOINT_KEYS = {
    "run",
    "step",
    "generation",
    "save_id",
    "world_size",
    "complete",
    "on_line",
    "created_ns",
    "state_bytes",
    "written_bytes",
    "metrics",
    "store_ranks",
}
TENSOR_KEYS = {
    *(
        "name",
        "aliases",
        "dtype",
        "role",
        "shape",
        "nbytes",
        "rank",
        "global_shape",
        "offset",
        "inline",
        "partitions",
        "why",
    ),
}
PARTITION_KEYS = {"digest", "length", "partition_length", "pack", "frame", "codec", "stored_length"}


def test_the_table_names_the_newest_and_the_abandoned(call: Call, store: Path) -> None:
    """Test one line a checkpoint, the abandoned step, and one newest checkpoint for each run."""
    outcome = call("inspect", store)
    assert outcome.status == 0
    lines = [line.split() for line in outcome.out.splitlines() if line.strip().startswith(("default", "other"))]
    assert [line[1] for line in lines] == ["10", "20", "30", "25", "1"]
    assert [word for line in lines for word in line if word in ("newest", "abandoned")] == [
        "abandoned",
        "newest",
        "newest",
    ]


@pytest.mark.parametrize("command", ["inspect", "du"])
def test_a_step_that_was_saved_twice_has_its_save_id(call: Call, store: Path, command: str) -> None:
    """Test rows that only differ by the save id; a step of two generations needs none."""
    assert " save " not in call(command, store).out
    with asymcheck.Store.open(store, create=True) as opened:
        saves = [opened.save({"x": 1}, step=40).save_id for _ in range(2)]
    outcome = call(command, store)
    assert " save " in outcome.out
    assert all(save_id[:12] in outcome.out for save_id in saves)


def test_json_of_checkpoints_has_its_documented_keys(call: Call, store: Path) -> None:
    """Test that the keys are exactly the documented ones, and that numbers that JSON lacks are null."""
    document = call("inspect", store, "--json").json
    assert set(document) == {"store", "usage", "checkpoints", "remote", "there"}
    assert set(document["usage"]) == {"store_id", "packs", "pack_bytes", "pooled_packs", "pooled_bytes"}  # type: ignore[call-overload]  # JSON
    checkpoints = document["checkpoints"]
    assert isinstance(checkpoints, list)
    assert all(set(item) == CHECKPOINT_KEYS for item in checkpoints)
    assert checkpoints[0]["metrics"] == {"loss": 0.1, "bad": None}
    assert [item["on_line"] for item in checkpoints] == [True, True, False, True, True]


def test_tensors_of_a_step(call: Call, store: Path) -> None:
    """Test dtype, shape, bytes, partitions and packs of each tensor."""
    document = call("inspect", store, "--step", 20, "--json").json
    assert set(document) == {"checkpoint", "tensors", "merged"}
    tensors = {item["name"]: item for item in document["tensors"]}  # type: ignore[attr-defined]  # JSON
    assert set(tensors) == {"model.weight", "optimizer.0.exp_avg"}
    weight = tensors["model.weight"]
    assert set(weight) == TENSOR_KEYS
    assert weight["aliases"] == ["model.tied"]
    assert weight["shape"] == [10_000]
    assert weight["nbytes"] == 40_000
    assert sum(partition["length"] for partition in weight["partitions"]) == 40_000
    assert all(set(partition) == PARTITION_KEYS for partition in weight["partitions"])
    assert "frame" not in call("inspect", store, "--step", 20).out
    table = call("inspect", store, "--step", 20, "--where").out
    assert "model.weight = model.tied" in table
    assert f"pack {weight['partitions'][0]['pack'][:8]} frame" in table


def test_where_is_about_tensors(call: Call, store: Path) -> None:
    """Test that a list of checkpoints refuses the option."""
    outcome = call("inspect", store, "--where")
    assert outcome.status == exit_status.USAGE
    assert "--where" in outcome.err


def test_tensors_by_glob_of_the_newest(call: Call, store: Path) -> None:
    """Test --tensors without a step."""
    document = call("inspect", store, "--tensors", "model.*", "--json").json
    assert document["checkpoint"]["step"] == 25  # type: ignore[index]  # JSON
    assert [item["name"] for item in document["tensors"]] == ["model.weight"]  # type: ignore[attr-defined]  # JSON


def test_partition_of_two_roles_is_counted_once(call: Call, store_path: Path) -> None:
    """Test the row of a partition with equal bytes of a model and of an optimizer."""
    config = asymcheck.StoreConfig(compression="smallest")
    same = torch.zeros(100_000)
    state = {"model": {"weight": same}, "optimizer": {0: {"exp_avg": same.clone()}}}
    with asymcheck.Store.open(store_path, config=config, create=True) as opened:
        opened.save(state, step=1)
    (row,) = [line for line in call("inspect", store_path, "--step", 1).out.splitlines() if "byte-planes" in line]
    assert row.split()[:4] == ["weights,", "first_moment", "byte-planes", "1"]


def test_a_missing_partition_is_shown(call: Call, store: Path) -> None:
    """Test that tensors of a lost pack are listed with the missing bytes."""
    for pack in (store / "packs").iterdir():
        pack.unlink()
    outcome = call("inspect", store, "--step", 20)
    assert outcome.status == exit_status.WARNINGS
    assert "MISSING: 7 partitions" in outcome.out
    assert "MISSING" in call("inspect", store, "--step", 20, "--where").out.splitlines()[4]


def test_missing_run(call: Call, store: Path) -> None:
    """Test that a mistyped run does not look like an empty store."""
    for name in ("inspect", "verify", "log", "du"):
        outcome = call(name, store, "--run", "nope")
        assert outcome.status == exit_status.NOT_FOUND
        assert "default" in outcome.err


def test_damage_shows_in_the_status(call: Call, store: Path) -> None:
    """Test a damaged manifest and a lost head record: status 6, a hint at verify, and no newest checkpoint."""
    manifest = max((store / "manifests" / "default").rglob("*.manifest"))
    manifest.write_bytes(b"x")
    outcome = call("inspect", store)
    assert outcome.status == exit_status.WARNINGS
    assert "asymcheck verify" in outcome.out
    for head in (store / "heads" / "default").iterdir():
        head.write_bytes(bytes(8192))
    outcome = call("inspect", store, "--run", "default")
    assert outcome.status == exit_status.WARNINGS
    assert "a head record is lost" in outcome.out
    assert "newest" not in outcome.out


def test_an_empty_store_says_so(call: Call, store_path: Path) -> None:
    """Test that a store without checkpoints is no error."""
    asymcheck.Store.open(store_path, create=True).close()
    outcome = call("inspect", store_path)
    assert (outcome.status, "no checkpoints yet" in outcome.out) == (0, True)


@pytest.mark.parametrize(
    "frames", [([1, 2, 3, 7], "1-3, 7"), ([4], "4"), ([9, 1], "1, 9")], ids=["mixed", "one", "two"]
)
def test_frame_numbers_are_shown_as_ranges(frames: tuple[list[int], str]) -> None:
    """Test that consecutive frame numbers are joined."""
    assert shown_spans(spans_of(frames[0])) == frames[1]


def test_plain_values(call: Call, store_path: Path) -> None:
    """Test the newest checkpoint or a step, all values or a glob, and shortened long values, without tensors."""
    long = "x" * 1000
    state = {"w": torch.ones(3), "epoch": 3, "optimizer": {"lr": 0.1, "betas": (0.9, 0.95)}, "note": long, "empty": []}
    with asymcheck.Store.open(store_path, create=True) as opened:
        opened.save({"epoch": 2}, step=1)
        opened.save(state, step=2)
    lines = call("inspect", store_path, "--values").out.splitlines()
    assert lines[0] == "run default, step 2, generation 1: 6 plain values"
    rows = dict(line.split(maxsplit=1) for line in lines[4:] if line.strip())
    assert list(rows) == ["epoch", "optimizer.lr", "optimizer.betas.0", "optimizer.betas.1", "note", "empty"]
    assert [rows[name].strip() for name in ("epoch", "optimizer.lr", "empty")] == ["3", "0.1", "[]"]
    assert rows["note"].strip().endswith("(1002 characters)")
    found = call("inspect", store_path, "--step", 2, "--values", "--tensors", "optimizer.b*", "--json").json
    assert found["values"] == [
        {"name": f"optimizer.betas.{number}", "text": text, "rank": 0} for number, text in enumerate(("0.9", "0.95"))
    ]
    assert call("inspect", store_path, "--values", "--step", 1, "--json").json["values"] == [
        {"name": "epoch", "text": "2", "rank": 0}
    ]
    outcome = call("inspect", store_path, "--values", "--tensors", "nothing")
    assert (outcome.status, "matches no name in the plain values of" in outcome.err) == (exit_status.USAGE, True)
    assert call("inspect", store_path, "--values", "--where").status == exit_status.USAGE


def test_long_lists_of_plain_values_are_abbreviated(call: Call, store_path: Path) -> None:
    """Test a list of 500 numbers, which --tensors and --json show as a whole."""
    with asymcheck.Store.open(store_path, create=True) as opened:
        opened.save({"order": list(range(500)), "pair": [1, 2]}, step=1)
    shown = [line.split() for line in call("inspect", store_path, "--values").out.splitlines()[4:] if line.strip()]
    assert [row[0] for row in shown] == [*(f"order.{number}" for number in range(5)), "order.*", "pair.0", "pair.1"]
    assert shown[5] == ["order.*", "…", "495", "more"]
    assert "order.499" in call("inspect", store_path, "--values", "--tensors", "order.*").out
    assert len(call("inspect", store_path, "--values", "--json").json["values"]) == 502  # type: ignore[arg-type]  # a list


def test_plain_values_of_several_ranks(call: Call, store_path: Path) -> None:
    """Test that a column shows the rank of each value."""
    save_id = f"{time.time_ns():032x}"
    with asymcheck.Store.open(store_path, create=True) as opened:
        for rank in range(2):
            opened.save({"seed": rank + 7}, step=1, part=Part(rank, 2, save_id))
    lines = call("inspect", store_path, "--values").out.splitlines()
    assert lines[0] == "run default, step 1, generation 1: 2 plain values, 2 ranks"
    assert [line.split() for line in lines[4:6]] == [["0", "seed", "7"], ["1", "seed", "8"]]


def test_replicated_tensors_count_once(call: Call, store_path: Path, tmp_path: Path) -> None:
    """Test the header, the rows, and a restore."""
    save_id = f"{time.time_ns():032x}"
    with asymcheck.Store.open(store_path, create=True) as opened:
        for rank in range(2):
            state = {"model": torch.ones(3000), f"own {rank}": torch.ones(2000)}
            opened.save(state, step=1, part=Part(rank, 2, save_id))
    lines = call("inspect", store_path, "--step", 1).out.splitlines()
    assert lines[0] == "run default, step 1, generation 1: 3 tensors, 27.3 KiB, 2 ranks"
    assert [re.findall(r"[\d.]+ KiB", line) for line in lines[4:7]] == [["11.7 KiB"], ["7.8 KiB"], ["7.8 KiB"]]
    assert ": 3 tensors, 27.3 KiB, from" in call("restore", store_path, "--to", tmp_path / "o.safetensors").out


def test_a_save_in_progress_hides_no_tensors(call: Call, store_path: Path) -> None:
    """Test the newest checkpoint whose save is complete, as a restore would choose it, and a named unfinished one."""
    with asymcheck.Store.open(store_path, create=True) as opened:
        opened.save({"x": torch.ones(5), "lr": 0.1}, step=1)
        opened.save({"x": torch.ones(5), "lr": 0.1}, step=2, part=Part(0, 2, f"{time.time_ns():032x}"))
    for words in (("--tensors", "*"), ("--values",)):
        outcome = call("inspect", store_path, *words)
        assert outcome.out.startswith("run default, step 1, generation 1: 1 ")
        assert "skipped step 2 (generation 1, save" in outcome.err
        assert outcome.err.endswith(": the manifest of rank 1 is missing (world size 2)\n")
    unfinished = call("inspect", store_path, "--step", 2)
    assert unfinished.status == exit_status.UNREADABLE
    assert "step 2 of run 'default' cannot be read; other steps may be intact" in unfinished.err


def test_a_narrow_terminal_gets_whole_words(call: Call, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that lines wrap instead of columns of one character."""
    monkeypatch.setattr("asymcheck.cli.output.console", lambda: Console(width=40))
    rows = [line for line in call("inspect", store).out.splitlines() if line.startswith(" default")]
    assert len(rows) == 4
    assert all(re.search(r" \d{4}-\d\d-\d\d ", row) for row in rows), rows


def test_one_save_of_a_step(call: Call, store: Path, tmp_path: Path) -> None:
    """Test the digits that are shown for a step that was saved twice, also for restore."""
    with asymcheck.Store.open(store, create=True) as opened:
        opened.save({"again": 1}, step=30, generation=2)
        first, second = [one for one in opened.checkpoints("default") if one.step == 30]
    assert "2 tensors" in call("inspect", store, "--step", f"save:{first.save_id[:14]}").out
    assert "0 tensors" in call("inspect", store, "--step", f"save:{second.save_id}").out
    target = tmp_path / "first.pt"
    assert call("restore", store, "--step", f"save:{first.save_id}", "--to", target).status == 0
    assert sorted(torch.load(target, weights_only=True)) == ["lr", "model", "optimizer"]
    wrong = call("inspect", store, "--step", "save:x")
    assert wrong.status == 2
    assert "give an integer, save:DIGITS" in wrong.err


@pytest.mark.parametrize("step", ["9" * 5000, "-1", "1.0", ""])
def test_invalid_checkpoint_name(call: Call, store: Path, step: str) -> None:
    """Test that the error is a usage error."""
    outcome = call("inspect", store, "--step", step)
    assert outcome.status == 2
    assert "give an integer, save:DIGITS" in outcome.err


def test_one_save_of_a_step_is_pushed_and_pulled(call: Call, store: Path, tmp_path: Path) -> None:
    """Test that push and pull accept the same names."""
    with asymcheck.Store.open(store, create=True) as opened:
        opened.save({"again": 1}, step=30, generation=2)
        first = next(one for one in opened.checkpoints("default") if one.step == 30)
    place, name = (tmp_path / "place").as_uri(), f"save:{first.save_id[:14]}"
    assert f"sent run default, step 30 (generation {first.generation}" in call("push", store, place, "--step", name).out
    assert call("pull", place, tmp_path / "new", "--step", name).status == 0
    with asymcheck.Store.open(tmp_path / "new", create=True) as new:
        assert [one.save_id for one in new.checkpoints("default")] == [first.save_id]
    assert call("push", store, place, "--step", "save:x").status == 2
