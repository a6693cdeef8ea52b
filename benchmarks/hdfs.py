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
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from asymcheck import Push, RemoteConfig, Store, StoreConfig
from asymcheck.executor import stand_back
from asymcheck.format import layout
from asymcheck.replication.background_push import BackgroundPush
from benchmarks import environment, states, training
from benchmarks.coldness import make_cold
from benchmarks.report import Report, Row, row
from tools.local_hdfs import LocalHdfs

if TYPE_CHECKING:
    # If the client is not installed, the run reports it.
    from benchmarks.hdfs_raw import RawClient

PUSH, PUT, PUT_FROM_MEMORY = "asymcheck push", "raw put", "raw put from memory"
RESTORE, GET, GET_BY_PACKETS = "asymcheck load into", "raw get", "raw get by packets"
_QUOTIENTS = (
    (PUSH, PUT, "push/raw_put"),
    (PUSH, PUT_FROM_MEMORY, "push/raw_put_from_memory"),
    (RESTORE, GET, "restore/raw_get"),
    (RESTORE, GET_BY_PACKETS, "restore/raw_get_by_packets"),
)
TORCH, DCP = "torch.save + put", "torch DCP through fsspec"
_PLAIN = 5


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
                    rows, more = _TrainingSlowdown(Path(scratch) / "trained", cluster, shape).measure()
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
        from benchmarks.hdfs_raw import RawClient  # noqa: PLC0415 - where the client is not installed the run says so

        self._remote = RemoteConfig(options={"dfs.replication": str(replicas)})
        self._config = StoreConfig(compression="off", remote=self._remote)
        self._where, self._url, self._state = where, url, state
        self._into = states.empty_like(state)
        self.gigabytes = sum(tensor.nbytes for tensor in states.tensors_of(state)) / 1e9
        self._raw = RawClient(url, self._remote.uploads, self._remote.piece_bytes)
        self._reader = RawClient(url, self._remote.reads, self._remote.piece_bytes)
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
            make_cold([path for path in (self._where / layout.PACKS).rglob("*") if path.is_file()])
            before = len(self._reader.sizes(f"/ours-{number}/packs"))

            def push() -> None:
                store.push(place)

            # The sizes of the packs are known after the first push; all rounds use the same sizes.
            took = {PUSH: _timed(push)}
            sizes = sorted(self._reader.sizes(f"/ours-{number}/packs"))[before:]
            files = self._files(sizes)
            took[PUT] = self._raw.put(raw, files)
            os.sync()
            took[PUT_FROM_MEMORY] = self._raw.put_from_memory(f"{raw}-from-memory", self._data, sizes)
        with Store.open(place, config=self._config, create=True) as remote:
            took[RESTORE] = _timed(lambda: remote.load(into=self._into))
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


@dataclasses.dataclass(frozen=True)
class _Slowed:
    """Slowdown of iterations during other work, relative to the iterations before and after it."""

    with_servers: float
    corrected: float
    """The slowdown without the processor time of the servers."""
    iteration_s: float


class _TrainingSlowdown:
    """Measure the disk usage of checkpoints of a real training on HDFS, and the slowdown by pushing them.

    For comparison, measure the slowdown while the client puts the same number of bytes from memory, on threads of
    equally low priority. This is the minimum cost of sending the bytes.
    """

    def __init__(self, where: Path, cluster: LocalHdfs, shape: Shape) -> None:
        from benchmarks.hdfs_raw import RawClient  # noqa: PLC0415 - as above

        self._where, self._cluster, self._shape = where, cluster, shape
        self._raw = RawClient(cluster.url, 1, 16 << 20)
        self._run = training.VARIANTS["mixed"](training.pretrained(shape.trained))
        self._alone: list[float] = []

    def measure(self) -> tuple[list[Row], dict[str, float]]:
        """Save checkpoints, push each during the training, then put the same number of bytes, and measure."""
        count, ours = self._shape.checkpoints, list[_Slowed]()
        raw, sizes = list[_Slowed](), list[int]()
        url = f"{self._cluster.url}/trained"
        with (
            Store.open(self._where, create=True) as store,
            store.training.push_in_background(Push(url, close_s=None)) as pushing,
        ):
            self._run.train(_PLAIN)
            self._plain(_PLAIN)
            for number in range(count):
                self._run.train(1)
                store.save(self._run.state(), step=number)
                # Notify the thread as a Checkpointer does, instead of waiting for its next poll.
                pushing.refresh()
                ours.append(self._slowdown(partial(_is_pushed, pushing, number + 1)))
                new = self._raw.sizes("/trained/packs")
                with _Putting(self._cluster.url, f"/raw-{number}", _without(new, sizes)) as putting:
                    raw.append(self._slowdown(putting.has_ended))
                sizes = new
        sizes, peers = self._raw.sizes("/trained"), self._peers()
        # Skip the first push and put, which include the setup.
        ours, raw = ours[1:], raw[1:]
        results = [
            row("no push", "iteration", "ms", [one * 1e3 for one in self._alone]),
            row(PUSH, "iteration beside it", "ms", [one.iteration_s * 1e3 for one in ours]),
            row(PUSH, "slowdown", "x", [one.corrected for one in ours]),
            row(PUSH, "slowdown with the servers", "x", [one.with_servers for one in ours]),
            row(PUT_FROM_MEMORY, "slowdown", "x", [one.corrected for one in raw]),
            row(PUT_FROM_MEMORY, "slowdown with the servers", "x", [one.with_servers for one in raw]),
        ]
        ratios = {
            "slowdown_while_pushing": statistics.median(one.corrected for one in ours),
            "slowdown_with_servers": statistics.median(one.with_servers for one in ours),
            "slowdown_beside_raw_put": statistics.median(one.corrected for one in raw),
        }
        for name, file_sizes in {PUSH: sizes, **peers}.items():
            results.append(row(name, f"{count} checkpoints there", "MB", [sum(file_sizes) / 1e6]))
            results.append(row(name, f"files of {count} checkpoints", "x", [len(file_sizes)]))
        for label, name in (("torch_save_put", TORCH), ("dcp_fsspec", DCP)):
            ratios[f"bytes/{label}"] = sum(sizes) / sum(peers[name])
            ratios[f"files/{label}"] = len(sizes) / len(peers[name])
        return results, ratios

    def _peers(self) -> dict[str, list[int]]:
        """Return the bytes of each file of as many checkpoints of other libraries; only one is written."""
        from benchmarks import hdfs_fsspec  # noqa: PLC0415 - as above

        file = io.BytesIO()
        torch.save(self._run.state(), file)
        self._raw.put_file("/torch/one.pt", file.getvalue())
        hdfs_fsspec.save(self._run.state(), f"{self._cluster.url}/dcp")
        folders = {TORCH: "/torch", DCP: "/dcp"}
        return {name: self._raw.sizes(folder) * self._shape.checkpoints for name, folder in folders.items()}

    def _slowdown(self, has_ended: Callable[[], bool]) -> _Slowed:
        """Train until some work has ended, and for as long without it."""
        count, servers = 0, self._cluster.processor_s()
        began = time.perf_counter()
        while not has_ended() or not count:
            self._run.train(1)
            count += 1
        took = time.perf_counter() - began
        # Real servers run on other machines, so their processor time, divided by the number of processors, is
        # subtracted.
        without = max(took - (self._cluster.processor_s() - servers) / (os.cpu_count() or 1), 0.0)
        before = self._alone[-1]
        alone = statistics.mean((before, self._plain(max(count, _PLAIN)))) * count
        return _Slowed(took / alone, without / alone, took / count)

    def _plain(self, count: int) -> float:
        """Return the seconds of an iteration without other work."""
        began = time.perf_counter()
        self._run.train(count)
        self._alone.append((time.perf_counter() - began) / count)
        return self._alone[-1]


class _Putting:
    """Put bytes on a thread. Use it in a ``with`` block, which ends when all bytes are at the location."""

    def __init__(self, url: str, folder: str, sizes: Sequence[int]) -> None:
        self._url, self._folder, self._sizes = url, folder, sizes
        self._data = bytes(max(sizes))
        self._thread = ThreadPoolExecutor(1, initializer=stand_back)
        # The client's threads inherit the low priority of the thread that creates them.
        self._raw = self._thread.submit(self._connected).result()

    def _connected(self) -> RawClient:
        from benchmarks.hdfs_raw import RawClient  # noqa: PLC0415 - as above

        remote = RemoteConfig()
        return RawClient(self._url, remote.uploads, remote.piece_bytes)

    def has_ended(self) -> bool:
        """Whether all bytes are at the location."""
        return self._put.done()

    def __enter__(self) -> _Putting:
        self._put = self._thread.submit(self._raw.put_from_memory, self._folder, self._data, self._sizes)
        return self

    def __exit__(self, *_: object) -> None:
        self._put.result()
        self._raw.remove(self._folder)
        self._thread.shutdown()


def _is_pushed(pushing: BackgroundPush, count: int) -> bool:
    now = pushing.statistics()
    if now.problem:
        raise RuntimeError(now.problem)
    return now.pushed >= count


def _without(sizes: Sequence[int], some: Sequence[int]) -> list[int]:
    return list((Counter(sizes) - Counter(some)).elements())


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
