"""``durable``: seconds from the call of ``save`` until the checkpoint is durable.

Beside a raw O_DIRECT write of as many bytes. Each round measures both, in turn first, after a sync, so that both see
the same machine. *New* writes new files; *recycled* overwrites files that are there: for asymcheck, packs that
collection freed. The ratios are quotients of throughputs: 1 is the machine's limit.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import asymcheck
from benchmarks import environment, raw, states
from benchmarks.report import Report, row

QUICK_LAYERS = 2


def run(folder: Path | None, *, quick: bool) -> Report:
    """Measure in a temporary folder inside ``folder``."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        state = states.gpt2_adamw(QUICK_LAYERS if quick else 12)
        total = sum(tensor.nbytes for tensor in states.tensors_of(state))
        times = _measure(Path(scratch), state, rounds=3 if quick else 7)
        described = environment.describe(Path(scratch))
    described["state"] = f"GPT-2 with AdamW, {total / 1e9:.2f} GB"
    results = [row(name, "time to durable", "s", values) for name, values in times.items()]
    results += [
        row(name, "throughput", "GB/s", [total / 1e9 / value for value in values]) for name, values in times.items()
    ]
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = {
        f"durable_{mode}/limit": medians[f"raw {mode}"] / medians[f"asymcheck {mode}"] for mode in ("new", "recycled")
    }
    return Report("durable", described, results, ratios)


def _measure(scratch: Path, state: dict[str, object], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"raw new": [], "asymcheck new": [], "raw recycled": [], "asymcheck recycled": []}
    raw_file, limit = scratch / "raw", raw.Limit(states.tensors_of(state))
    with asymcheck.Store.open(scratch / "store") as store:

        def save(step: int) -> float:
            states.change_everything(state)
            began = time.perf_counter()
            store.save(state, step=step)
            return time.perf_counter() - began

        for number in range(rounds + 1):
            raw_file.unlink(missing_ok=True)
            _empty_pool(store)
            for mode in ("new", "recycled"):
                step = 2 * number + (mode == "recycled")
                # Who goes first changes: the device may still be busy with what the one before left behind.
                for system in ("raw", "asymcheck") if number % 2 else ("asymcheck", "raw"):
                    os.sync()
                    taken = limit.write(raw_file) if system == "raw" else save(step)
                    # The first round warms up memory and file system, for both alike.
                    if number > 0:
                        times[f"{system} {mode}"].append(taken)
                store.delete(step)
                store.gc()
    return times


def _empty_pool(store: asymcheck.Store) -> None:
    for path in (store.path / "pool").iterdir():
        path.unlink()
