"""Test restores by another number of ranks, whose machines have the parts of some ranks only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from asymcheck import Checkpointer, Push, Ranks, Store
from asymcheck.config import CaptureConfig
from tests.distributed.launched import CONFIG
from tests.distributed.test_coordinator import each


@pytest.mark.filterwarnings("ignore::asymcheck.errors.RemoteCopyWarning")
@pytest.mark.slow
@pytest.mark.parametrize("same", [False, True], ids=["new", "same"])
def test_tensors_of_other_ranks_are_not_added_on_any_machine(tmp_path: Path, *, same: bool) -> None:
    """Test that a rank gets the tensors that all ranks had saved, not those that all ranks of its machine had saved."""
    push = Push((tmp_path / "there").as_uri())

    def checkpointed(rank: int, machine: str, keys: dist.Store, more: dict[str, torch.Tensor]) -> list[str]:
        entries: dict[str, torch.Tensor] = {**more}
        memory = tmp_path / f"memory-{machine}"
        memory.mkdir(exist_ok=True)
        ranks = Ranks(rank, 3 if more else 2, keys, timeout_s=60.0, node=machine)
        capture = CaptureConfig(ring_folder=str(memory))
        with (
            Store.open(tmp_path / machine, config=CONFIG, remote=push.remote, create=True) as store,
            Checkpointer(store, {"x": entries}, capture=capture, push=push, ranks=ranks, every=1) as checkpointer,
        ):
            if more:
                checkpointer.save(0)
                checkpointer.wait("remote")
            else:
                checkpointer.restore()
        return [*entries]

    saving, restoring = dist.HashStore(), dist.HashStore()
    each(3, lambda rank: checkpointed(rank, f"m{rank}", saving, {f"e{rank}": torch.ones(9), "both": torch.ones(3000)}))
    machine = "m" if same else "n"
    assert each(2, lambda rank: checkpointed(rank, f"{machine}{rank}", restoring, {})) == [["both"]] * 2
