"""Call DeepSpeed's checkpoint engines in the same order as DeepSpeed's training engine.

``save_checkpoint`` creates, saves and commits. The decoupled engine commits later, just before the next step changes
the state. Then the name of the checkpoint is written into the file ``latest``. This module syncs the engines' files, as
for all peers. The Fast and Decoupled engines use the Python writer. The libaio writer (``"type": "fast"``) needs an
operator that DeepSpeed provides only on GPUs.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import deepspeed
import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import DecoupledCheckpointEngine
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.model_checkpointing.config import get_checkpoint_config
from deepspeed.runtime.model_checkpointing.data_parallel_writer_factory import DataParallelWriterConfig
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

from benchmarks import peers, states
from benchmarks.async_peers import Saver, flat_tensors

Kind = Literal["Torch", "Fast", "Decoupled"]
_FILE = "mp_rank_00_model_states.pt"
_LATEST = "latest"


class Engine(Saver):
    """A checkpoint engine, for a training of one process."""

    def __init__(self, state: dict[str, Any], where: Path, kind: Kind) -> None:
        """Save into a folder for each step, below ``where``. The engines need a process group."""
        super().__init__(state, where)
        self.name = f"DeepSpeed {kind} engine"
        self._engine = _engine(kind, writes=True)
        self._uncommitted: Any = None
        self._began = 0.0

    def save(self, step: int) -> None:
        """Pass the state to the engine. The decoupled engine writes in the background."""
        self.before_optimizer()
        self._began = time.perf_counter()
        self._uncommitted = CheckpointCommitInfo(tag=str(step), save_dir=str(self.where), save_latest=True)
        self._engine.create(self._uncommitted)
        (self.where / str(step)).mkdir()
        self._engine.save(states.unique(self.tensors()), str(self.where / str(step) / _FILE))
        if not self._engine.is_decoupled():
            self._commit()
        self.stalls.append(time.perf_counter() - self._began)

    def before_optimizer(self) -> None:
        """Commit. This waits for the decoupled engine, which reads the state directly and makes no copy."""
        if self._uncommitted is not None:
            began = time.perf_counter()
            self._commit()
            self.stalls[-1] += time.perf_counter() - began

    def _commit(self) -> None:
        # The engine prints a message for each checkpoint.
        with contextlib.redirect_stdout(io.StringIO()):
            self._engine.commit(self._uncommitted)
        peers.sync(self.where / self._uncommitted.tag)
        (self.where / _LATEST).write_text(self._uncommitted.tag)
        peers.sync(self.where / _LATEST)
        self._uncommitted = None
        self.durable.append(time.perf_counter() - self._began)

    def drain(self) -> None:
        """Commit the pending checkpoint, if any."""
        self.before_optimizer()

    def finish(self) -> None:
        """Drain, and end the process of the decoupled engine."""
        self.drain()
        self._engine.cleanup()


def recover(state: dict[str, Any], where: Path, kind: Kind) -> int:
    """Load the checkpoint named by ``latest``, as ``load_checkpoint`` does; return its step."""
    tag = (where / _LATEST).read_text()
    loaded = _engine(kind, writes=False).load(str(where / tag / _FILE))
    for name, tensor in flat_tensors(state).items():
        if name in loaded:
            tensor.detach().copy_(loaded[name])
    return int(tag)


def _engine(kind: Kind, *, writes: bool) -> Any:  # noqa: ANN401 - what DeepSpeed makes of its configuration
    # Otherwise, DeepSpeed compiles an operator for ranks of one machine first.
    deepspeed.ops.__compatible_ops__ = {}
    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    settings = {"checkpoint": {"writer": {"type": "python", "decoupled": kind == "Decoupled"}}, "aio": {}}
    config = SimpleNamespace(checkpoint_config=get_checkpoint_config(settings), aio_config=get_aio_config(settings))
    if kind == "Torch":
        return TorchCheckpointEngine(config)
    # Set the start method, because DeepSpeed requires spawning and fails if another method was chosen before.
    torch.multiprocessing.set_start_method("spawn", force=True)
    rank = DataParallelWriterConfig(world_size=1, rank=0, global_rank=0, local_rank=0, pure_dp=True) if writes else None
    with contextlib.redirect_stdout(io.StringIO()):
        return (DecoupledCheckpointEngine if kind == "Decoupled" else FastCheckpointEngine)(config, rank, False)
