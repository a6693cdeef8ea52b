"""Test checkpoints of several ranks in other formats: whole tensors, or the shards of one rank."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from asymcheck import Store, StoreConfig, TensorShard
from asymcheck.convert.convert import Output, export_checkpoint
from asymcheck.errors import InvalidInputError
from asymcheck.restore import tensor_stream
from tests.convert.files import import_checkpoint
from tests.reshard.ranks import cut_in_grid, save_ranks
from tests.store.equality import assert_same, tensor_bytes

SMALL = StoreConfig(partition_bytes=4096, bundle_below_bytes=2048, inline_bytes=64)
FULL = {
    "rows": torch.randn(33, 50),
    "columns": torch.randn(40, 60),
    "blocks": torch.randn(30, 4, 30),
    "half": torch.randn(64, 64).to(torch.bfloat16),
    "small": torch.randn(3, 2),
    "whole": torch.randn(500),
}


def _states() -> list[dict[str, object]]:
    cuts: dict[str, list[list[int]]] = {
        "rows": [[5, 6, 20], []],
        "columns": [[], [7, 30, 31]],
        "blocks": [[10], [], [11]],
        "half": [[], [16, 32, 48]],
        "small": [[1, 1, 2], []],
    }
    parts = {name: cut_in_grid(FULL[name], places) for name, places in cuts.items()}
    shared = {"whole": FULL["whole"]}
    return [
        {"model": {**{name: shards[rank] for name, shards in parts.items()}, **shared}, "rank": rank}
        for rank in range(4)
    ]


@pytest.fixture
def store(store_path: Path) -> Store:
    """Return a store with a checkpoint of four ranks, of which each has one shard of all tensors but the last."""
    with Store.open(store_path, config=SMALL, create=True) as opened:
        save_ranks(opened, _states())
        return opened


@pytest.mark.parametrize("most", [1, 10_000, 1 << 28])
def test_files_hold_whole_tensors(store_path: Path, tmp_path: Path, store: Store, most: int) -> None:
    """Test any shards, and any limit of tensors that are assembled in memory."""
    with Store.open(store_path, create=True) as opened, mock.patch.object(tensor_stream, "_GATHERED_BYTES", most):
        for name in ("all.safetensors", "all.pt"):
            done = export_checkpoint(opened, Output(tmp_path / name), part="model" if "safe" in name else None)
            assert (done.tensors, done.nbytes) == (6, sum(len(tensor_bytes(value)) for value in FULL.values()))
    found = load_file(tmp_path / "all.safetensors")
    assert found.keys() == FULL.keys()
    for name, value in FULL.items():
        assert tensor_bytes(found[name]) == tensor_bytes(value), name
    assert_same(torch.load(tmp_path / "all.pt", weights_only=True), {"model": FULL, "rank": 0})


def test_memory_is_bounded_while_tensors_are_put_together(store_path: Path, tmp_path: Path, store: Store) -> None:
    """Test tensors sharded along an inner dimension, of which only one is assembled at a time."""
    batches: list[list[str]] = []
    real = tensor_stream._batches

    def seen(demands: list[tensor_stream.Demand]) -> list[list[tensor_stream.Demand]]:
        found = list(real(demands))
        batches.extend([demand.row.name for demand in batch] for batch in found)
        return found

    with (
        Store.open(store_path, create=True) as opened,
        mock.patch.object(tensor_stream, "_GATHERED_BYTES", 1),
        mock.patch.object(tensor_stream, "_batches", seen),
    ):
        export_checkpoint(opened, Output(tmp_path / "all.pt"))
    assert batches == [["model.columns"], ["model.blocks"], ["model.half"]]


def test_file_of_one_rank(store_path: Path, tmp_path: Path, store: Store) -> None:
    """Test its shards as tensors, and its values."""
    for rank, state in enumerate(_states()):
        with Store.open(store_path, create=True) as opened:
            export_checkpoint(opened, Output(tmp_path / f"{rank}.pt"), rank=rank)
        model = state["model"]
        assert isinstance(model, dict)
        local = {name: one.local if isinstance(one, TensorShard) else one for name, one in model.items()}
        assert_same(torch.load(tmp_path / f"{rank}.pt", weights_only=True), {"model": local, "rank": rank})
    with (
        Store.open(store_path, create=True) as opened,
        pytest.raises(InvalidInputError, match="saved by 4 ranks, so rank 4"),
    ):
        export_checkpoint(opened, Output(tmp_path / "4.pt"), rank=4)
    assert not (tmp_path / "4.pt").exists()


def test_progress_ends_at_the_total(store_path: Path, tmp_path: Path, store: Store) -> None:
    """Test that the total is the size of the whole tensors."""
    reports: list[tuple[int, int]] = []
    with Store.open(store_path, create=True) as opened:
        export_checkpoint(opened, Output(tmp_path / "a.pt"), progress=lambda done, total: reports.append((done, total)))
    assert {total for _, total in reports} == {sum(len(tensor_bytes(value)) for value in FULL.values())}
    assert all(0 < done <= total for done, total in reports)


def test_export_can_be_saved_by_one_rank(store_path: Path, tmp_path: Path, store: Store) -> None:
    """Test a conversion to a checkpoint of one rank."""
    with Store.open(store_path, create=True) as opened:
        export_checkpoint(opened, Output(tmp_path / "all.pt"))
    with Store.open(tmp_path / "other", create=True) as other:
        import_checkpoint(other, tmp_path / "all.pt")
        assert_same(other.load(), {"model": FULL, "rank": 0})
