"""The libraries that users have instead: each saves and restores the same named tensors, each as its own guide says.

The bytes that they write are made durable here as asymcheck makes its own: every file synced, and every directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

with warnings.catch_warnings():
    # It is compiled on import by what torch has deprecated since.
    warnings.simplefilter("ignore")
    from torchsnapshot import Snapshot, StateDict

THREADS = 4
"""Threads of peers that take a number: as many as asymcheck has in-flight frames."""

Tensors = dict[str, torch.Tensor]


class Peer:
    """One library, which saves a file or a folder at ``where``."""

    name = ""
    """As the tables call it."""
    overwrites = False
    """Whether users save to the same name again, over the old file."""

    def save(self, tensors: Tensors, where: Path) -> None:
        """Write all tensors, as durable as the library makes them by itself."""
        raise NotImplementedError

    def loads(self) -> dict[str, Callable[[Path], Tensors]]:
        """Return the ways to restore into new tensors, by name."""
        return {}

    def fills(self) -> dict[str, Callable[[Path, Tensors], None]]:
        """Return the ways to restore into given tensors, by name."""
        return {}


class TorchSave(Peer):
    """``torch.save``: one zip file."""

    name = "torch.save"
    overwrites = True

    def save(self, tensors: Tensors, where: Path) -> None:
        """Write the file."""
        torch.save(tensors, where)

    def loads(self) -> dict[str, Callable[[Path], Tensors]]:
        """Read the file, or map it and copy the mapped bytes."""
        return {
            "torch.load": lambda where: _torch_load(where, mapped=False),
            "torch.load mmap": lambda where: {
                name: tensor.clone() for name, tensor in _torch_load(where, mapped=True).items()
            },
        }

    def fills(self) -> dict[str, Callable[[Path, Tensors], None]]:
        """Map the file and copy from it, as ``load_state_dict`` does."""
        return {"torch.load mmap": lambda where, tensors: _copy(_torch_load(where, mapped=True), tensors)}


class Safetensors(Peer):
    """``safetensors.torch``: one file, which it maps to load."""

    name = "safetensors"
    overwrites = True

    def save(self, tensors: Tensors, where: Path) -> None:
        """Write the file."""
        save_file(tensors, where)

    def loads(self) -> dict[str, Callable[[Path], Tensors]]:
        """Load the file; its bytes are read when they are touched."""
        return {"safetensors": load_file}

    def fills(self) -> dict[str, Callable[[Path, Tensors], None]]:
        """Load the file and copy from it."""
        return {"safetensors": lambda where, tensors: _copy(load_file(where), tensors)}


class DistributedCheckpoint(Peer):
    """``torch.distributed.checkpoint`` without a process group: a folder of files."""

    name = "torch DCP"

    def save(self, tensors: Tensors, where: Path) -> None:
        """Write the folder."""
        with _no_warnings():
            save_distributed(dict(tensors), storage_writer=FileSystemWriter(where, thread_count=THREADS), no_dist=True)

    def fills(self) -> dict[str, Callable[[Path, Tensors], None]]:
        """Load in place, the only way that it has."""

        def fill(where: Path, tensors: Tensors) -> None:
            with _no_warnings():
                load_distributed(tensors, storage_reader=FileSystemReader(where), no_dist=True)

        return {self.name: fill}


class TorchSnapshot(Peer):
    """``torchsnapshot``: a folder of files."""

    name = "torchsnapshot"

    def save(self, tensors: Tensors, where: Path) -> None:
        """Write the folder."""
        with _no_warnings():
            Snapshot.take(str(where), {"state": StateDict(**tensors)})

    def fills(self) -> dict[str, Callable[[Path, Tensors], None]]:
        """Restore in place, the only way that it has."""

        def fill(where: Path, tensors: Tensors) -> None:
            with _no_warnings():
                Snapshot(str(where)).restore({"state": StateDict(**tensors)})

        return {self.name: fill}


PEERS: tuple[Peer, ...] = (TorchSave(), Safetensors(), DistributedCheckpoint(), TorchSnapshot())
"""All of them."""


def save_durably(peer: Peer, tensors: Tensors, where: Path) -> float:
    """Save at ``where``, sync every file and directory; return the seconds of all that."""
    began = time.perf_counter()
    peer.save(tensors, where)
    sync(where)
    return time.perf_counter() - began


def sync(where: Path) -> None:
    """Make a file, or a folder with all that is in it, durable, and its name."""
    for path in [*files_in(where), *(path for path in (where, *where.rglob("*")) if path.is_dir()), where.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def files_in(where: Path) -> list[Path]:
    """Return the file itself, or all files in a folder."""
    return [where] if where.is_file() else sorted(path for path in where.rglob("*") if path.is_file())


def on_drive(where: Path) -> int:
    """Return the bytes that a file, or all files of a folder, take on the drive."""
    return sum(path.lstat().st_blocks * 512 for path in files_in(where))


def remove(where: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if where.is_dir():
        shutil.rmtree(where)
    else:
        where.unlink(missing_ok=True)


def _torch_load(where: Path, *, mapped: bool) -> Tensors:
    loaded: Tensors = torch.load(where, weights_only=True, mmap=mapped)
    return loaded


def _copy(source: Tensors, target: Tensors) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    # One process without a group is what we mean, and torchsnapshot uses what torch has renamed since.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
