"""Environment of a launched process: rank, world size, store, and a Checkpointer with full tear detection."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

from asymcheck import Checkpointer, Ranks, Store
from asymcheck.config import CaptureConfig, StoreConfig

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
CONFIG = StoreConfig(
    partition_bytes=8 * 1024, bundle_below_bytes=4 * 1024, inline_bytes=16, inline_total_bytes=32, slots=2
)
Scenario = Callable[[Path], dict[str, object]]


def connect() -> dist.Store:
    """Return the key-value store for the rendezvous."""
    return dist.TCPStore("127.0.0.1", int(os.environ["MEETING"]), None, is_master=False, wait_for_workers=False)


def ranks_of(folder: Path, timeout_s: float) -> Ranks:
    """Return the ranks of all launches in a folder; keys of earlier launches still exist."""
    return Ranks(RANK, WORLD, dist.PrefixStore(str(folder), connect()), timeout_s=timeout_s)


@contextlib.contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """Create the default process group temporarily."""
    dist.init_process_group("gloo", store=dist.PrefixStore(f"{folder}/group", connect()), rank=RANK, world_size=WORLD)
    yield
    dist.destroy_process_group()


def opened(folder: Path) -> Store:
    """Open the store of all ranks."""
    return Store.open(folder / "store", config=CONFIG, create=True)


def checkpointer(folder: Path, store: Store, state: dict[str, object], **more: object) -> Checkpointer:
    """Return a Checkpointer with a full proof."""
    capture = CaptureConfig(proof="full", ring_folder=str(folder / "memory"))
    return Checkpointer(store, state, capture=capture, **{"every": 1, "keep": None, **more})  # type: ignore[arg-type]  # knobs of tests


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """Record warnings."""
    texts: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda text, kind, *_rest: texts.append(f"{kind.__name__}: {text}")
        yield texts
