"""Test that the requests of one machine do not grow with the number of machines of its job (SPEC.md §C1)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from asymcheck import Checkpointer, Ranks, Store, TensorShard
from asymcheck.config import CaptureConfig
from asymcheck.errors import RemoteCopyWarning
from asymcheck.format import layout
from asymcheck.replication.push import open_location, push
from asymcheck.replication.transfer_stats import Moved
from asymcheck.storage.remote import parse_location
from tests.distributed.test_coordinator import each
from tests.remote.conftest import CONFIG

_ROWS = 20_000
_STEPS = 2


def shard(rank: int, step: int) -> torch.Tensor:
    """Return the shard of the changing tensor at a step; of the frozen tensor for a negative one."""
    return torch.randn(_ROWS, generator=torch.Generator().manual_seed(100 * rank + step + 1))


class Job:
    """A job with one rank on each machine."""

    def __init__(self, folder: Path, machines: int) -> None:
        self.folder, self.machines, self.location = folder, machines, f"file://{folder}/location"

    def store(self, rank: int) -> Path:
        """Return the path of the store of a machine."""
        return self.folder / f"machine-{rank}"

    def launch(self, *, trains: bool) -> list[torch.Tensor]:
        """Restore on all machines, and save two checkpoints if the job ``trains``; return the changing shards."""
        keys = dist.HashStore()

        def work(rank: int) -> torch.Tensor:
            memory = self.folder / f"memory-{rank}"
            memory.mkdir(exist_ok=True)
            whole, offset = (self.machines * _ROWS,), (rank * _ROWS,)
            changing, frozen = torch.zeros(_ROWS), shard(rank, -1)
            state = {name: TensorShard(part, whole, offset) for name, part in (("c", changing), ("f", frozen))}
            ranks = Ranks(rank, self.machines, keys, timeout_s=120.0, node=f"node-{rank}")
            capture = CaptureConfig(ring_folder=str(memory))
            remote = None if trains else self.location
            with (
                Store.open(self.store(rank), config=CONFIG, remote=remote, create=True) as store,
                Checkpointer(store, state, every=1, ranks=ranks, capture=capture, keep=None) as checkpointer,
            ):
                checkpointer.restore()
                for step in range(_STEPS if trains else 0):
                    changing.copy_(shard(rank, step))
                    checkpointer.save(step)
            return changing

        return each(self.machines, work)

    def push(self, rank: int, step: int) -> Moved:
        """Push a checkpoint of one machine, as a process that has pushed nothing yet."""
        with Store.open(self.store(rank), config=CONFIG) as store:
            remote = open_location(store.resources.tier, parse_location(self.location), CONFIG)
            listings = store.resources.tier.manifests.checkpoints("default")
            return push(store.resources.tier, remote, [one for one in listings if one.ref.step == step])

    def push_all(self) -> None:
        """Push all checkpoints of all machines."""
        for step in range(_STEPS):
            for rank in range(self.machines):
                self.push(rank, step)

    def check_restored(self) -> None:
        """Lose all machines, and check what each rank restores from the location."""
        for rank in range(self.machines):
            shutil.rmtree(self.store(rank))
        with pytest.warns(RemoteCopyWarning):
            restored = self.launch(trains=False)
        for rank, changing in enumerate(restored):
            assert torch.equal(changing, shard(rank, _STEPS - 1))


@pytest.fixture
def trained(tmp_path: Path) -> Callable[[int], Job]:
    """Return a function that trains on a number of machines."""

    def train(machines: int) -> Job:
        folder = tmp_path / f"{machines}-machines"
        folder.mkdir()
        job = Job(folder, machines)
        job.launch(trains=True)
        return job

    return train


def test_a_push_reads_the_packs_of_its_machine_only(trained: Callable[[int], Job], operations: list[str]) -> None:
    """Test that operations do not grow, and that data of the machine that is there is not sent again."""
    counts = []
    for job in map(trained, (2, 5)):
        for rank in range(job.machines):
            job.push(rank, 0)
        operations.clear()
        moved = job.push(0, 1)
        counts.append(len(operations))
        assert moved.moved_bytes == 4 * _ROWS
        assert moved.reused_partitions
    assert counts[0] == counts[1]


def test_a_job_reads_the_packs_of_its_machines_only(trained: Callable[[int], Job], operations: list[str]) -> None:
    """Test that the operations of a machine in a restore from the location do not grow."""
    counts = []
    for job in map(trained, (2, 5)):
        job.push_all()
        operations.clear()
        job.check_restored()
        counts.append(len(operations) / job.machines)
    assert counts[1] <= counts[0]


def test_any_pack_may_hold_a_partition(trained: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Test restores from packs whose ids are random."""
    job = trained(2)
    with monkeypatch.context() as patch:
        patch.setattr(layout, "pack_prefix", lambda _: os.urandom(layout.PACK_PREFIX_BYTES))
        job.push_all()
    with Store.open(job.location, config=CONFIG) as remote:
        state = remote.load()
        assert not remote.verify()
    assert isinstance(state, dict)
    assert torch.equal(state["c"], torch.cat([shard(rank, _STEPS - 1) for rank in range(2)]))
    job.check_restored()


def test_ids_begin_with_the_prefix_of_the_lowest_rank(trained: Callable[[int], Job]) -> None:
    """Test the names of the packs of two machines."""
    job = trained(2)
    job.push_all()
    prefixes = {bytes.fromhex(path.stem)[:4] for path in (job.folder / "location" / "packs").iterdir()}
    assert prefixes == {layout.pack_prefix(0), layout.pack_prefix(1)}
