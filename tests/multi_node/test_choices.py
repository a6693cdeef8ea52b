"""Test the selection by metrics on each machine: all machines choose the same checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from asymcheck import Checkpointer, Push, Ranks, Retention, Store
from asymcheck.config import CaptureConfig
from tests.distributed.launched import CONFIG
from tests.distributed.test_coordinator import each

LOSSES = ((1.0, 2.0, 3.0, 4.0), (3.0, 1.0, 2.0, 5.0))
"""Metrics of each rank by step; if several ranks report a metric, the last counts."""


@pytest.mark.slow
def test_the_best_is_the_same_one_on_all_machines(tmp_path: Path) -> None:
    """Test a loss of each rank, and an accuracy of rank 0: all stores keep and push the same steps."""
    location, keys = (tmp_path / "there").as_uri(), dist.HashStore()

    def work(rank: int) -> list[tuple[int, dict[str, float]]]:
        memory = tmp_path / f"memory-{rank}"
        memory.mkdir()
        capture = CaptureConfig(ring_folder=str(memory))
        ranks = Ranks(rank, 2, keys, timeout_s=60.0, node=f"node-{rank}")
        weight = torch.zeros(3000)
        state: dict[str, object] = {"all": weight, f"rank-{rank}": torch.zeros(300)}
        keep = Retention(keep_best=("loss", 1))
        with Store.open(tmp_path / f"machine-{rank}", config=CONFIG, create=True) as store:
            with Checkpointer(store, state, keep=keep, capture=capture, ranks=ranks, every=1) as checkpointer:
                for step, loss in enumerate(LOSSES[rank]):
                    weight += 1
                    checkpointer.save(step, {"loss": loss, **({} if rank else {"accuracy": float(step == 1)})})
            with store.training.push_in_background(Push(location, best=("accuracy", 1, "max"))):
                pass
            return [(one.step, dict(one.metrics)) for one in store.checkpoints()]

    assert each(2, work) == [[(1, {"loss": 1.0, "accuracy": 1.0}), (3, {"loss": 5.0, "accuracy": 0.0})]] * 2
    with Store.open(location, config=CONFIG, create=True) as there:
        assert [(one.step, one.complete) for one in there.checkpoints()] == [(1, True)]
