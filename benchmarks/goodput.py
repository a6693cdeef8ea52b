"""``goodput``: the share of a training's time that makes progress, by scheme, under a realistic failure rate.

The input is a result of ``models`` (``--from FILE``), from this or another machine. Each scheme runs at its own best
interval. A job on n GPUs fails n times as often as one GPU. The kind of a failure decides which checkpoints survive.
When only the process ends, the ring in memory survives. When the node reboots, its drive survives. When the node is
replaced, only copies elsewhere survive. The event simulation plays failures one by one. The formula is renewal theory.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from benchmarks import environment
from benchmarks.failure_trace import read_trace, repeated
from benchmarks.report import Report, Row, UnreadableReportError, read_json, row

Survives = Literal["dram", "nvme", "remote"]

LLAMA3_GPUS, LLAMA3_DAYS = 16_384, 54
LLAMA3_INTERRUPTIONS: Mapping[str, tuple[int, Survives]] = {
    "faulty GPU": (148, "remote"),
    "GPU HBM3 memory": (72, "nvme"),
    "software bug": (54, "dram"),
    "network switch or cable": (35, "dram"),
    "host maintenance": (32, "remote"),
    "GPU SRAM memory": (19, "nvme"),
    "GPU system processor": (17, "nvme"),
    "network card": (7, "remote"),
    "NCCL watchdog": (7, "dram"),
    "silent data corruption": (6, "remote"),
    "GPU thermal interface and sensor": (6, "remote"),
    "SSD": (3, "remote"),
    "power supply": (3, "remote"),
    "server chassis": (2, "remote"),
    "IO expansion board": (2, "remote"),
    "dependency": (2, "dram"),
    "CPU": (2, "remote"),
    "system memory": (2, "remote"),
}
"""Unexpected interruptions of the Llama 3 405B pre-training (Dubey et al., 2024, table 5), with what we say survives:
a process that ends leaves memory, a device that is reset with its node leaves the drive, other hardware is replaced."""

_TIERS: tuple[Survives, ...] = ("dram", "nvme", "remote")


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of one scheme on each rank, in seconds."""

    iteration_s: float
    stall_s: float
    """Seconds for which a checkpoint blocks the training."""
    lag_s: Mapping[Survives, float]
    """Seconds from the start of a checkpoint until it survives a failure of each kind; infinite if it never does."""
    restore_s: Mapping[Survives, float]
    """Seconds from the start of the processes until the training continues."""
    least_interval_s: float
    """Minimum seconds between two checkpoints, because checkpoints in flight must be written first."""


@dataclasses.dataclass(frozen=True)
class Failures:
    """Failure rate of a job, kinds of failures, and restart time without recovery from a checkpoint."""

    mean_s: float
    """Mean time between failures."""
    shares: Mapping[Survives, float]
    """Share of failures after which only this tier and the tiers below it survive; the shares add up to 1."""
    restart_s: float


def llama3(gpus: int, restart_s: float = 300.0) -> Failures:
    """Return the failures of the Llama 3 run, for a job on the given number of GPUs."""
    total = sum(count for count, _ in LLAMA3_INTERRUPTIONS.values())
    mean_s = LLAMA3_DAYS * 86_400 / total * LLAMA3_GPUS / gpus
    return Failures(mean_s, _shares(), restart_s)


def _shares() -> dict[Survives, float]:
    total = sum(count for count, _ in LLAMA3_INTERRUPTIONS.values())
    return {
        tier: sum(count for count, surviving in LLAMA3_INTERRUPTIONS.values() if surviving == tier) / total
        for tier in _TIERS
    }


def formula(costs: Costs, failures: Failures, every: int) -> float:
    """Return the expected share of time that makes progress, with a checkpoint each ``every`` iterations.

    A cycle is the time from one resumption to the next failure, exponential with mean M, and the recovery after it,
    which starts over when it fails: M (exp(D / M) - 1) for a recovery of D seconds. Only the progress up to the newest
    surviving checkpoint counts. With a period P and a lag d, the expected number of checkpoints is
    exp(-d / M) exp(-P / M) / (1 - exp(-P / M)).
    """
    period = every * costs.iteration_s + costs.stall_s
    mean = failures.mean_s
    progress_s = recovery = 0.0
    for tier, share in failures.shares.items():
        lag, restore = _of(costs, tier)
        expected_periods = 1 / math.expm1(period / mean) if period < 700 * mean else 0.0
        progress_s += share * math.exp(-lag / mean) * expected_periods * every * costs.iteration_s
        recovery += share * mean * math.expm1(min((failures.restart_s + restore) / mean, 700.0))
    return progress_s / (mean + recovery)


def _of(costs: Costs, tier: Survives) -> tuple[float, float]:
    """Return lag and restore time if ``tier`` and the tiers below it survive."""
    surviving = _TIERS[_TIERS.index(tier) :]
    lag = min(costs.lag_s[one] for one in surviving)
    restore = (
        min(costs.restore_s[one] for one in surviving if math.isfinite(costs.lag_s[one])) if math.isfinite(lag) else 0.0
    )
    return lag, restore


def simulate(
    costs: Costs, failures: Failures, every: int, *, days: float, seed: int = 0, ups: Iterator[float] | None = None
) -> float:
    """Return the share of time that made progress in a training of ``days``, by simulating each failure.

    ``ups`` yields the times between failures endlessly. None draws them at random, with the mean of ``failures``.
    """
    chance = random.Random(seed)
    ups = ups or _by_chance(chance, failures.mean_s)
    tiers, weights = list(failures.shares), list(failures.shares.values())
    now, progress, end = 0.0, 0.0, days * 86_400
    # Progress of the newest checkpoint in each tier, in seconds of iterations.
    saved = dict.fromkeys(_TIERS, 0.0)
    period = every * costs.iteration_s + costs.stall_s
    recovery = 0.0
    while now < end:
        gap = next(ups)
        now += gap
        up = gap - recovery
        if up <= 0:
            # The recovery failed, and starts again.
            continue
        tier = chance.choices(tiers, weights)[0]
        for one in _TIERS:
            if up >= costs.lag_s[one] + period:
                saved[one] = progress + int((up - costs.lag_s[one]) / period) * every * costs.iteration_s
        surviving = _TIERS[_TIERS.index(tier) :]
        progress = max(saved[one] for one in surviving)
        # Newer checkpoints were in lost tiers, or on an abandoned line.
        saved = {one: min(value, progress) for one, value in saved.items()}
        recovery = failures.restart_s + _of(costs, tier)[1]
    return progress / now


def _by_chance(chance: random.Random, mean_s: float) -> Iterator[float]:
    while True:
        yield chance.expovariate(1 / mean_s)


def best_interval(costs: Costs, failures: Failures) -> int:
    """Return the number of iterations between checkpoints at which the formula is greatest."""
    least = max(1, math.ceil(costs.least_interval_s / costs.iteration_s))
    best, most = least, 0.0
    every = float(least)
    while every * costs.iteration_s < 4 * failures.mean_s or every == least:
        value = formula(costs, failures, round(every))
        if value > most:
            best, most = round(every), value
        every = max(every * 1.05, every + 1)
    return best


def run(
    folder: Path | None, *, quick: bool, source: Path, model: str | None = None, trace: Path | None = None
) -> Report:
    """Compare the schemes of the ``models`` report in ``source``; ``folder`` is not written to.

    Also replay the failures of ``trace``. Each of them removes its node.
    """
    measured = read_json(source)
    if measured.workload != "models":
        raise UnreadableReportError(f"{source} is a report of {measured.workload}; goodput needs one of models")
    costs = costs_of(measured, model)
    days = 200 if quick else 4000
    results: list[Row] = []
    ratios: dict[str, float] = {}
    played = {} if trace is None else {trace.name: read_trace(trace)}
    for name, failures in (*scenarios(), *((name, _of_trace(uptimes)) for name, uptimes in played.items())):
        for scheme, cost in costs.items():
            every = best_interval(cost, failures)
            runs = [
                simulate(
                    *(cost, failures, every),
                    days=days,
                    seed=seed,
                    ups=repeated(played[name], seed) if name in played else None,
                )
                for seed in range(3)
            ]
            results.append(row(scheme, f"goodput, {name}", "%", [100 * value for value in runs]))
            results.append(row(scheme, f"formula, {name}", "%", [100 * formula(cost, failures, every)]))
            results.append(row(scheme, f"best interval, {name}", "iterations", [float(every)]))
            if name == "16384 GPUs":
                ratios[f"goodput_at_16384: {scheme}"] = sum(runs) / len(runs)
    results += _lost(measured, model)
    described = environment.describe(folder or Path())
    described["state"] = f"{measured.environment['state']}; measured {measured.environment['date']}"
    return Report("goodput", described, results, ratios)


def _lost(measured: Report, model: str | None) -> Iterator[Row]:
    """Yield the GPU-hours that each scheme loses in a month by checkpoints and failures, by the formula."""
    by_value = [costs_of(measured, model, value) for value in _VALUES]
    for scheme in by_value[0]:
        for gpus in _LOST_GPUS:
            failures = llama3(gpus)
            costs = [one[scheme] for one in by_value]
            shares = [1 - formula(one, failures, best_interval(one, failures)) for one in costs]
            hours = [share * gpus * _MONTH_H for share in shares]
            yield row(scheme, f"lost in a month, {gpus:,} GPUs", "GPU-hours", hours)


_VALUES: Sequence[Literal["median", "min", "max"]] = ("median", "min", "max")
_LOST_GPUS = (512, 2048, 16_384)
_MONTH_H = 730
_SPOT = Failures(3600, {"dram": 0.0, "nvme": 0.0, "remote": 1.0}, restart_s=120.0)
"""Failures of a spot instance, which remove the node and all its data."""


def scenarios() -> Iterator[tuple[str, Failures]]:
    """Yield the simulated failures: for jobs from 8 to 100,000 GPUs, and for given mean times between failures."""
    for gpus in (8, 64, 512, 2048, 16_384, 100_000):
        yield f"{gpus} GPUs", llama3(gpus)
    for mean_s, name in ((600, "every 10 min"), (3600, "every 1 h"), (10_800, "every 3 h")):
        yield f"a failure {name}", Failures(mean_s, _shares(), restart_s=60.0)
    yield "spot instances", _SPOT


def _of_trace(uptimes: Sequence[float]) -> Failures:
    return dataclasses.replace(_SPOT, mean_s=sum(uptimes) / len(uptimes))


_REMOTE_SHARE = 4.0
"""Ratio of the write time to a remote tier and to the drive: a network file system is slower."""


def costs_of(
    measured: Report, model: str | None = None, value: Literal["median", "min", "max"] = "median"
) -> dict[str, Costs]:
    """Return the costs of the schemes of a report, for one model; by default, for the first model.

    ``value`` says which of the measured costs are taken. Schemes that were not measured are left out.
    """
    rows: dict[tuple[str, str], float] = {(one.system, one.metric): getattr(one, value) for one in measured.results}
    model = model or next(metric for _, metric in rows if metric.startswith("steps lost, ")).partition(", ")[2]
    costs = {}
    for scheme in dict.fromkeys(one.system for one in measured.results):
        found = {metric: value for (system, metric), value in rows.items() if system == scheme}
        if f"recovery, {model}" not in found or f"visible stall, {model}, every 10" not in found:
            continue
        durable = found.get(f"time to durable, {model}, every 10")
        stall, iteration = found[f"visible stall, {model}, every 10"], found[f"iteration, {model}, every 10"]
        recovery = found[f"recovery, {model}"]
        lag = math.inf if durable is None else durable / 1e3
        # Unsynced files survive the process in the page cache, but not a reboot.
        in_memory = stall / 1e3 + iteration / 1e3 if scheme.startswith("asymcheck") or durable is None else lag
        costs[scheme] = Costs(
            iteration_s=iteration / 1e3,
            stall_s=stall / 1e3,
            lag_s={"dram": min(in_memory, lag), "nvme": lag, "remote": _REMOTE_SHARE * lag},
            restore_s={"dram": recovery / 1e3, "nvme": recovery / 1e3, "remote": _REMOTE_SHARE * recovery / 1e3},
            least_interval_s=0.0 if durable is None else lag / 2,
        )
    return costs


def agreement(costs: Costs, failures: Failures, intervals: Sequence[int], days: float) -> float:
    """Return the maximum difference of simulation and formula, relative to the formula."""
    return max(
        abs(simulate(costs, failures, every, days=days) / formula(costs, failures, every) - 1) for every in intervals
    )
