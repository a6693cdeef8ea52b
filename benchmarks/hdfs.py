"""``hdfs``: push to and restore from a real HDFS on this machine, compared with put and get of the client.

The NameNode and DataNodes of Apache Hadoop run on this machine (``tools.local_hdfs``), so servers and clients share the
processors. Absolute throughput says little, and ratios of one run say more. The raw client writes files of the same
sizes as the packs of the push, with the same number of streams, from the same drive, and once more from memory. The raw
client checks and commits nothing. A push reads the store, checks every byte, and commits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from asymcheck import RemoteConfig, Store, StoreConfig
from asymcheck.executor import stand_back
from asymcheck.format import layout
from benchmarks import environment, states, training
from benchmarks.beside_training import PUSH, PUT_FROM_MEMORY, Location, TrainingSlowdown
from benchmarks.coldness import make_cold
from benchmarks.peers import files_in
from benchmarks.report import Report, Row, row, seconds_of
from tools.local_hdfs import LocalHdfs

if TYPE_CHECKING:
    # If the client is not installed, the run reports it.
    from benchmarks.hdfs_raw import RawClient

PUT = "raw put"
RESTORE, GET, GET_BY_PACKETS = "asymcheck load into", "raw get", "raw get by packets"
_QUOTIENTS = (
    (PUSH, PUT, "push/raw_put"),
    (PUSH, PUT_FROM_MEMORY, "push/raw_put_from_memory"),
    (RESTORE, GET, "restore/raw_get"),
    (RESTORE, GET_BY_PACKETS, "restore/raw_get_by_packets"),
)
TORCH, DCP = "torch.save + put", "torch DCP through fsspec"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes and counts of the measurement."""

    layers: int
    """Layers of the GPT-2 whose state is pushed."""
    rounds: int
    """Rounds of each measurement, after one warm-up round."""
    replicas: tuple[int, ...]
    """Numbers of DataNodes and of replicas of each block."""
    trained: training.Shape
    """Training whose bytes and slowdown are measured."""
    checkpoints: int
    """Number of checkpoints of the training that are pushed."""


FULL = Shape(8, 5, (1, 3), training.FULL, 20)
QUICK = Shape(1, 3, (1,), training.QUICK, 12)


def run(
    folder: Path | None, *, quick: bool, shape: Shape | None = None, state: dict[str, object] | None = None
) -> Report:
    """Measure in a temporary folder inside ``folder``, which also stores the blocks of HDFS.

    ``shape`` replaces the sizes and counts, ``state`` replaces GPT-2 with AdamW.

    Raises:
        SystemExit: no HDFS is available.
    """
    _check_there_is_hdfs()
    shape = shape or (QUICK if quick else FULL)
    results: list[Row] = []
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        state = state or states.gpt2_adamw(shape.layers)
        for replicas in shape.replicas:
            with _hdfs(Path(scratch) / f"hdfs-{replicas}", replicas) as cluster:
                one = _Throughput(Path(scratch) / "store", cluster.url, state, replicas)
                times = one.measure(shape.rounds)
                if replicas == shape.replicas[0]:
                    rows, more = _trained(Path(scratch) / "trained", cluster, shape)
                    results += rows
                    ratios |= more
            shutil.rmtree(Path(scratch) / f"hdfs-{replicas}")
            suffix = "" if replicas == 1 else f"_{replicas}_replicas"
            for ours, raw, label in _QUOTIENTS:
                ratios[label + suffix] = statistics.median(
                    raw_s / ours_s for raw_s, ours_s in zip(times[raw], times[ours], strict=True)
                )
            results += [
                row(name, f"throughput, {replicas} replicas", "GB/s", [one.gigabytes / value for value in values])
                for name, values in times.items()
            ]
        described = environment.describe(Path(scratch))
    described["state"] = states.describe(state)
    described["store"] = "HDFS of Hadoop 3.3.6 on this machine; servers and clients share its processors"
    return Report("hdfs", described, results, ratios)


def _check_there_is_hdfs() -> None:
    if shutil.which("java") is None:
        raise SystemExit("hdfs: this workload starts Hadoop's servers and found no java; install Java 11 or 17")
    if importlib.util.find_spec("hdfs_native") is None:
        raise SystemExit("hdfs: this workload needs hdfs-native; pip install 'asymcheck[hdfs]'")


@contextlib.contextmanager
def _hdfs(base: Path, replicas: int) -> Iterator[LocalHdfs]:
    base.mkdir()
    try:
        cluster = LocalHdfs(base, replicas)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"hdfs: Hadoop is missing and could not be downloaded ({error}); run python -m tools.local_hdfs prepare"
        ) from error
    with cluster:
        yield cluster


class _Throughput:
    """Push and read one state repeatedly, alternating with the raw client."""

    def __init__(self, where: Path, url: str, state: dict[str, object], replicas: int) -> None:
        self._remote = RemoteConfig(options={"dfs.replication": str(replicas)})
        self._config = StoreConfig(compression="off", remote=self._remote)
        self._where, self._url, self._state = where, url, state
        self._into = states.empty_like(state)
        self.gigabytes = sum(tensor.nbytes for tensor in states.tensors_of(state)) / 1e9
        self._raw = _raw_client(url, self._remote.uploads, self._remote.piece_bytes)
        self._reader = _raw_client(url, self._remote.reads, self._remote.piece_bytes)
        self._data = os.urandom(self._remote.pack_bytes + (16 << 20))

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """Return the seconds of each, by round.

        Raises:
            RuntimeError: the restored state differs from the saved state.
        """
        times: dict[str, list[float]] = {
            name: [] for name in (PUSH, PUT, PUT_FROM_MEMORY, RESTORE, GET, GET_BY_PACKETS)
        }
        for number in range(rounds + 1):
            file_sizes = self._round(number)
            if number:
                for name, value in file_sizes.items():
                    times[name].append(value)
        shutil.rmtree(self._where)
        shutil.rmtree(self._where.with_name(f"{self._where.name}-raw"))
        return times

    def _round(self, number: int) -> dict[str, float]:
        """Save an entirely new state, push it, put the same number of bytes, and read both."""
        place, raw = f"{self._url}/ours-{number}", f"/raw-{number}"
        states.change_everything(self._state)
        shutil.rmtree(self._where, ignore_errors=True)
        with Store.open(self._where, config=self._config, create=True) as store:
            store.save({"x": torch.ones(1 << 16)}, step=0)
            store.push(place)
            store.save(self._state, step=1)
            os.sync()
            make_cold(files_in(self._where / layout.PACKS))
            before = len(self._reader.sizes(f"/ours-{number}/packs"))

            # The sizes of the packs are known after the first push; all rounds use the same sizes.
            took = {PUSH: seconds_of(lambda: store.push(place))}
            sizes = sorted(self._reader.sizes(f"/ours-{number}/packs"))[before:]
            files = self._files(sizes)
            took[PUT] = self._raw.put(raw, files)
            os.sync()
            took[PUT_FROM_MEMORY] = self._raw.put_from_memory(f"{raw}-from-memory", self._data, sizes)
        with Store.open(place, config=self._config, create=True) as remote:
            took[RESTORE] = seconds_of(lambda: remote.load(into=self._into))
        took[GET] = self._reader.get(raw, sizes)
        took[GET_BY_PACKETS] = self._reader.get_by_packets(raw, sizes)
        if differing := states.differing(self._state, states.named_tensors(self._into)):
            raise RuntimeError(f"restored {len(differing)} tensors that differ from the saved ones")
        for folder in (f"/ours-{number}", raw, f"{raw}-from-memory"):
            self._raw.remove(folder)
        return took

    def _files(self, sizes: Sequence[int]) -> list[Path]:
        """Return files of these sizes on the drive, outside the page cache like the store before its push."""
        folder = self._where.with_name(f"{self._where.name}-raw")
        folder.mkdir(exist_ok=True)
        paths = [folder / str(number) for number in range(len(sizes))]
        for path, size in zip(paths, sizes, strict=True):
            if not path.exists() or path.stat().st_size != size:
                path.write_bytes(memoryview(self._data)[:size])
        os.sync()
        make_cold(paths)
        return paths


def _trained(where: Path, cluster: LocalHdfs, shape: Shape) -> tuple[list[Row], dict[str, float]]:
    """Measure the slowdown of a training by pushes, and the disk usage of its checkpoints on HDFS."""
    raw, count = _raw_client(cluster.url, 1, 16 << 20), shape.checkpoints
    location = Location(
        f"{cluster.url}/trained",
        lambda: raw.sizes("/trained/packs"),
        lambda number, sizes: _putting(cluster.url, f"/raw-{number}", sizes),
        cluster.processor_s,
    )
    slowdown = TrainingSlowdown(where, location, shape.trained)
    results, ratios = slowdown.measure(count)
    sizes, peers = raw.sizes("/trained"), _peers(raw, cluster.url, slowdown.state(), count)
    for name, file_sizes in {PUSH: sizes, **peers}.items():
        results.append(row(name, f"{count} checkpoints there", "MB", [sum(file_sizes) / 1e6]))
        results.append(row(name, f"files of {count} checkpoints", "x", [len(file_sizes)]))
    for label, name in (("torch_save_put", TORCH), ("dcp_fsspec", DCP)):
        ratios[f"bytes/{label}"] = sum(sizes) / sum(peers[name])
        ratios[f"files/{label}"] = len(sizes) / len(peers[name])
    return results, ratios


def _peers(raw: RawClient, url: str, state: training.State, count: int) -> dict[str, list[int]]:
    """Return the bytes of each file of ``count`` checkpoints of other libraries; only one is written."""
    from benchmarks import hdfs_fsspec  # noqa: PLC0415 - where the client is not installed the run says so

    file = io.BytesIO()
    torch.save(state, file)
    raw.put_file("/torch/one.pt", file.getvalue())
    hdfs_fsspec.save(state, f"{url}/dcp")
    return {name: raw.sizes(folder) * count for name, folder in {TORCH: "/torch", DCP: "/dcp"}.items()}


def _raw_client(url: str, streams: int, piece_bytes: int) -> RawClient:
    from benchmarks.hdfs_raw import RawClient  # noqa: PLC0415 - as above

    return RawClient(url, streams, piece_bytes)


@contextlib.contextmanager
def _putting(url: str, folder: str, sizes: Sequence[int]) -> Iterator[Callable[[], bool]]:
    """Put bytes on a thread of low priority, until the end of the block; return whether it has ended."""
    remote, data = RemoteConfig(), bytes(max(sizes))
    with ThreadPoolExecutor(1, initializer=stand_back) as thread:
        # The client's threads inherit the low priority of the thread that creates them.
        raw = thread.submit(_raw_client, url, remote.uploads, remote.piece_bytes).result()
        put = thread.submit(raw.put_from_memory, folder, data, sizes)
        yield put.done
        put.result()
        raw.remove(folder)
