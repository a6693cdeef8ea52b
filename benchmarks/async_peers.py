"""Compare saving in a training loop: asymcheck and other libraries, synchronous and in the background.

Each saver is called after a step and before the optimizer changes the state again. It counts the seconds for which it
blocks the training thread: its *visible stall*. The benchmark syncs the peers' files on a separate thread, so that they
are as durable as the files of asymcheck. That thread does not count as a stall.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save

import asymcheck
from asymcheck.config import CaptureConfig
from benchmarks import peers, states

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchsnapshot import Snapshot, StateDict


class Saver:
    """A method to save in a training loop."""

    name = "no checkpoints"
    """Name in the tables."""

    def __init__(self, state: dict[str, Any], where: Path) -> None:
        """Save ``state``, objects with ``state_dict``, below ``where``."""
        self.state, self.where = state, where
        self.stalls: list[float] = []
        """Seconds for which each checkpoint blocked the training thread."""
        self.durable: list[float] = []
        """Seconds from the beginning of each checkpoint until it was durable."""
        self.errors: list[float] = []
        """For lossy schemes: the maximum error of each checkpoint relative to the largest value."""

    def save(self, step: int) -> None:
        """Begin a checkpoint; the training continues on return."""

    def before_optimizer(self) -> None:
        """Prepare for the optimizer, which is about to change the state."""

    def drain(self) -> None:
        """Wait until all checkpoints in flight are durable."""

    def finish(self) -> None:
        """Drain, and stop all background work."""
        self.drain()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state's tensors by dotted names, without a copy."""
        return flat_tensors(self.state)


SETTLING = 2
"""Untimed checkpoints at the start: the first sets up memory, threads or processes; asymcheck digests two in full."""
_SETTLING_STEPS = 10
"""Maximum number of untimed steps after the first checkpoint."""


def untimed(every: int) -> int:
    """Return the number of steps that :func:`train` runs before the timed steps."""
    return 1 + min(every, _SETTLING_STEPS) if every else 0


def train(iterate: Callable[[int], object], saver: Saver, every: int, steps: int) -> float:
    """Train with a checkpoint every so many steps, or with none; return the mean seconds of ``steps`` iterations.

    Run :data:`SETTLING` checkpoints some steps apart, and wait for them, before the timed steps. A training pays for
    them only once. The first timed step begins a checkpoint.
    """
    first = untimed(every)
    for step in range(first):
        iterate(step)
        if step in [number * first // SETTLING for number in range(SETTLING)]:
            saver.save(step)
    saver.drain()
    began = time.perf_counter()
    for step in range(first, first + steps):
        iterate(step)
        if every and (step - first) % every == 0:
            saver.save(step)
    return (time.perf_counter() - began) / steps


def flat_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of objects with ``state_dict`` by dotted names, without a copy."""
    return states.named_tensors({key: value.state_dict() for key, value in state.items()})


Schedule = Literal["immediate", "asymmetric", "symmetric", "eager"]
"""When asymcheck copies tensors (see ``CaptureConfig.schedule``)."""


class Ours(Saver):
    """Save with asymcheck in the background."""

    def __init__(
        self,
        state: dict[str, Any],
        where: Path,
        schedule: Schedule = "immediate",
        config: asymcheck.StoreConfig | None = None,
        keep: asymcheck.Retention | None = None,
    ) -> None:
        """Save with the given schedule, into a store with the given configuration, with retention ``keep``."""
        super().__init__(state, where)
        self.name = f"asymcheck {schedule}"
        self._store = asymcheck.Store.open(where, config=config, create=True)
        # Only the float32 masters are in the optimizer; the training rounds them to the weights after each step.
        capture = CaptureConfig(schedule=schedule, deferred=("model.*",) if "masters" in state else ())
        self._checkpointer = asymcheck.Checkpointer(self._store, state, capture=capture, every=1, keep=keep)
        self._counted = 0.0

    def save(self, step: int) -> None:
        """Record the measurements of the previous checkpoint, then begin a checkpoint."""
        self._count()
        began = time.perf_counter()
        self._checkpointer.step(step)
        # Measure the call by wall time, as for the peers.
        self.stalls.append(time.perf_counter() - began)

    def _count(self) -> None:
        # Hooks and fences since the previous call belong to the previous checkpoint.
        seen = self._checkpointer.statistics()
        if self.stalls:
            self.stalls[-1] += seen.fence_s + seen.hooks_s - self._counted
        self._counted = seen.fence_s + seen.hooks_s

    def drain(self) -> None:
        """Wait as a training does at its end."""
        self._checkpointer.wait()

    def finish(self) -> None:
        """Drain, and record the times until checkpoints were durable."""
        self.drain()
        self._count()
        self.durable = self._checkpointer.statistics().durable_s
        self._checkpointer.close()
        self._store.close()


class Blocking(Saver):
    """Save with a library that blocks the loop."""

    def __init__(self, state: dict[str, Any], where: Path, peer: peers.Peer) -> None:
        """Save with ``peer``."""
        super().__init__(state, where)
        self.name = f"{peer.name} sync"
        self._peer = peer

    def save(self, step: int) -> None:
        """Save durably."""
        began = time.perf_counter()
        # Otherwise, clones for a library that refuses tied weights would count as time of the library.
        peers.save_durably(self._peer, states.unique(self.tensors()), self.where / str(step))
        self.stalls.append(time.perf_counter() - began)
        self.durable.append(self.stalls[-1])


Begin = Callable[["Background", Path], Callable[[], object]]
"""Function that begins to save into a folder, and returns a function that waits for the end."""


class _KeptStager(DefaultStager):
    """Stager of torch DCP that keeps its memory between checkpoints, as the guides recommend; torch 2.11 frees it.

    Its copies wait for the work that the training has queued. Otherwise, they would copy an unfinished step.
    """

    def __init__(self, options: StagingOptions) -> None:
        super().__init__(options)
        self._free: Callable[[], None] = self._state_dict_stager.close
        self._state_dict_stager.close = lambda: None  # type: ignore[method-assign]  # until close()

    def stage(self, state_dict: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as in torch
        if self._staging_stream is not None:
            self._staging_stream.wait_stream(torch.cuda.current_stream())
        return super().stage(state_dict, **kwargs)

    def close(self) -> None:
        super().close()
        self._free()


class Background(Saver):
    """Save with a library in the background, one save at a time, as the guides of the libraries recommend."""

    def __init__(self, state: dict[str, Any], where: Path, name: str, begin: Begin) -> None:
        """Use ``begin``, which returns a function that waits for the end."""
        super().__init__(state, where)
        self.name = name
        self._begin = begin
        self._thread = ThreadPoolExecutor(1)
        self._saving: Future[None] | None = None
        self.staged: Callable[[], object] | None = None
        """Function that waits until the state may change, for libraries that copy in the background."""
        self.stager: DefaultStager | None = None
        """Copies the state for torch DCP."""

    def save(self, step: int) -> None:
        """Wait for the previous checkpoint, then begin a checkpoint."""
        began = time.perf_counter()
        self.drain()
        target = self.where / str(step)
        wait = self._begin(self, target)

        def end() -> None:
            wait()
            peers.sync(target)
            self.durable.append(time.perf_counter() - began)

        self._saving = self._thread.submit(end)
        self.stalls.append(time.perf_counter() - began)

    def before_optimizer(self) -> None:
        """Wait until the state has been copied."""
        if self.staged is not None:
            began = time.perf_counter()
            self.staged()
            self.staged = None
            self.stalls[-1] += time.perf_counter() - began

    def drain(self) -> None:
        """Wait for the last checkpoint, and raise its error."""
        if self._saving is not None:
            self._saving.result()

    def finish(self) -> None:
        """Wait for the last checkpoint, and free the memory of its copy."""
        self.drain()
        self._thread.shutdown()
        if self.stager is not None:
            self.stager.close()


def _dcp(kind: AsyncCheckpointerType, *, staged: bool = False) -> Begin:
    def begin(saver: Background, target: Path) -> Callable[[], object]:
        if staged and saver.stager is None:
            # Pinned memory and copies that do not block, where the state is on a GPU; shared memory for a process.
            on_gpu = any(tensor.is_cuda for tensor in saver.tensors().values())
            options = StagingOptions(on_gpu, kind is AsyncCheckpointerType.PROCESS, True, on_gpu)
            saver.stager = _KeptStager(options)
        response = async_save(
            dict(saver.tensors()),
            storage_writer=FileSystemWriter(target, thread_count=peers.THREADS),
            async_checkpointer_type=kind,
            async_stager=saver.stager,
        )
        if isinstance(response, AsyncSaveResponse):
            saver.staged = response.staging_completion.result
            return response.upload_completion.result
        return response.result

    return begin


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Create the process group that the background processes of torch DCP need. This process is its only member."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def _torchsnapshot(saver: Background, target: Path) -> Callable[[], object]:
    pending = Snapshot.async_take(str(target), {"state": StateDict(**saver.tensors())})
    wait: Callable[[], object] = pending.wait
    return wait


Factory = Callable[[dict[str, Any], Path], Saver]

OURS: dict[str, Factory] = {
    f"asymcheck {schedule}": (lambda state, where, schedule=schedule: Ours(state, where, schedule))  # type: ignore[misc]  # the default binds the loop's value
    for schedule in ("immediate", "asymmetric", "eager")
}
"""Savers of asymcheck, by schedule."""

SYNC: dict[str, Factory] = {
    f"{peer.name} sync": (lambda state, where, peer=peer: Blocking(state, where, peer))  # type: ignore[misc]  # as above
    for peer in (peers.TorchSave(), peers.DistributedCheckpoint())
}
"""Libraries that block the loop."""

ASYNC: dict[str, Factory] = {
    name: (lambda state, where, name=name, begin=begin: Background(state, where, name, begin))  # type: ignore[misc]  # as above
    for name, begin in {
        "torch DCP async thread": _dcp(AsyncCheckpointerType.THREAD),
        "torch DCP async staged": _dcp(AsyncCheckpointerType.THREAD, staged=True),
        "torch DCP async process": _dcp(AsyncCheckpointerType.PROCESS, staged=True),
        "torchsnapshot async": _torchsnapshot,
    }.items()
}
"""Libraries that save in the background."""
