"""Gemini (Wang et al., SOSP 2023), our reimplementation: checkpoints go to the memory of another process, over gloo.

The authors place copies in the memory of other machines, in the network's idle times. This module replaces the other
machine by a peer process. The training copies its state during the forward and backward pass, as all schemes do, and
sends it to the peer, which keeps the last two. Nothing is written to a drive: a checkpoint survives the loss of the
training's process or node, not of both.

``python -m benchmarks.peer_memory FOLDER BYTES`` is the peer process.
"""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]  # they are there

from benchmarks.async_peers import flat_tensors
from benchmarks.reimplemented import Fenced

_TIMEOUT = dt.timedelta(seconds=60)
_TRAINING, _PEER = 0, 1
_PORT, _PARENT = "port", Path(__file__).parents[1]
_ASK = -1
"""Request for the newest checkpoint, sent instead of a step."""


def _group(store: TCPStore, name: str, rank: int) -> Any:  # noqa: ANN401 - its methods are missing in torch's types
    return ProcessGroupGloo(PrefixStore(name, store), rank, 2, _TIMEOUT)


def _connected(where: Path, name: str) -> Any:  # noqa: ANN401 - as above
    store = TCPStore("127.0.0.1", int((where / _PORT).read_text()), is_master=False, timeout=_TIMEOUT)
    return _group(store, name, _TRAINING)


class PeerMemory(Fenced):
    """Sends checkpoints to another process, with at most one in flight."""

    name = "Gemini (reimplemented)"

    def __init__(self, state: dict[str, Any], where: Path) -> None:
        """Start the other process."""
        super().__init__(state, where)
        nbytes = sum(tensor.nbytes for tensor in self.tensors().values())
        self._buffer = torch.zeros(nbytes, dtype=torch.uint8)
        command = [sys.executable, "-m", "benchmarks.peer_memory", str(where), str(nbytes)]
        # Start a new session, so that the peer outlives the training, as another machine does.
        subprocess.Popen(command, cwd=_PARENT, start_new_session=True, stderr=subprocess.DEVNULL)
        while not (where / _PORT).exists():
            time.sleep(0.01)
        self._group = _connected(where, "train")
        self._thread: threading.Thread | None = None

    def save(self, step: int) -> None:
        """Wait for the previous checkpoint, then begin to copy and send."""
        began = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
        self._copied = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(step, self.tensors(), began))
        self._thread.start()
        self.stalls.append(time.perf_counter() - began)

    def _run(self, step: int, tensors: dict[str, torch.Tensor], began: float) -> None:
        start = 0
        for tensor in tensors.values():
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            self._buffer[start : start + len(flat)] = flat
            start += len(flat)
        self._copied.set()
        answer = torch.zeros(1, dtype=torch.int64)
        self._group.send([torch.tensor([step])], _PEER, 0).wait()
        self._group.send([self._buffer], _PEER, 1).wait()
        self._group.recv([answer], _PEER, 2).wait()
        # The checkpoint is not on a drive. It survives the training's process, so count it as durable.
        self.durable.append(time.perf_counter() - began)

    def drain(self) -> None:
        """Wait for the last checkpoint."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Drain. The peer process ends with the connection, when no other process requests its data."""
        self.drain()
        (self.where / "over").touch()


def recover(state: dict[str, Any], where: Path) -> int:
    """Load a state from the memory of the peer process; return the step."""
    tensors = flat_tensors(state)
    group = _connected(where, "recover")
    step = torch.zeros(1, dtype=torch.int64)
    buffer = torch.zeros(sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    group.send([torch.tensor([_ASK])], _PEER, 0).wait()
    group.recv([step], _PEER, 1).wait()
    group.recv([buffer], _PEER, 2).wait()
    start = 0
    for tensor in tensors.values():
        tensor.detach().view(-1).view(torch.uint8).copy_(buffer[start : start + tensor.nbytes])
        start += tensor.nbytes
    (where / "over").touch()
    return int(step)


def serve(where: Path, nbytes: int) -> None:
    """Receive checkpoints until the training ends, then send the newest to one process that asks."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    temporary = where / "port.tmp"
    temporary.write_text(str(store.port))
    temporary.rename(where / _PORT)
    buffers = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]
    step, newest, number = torch.zeros(1, dtype=torch.int64), -1, 0
    group = _group(store, "train", _PEER)
    try:
        while True:
            group.recv([step], _TRAINING, 0).wait()
            group.recv([buffers[1 - number]], _TRAINING, 1).wait()
            # Overwrite the other copy only when this copy is complete.
            newest, number = int(step), 1 - number
            group.send([step], _TRAINING, 2).wait()
    except RuntimeError:
        # The training has ended, or was killed.
        pass
    if (where / "over").exists() or not where.exists():
        return
    group = _group(store, "recover", _PEER)
    group.recv([step], _TRAINING, 0).wait()
    group.send([torch.tensor([newest])], _TRAINING, 1).wait()
    group.send([buffers[number]], _TRAINING, 2).wait()
    while where.exists() and not (where / "over").exists():
        time.sleep(0.05)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
