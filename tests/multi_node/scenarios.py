"""Scenarios of ranks with one store per machine, run as a program with one process per rank."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from asymcheck import Checkpointer, Push, Ranks, Retention, Store, TensorShard
from asymcheck.capture import two_phase_commit
from asymcheck.capture.ring_flush import RingFlusher
from asymcheck.config import CaptureConfig
from asymcheck.errors import AsymcheckError
from asymcheck.replication import background_push, cross_node_dedup
from asymcheck.storage.nvme import ManifestFiles
from tests.distributed.launched import CONFIG, RANK, WORLD, connect, noted
from tests.distributed.scenarios import mark, never_commit, note, tell
from tests.distributed.training import Training, digest_of
from tests.remote.conftest import ChildOnThread

PER_MACHINE = int(os.environ.get("PER_MACHINE", "2"))
MACHINE = RANK // PER_MACHINE
ROWS, COLUMNS = 16, 256
"""Rows of a tensor that all ranks share equally."""


class Job(Training):
    """A training that is equal on all ranks, except for a per-rank tensor and a sharded one."""

    def __init__(self, seed: int = 0) -> None:
        """Begin with numbers that follow from ``seed``."""
        super().__init__(seed)
        self.part = torch.full((ROWS // WORLD, COLUMNS), float(seed))

    def state(self) -> dict[str, object]:
        """Return the saved state."""
        cut = TensorShard(self.part, (ROWS, COLUMNS), (ROWS // WORLD * RANK, 0))
        return {**super().state(), "cut": cut}

    def step(self, step: int) -> None:
        """Train one step."""
        self.train(step, 0)
        rows = ROWS // WORLD
        # The change of a row is the same for any distribution of the rows.
        self.part += (step + 1) * torch.arange(rows * RANK, rows * (RANK + 1))[:, None]

    def text(self) -> str:
        """Return a digest of the whole state."""
        return f"{self.digest()} {digest_of([self.part])}"


def store_of(folder: Path, machine: int = MACHINE) -> Path:
    """Return the store of a machine."""
    return folder / f"machine-{machine}" / "store"


def opened(folder: Path) -> Store:
    """Open the store of this machine, with the remote location if there is one."""
    store_of(folder).parent.mkdir(exist_ok=True)
    remote = os.environ.get("LOCATION")
    return Store.open(store_of(folder), config=CONFIG, remote=remote or None, create=True)


def ranks_of(folder: Path) -> Ranks:
    """Return the ranks of all launches in a folder. All ranks are alive, so wait for a busy machine."""
    keys = dist.PrefixStore(str(folder), connect())
    return Ranks(RANK, WORLD, keys, timeout_s=60.0, local_size=PER_MACHINE, node=f"machine-{MACHINE}")


def checkpointer(folder: Path, store: Store, job: Job, ranks: Ranks, **more: object) -> Checkpointer:
    """Return a Checkpointer with a full proof, which pushes if there is a location."""
    memory = folder / f"machine-{MACHINE}" / "memory"
    memory.mkdir(exist_ok=True)
    location = os.environ.get("LOCATION")
    if location:
        more["push"] = Push(location, every=2)
    if "KEEP" in os.environ:
        more["keep"] = Retention(keep_last=int(os.environ["KEEP"]))
    capture = CaptureConfig(proof="full", ring_folder=str(memory))
    return Checkpointer(store, job.state(), capture=capture, ranks=ranks, **{"every": 1, "keep": None, **more})  # type: ignore[arg-type]  # knobs of tests


def trained(folder: Path) -> dict[str, object]:
    """Train and save for some steps, or until killed; note the state of each step before its save."""
    found: dict[str, object] = {}
    with opened(folder) as store, noted() as texts:
        job = Job(seed=0)
        ckpt = checkpointer(folder, store, job, ranks_of(folder), on_error="warn")
        try:
            restored = ckpt.restore()
        except AsymcheckError as error:
            return {"refused": f"{type(error).__name__}: {error}", "reports": texts}
        found = {"restored": None if restored is None else restored.step, "state": job.text(), "reports": texts}
        tell(found)
        start = 0 if restored is None else restored.step + 1
        try:
            for step in range(start, start + int(sys.argv[3])):
                job.step(step)
                note(folder, step, job.text())
                ckpt.step(step)
                mark(folder, f"step-{step}-{RANK}")
                if "IN_STEP" in os.environ:
                    # Machines that restore different checkpoints would push to each other.
                    ckpt.wait("remote")
                time.sleep(0.02)
                if sum("Lost" in text for text in texts) > 1:
                    # The other rank has ended, and it is sufficient that the training continues.
                    break
            ckpt.wait("remote" if os.environ.get("LOCATION") else "local")
            found["written"] = ckpt.statistics().written_bytes
            found["pushed"] = [
                ckpt.push_statistics().pushed,
                ckpt.push_statistics().problem,
                ckpt.push_statistics().sent_bytes,
            ]
            found["newest_there"] = ckpt.push_statistics().newest_step
        except AsymcheckError as error:
            found["ended"] = f"{type(error).__name__}: {error}"
        with contextlib.suppress(AsymcheckError):
            ckpt.close()
    return found


def stuck(folder: Path) -> dict[str, object]:
    """Save one checkpoint, and begin a second that is complete in memory, but never committed."""
    with opened(folder) as store:
        job = Job()

        def train(step: int) -> str:
            job.step(step)
            return job.text()

        never_commit(folder, checkpointer(folder, store, job, ranks_of(folder)), train)
    return {}


def first(folder: Path) -> dict[str, object]:
    """Save a first checkpoint; the last rank is killed before its capture is complete, or before its manifest."""
    if WORLD - 1 == RANK:
        killed = {"capture": (RingFlusher, "_complete"), "manifest": (ManifestFiles, "publish")}[sys.argv[3]]
        setattr(*killed, lambda *_more: os.kill(os.getpid(), signal.SIGKILL))
    with opened(folder) as store:
        job = Job(seed=0)
        ckpt = checkpointer(folder, store, job, ranks_of(folder))
        ckpt.restore()
        job.step(0)
        ckpt.step(0)
        ckpt.wait("memory")
        mark(folder, f"in-memory-{RANK}")
        time.sleep(1000)
    return {}


def rolled(folder: Path) -> dict[str, object]:
    """Roll back in memory, and continue training."""
    with opened(folder) as store:
        job = Job()
        with checkpointer(folder, store, job, ranks_of(folder)) as ckpt:
            ckpt.restore()
            for step in range(3):
                job.step(step)
                ckpt.step(step)
            ckpt.wait()
            before = job.text()
            job.step(3)
            back = ckpt.rollback()
            is_same = job.text() == before
            job.step(3)
            saved = ckpt.save(3)
    return {"step": back.step, "generation": back.generation, "is_same": is_same, "saved": saved.generation}


def diverged(folder: Path) -> dict[str, object]:
    """Change a weight on one machine only, with a comparison of replicas at each save."""
    two_phase_commit._SHARED_FOR_BY_STORES = 1
    with opened(folder) as store, noted() as texts:
        job = Job()
        with checkpointer(folder, store, job, ranks_of(folder)) as ckpt:
            ckpt.restore()
            for step in range(5):
                job.step(step)
                if step == 3 and RANK == 1:
                    with torch.no_grad():
                        job.model[1].weight.view(torch.int32)[0, 0] ^= 1
                ckpt.step(step)
                ckpt.wait()
    return {"reports": texts}


def main() -> None:
    """Run the scenario of the command line."""
    torch.set_num_threads(1)
    # Push on a thread, because launches last for seconds, as long as the start of a process on each machine.
    background_push._start = ChildOnThread  # type: ignore[assignment]  # in place of a process
    if "IN_STEP" in os.environ:
        cross_node_dedup.PATIENCE_S = 200.0
    scenarios = {"trained": trained, "stuck": stuck, "first": first, "rolled": rolled, "diverged": diverged}
    tell(scenarios[sys.argv[1]](Path(sys.argv[2])))


if __name__ == "__main__":
    main()
