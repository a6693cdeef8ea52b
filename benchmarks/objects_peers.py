"""Save a state to an S3 server and load it by other libraries, for the workload ``objects``.

The settings are the fastest of those tried, with SeaweedFS and 0.68 GB: a file of s3fs read through its cache, and not
fetched whole; one file of DCP's writer for fsspec, and not four; four threads and the sequential reader of
s3torchconnector.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from benchmarks import states

TORCH, DCP, CONNECTOR = "torch.save through s3fs", "torch DCP through s3fs", "torch DCP by s3torchconnector"
State = dict[str, object]
_THREADS = 4


class Peer:
    """Saves a state below a location, and loads it: DCP into the tensors of a state, and torch into new tensors."""

    def __init__(self, save: Callable[[State, str], object], load: Callable[[State, str], object]) -> None:
        self.save = save
        """Save a state below the URL."""
        self._load = load

    def load(self, into: State, url: str) -> State:
        """Return the state below the URL."""
        loaded = self._load(into, url)
        return loaded if isinstance(loaded, dict) else into


def available(endpoint: str, region: str) -> dict[str, Peer]:
    """Return the libraries that are installed, by name, for the server at ``endpoint``."""
    found: dict[str, Peer] = {}
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    if importlib.util.find_spec("s3fs") is not None:
        found |= {TORCH: _torch_through_s3fs(endpoint), DCP: _distributed(FsspecWriter, FsspecReader)}
    if importlib.util.find_spec("s3torchconnector") is not None:
        found[CONNECTOR] = _connector(region)
    return found


def _torch_through_s3fs(endpoint: str) -> Peer:
    files: Any = importlib.import_module("s3fs").S3FileSystem(endpoint_url=endpoint, skip_instance_cache=True)

    def save(state: State, url: str) -> None:
        with files.open(f"{url}/state.pt", "wb") as file:
            torch.save(state, file)

    def load(_into: State, url: str) -> object:
        files.invalidate_cache()
        with files.open(f"{url}/state.pt", "rb") as file:
            return torch.load(file, weights_only=True)

    return Peer(save, load)


def _connector(region: str) -> Peer:
    package: Any = importlib.import_module("s3torchconnector")
    library: Any = importlib.import_module("s3torchconnector.dcp")
    config = package.S3ClientConfig(force_path_style=True)
    return _distributed(
        lambda url: library.S3StorageWriter(region, url, s3client_config=config, thread_count=_THREADS),
        lambda url: library.S3StorageReader(region, url, s3client_config=config),
    )


def _distributed(writer: Callable[[str], Any], reader: Callable[[str], Any]) -> Peer:
    return Peer(
        lambda state, url: save_distributed(dict(state), storage_writer=writer(url)),
        lambda into, url: load_distributed(into, storage_reader=reader(url)),
    )


def check(name: str, state: State, loaded: State) -> None:
    """Compare a loaded state with the saved one.

    Raises:
        RuntimeError: a tensor differs.
    """
    if differing := states.differing(state, states.named_tensors(loaded)):
        raise RuntimeError(f"{name} restored {len(differing)} tensors that differ from the saved ones")
