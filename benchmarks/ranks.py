"""``ranks``: time to commit and resolve one checkpoint of many ranks.

Simulated ranks report to a real coordinator through a real key-value store. Their manifests are written to a real
store. In addition, some real ranks save a replicated state.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not say that it exports it

import asymcheck
from asymcheck import TensorShard
from asymcheck.config import StoreConfig
from asymcheck.format.manifest import encode
from asymcheck.storage.nvme import NvmeTier
from asymcheck.types import Part
from benchmarks import environment
from benchmarks.report import Report, Row, row

_RUN = "default"
_SAVE_ID = "18ea000000000000" + "0123456789abcdef"
_PIECE = 64 << 10
_SHARDS = 4
"""Number of ranks over which the state is sharded. Each shard is replicated over the rest, as in hybrid sharding."""
_WAIT_S = 1800.0


@dataclasses.dataclass(frozen=True)
class Shape:
    """Numbers of ranks and sizes of the measurement."""

    worlds: tuple[int, ...]
    """Numbers of simulated ranks."""
    tensors: int
    """Tensors of each simulated rank."""
    extents: int
    """Partitions of each simulated rank."""
    real: tuple[int, ...]
    """Numbers of real ranks."""
    real_bytes: int
    """Bytes of the replicated state."""
    saves: int
    """Number of saves."""


FULL = Shape((64, 1024, 16384), 200, 400, (1, 2, 4), 256 << 20, 5)
QUICK = Shape((4, 64), 20, 40, (1, 2), 8 << 20, 3)


def run(folder: Path | None, *, quick: bool, shape: Shape | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``; ``shape`` replaces the sizes."""
    shape = shape or (QUICK if quick else FULL)
    results: list[Row] = []
    for world_size in shape.worlds:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            results += _agreements(world_size, shape)
            results += _manifests(Path(scratch), world_size, shape)
    for count in shape.real:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            results += _real(Path(scratch), count, shape)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        described = environment.describe(Path(scratch))
    described["state"] = f"{shape.tensors} tensors in {shape.extents} partitions on each simulated rank"
    largest = max(shape.worlds)
    label = f"{largest} simulated ranks"
    median = {one.metric: one.median for one in results if one.system == label}
    ratios = {f"commit_s_at_{largest}": median["commit, later"], f"resolve_s_at_{largest}": median["resolve"]}
    written = {one.system: one.median for one in results if one.metric == "written by all"}
    names = list(written)
    ratios[f"written_by_{max(shape.real)}/written_by_1"] = written[names[-1]] / written[names[0]]
    return Report("ranks", described, results, ratios)


def _child(*parameters: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.ranks_child", *map(str, parameters)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def _result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=_WAIT_S)
    if process.returncode:
        message = f"{process.args!r} ended with {process.returncode}"
        raise RuntimeError(message)
    result: dict[str, Any] = json.loads(out)
    return result


def _server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


def _agreements(world_size: int, shape: Shape) -> list[Row]:
    """Measure the rounds of saves."""
    server = _server()
    numbers = (server.port, world_size, shape.extents, shape.saves)
    other_ranks, first = _child("others", *numbers), _child("coordinator", *numbers)
    result = _result_of(first)
    _result_of(other_ranks)
    label = f"{world_size} simulated ranks"
    return [
        row(label, "commit, with digests", "s", result["first"]),
        row(label, "commit, later", "s", result["later"]),
        row(label, "memory of rank 0", "bytes", [float(result["memory"])]),
    ]


def _manifests(folder: Path, world_size: int, shape: Shape) -> list[Row]:
    """Publish the manifests of all ranks, each with a shard or a replica of a shard, and resolve the checkpoint."""
    shards = min(_SHARDS, world_size // 2)
    count = shape.extents * _PIECE // shape.tensors // 4
    config = StoreConfig(partition_bytes=_PIECE, bundle_below_bytes=1024, inline_bytes=0)
    with asymcheck.Store.open(folder / "store", config=config, create=True) as store:
        for rank in range(shards):
            state = {
                f"layer{number}": TensorShard(torch.randn(count), (shards * count,), (rank * count,))
                for number in range(shape.tensors)
            }
            store.save(state, step=1, part=Part(rank, world_size, _SAVE_ID))
    tier = NvmeTier(folder / "store", config, read_only=False)
    (files,) = tier.manifests.checkpoints(_RUN)
    manifests = [tier.manifests.read(_RUN, files.ref, name) for name in files.manifests]
    seconds = []
    for rank in range(shards, world_size):
        manifest = manifests[rank % shards]
        data = encode(manifest, dataclasses.replace(manifest.header, rank=rank))
        began = time.perf_counter()
        tier.manifests.publish(_RUN, files.ref, rank, world_size, data)
        seconds.append(time.perf_counter() - began)
    tier.close()
    result = _result_of(_child("resolve", folder / "store"))
    label = f"{world_size} simulated ranks"
    return [
        row(label, "manifest of one rank", "ms", [one * 1e3 for one in seconds]),
        row(label, "resolve", "s", [result["seconds"]]),
        row(label, "memory of a resolve", "bytes", [result["memory"]]),
    ]


def _real(folder: Path, count: int, shape: Shape) -> list[Row]:
    """Save one replicated state with real ranks."""
    server = _server()
    ranks = [_child("real", server.port, count, rank, shape.real_bytes, shape.saves, folder) for rank in range(count)]
    result = [_result_of(one) for one in ranks]
    label = f"{count} real rank{'s' if count > 1 else ''}"
    return [
        row(label, "durable", "s", result[0]["durable"]),
        row(label, "step()", "ms", [1e3 * float(one["step"]) for one in result]),
        row(label, "written by all", "bytes", [sum(float(one["written"]) for one in result)]),
    ]
