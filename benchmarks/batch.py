"""``batch``: time until a state is durable, by batch size, and the batch size that the policy predicts.

A pack is one durable flush: one file, one index, one header, one sync, one name. ``StoreConfig.pack_bytes`` is
therefore the batch size. The curve is measured with ``Store.save``, as users call it, into packs that garbage
collection freed. Facts of the same machine, measured right before, give the predicted curve and its minimum, B*, which
is also measured.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import asymcheck
from asymcheck.config import ring_folder_of
from asymcheck.inspect.sample import measure_store
from asymcheck.policies.advice import Facts, Situation, flush_facts
from asymcheck.policies.batching import batch_bytes, flush_s
from benchmarks import environment, states
from benchmarks.report import Report, row

MIB = 1 << 20
SIZES = tuple(MIB << power for power in range(2, 12))
DURABLE, PREDICTED, AT_BEST = "time to durable", "predicted time", "B*"


def run(
    folder: Path | None, *, quick: bool, state: dict[str, object] | None = None, sizes: Sequence[int] = SIZES
) -> Report:
    """Measure in a temporary folder inside ``folder``; ``state`` replaces GPT-2 with AdamW."""
    state = state or states.gpt2_adamw(1 if quick else 12)
    total = sum(tensor.nbytes for tensor in states.tensors_of(state))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        with asymcheck.Store.open(Path(scratch) / "measured", create=True) as store:
            facts = measure_store(store.resources.nvme, ring_folder_of(None), quick=quick)
        config = asymcheck.StoreConfig()
        situation = Situation(total, 1.0, config.partition_bytes, config.pack_bytes, max(sizes))
        flush = flush_facts(facts, situation)
        chosen = batch_bytes(flush, max(sizes))
        times = _measure(Path(scratch), state, sorted({*sizes, chosen}), rounds=2 if quick else 5)
        described = environment.describe(Path(scratch))
    described["state"] = states.describe(state)
    described["facts"] = _describe(facts, flush.chunk_s)
    results = [row(_name(size), DURABLE, "s", values) for size, values in times.items()]
    results += [row(_name(size), PREDICTED, "s", [flush_s(flush, size)]) for size in times]
    results.append(row(AT_BEST, "size", "MB", [chosen / 1e6]))
    medians = {size: statistics.median(values) for size, values in times.items()}
    least = min(medians.values())
    return Report(
        "batch",
        described,
        results,
        {
            "batch_time_at_Bstar/best": medians[chosen] / least,
            "batch_time_at_smallest/best": medians[min(medians)] / least,
        },
    )


def _measure(scratch: Path, state: dict[str, object], sizes: Sequence[int], rounds: int) -> dict[int, list[float]]:
    """Return the seconds of saves with each pack size. Each round starts with a different size."""
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(rounds + 1):
        start = number * 3 % len(sizes)
        for size in (*sizes[start:], *sizes[:start]):
            config = asymcheck.StoreConfig(pack_bytes=size)
            # Use a store for each size. A common pool would offer packs of other sizes.
            with asymcheck.Store.open(scratch / str(size), config=config, create=True) as store:
                states.change_everything(state)
                os.sync()
                began = time.perf_counter()
                store.save(state, step=number)
                elapsed = time.perf_counter() - began
                store.delete(number)
                store.gc()
            # The first round writes new files and fills the pools.
            if number > 0:
                times[size].append(elapsed)
    return times


def _name(size: int) -> str:
    return f"{size / MIB:g} MiB"


def size_of(system: str) -> float:
    """Return the MiB in the name of a row."""
    return float(system.split(maxsplit=1)[0])


def _describe(facts: Facts, chunk_s: float) -> str:
    return (
        f"{facts.drive.flush_latency_s * 1e3:.2f} ms for a durable pack besides its bytes, {chunk_s * 1e3:.2f} ms for "
        f"a partition, {facts.drive.durable_write_bytes_per_s / 1e9:.2f} GB/s"
    )
