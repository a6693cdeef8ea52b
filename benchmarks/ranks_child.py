"""Run one process of the workload ``ranks``: ``python -m benchmarks.ranks_child ROLE …``. Print JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not say that it exports it

from asymcheck import Checkpointer, Ranks, Store
from asymcheck.config import DEFAULT_RUN, CaptureConfig, StoreConfig
from asymcheck.distributed import Session
from asymcheck.distributed.rendezvous import RendezvousResult
from asymcheck.distributed.replica_assignment import encode_rows, share_out
from asymcheck.format.spans import spans_of
from asymcheck.restore.resolve import candidates, resolve_one
from asymcheck.storage.nvme import NvmeTier
from benchmarks.resident import peak_since, reset_peak

_THREADS = 4
_PARTS = 3
"""Rounds of a save: digests, stored, committed."""
_WAIT_S = 900.0


def _sessions(port: int, world_size: int, ranks: Sequence[int]) -> list[Session]:
    """Return sessions of the given ranks that share a connection."""
    store = TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    keys = Ranks(0, world_size, store).connect()
    met = RendezvousResult("simulated", (spans_of(range(world_size)),), 1)
    return [Session(Ranks(rank, world_size, store, timeout_s=_WAIT_S), keys, met.name, met) for rank in ranks]


def _digests(extents: int) -> bytes:
    """Return a report on partitions that all ranks have, as in a replicated state."""
    names = np.random.default_rng(0).bytes(8 * extents)
    keys = [names[start : start + 8] for start in range(0, len(names), 8)]
    return encode_rows(keys, [4 << 20] * extents)


def coordinator(port: int, world_size: int, extents: int, saves: int) -> dict[str, object]:
    """Act as rank 0; return the seconds of each save from the ready ranks to the last commit, and the memory used."""
    (session,) = _sessions(port, world_size, [0])
    report = _digests(extents)
    session.agree((0, 0), b"", b"".join, "ready")
    before = reset_peak()
    total, steady = [], []
    for number in range(1, saves + 1):
        session.post((number, 0), b"go")
        began = time.perf_counter()
        session.agree((number, 1), report, share_out, "digests")
        shared = time.perf_counter()
        for part in range(2, _PARTS + 1):
            session.agree((number, part), b"{}", lambda reports: reports[0], "commit")
        ended = time.perf_counter()
        total.append(ended - began)
        steady.append(ended - shared)
    return {"first": total, "later": steady, "memory": peak_since(before)}


def others(port: int, world_size: int, extents: int, saves: int) -> dict[str, object]:
    """Simulate all other ranks with a few threads."""
    report = _digests(extents)

    def work(first: int) -> None:
        sessions = _sessions(port, world_size, range(1 + first, world_size, _THREADS))
        _take_part(sessions, (0, 0), b"")
        for number in range(1, saves + 1):
            if sessions:
                sessions[0].receive((number, 0), "go")
            for part in range(1, _PARTS + 1):
                _take_part(sessions, (number, part), report if part == 1 else b"{}")

    threads = [threading.Thread(target=work, args=(first,)) for first in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {}


def _take_part(sessions: Sequence[Session], at: tuple[int, int], value: bytes) -> None:
    for session in sessions:
        session.report(at, value)
    for session in sessions:
        session.verdict(at, "simulated")


def resolve(folder: Path) -> dict[str, object]:
    """Resolve the newest checkpoint of a store as a restore does; return the seconds and the memory used."""
    tier = NvmeTier(folder, StoreConfig(), read_only=True)
    before, began = reset_peak(), time.perf_counter()
    resolved = resolve_one(tier, candidates(tier, DEFAULT_RUN, None)[0])
    result: dict[str, object] = {"seconds": time.perf_counter() - began, "memory": peak_since(before)}
    resolved.sources.close()
    tier.close()
    return result


def real(port: int, world_size: int, rank: int, nbytes: int, saves: int, folder: Path) -> dict[str, object]:
    """Save the same state as the other ranks; return the seconds until durable, and the bytes written by this rank."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    ranks = Ranks(rank, world_size, store) if world_size > 1 else None
    state: dict[str, object] = {f"layer{number}": torch.zeros(nbytes // 32) for number in range(8)}
    generator = torch.Generator().manual_seed(0)
    steps = []
    capture = CaptureConfig(ring_folder=str(folder))
    with (
        Store.open(folder / "store", create=True) as opened,
        Checkpointer(opened, state, every=1, capture=capture, ranks=ranks, keep=None) as ckpt,
    ):
        for step in range(saves):
            for tensor in state.values():
                tensor.normal_(generator=generator)  # type: ignore[attr-defined]  # all are tensors
            began = time.perf_counter()
            ckpt.step(step)
            steps.append(time.perf_counter() - began)
            ckpt.wait()
        # The first save creates the ring and compares the digests of all ranks.
        result = ckpt.statistics()
        return {
            "durable": result.durable_s[1:],
            "step": statistics.median(steps[1:]),
            "written": result.written_bytes,
        }


def main(argv: Sequence[str]) -> None:
    """Run one role."""
    role, numbers = argv[0], [int(word) for word in argv[1:6] if word.isdigit()]
    if role == "resolve":
        result = resolve(Path(argv[1]))
    elif role == "real":
        port, world_size, rank, nbytes, saves = numbers
        result = real(port, world_size, rank, nbytes, saves, Path(argv[6]))
    else:
        result = {"coordinator": coordinator, "others": others}[role](*numbers)
    print(json.dumps(result), flush=True)
    sys.stdout.flush()
    # Skip the shutdown, because torch's client would look for the server, which may have ended.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
