"""Test commands on a checkpoint of several ranks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asymcheck import Store, StoreConfig, TensorShard
from asymcheck.errors import InvalidInputError
from tests.cli.conftest import Outcome, run_command
from tests.reshard.ranks import cut_in_grid, save_ranks
from tests.store.equality import assert_same

FULL = torch.arange(20_000, dtype=torch.float32).reshape(100, 200)
SAME = torch.arange(9_000, dtype=torch.int64)
Call = Callable[..., Outcome]


def _states(step: int, full: torch.Tensor = FULL, cut: int = 40) -> list[dict[str, object]]:
    shards = cut_in_grid(full, [[cut], []])
    return [{"model": {"w": shard, "same": SAME}, "step": step + rank} for rank, shard in enumerate(shards)]


@pytest.fixture
def shared(store_path: Path) -> Path:
    """Return a store with three checkpoints of two ranks, the last with other shards, and one of a single rank."""
    config = StoreConfig(partition_bytes=8192, bundle_below_bytes=4096, inline_bytes=64)
    changed = FULL.clone()
    changed[99] += 1
    with Store.open(store_path, config=config, create=True) as opened:
        save_ranks(opened, _states(10), 10)
        save_ranks(opened, _states(20, changed), 20)
        save_ranks(opened, _states(30, changed, 60), 30)
        opened.save({"model": {"w": FULL}}, step=40)
    return store_path


def _rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


def test_inspect_shows_the_number_of_ranks(shared: Path) -> None:
    """Test also the whole shape, the bytes, and the number of shards of a tensor."""
    rows = _rows(run_command("inspect", shared).out)
    assert ["run", "step", "generation", "saved", "(UTC)", "age", "ranks", "size", "status", "metrics"] in rows
    outcome = run_command("inspect", shared, "--step", "10", "--where")
    assert outcome.status == 0
    rows = _rows(outcome.out)
    assert "2 tensors" in outcome.out
    assert "2 ranks" in outcome.out
    (w,) = (row for row in rows if row and row[0] == "model.w")
    assert w[:6] == ["model.w", "float32", "100×200", "2", "78.1", "KiB"]
    (same,) = (row for row in rows if row and row[0] == "model.same")
    assert same[:6] == ["model.same", "int64", "9000", "1", "70.3", "KiB"]
    document = run_command("inspect", shared, "--step", "10", "--json").json
    tensors = document["tensors"]
    assert isinstance(tensors, list)
    assert [(one["rank"], one["name"], one["shape"], one["global_shape"], one["offset"]) for one in tensors] == [
        (0, "model.w", [40, 200], [100, 200], [0, 0]),
        (0, "model.same", [9000], [9000], [0]),
        (1, "model.w", [60, 200], [100, 200], [40, 0]),
        (1, "model.same", [9000], [9000], [0]),
    ]
    assert "shards" not in run_command("inspect", shared, "--step", "40").out


def test_restore_writes_whole_tensors_or_one_ranks(shared: Path, tmp_path: Path) -> None:
    """Test that a .pt file has the values of rank 0, or of the requested rank."""
    assert run_command("restore", shared, "--step", "10", "--to", tmp_path / "all.pt").status == 0
    assert_same(torch.load(tmp_path / "all.pt", weights_only=True), {"model": {"w": FULL, "same": SAME}, "step": 10})
    outcome = run_command("restore", shared, "--step", "10", "--rank", "1", "--to", tmp_path / "one.pt", "--json")
    assert (outcome.status, outcome.json["tensors"]) == (0, 2)
    assert_same(
        torch.load(tmp_path / "one.pt", weights_only=True), {"model": {"w": FULL[40:], "same": SAME}, "step": 11}
    )
    refused = run_command("restore", shared, "--step", "10", "--rank", "2", "--to", tmp_path / "two.pt")
    assert (refused.status, "was saved by 2 ranks" in refused.err) == (2, True)
    refused = run_command("restore", shared, "--tier", "memory", "--rank", "0", "--to", tmp_path / "two.pt")
    assert (refused.status, "leave out --rank" in refused.err) == (2, True)
    assert run_command("convert", shared, tmp_path / "w.pt", "--step", "30").status == 0
    assert torch.load(tmp_path / "w.pt", weights_only=True)["model"]["w"].shape == (100, 200)


def test_diff_compares_rank_by_rank(shared: Path) -> None:
    """Test equal shards, other shards, and different numbers of ranks, which are refused."""
    outcome = run_command("diff", shared, "10", "20")
    assert "1 changed in value, 3 unchanged" in outcome.out
    (row,) = (row for row in _rows(outcome.out) if "100×200" in row)
    assert row[:4] == ["1", "model.w", "value", "float32"]
    outcome = run_command("diff", shared, "20", "30")
    assert "2 changed in sharding, 2 unchanged" in outcome.out
    document = json.loads(run_command("diff", shared, "20", "30", "--json").out)["difference"]
    assert [(one["rank"], one["change"], one["norms"]) for one in document["tensors"]] == [
        (0, "layout", None),
        (1, "layout", None),
    ]
    refused = run_command("diff", shared, "30", "40")
    assert refused.status == 2
    assert "was saved by 2 ranks and step 40" in refused.err


def test_other_commands_take_all_ranks_together(shared: Path, tmp_path: Path) -> None:
    """Test verify, du and push: nothing is damaged or counted twice, and all parts are copied."""
    assert run_command("verify", shared).status == 0
    assert run_command("du", shared).status == 0
    with Store.open(shared, create=True) as opened:
        listed = opened.disk_usage().checkpoints
    assert [one.state_bytes for one in listed][:3] == [80_000 + 2 * 72_000] * 3
    assert listed[0].complete
    assert 80_000 + 72_000 < listed[0].stored_bytes < 80_000 + 72_000 + 40 * 4096
    assert len([row for row in _rows(run_command("log", shared).out) if row]) >= 4
    place = f"file://{tmp_path / 'far'}"
    assert run_command("push", shared, place, "--step", "10").status == 0
    with Store.open(place, create=True) as far:
        shard = TensorShard(torch.zeros(50, 200), (100, 200), (25, 0))
        far.load(into={"model": {"w": shard}}, rank=0)
        assert torch.equal(shard.local, FULL[25:75])


def test_strict_comparison_raises(shared: Path) -> None:
    """Test that the library raises an error where the command line returns a status."""
    with Store.open(shared, create=True) as store, pytest.raises(InvalidInputError, match="different numbers of ranks"):
        store.diff(30, 40)
