"""Test machines that share only a location: their stores are lost and restored from it."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from asymcheck import Checkpointer, Push, Ranks, Store, TensorShard
from asymcheck.config import CaptureConfig
from asymcheck.replication import cross_node_dedup
from tests.distributed.test_coordinator import each
from tests.remote.conftest import CONFIG

_ROWS = 20_000
"""Size of each rank's shard of a tensor."""


def whole_tensor(step: int) -> torch.Tensor:
    """Return the whole tensor of both ranks at a step."""
    return torch.randn(2 * _ROWS, generator=torch.Generator().manual_seed(step))


def launched(folder: Path, location: str, keys: dist.Store, steps: range) -> list[tuple[int | None, bool]]:
    """Train on two machines of one rank each; return the restored step of each, and whether the state was right."""

    def work(rank: int) -> tuple[int | None, bool]:
        memory = folder / f"memory-{rank}"
        memory.mkdir(exist_ok=True)
        part, own_shard = torch.zeros(_ROWS), slice(rank * _ROWS, (rank + 1) * _ROWS)
        same = torch.zeros(30_000)
        state: dict[str, object] = {"cut": TensorShard(part, (2 * _ROWS,), (rank * _ROWS,)), "same": same}
        ranks = Ranks(rank, 2, keys, timeout_s=120.0, node=f"node-{rank}")
        capture = CaptureConfig(ring_folder=str(memory))
        with (
            Store.open(folder / f"machine-{rank}", config=CONFIG, remote=location, create=True) as store,
            Checkpointer(
                store, state, every=1, push=Push(location, every=2), ranks=ranks, capture=capture, keep=None
            ) as checkpointer,
        ):
            found = checkpointer.restore()
            is_right = found is None or (
                torch.equal(part, whole_tensor(found.step)[own_shard]) and bool((same == found.step).all())
            )
            for step in steps:
                part.copy_(whole_tensor(step)[own_shard])
                same.fill_(step)
                checkpointer.save(step)
                # Machines that restore different checkpoints would wait for each other.
                checkpointer.wait("remote")
            assert checkpointer.push_statistics().problem == ""
        return None if found is None else found.step, is_right

    return each(2, work)


@pytest.mark.slow
def test_two_machines_come_back_from_the_location_alone(
    tmp_path: Path, any_location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a restore of the newest checkpoint that both machines had pushed, also by a single process.

    Most of the state repeats one partition, for which neither machine may wait forever.
    """
    keys = dist.HashStore()
    monkeypatch.setattr(cross_node_dedup, "PATIENCE_S", 1e6)
    with warnings.catch_warnings():
        # Warnings about data read from the location, and about the step that was not pushed.
        warnings.simplefilter("ignore")
        assert launched(tmp_path, any_location, keys, range(4)) == [(None, True)] * 2
        assert launched(tmp_path, any_location, keys, range(4, 6)) == [(3, True)] * 2
        for rank in range(2):
            shutil.rmtree(tmp_path / f"machine-{rank}")
        assert launched(tmp_path, any_location, keys, range(5, 7)) == [(4, True)] * 2
    for rank in range(2):
        # The new stores know the line of which they have no checkpoint.
        with Store.open(tmp_path / f"machine-{rank}", config=CONFIG, create=True) as store:
            assert [head.generation for head in store.training.heads("default")] == [1, 2, 3]
    with Store.open(any_location, config=CONFIG, create=True) as remote:
        assert [(one.step, one.complete, one.generation) for one in remote.checkpoints()] == [
            *((step, True, generation) for step, generation in ((0, 1), (2, 1), (4, 2), (6, 3)))
        ]
        assert not remote.verify()
        state = remote.load()
    assert isinstance(state, dict)
    assert torch.equal(state["cut"], whole_tensor(6))
    assert bool((state["same"] == 6).all())
