"""Program for torchrun: ranks save and load by the paths of checkpoints, as trainers that only take a path do."""

import copy
import os
import signal
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from asymcheck.integrations.dcp import register
from tests.integrations.dcp_ranks import App, whole
from tests.store.equality import assert_same

# The processes of async_save import this program again.
register()


class KillingPlanner(DefaultSavePlanner):
    """Planner with which a rank is killed while it writes."""

    def resolve_data(self, write_item: Any) -> Any:  # noqa: ANN401 - as in torch
        """Kill this process."""
        os.kill(os.getpid(), signal.SIGKILL)


def extra(rank: int, value: float) -> dict[str, Any]:
    """Return entries that all ranks have, and one that only this rank has."""
    return {"step": int(value), "same": torch.full((4,), value), f"rng-{rank}": torch.full((2,), value + rank)}


def save(base: str) -> None:
    """Save by path in each way, and with an error on one rank."""
    rank, app = dist.get_rank(), App(1)
    app.step()
    # Two shards of a tensor on each rank.
    shards = [ShardMetadata([2 * i, 0], [2, 3], placement=f"rank:{i % 2}/cpu") for i in range(4)]
    rows = sharded_tensor.empty(EnumerableShardingSpec(shards), 8, 3, init_rrefs=False)
    for shard in rows.local_shards():
        shard.tensor.fill_(shard.metadata.shard_offsets[0])
    dcp.save({"app": app, "extra": extra(rank, 1), "rows": rows}, checkpoint_id=f"{base}/step-1")
    group = dist.new_group(backend="gloo")
    app.step()
    dcp.async_save({"app": app, "extra": extra(rank, 2)}, checkpoint_id=f"{base}/step-2", process_group=group).result()
    app.step()
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=False
    )
    stager = DefaultStager(options)
    saving = dcp.async_save(
        {"app": app, "extra": extra(rank, 3)},
        checkpoint_id=f"{base}/step-3",
        process_group=group,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        async_stager=stager,
    )
    expected = copy.deepcopy(whole({"app": app.state_dict()}))
    saving.staging_completion.result()
    app.step()  # a staged state does not change
    saving.upload_completion.result()
    stager.close()
    if rank == 0:
        torch.save(expected, f"{base.partition('?')[0].removeprefix('asymcheck://')}.pt")
    with pytest.raises(CheckpointException, match="values of type object") as caught:
        dcp.save({"app": app, f"rng-{rank}": object() if rank == 1 else 1}, checkpoint_id=f"{base}/step-4")
    assert list(caught.value.failures) == [1]


def load(base: str) -> None:
    """Load by path on another number of ranks, and compare with the saved state."""
    rank, app = dist.get_rank(), App(2)
    app.step()
    state = {"app": app, "extra": extra(rank % 2, 9)}
    if dist.get_world_size() == 1:
        state["extra"] |= extra(1, 9)
    dcp.load(state, checkpoint_id=f"{base}&strict=1/step-3")
    path = base.partition("?")[0].removeprefix("asymcheck://")
    assert_same(whole({"app": app.state_dict()}), torch.load(f"{path}.pt", weights_only=True))
    assert state["extra"]["step"] == 3
    assert torch.equal(state["extra"][f"rng-{rank % 2}"], torch.full((2,), 3.0 + rank % 2))
    rows = {"rows": torch.zeros(8, 3)}
    dcp.load(rows, checkpoint_id=f"{base}&strict=1&tensors=rows/step-1")
    assert rows["rows"][:, 0].tolist() == [0, 0, 2, 2, 4, 4, 6, 6]


def kill(base: str) -> None:
    """Save while rank 1 is killed."""
    planner = KillingPlanner() if dist.get_rank() == 1 else None
    dcp.save({"app": App(3)}, checkpoint_id=f"{base}/step-5", planner=planner)


def main(what: str, base: str) -> None:
    """Run one of the functions above on each rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Hide torch's warnings about its own functions.
    warnings.filterwarnings("ignore", module="torch")
    dist.init_process_group("gloo")
    {"save": save, "load": load, "kill": kill}[what](base)
    dist.barrier()
    # Skip the interpreter's shutdown: threads of gloo sometimes abort the process during it.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
