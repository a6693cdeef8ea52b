"""Checkpoint schemes that ``models`` compares: asymcheck, unchanged libraries, and our reimplementations of papers.

Each scheme is a saver in the loop and a recovery function. The recovery function fills the state of a new process from
the newest checkpoint of a killed process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.api import CheckpointException

import asymcheck
from benchmarks import lossy, peer_memory, peers, states
from benchmarks.async_peers import ASYNC, Blocking, Ours, Saver, flat_tensors
from benchmarks.reimplemented import CHECKFREQ, DATASTATES, PCCHECK, Buffered, read_newest

State = dict[str, Any]
Kind = Literal["none", "asymcheck", "upstream", "reimplemented"]
Recover = Callable[[State, Path], int]
"""Fills a state from the newest checkpoint in a folder; returns the step."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A checkpoint scheme."""

    name: str
    """Name in the tables."""
    kind: Kind
    """Origin of the scheme. Reimplementations do not count, because the authors' own code may be faster or slower."""
    make: Callable[[State, Path], Saver]
    """Function that begins to save a state into a folder."""
    recover: Recover | None
    """Recovery function; None if the scheme has none."""
    missing: Callable[[], str | None] = lambda: None
    """Returns the name of a missing requirement, or None if the scheme can run."""


class Ladder(Ours):
    """Save with asymcheck, with the modules of the paper enabled one after another."""

    def __init__(self, state: State, where: Path, name: str, config: asymcheck.StoreConfig) -> None:
        """Save into a store with the given configuration."""
        super().__init__(state, where, config=config)
        self.name = name
        # Begin a generation, so that a killed training can resume from memory.
        self._checkpointer.restore()


class TorchSaveOnly(Saver):
    """Save with ``torch.save`` as most training scripts do: overwrite the previous file without a sync."""

    name = "torch.save, not synced"

    def save(self, step: int) -> None:
        """Overwrite the file."""
        began = time.perf_counter()
        torch.save({"step": step, **self.tensors()}, self.where / "checkpoint.pt")
        self.stalls.append(time.perf_counter() - began)


class Renamed(Blocking):
    """Save with a library, then sync and rename the file, as a careful script does."""

    def save(self, step: int) -> None:
        """Save to a temporary file, then rename it over the old file."""
        began = time.perf_counter()
        temporary = self.where / "new"
        peers.save_durably(self._peer, states.unique(self.tensors()), temporary)
        os.replace(temporary, self.where / f"{step:09}")
        peers.sync(self.where / f"{step:09}")
        self.stalls.append(time.perf_counter() - began)
        self.durable.append(self.stalls[-1])


def _recover_ours(state: State, where: Path) -> int:
    with (
        asymcheck.Store.open(where, create=True) as store,
        asymcheck.Checkpointer(store, state, every=1, keep=None) as checkpointer,
    ):
        restored = checkpointer.restore()
        return -1 if restored is None else restored.step


def _recover_torch_save(state: State, where: Path) -> int:
    loaded = torch.load(where / "checkpoint.pt", weights_only=True)
    _copy(loaded, state)
    step: int = loaded["step"]
    return step


def _recover_filled(state: State, where: Path, fill: Callable[[Path, peers.Tensors], None]) -> int:
    """Load the newest readable checkpoint, because a name does not show whether the checkpoint is complete."""
    paths = {int(path.name): path for path in where.iterdir() if path.name.isdigit()}
    for step in sorted(paths, reverse=True):
        # A truncated file may raise any error of a library; the error of torch DCP is not derived from Exception.
        with contextlib.suppress(Exception, CheckpointException), _quiet():
            fill(paths[step], states.unique(flat_tensors(state)))
            return step
    return -1


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide a library's messages about a damaged file from the terminal."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _recover_raw(state: State, where: Path) -> int:
    step, tensors = read_newest(where)
    _copy(tensors, state)
    return step


def _copy(source: dict[str, Any], state: State) -> None:
    for name, tensor in flat_tensors(state).items():
        if name in source:
            tensor.detach().copy_(source[name])


def _ours(name: str, config: asymcheck.StoreConfig) -> Scheme:
    return Scheme(name, "asymcheck", lambda state, where: Ladder(state, where, name, config), _recover_ours)


def _upstream(name: str, make: Callable[[State, Path], Saver], peer: peers.Peer) -> Scheme:
    fill = next(iter(peer.fills().values()))
    return Scheme(name, "upstream", make, partial(_recover_filled, fill=fill))


def _deepspeed(kind: Literal["Torch", "Fast", "Decoupled"]) -> Scheme:
    def make(state: State, where: Path) -> Saver:
        from benchmarks import deepspeed_engines  # noqa: PLC0415 - where it is not installed the run says so

        return deepspeed_engines.Engine(state, where, kind)

    def recover(state: State, where: Path) -> int:
        from benchmarks import deepspeed_engines  # noqa: PLC0415 - as above

        return deepspeed_engines.recover(state, where, kind)

    def missing() -> str | None:
        return None if importlib.util.find_spec("deepspeed") else "DeepSpeed is not installed"

    return Scheme(f"DeepSpeed {kind} engine", "upstream", make, recover, missing)


def _reimplemented(name: str, **knobs: Any) -> Scheme:  # noqa: ANN401 - passed on as they are
    return Scheme(name, "reimplemented", lambda state, where: Buffered(state, where, name, **knobs), _recover_raw)


_ONE_BY_ONE = 4 << 20
"""Use packs of one partition, without batching."""

NONE = Scheme("no checkpoints", "none", Saver, None)
SCHEMES: tuple[Scheme, ...] = (
    _ours("asymcheck naive", asymcheck.StoreConfig(compression="off", pack_bytes=_ONE_BY_ONE)),
    _ours("asymcheck +S", asymcheck.StoreConfig(pack_bytes=_ONE_BY_ONE)),
    _ours("asymcheck +S+O", asymcheck.StoreConfig()),
    Scheme("torch.save, not synced", "upstream", TorchSaveOnly, _recover_torch_save),
    _upstream("torch.save", lambda state, where: Renamed(state, where, peers.TorchSave()), peers.TorchSave()),
    _upstream("safetensors", lambda state, where: Renamed(state, where, peers.Safetensors()), peers.Safetensors()),
    _upstream(
        "torch DCP",
        lambda state, where: Blocking(state, where, peers.DistributedCheckpoint()),
        peers.DistributedCheckpoint(),
    ),
    *(
        _upstream(name, make, peers.TorchSnapshot() if "snapshot" in name else peers.DistributedCheckpoint())
        for name, make in ASYNC.items()
    ),
    _deepspeed("Torch"),
    _deepspeed("Fast"),
    _deepspeed("Decoupled"),
    _reimplemented("CheckFreq (reimplemented)", **CHECKFREQ),
    _reimplemented("DataStates (reimplemented)", **DATASTATES),
    _reimplemented("PCcheck (reimplemented)", **PCCHECK),
    Scheme(peer_memory.PeerMemory.name, "reimplemented", peer_memory.PeerMemory, peer_memory.recover),
    Scheme(lossy.Lossy.name, "reimplemented", lossy.Lossy, lossy.recover),
)
"""All schemes except :data:`NONE`."""
