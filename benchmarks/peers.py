"""Save and restore the same named tensors with other libraries, as the guides of these libraries recommend.

The benchmark makes their bytes as durable as asymcheck's: it syncs every file and every directory.
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

from asymcheck import StoreConfig

with warnings.catch_warnings():
    # Importing the library raises warnings about names that torch has deprecated.
    warnings.simplefilter("ignore")
    from torchsnapshot import Snapshot, StateDict

THREADS = StoreConfig().slots
"""Number of threads for peers with such an option: as many as asymcheck has frames in flight."""

Tensors = dict[str, torch.Tensor]


class Peer:
    """A library that saves a file or a folder at ``where``."""

    name = ""
    """Name in the tables."""
    overwrites = False
    """Whether users typically save to the same name again, over the old file."""

    def save(self, tensors: Tensors, where: Path) -> None:
        """Write all tensors, with the durability that the library itself provides."""
        raise NotImplementedError

    def loads(self) -> dict[str, Callable[[Path], Tensors]]:
        """Return functions that restore into new tensors, by name."""
        return {}

    def fills(self) -> dict[str, Callable[[Path, Tensors], None]]:
        """Return functions that restore into given tensors, by name."""
        return {}


class TorchSave(Peer):
    """Save with ``torch.save``: one zip file."""

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
    """Save with ``safetensors.torch``: one file, which the library maps to load."""

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
    """Save with ``torch.distributed.checkpoint`` without a process group: a folder of files."""

    name = "torch DCP"

    def save(self, tensors: Tensors, where: Path) -> None:
        """Write the folder."""
        with _no_warnings():
            save_distributed(dict(tensors), storage_writer=FileSystemWriter(where, thread_count=THREADS), no_dist=True)

    def fills(self) -> dict[str, Callable[[Path, Tensors], None]]:
        """Load in place, because the library has no other method."""

        def fill(where: Path, tensors: Tensors) -> None:
            with _no_warnings():
                load_distributed(tensors, storage_reader=FileSystemReader(where), no_dist=True)

        return {self.name: fill}


class TorchSnapshot(Peer):
    """Save with ``torchsnapshot``: a folder of files."""

    name = "torchsnapshot"

    def save(self, tensors: Tensors, where: Path) -> None:
        """Write the folder."""
        with _no_warnings():
            Snapshot.take(str(where), {"state": StateDict(**tensors)})

    def fills(self) -> dict[str, Callable[[Path, Tensors], None]]:
        """Restore in place, because the library has no other method."""

        def fill(where: Path, tensors: Tensors) -> None:
            with _no_warnings():
                Snapshot(str(where)).restore({"state": StateDict(**tensors)})

        return {self.name: fill}


PEERS: tuple[Peer, ...] = (TorchSave(), Safetensors(), DistributedCheckpoint(), TorchSnapshot())
"""All peers."""


def save_durably(peer: Peer, tensors: Tensors, where: Path) -> float:
    """Save at ``where``, and sync every file and directory; return the seconds of the save and the syncs."""
    began = time.perf_counter()
    peer.save(tensors, where)
    sync(where)
    return time.perf_counter() - began


def sync(where: Path) -> None:
    """Sync a file, or a folder with its contents, and the directory that contains it."""
    for path in [*files_in(where), *(path for path in (where, *where.rglob("*")) if path.is_dir()), where.parent]:
        fsync(path)


def fsync(path: Path) -> None:
    """Sync one file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_in(where: Path) -> list[Path]:
    """Return the file itself, or all files in a folder."""
    return [where] if where.is_file() else sorted(path for path in where.rglob("*") if path.is_file())


def on_drive(where: Path) -> int:
    """Return the disk usage of a file, or of all files in a folder."""
    return sum(path.lstat().st_blocks * 512 for path in files_in(where))


def remove(where: Path) -> None:
    """Remove a file or a folder, if it exists."""
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
    # Saving without a process group is intended, and torchsnapshot uses names that torch has deprecated.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
